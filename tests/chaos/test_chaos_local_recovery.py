"""Aim: what comes back to a TaskManager that was killed is restored from the copies on its disk; damaged copies are
not used; with the job its copies go.

Method: the ledger job with local recovery; one of two TaskManagers is killed and started again under its id.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger_job import LedgerJob
from tests.support.processes import wait_ended, wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]


def copies(job: LedgerJob) -> list[Path]:
    """All local copies of the job, on both TaskManagers."""
    # Not by Path.glob, which fails where a directory of an older checkpoint goes while it is looked into.
    pattern = f"{job.cluster.directory}/local-state/*/{job.handle.job_id}/*/*/*"
    return [Path(path) for path in glob.glob(pattern)]  # noqa: PTH207


def restored_bytes(job: LedgerJob) -> tuple[int, int]:
    """What the running attempts were restored from: copies, and the checkpoint store."""
    metrics: list[Any] = []

    def is_reported(details: Any) -> bool:
        metrics[:] = [subtask.metrics for vertex in details.vertices for subtask in vertex.subtasks]
        return any(one.restored_local_bytes or one.restored_store_bytes for one in metrics)

    job.await_that(is_reported)
    return (
        sum(one.restored_local_bytes for one in metrics),
        sum(one.restored_store_bytes for one in metrics),
    )


def restart_a_taskmanager(job: LedgerJob, taken: int) -> None:
    victim = job.cluster.pid("taskmanager")
    os.kill(victim, signal.SIGKILL)
    wait_ended(victim)
    job.cluster.start(taskmanagers=2)
    job.await_restart(taken)


@pytest.mark.parametrize("backend", ["hashmap", pytest.param("rocksdb", marks=pytest.mark.chaos)])
@pytest.mark.parametrize(
    "is_damaged", [False, pytest.param(True, marks=pytest.mark.chaos)], ids=["whole", "damaged"]
)
def test_a_taskmanager_is_killed_and_replaced(
    job: LedgerJob, backend: str, is_damaged: bool
) -> None:
    job.submit(state__backend__type=backend, execution__state_recovery__from_local="true")
    job.handle.checkpoint(30)
    taken = job.handle.checkpoint(30)
    held = copies(job)
    assert held
    if is_damaged:
        for path in held:
            # The next checkpoint may have made some superfluous by now.
            with contextlib.suppress(FileNotFoundError):
                path.write_bytes(path.read_bytes()[:-1] + b"?")
    restart_a_taskmanager(job, taken)
    local, stored = restored_bytes(job)
    if is_damaged:
        assert local == 0
        assert stored > 0
    else:
        assert local > 0
        assert stored == 0
    assert job.handle.checkpoint(30) > taken
    job.finish()
    for directory in (job.cluster.directory / "local-state").glob("*"):
        gone = directory / job.handle.job_id
        wait_in_directory(directory, lambda gone=gone: not gone.exists(), "the copies to go")
