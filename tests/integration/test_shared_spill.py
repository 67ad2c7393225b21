"""Aim: what is complete on shared storage needs no TaskManager: the loss of one repeats nothing that was done, nothing of
it stays behind, and no JobManager removes what is not its cluster's.

Method: real daemons; TaskManagers and JobManagers are killed between the stages of a batch job, whose output is compared
with what plain Python makes of the input.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.client import Client
from tests.support.jobs import cancel_all
from tests.support.processes import (
    DEADLINE_S,
    DaemonCluster,
    kill_all,
    site,
    slot_pids,
    wait_ended,
    wait_in_directory,
)
from tests.support.shared_persisted import rows_outlive_whoever_made_them
from tests.support.small_disk import filled, frozen, own_disk, small_disk
from tests.support.staged_job import StagedJob, kill_taskmanager
from tests.support.watched_job import Placed, Subtask

pytestmark = [pytest.mark.integration]

FOREIGN = "of-another-cluster"


def start(
    cluster: DaemonCluster, shared: str, spill_format: str = "arrow", **others: str
) -> list[str]:
    """Starts what is missing; returns the options."""
    options = {
        **{key.replace("__", "-").replace("_", "."): value for key, value in others.items()},
        "taskmanager.spill.format": spill_format,
        "heartbeat.interval": "100ms",
        "heartbeat.timeout": "5s",
    }
    if shared:
        options["taskmanager.spill.shared-dir"] = shared
    arguments = [part for key, value in options.items() for part in ("-D", f"{key}={value}")]
    cluster.start(*arguments, taskmanagers=2, slots=2)
    return arguments


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaemonCluster]:
    """Of a test that starts it otherwise than the others."""
    with site(tmp_path / "site") as place:
        daemons = DaemonCluster(place)
        yield daemons
        daemons.stop()
        daemons.assert_nothing_left()


class Sharing:
    """A cluster with shared storage, of which tests kill parts.

    Attributes:
        options: that it is started with.
        shared: where what it shares lies.
    """

    def __init__(self, cluster: DaemonCluster, shared: Path) -> None:
        self.cluster = cluster
        self.shared = shared
        self.options: list[str] = []

    def start(self) -> DaemonCluster:
        """Starts what is missing."""
        self.options = start(self.cluster, str(self.shared))
        return self.cluster


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    root = tmp_path_factory.mktemp("sharing")
    with site(root / "site") as place:
        daemons = DaemonCluster(place)
        yield Sharing(daemons, root / "shared")
        daemons.stop()
        daemons.assert_nothing_left()


@pytest.fixture
def sharing(made: Sharing) -> Iterator[Sharing]:
    """All of it runs; nothing of the test before lies there, and what it has put there goes with it."""
    made.start()
    yield made
    cancel_all(Client(made.cluster.jobmanager))
    shutil.rmtree(made.shared / FOREIGN, ignore_errors=True)
    if files(made.shared):
        wait_left(made.shared, [], "that nothing of a test is left")


def attempts(subtasks: dict[Subtask, Placed], vertex: str) -> set[int]:
    return {one.attempt for key, one in subtasks.items() if key[0] == vertex}


def files(shared: Path) -> list[Path]:
    """Of all clusters, whoever removes some meanwhile."""
    return sorted(Path(root) / name for root, _, names in os.walk(shared) for name in names)


def wait_left(shared: Path, foreign: list[Path], what: str) -> None:
    """Waits until nothing is left of the only cluster that has begun in a directory: a job's own directory goes last."""
    others = {path.relative_to(shared).parts[0] for path in foreign}
    (own,) = (path for path in shared.iterdir() if path.name not in others)
    wait_in_directory(own, lambda: files(shared) == foreign, what)


def loses_a_taskmanager_between_stages(
    cluster: DaemonCluster, shared: Path, tmp_path: Path, spill_format: str
) -> None:
    foreign = shared / FOREIGN / "job" / "x"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    staged = StagedJob(tmp_path)
    with Client(cluster.jobmanager) as client, staged.submit(cluster, client) as job:
        before = staged.await_second_stage(job)
        assert {path.suffix for path in files(shared)} == {f".{spill_format}", ""}
        assert client.partitions() == [], "no TaskManager holds anything"
        kill_taskmanager(cluster, before["v0", 0].taskmanager_id)
        job.await_that(lambda details: details.summary.restarts, "that something begins again")
        staged.gate.touch()
        job.finish()
        after = job.placed()
    staged.check()
    assert attempts(after, "v0") == {0}
    assert attempts(after, "v1") != {0}
    wait_left(shared, [foreign], "that all of the job is removed")


def test_a_lost_taskmanager_repeats_nothing_of_a_complete_stage(
    sharing: Sharing, tmp_path: Path
) -> None:
    loses_a_taskmanager_between_stages(sharing.cluster, sharing.shared, tmp_path, "arrow")


@pytest.mark.chaos
def test_a_lost_taskmanager_repeats_nothing_of_a_complete_stage_in_parquet(
    cluster: DaemonCluster, tmp_path: Path
) -> None:
    start(cluster, str(tmp_path / "shared"), "parquet")
    loses_a_taskmanager_between_stages(cluster, tmp_path / "shared", tmp_path, "parquet")


def test_without_shared_storage_it_is_made_again(cluster: DaemonCluster, tmp_path: Path) -> None:
    """That the test above can tell the difference."""
    start(cluster, "")
    staged = StagedJob(tmp_path)
    with Client(cluster.jobmanager) as client, staged.submit(cluster, client) as job:
        before = staged.await_second_stage(job)
        kill_taskmanager(cluster, before["v0", 0].taskmanager_id)
        job.await_that(lambda details: details.summary.restarts, "that something begins again")
        staged.gate.touch()
        job.finish()
        after = job.placed()
    staged.check()
    assert attempts(after, "v0") != {0}


