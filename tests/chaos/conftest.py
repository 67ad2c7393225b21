"""A cluster for all tests of this directory that leave it in order, and ledger jobs on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import Client
from penstock.errors import StreamError
from penstock.local_cluster import LocalCluster
from tests.support.ledger_job import LedgerJob
from tests.support.processes import DaemonCluster, site


@pytest.fixture(scope="session")
def chaos_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Two TaskManagers with a slot each, quick to notice; nothing may be left of them."""
    with site(tmp_path_factory.mktemp("chaos")) as place:
        cluster = DaemonCluster(place)
        cluster.start(taskmanagers=2, slots=1, heartbeat_interval="200ms", heartbeat_timeout="3s")
        yield cluster
        cluster.stop()
        cluster.assert_nothing_left()
        place.assert_nothing_left()


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
