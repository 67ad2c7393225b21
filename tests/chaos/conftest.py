"""A cluster for all tests of this directory that leave it in order, and ledger jobs on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client.client import Client
from penstock.errors import StreamError
from penstock.local.local_cluster import LocalCluster
from penstock.streams.environment import Environment
from tests.support.ledger_job import LedgerJob
from tests.support.processes import DaemonCluster, own_cluster
from tests.support.watched_job import WatchedJob, submitted


@pytest.fixture(scope="package")
def chaos_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Two TaskManagers with a slot each, quick to notice; nothing may be left of them."""
    with own_cluster(
        tmp_path_factory.mktemp("chaos"),
        taskmanagers=2,
        slots=1,
        heartbeat_interval="200ms",
        heartbeat_timeout="3s",
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(chaos_cluster: DaemonCluster) -> DaemonCluster:
    """The cluster, with what the last test has ended started again."""
    daemons = LocalCluster(chaos_cluster.directory).daemons()
    if len([daemon for daemon in daemons if daemon.alive]) < 3:
        chaos_cluster.start(taskmanagers=2)
    return chaos_cluster


@pytest.fixture
def job(cluster: DaemonCluster, tmp_path: Path) -> Iterator[LedgerJob]:
    """A ledger job that can be submitted; whatever the test has left of it is cancelled."""
    with Client(cluster.jobmanager) as client:
        job = LedgerJob(cluster, client, tmp_path)
        yield job
        with contextlib.suppress(StreamError):
            job.cancel()


@pytest.fixture(scope="package")
def wide_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Three TaskManagers with three slots each: room for what one of them has lost."""
    with own_cluster(
        tmp_path_factory.mktemp("wide"),
        taskmanagers=3,
        slots=3,
        heartbeat_interval="200ms",
        heartbeat_timeout="3s",
    ) as cluster:
        yield cluster


@pytest.fixture
def wide(wide_session: DaemonCluster) -> Iterator[DaemonCluster]:
    """The cluster, whole again; a test leaves no slot process and no row on any disk."""
    if not all(daemon.alive for daemon in LocalCluster(wide_session.directory).daemons()):
        wide_session.start(taskmanagers=3)
    yield wide_session
    wide_session.assert_slots_ended()
    wide_session.wait_for_no_spilled_rows()


@pytest.fixture
def submit(wide: DaemonCluster) -> Iterator[Callable[..., WatchedJob]]:
    """``tests.support.watched_job.submitted`` on the wide cluster; what a failed test has left is cancelled."""
    jobs: list[WatchedJob] = []
    with Client(wide.jobmanager) as client:

        def run(build: Callable[[Environment], None], **options: Any) -> WatchedJob:
            jobs.append(submitted(wide, client, build, **options))
            return jobs[-1]

        yield run
        for job in jobs:
            job.cancel()
