"""Aim: what is said of the output of a savepoint is what has become of it, also where the job ends meanwhile.

Method: the runner on a real directory; who asks for checkpoints is told by the test what comes of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.clock import SystemClock
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.job.job_operation import JobOperation, OperationKind
from jobmanager.job.savepoints_runner import SavepointsRunner
from penstock.errors import StreamError
from penstock.pb import graph_pb2
from penstock.storage.checkpoint_properties import CheckpointProperties, SavepointFormat
from penstock.storage.open_store import open_store

SAVEPOINT_ID = 2


@pytest.mark.parametrize("last_checkpoint", [0, SAVEPOINT_ID + 1])
def test_the_last_checkpoint_of_a_job_commits_what_its_savepoint_covers(
    tmp_path: Path, last_checkpoint: int
) -> None:
    """It was taken while the runner waited to ask for one of its own, and the job has ended with it."""
    completed = 0
    path = str(tmp_path / "savepoint")

    async def request(_id: str, properties: CheckpointProperties) -> int:
        if properties.is_savepoint:
            return SAVEPOINT_ID
        raise StreamError("the tasks are busy")

    async def pause(_pause_s: float) -> bool:
        nonlocal completed
        completed = last_checkpoint
        return False

    def fail(error: StreamError) -> None:
        raise error

    runner = SavepointsRunner(
        "job",
        CheckpointStoreRunner(
            "job",
            graph_pb2.JobGraph(),
            open_store(str(tmp_path / "own")),
            leader_epoch=1,
            version="",
            now_ms=lambda: 0,
        ),
        StoreCallsRunner("job", 10_000, lambda: None),
        SystemClock(),
        request=request,
        post=lambda _: None,
        fail=fail,
        pause=pause,
        completed_id=lambda: completed,
        seeks_attempts=False,
    )
    taken = JobOperation("mine", OperationKind.SAVEPOINT, path)
    if last_checkpoint:
        asyncio.run(runner.take(taken, SavepointFormat.NATIVE))
    else:
        with pytest.raises(StreamError, match="--in-doubt commit"):
            asyncio.run(runner.take(taken, SavepointFormat.NATIVE))
    assert (tmp_path / "savepoint" / "committed").exists() is bool(last_checkpoint)
