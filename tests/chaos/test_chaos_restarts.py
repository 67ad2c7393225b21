"""Aim: a cluster that is stopped and started goes on with its jobs and leaves no orphan in the store; a job that is
restarting can still be cancelled; what the command line says of checkpoints is true.

Method: the ledger job, the command line, and ``penstock fsck`` on the store.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.client.job_result import state_name
from tests.support.ledger_job import LedgerJob
from tests.support.processes import wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]


def assert_no_orphans(job: LedgerJob) -> None:
    """All that is in the store is referred to, and whole, once what attempts have left is swept behind the restart."""

    def look() -> Any:
        return job.cluster.site.penstock("fsck", str(job.store), "--orphans", "--json")

    job.await_that(lambda _: look().json["jobs"][0]["orphans"] == [])
    ended = look()
    (found,) = ended.json["jobs"]
    assert found["problems"] == []
    assert ended.status == 0, ended.stderr


def leave_orphans(store: Path, checkpoint_id: int) -> list[Path]:
    """Files such as an attempt leaves that dies while it uploads."""
    left = [
        store / "shared" / f"{checkpoint_id}-v2-0-0-0123456789ab",
        store / f"chk-{checkpoint_id}" / "manifest-0",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half of a snapsh")
    return left


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_the_cluster_is_stopped_and_started(job: LedgerJob, backend: str) -> None:
    # To be stopped is no failure: the job goes on although it may not restart.
    job.submit(state__backend__type=backend, restart_strategy__type="none")
    taken = job.handle.checkpoint(30)
    job.cluster.stop()
    left = leave_orphans(job.store, taken + 1)
    job.cluster.start(taskmanagers=2)
    job.await_restart(taken)
    assert job.handle.checkpoint(30) > taken
    job.await_that(lambda _: not any(path.exists() for path in left))
    assert_no_orphans(job)
    job.finish()


def test_the_jobmanager_is_killed_while_the_job_restarts(job: LedgerJob) -> None:
    job.submit(restart_strategy__fixed_delay__delay="2s")
    taken = job.handle.checkpoint(30)
    job.kill_a_slot()
    job.await_that(lambda details: state_name(details) == "RESTARTING")
    job.kill_the_jobmanager()
    job.cluster.start(taskmanagers=2)
    job.await_restart(taken)
    job.handle.checkpoint(30)
    assert_no_orphans(job)
    job.finish()


def test_a_job_is_cancelled_while_it_restarts(job: LedgerJob) -> None:
    job.submit(restart_strategy__fixed_delay__delay="1h")
    job.handle.checkpoint(30)
    job.kill_a_slot()
    job.await_that(lambda details: state_name(details) == "RESTARTING")
    job.cancel()
    assert job.handle.status() == "CANCELED"
    for pid in job.slots():
        wait_ended(pid)


def test_a_job_is_cancelled_while_it_waits_for_a_taskmanager(job: LedgerJob) -> None:
    job.submit()
    job.handle.checkpoint(30)
    victim = job.cluster.pid("taskmanager")
    os.kill(victim, signal.SIGKILL)
    wait_ended(victim)
    job.await_that(lambda details: state_name(details) == "RESTARTING")
    job.cancel()
    assert job.handle.status() == "CANCELED"


def test_checkpoints_by_the_command_line(job: LedgerJob) -> None:
    job.submit()
    options = ("--jobmanager", job.cluster.jobmanager, "--json")
    site, job_id = job.cluster.site, job.handle.job_id
    taken = site.penstock("checkpoint", job_id, *options)
    assert taken.status == 0, taken.stderr
    listed = site.penstock("checkpoints", job_id, *options)
    assert listed.status == 0, listed.stderr
    assert listed.json["completed_count"] == 1
    # One that meets the end of a subtask is taken again without that.
    (one,) = [one for one in listed.json["checkpoints"] if one["status"] == "COMPLETED"]
    assert one["id"] == taken.json["checkpoint_id"]
    assert Path(one["path"]).is_file()
    assert_no_orphans(job)
    job.finish()