def test_a_new_jobmanager_sweeps_what_no_job_has(sharing: Sharing, tmp_path: Path) -> None:
    cluster, shared = sharing.cluster, sharing.shared
    staged = StagedJob(tmp_path)
    with Client(cluster.jobmanager) as client, staged.submit(cluster, client) as job:
        staged.await_second_stage(job)
        staged.gate.touch()
        job.finish()
    staged.check()
    (own,) = shared.iterdir()
    orphan = own / "a-job-nobody-knows" / "e0-0" / "part=0" / "sub=0" / "00000000.arrow"
    orphan.parent.mkdir(parents=True)
    orphan.touch()
    foreign = shared / FOREIGN / "job" / "x"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    jobmanager = cluster.pid("jobmanager")
    os.kill(jobmanager, signal.SIGKILL)
    wait_ended(jobmanager)
    sharing.start()
    wait_left(shared, [foreign], "that the orphan is swept")


@pytest.mark.sampled(2)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["slots that write", "slots that read", "the JobManager"])
def test_whatever_is_killed_every_row_is_there_once(
    sharing: Sharing, tmp_path: Path, what: str
) -> None:
    cluster, shared = sharing.cluster, sharing.shared
    staged = StagedJob(tmp_path)
    if what == "slots that write":
        staged.closed.touch()
    with Client(cluster.jobmanager) as client, staged.submit(cluster, client) as job:
        if what == "slots that write":
            staged.await_first_stage(job)
        else:
            staged.await_second_stage(job)
        if what == "the JobManager":
            jobmanager = cluster.pid("jobmanager")
            os.kill(jobmanager, signal.SIGKILL)
            wait_ended(jobmanager)
            sharing.start()
        else:
            kill_all(slot_pids(cluster.pid("taskmanager")))
        staged.closed.unlink(missing_ok=True)
        staged.gate.touch()
        job.finish()
        if what != "slots that write":
            assert attempts(job.placed(), "v0") == {0}
        if what == "the JobManager":
            assert attempts(job.placed(), "v1") == {0}
            assert job.handle.details().summary.restarts == 0, "what was read halfway is read on"
    staged.check()
    wait_left(shared, [], "that all of the job is removed")


def test_what_outlives_its_job_outlives_whoever_made_it(sharing: Sharing) -> None:
    rows_outlive_whoever_made_them(
        sharing.cluster,
        sharing.options,
        lambda: [str(path) for path in files(sharing.shared)],
    )


@pytest.mark.sampled(2)
def test_two_clusters_share_a_directory(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with site(tmp_path / "site") as place:
        clusters = [DaemonCluster(place, name) for name in ("one", "other")]
        for cluster in clusters:
            start(cluster, str(shared))
        first, second = (StagedJob(tmp_path, name) for name in ("a", "b"))
        with (
            Client(clusters[0].jobmanager) as one,
            Client(clusters[1].jobmanager) as other,
            first.submit(clusters[0], one) as mine,
            second.submit(clusters[1], other) as its,
        ):
            first.await_second_stage(mine)
            second.await_second_stage(its)
            assert len(list(shared.iterdir())) == 2
            first.gate.touch()
            mine.finish()
            jobmanager = clusters[0].pid("jobmanager")
            os.kill(jobmanager, signal.SIGKILL)
            wait_ended(jobmanager)
            start(clusters[0], str(shared))  # and sweeps what no job of its own has
            second.gate.touch()
            its.finish()
            assert attempts(its.placed(), "v0") == attempts(its.placed(), "v1") == {0}
        first.check()
        second.check()
        for cluster in clusters:
            cluster.stop()


NEVER = {"restart-strategy.type": "none"}


@pytest.mark.sampled(2)
def test_a_full_disk_is_told_and_a_job_goes_on_when_there_is_room(
    cluster: DaemonCluster, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "shared", "8m") as shared:
        start(cluster, str(shared))
        staged = StagedJob(tmp_path)
        staged.closed.touch()
        with Client(cluster.jobmanager) as client:
            with (
                filled(shared, leave_bytes=8192),
                staged.submit(cluster, client, config=NEVER) as job,
            ):
                staged.await_first_stage(job)
                staged.closed.unlink()
                with pytest.raises(ps.JobFailed, match=r"cannot be written to .*/shared.*No space"):
                    job.handle.wait(DEADLINE_S)
            again = StagedJob(tmp_path, "again")
            again.gate.touch()
            with again.submit(cluster, client) as job:
                job.finish()
            again.check()


@pytest.mark.sampled(2)
def test_a_mount_that_hangs_is_waited_for_so_long(cluster: DaemonCluster, tmp_path: Path) -> None:
    with own_disk(tmp_path / "shared") as shared:
        start(cluster, str(shared), taskmanager_spill_shared__timeout="1s")
        staged = StagedJob(tmp_path)
        staged.closed.touch()
        with Client(cluster.jobmanager) as client:
            with staged.submit(cluster, client, config=NEVER) as job:
                staged.await_first_stage(job)
                with frozen(shared):
                    staged.closed.unlink()
                    with pytest.raises(
                        ps.JobFailed,
                        match=r"has not answered for 1 s \(taskmanager\.spill\.shared-timeout\)",
                    ):
                        job.handle.wait(DEADLINE_S)
            again = StagedJob(tmp_path, "again")
            again.gate.touch()
            with again.submit(cluster, client) as job:
                job.finish()
            again.check()
        cluster.stop()
