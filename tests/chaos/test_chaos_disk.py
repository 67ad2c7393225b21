"""Aim: where the disk for rows of exchanges is full, producers wait or attempts fail with a clear cause; no row is
lost without a word.

Method: a spill directory on a small file system in memory, which needs the right to mount.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from common.clock import SystemClock
from penstock.client.client import Client
from tests.support.numbered_job import NumberedJob
from tests.support.processes import DaemonCluster, site, wait_ended, wait_in_directory
from tests.support.small_disk import filled, small_disk
from tests.support.watched_job import submitted

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.sampled(3)]

CACHING = {
    "execution.exchange.default": "caching",
    "execution.pre-aggregation": "never",
    "execution.checkpointing.interval": "3s",
}
PAD = 2_000


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("disk") / "small", "300m") as directory:
        yield directory


@pytest.fixture(scope="module")
def shared_session(
    tmp_path_factory: pytest.TempPathFactory, small: Path
) -> Iterator[DaemonCluster]:
    """Two TaskManagers with a slot each, which keep a megabyte in memory and share the disk.

    The space is looked at once a second: what can be written in that time must fit between both limits.
    """
    with site(tmp_path_factory.mktemp("spill")) as place:
        cluster = DaemonCluster(place)
        cluster.start(
            "-D", f"taskmanager.spill.dir={small}",
            "-D", "taskmanager.spill.min-free=160mb",
            "-D", "taskmanager.spill.hard-min-free=4mb",
            "-D", "taskmanager.spill.wait-timeout=3s",
            "-D", "taskmanager.memory.exchange-cache.size=1mb",
            taskmanagers=2, slots=1,
        )  # fmt: skip
        yield cluster
        cluster.stop()
        cluster.assert_nothing_left()
        place.assert_nothing_left()
        assert list(small.iterdir()) == []


def await_spilling(cluster: DaemonCluster, *, is_allowed: bool) -> None:
    """Every TaskManager has seen that there is space, or none."""
    logs = cluster.directory / "logs"

    def may_spill(log: Path) -> bool:
        since_start = log.read_text().rpartition('"event": "taskmanager.started"')[2]
        told = [line for line in since_start.splitlines() if '"event": "spill.' in line]
        return not told or "spill.resumed" in told[-1]

    def have_seen() -> bool:
        found = [
            may_spill(logs / f"taskmanager-{daemon['id']}.log")
            for daemon in cluster.daemons("taskmanager")
        ]
        return found == [is_allowed] * 2

    wait_in_directory(logs, have_seen, f"spilling is allowed: {is_allowed}")


@pytest.fixture
def shared(shared_session: DaemonCluster) -> Iterator[DaemonCluster]:
    """The cluster; a test leaves no row on the disk, and both TaskManagers have seen that there is space."""
    yield shared_session
    shared_session.wait_for_no_spilled_rows()
    await_spilling(shared_session, is_allowed=True)


def test_producers_wait_where_the_disk_is_full(
    shared: DaemonCluster, small: Path, tmp_path: Path
) -> None:
    since = SystemClock().now_ms() / 1000
    numbered = NumberedJob(60_000, None, tmp_path, PAD)
    with (
        filled(small, leave_bytes=200 << 20),
        Client(shared.jobmanager) as client,
        submitted(shared, client, numbered.build, parallelism=2, config=CACHING) as job,
    ):
        shared.wait_for_log("taskmanager", "spill.stopped", since=since)
        # Each checkpoint makes room: the job gets on.
        job.finish()
        numbered.check()
        assert job.handle.exceptions() == []


def test_a_batch_job_waits_for_the_disk_and_fails_with_the_cause_when_no_space_comes(
    shared: DaemonCluster, small: Path, tmp_path: Path
) -> None:
    numbered = NumberedJob(20_000, None, tmp_path, PAD)
    how = {"parallelism": 2, "mode": "batch", "config": {"restart-strategy.type": "none"}}
    with Client(shared.jobmanager) as client:
        with filled(small, leave_bytes=100 << 20):
            await_spilling(shared, is_allowed=False)
            with (
                submitted(shared, client, numbered.build_stages, **how) as job,
                pytest.raises(ps.JobFailed, match=r"taskmanager\.spill\.wait-timeout"),
            ):
                job.finish()
        await_spilling(shared, is_allowed=True)
        with submitted(shared, client, numbered.build_stages, **how) as job:
            job.finish()
    numbered.check_stages()


@pytest.mark.chaos
def test_a_taskmanager_ends_at_the_hard_limit_and_the_job_goes_on_elsewhere(
    shared: DaemonCluster, small: Path, tmp_path: Path
) -> None:
    since = SystemClock().now_ms() / 1000
    numbered = NumberedJob(20_000, 2_000, tmp_path, PAD)
    pids = [daemon["pid"] for daemon in shared.daemons("taskmanager")]
    with (
        Client(shared.jobmanager) as client,
        submitted(shared, client, numbered.build, parallelism=2, config=CACHING) as job,
    ):
        job.await_running()
        job.await_checkpoints()
        with filled(small):
            for pid in pids:
                wait_ended(pid)
        shared.start(taskmanagers=2)
        job.finish()
        numbered.check()
        told = job.told()
        assert "TaskManagerLost" in told
    shared.wait_for_log("jobmanager", "taskmanager.lost", since=since)
    outputs = [path.read_text() for path in (shared.directory / "logs").glob("taskmanager-*.out")]
    assert any("taskmanager.spill.hard-min-free" in text for text in outputs)
