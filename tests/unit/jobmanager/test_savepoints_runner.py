"""Aim: what is said of the output of a savepoint is what has become of it, also where the job ends meanwhile.

Method: the runner on a real directory; who asks for checkpoints is told by the test what comes of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from common.clock import SystemClock
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.job import savepoints_runner
from jobmanager.job.job_operation import JobOperation, OperationKind
from jobmanager.job.savepoints_runner import SavepointsRunner
from jobmanager.messages.job_effects import WriteManifest
from penstock.errors import StoreTransient, StreamError
from penstock.pb import graph_pb2
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.local_store import LocalStore
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.open_store import open_store
from penstock.storage.savepoint import MANIFEST_PATH
from tests.support.savepoint_marks import marks_beside

SAVEPOINT_ID = 2


def made(
    directory: Path,
    request: Callable[[str, CheckpointProperties], Awaitable[int]],
    pause: Callable[[float], Awaitable[bool]],
    job_id: str = "job",
    leader_epoch: int = 1,
    post: Callable[[Any], None] = lambda _: None,
) -> tuple[SavepointsRunner, CheckpointStoreRunner]:
    """A runner, and the store of the job's checkpoints."""

    def fail(error: StreamError) -> None:
        raise error

    store = CheckpointStoreRunner(
        job_id,
        graph_pb2.JobGraph(),
        open_store(str(directory / "own")),
        leader_epoch=leader_epoch,
        version="",
        now_ms=lambda: 0,
    )
    runner = SavepointsRunner(
        job_id,
        store,
        StoreCallsRunner(job_id, 10_000, lambda: None),
        SystemClock(),
        request=request,
        post=post,
        fail=fail,
        pause=pause,
        seeks_attempts=False,
    )
    return runner, store


async def never(_pause_s: float) -> bool:
    """A pause where nothing is to be waited for."""
    raise AssertionError("nothing is waited for")


def stored(properties: CheckpointProperties) -> c.StoreCheckpoint:
    """What is written of a savepoint of no tasks."""
    return c.StoreCheckpoint(
        SAVEPOINT_ID,
        triggered_at_ms=0,
        snapshots=(),
        finished=(),
        replaced=(),
        retained=(SAVEPOINT_ID,),
        next_checkpoint_id=9,
        state_bytes=0,
        properties=properties,
    )


@pytest.mark.parametrize("last_checkpoint", [0, SAVEPOINT_ID + 1])
def test_the_last_checkpoint_of_a_job_commits_what_its_savepoint_covers(
    tmp_path: Path, last_checkpoint: int
) -> None:
    """It was taken while the runner waited to ask for one of its own, and the job has ended with it."""
    path = str(tmp_path / "savepoint")

    def end() -> None:
        runner.note_committed(last_checkpoint)
        runner.end(is_finished=False)

    async def request(_id: str, properties: CheckpointProperties) -> int:
        if properties.is_savepoint:
            runner.begin(stored(properties))
            return SAVEPOINT_ID
        asyncio.get_running_loop().call_soon(end)
        raise StreamError("the tasks are busy")

    runner, _ = made(tmp_path, request, never)
    taken = JobOperation("mine", OperationKind.SAVEPOINT, path)
    if last_checkpoint:
        asyncio.run(runner.take(taken, SavepointFormat.CANONICAL))
    else:
        with pytest.raises(StreamError, match="--in-doubt commit"):
            asyncio.run(runner.take(taken, SavepointFormat.CANONICAL))
    assert (tmp_path / "savepoint" / "committed").exists() is bool(last_checkpoint)


@pytest.mark.parametrize(
    ("restored_id", "then", "told", "mark"),
    [
        (SAVEPOINT_ID - 1, "goes on", "--in-doubt leave", "taken-back"),
        (SAVEPOINT_ID - 1, "ends", "--in-doubt commit", ""),
        (SAVEPOINT_ID + 1, "goes on", "", "committed"),
    ],
)
def test_a_job_that_goes_back_behind_one_while_it_is_stored_takes_it_back(
    tmp_path: Path, restored_id: int, then: str, told: str, mark: str
) -> None:
    """Its storage takes longer than a restart; the next checkpoint is one of the tasks that began before it."""

    def marks() -> set[str]:
        return marks_beside(LocalStore(tmp_path / "savepoint"))

    async def request(_id: str, properties: CheckpointProperties) -> int:
        if properties.is_savepoint:
            runner.begin(stored(properties))
            runner.note_restored(restored_id)
            LocalStore(tmp_path / "savepoint").put(MANIFEST_PATH, [b"there"])
            return SAVEPOINT_ID
        assert marks() == ({"taken-back"} if told else set())  # nobody is to commit it from now on
        if then == "ends":
            runner.end(is_finished=False)
            raise StreamError("the job has ended")
        runner.note_completed(SAVEPOINT_ID + 1)
        runner.note_committed(SAVEPOINT_ID + 1)
        return SAVEPOINT_ID + 1

    runner, _ = made(tmp_path, request, never)
    taken = JobOperation("mine", OperationKind.SAVEPOINT, str(tmp_path / "savepoint"))
    with pytest.raises(StreamError, match=told) if told else contextlib.nullcontext():
        asyncio.run(runner.take(taken, SavepointFormat.CANONICAL))
    assert marks() == ({mark} if mark else set())


@pytest.mark.parametrize("end", ["at once", "later", "the job ends"])
def test_one_that_is_made_of_a_checkpoint_is_committed_when_its_manifest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """HEAD names the checkpoint; whether the manifest can be written behind that differs."""
    path = tmp_path / "savepoint"
    is_slow = end != "at once"
    swap = LocalStore.compare_and_swap

    def slow(store: LocalStore, name: str, expected: bytes | None, content: bytes) -> bool:
        if is_slow and name == MANIFEST_PATH:
            raise StoreTransient("slow down")
        return swap(store, name, expected, content)

    async def request(_id: str, properties: CheckpointProperties) -> int:
        assert (properties.is_saved, properties.target) == (True, str(path))
        runner.begin(stored(properties))
        assert isinstance(store.store(stored(properties)), c.CheckpointStored)
        runner.note_committed(SAVEPOINT_ID)
        return SAVEPOINT_ID

    async def pause(_pause_s: float) -> bool:
        nonlocal is_slow
        is_slow = False
        return end != "the job ends"

    runner, store = made(tmp_path, request, pause)
    store.starts.prepare()
    monkeypatch.setattr(LocalStore, "compare_and_swap", slow)
    taken = JobOperation("mine", OperationKind.SAVEPOINT, str(path))
    if end == "the job ends":
        with pytest.raises(StoreTransient, match="slow down"):
            asyncio.run(runner.take(taken, SavepointFormat.NATIVE))
        assert not path.exists()
    else:
        asyncio.run(runner.take(taken, SavepointFormat.NATIVE))
        assert taken.checkpoint_id == SAVEPOINT_ID
        assert {"manifest", "committed"} <= {one.name for one in path.iterdir()}


@pytest.mark.parametrize(
    ("end", "told", "mark"),
    [
        ("finished", "", "committed"),
        ("cancelled", "--in-doubt commit", ""),
        ("goes back", "--in-doubt leave", "taken-back"),
    ],
)
def test_a_stop_that_another_jobmanager_had_begun_is_committed_when_its_job_is_finished(
    tmp_path: Path, end: str, told: str, mark: str
) -> None:
    """HEAD names its checkpoint; whether tasks have committed what that covers nobody knows."""
    path = tmp_path / "savepoint"

    async def request(_id: str, properties: CheckpointProperties) -> int:
        raise AssertionError("none is taken behind a stop")

    def go_on() -> None:
        if end == "goes back":
            runner.note_restored(SAVEPOINT_ID - 1)
        runner.end(is_finished=end == "finished")

    async def settle() -> None:
        asyncio.get_running_loop().call_later(0.01, go_on)
        await runner.settle_stop(inherited, SAVEPOINT_ID)

    runner, store = made(tmp_path, request, never)
    store.starts.prepare()
    store.store(stored(CheckpointProperties(target=str(path), behind=BehindBarrier.HOLD)))
    inherited = JobOperation("mine", OperationKind.STOP, str(path))
    if told:
        with pytest.raises(StreamError, match=told):
            asyncio.run(settle())
    else:
        asyncio.run(settle())
    assert marks_beside(LocalStore(path)) == ({mark} if mark else set())


def test_a_stop_whose_job_finishes_before_the_storage_answers_again_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was another JobManager's; the first look at its savepoint fails, and the job has FINISHED before the next."""
    monkeypatch.setattr(savepoints_runner, "pause_s", lambda _: 0.0)
    looks = 0
    begin = SavepointStoreRunner.begin

    def fails_first(directory: SavepointStoreRunner) -> object:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise StoreTransient("the disk is away")
        return begin(directory)

    async def request(_id: str, properties: CheckpointProperties) -> int:
        raise AssertionError("none is taken behind a stop")

    async def has_ended(_pause_s: float) -> bool:
        runner.end(is_finished=True)
        return False

    path = tmp_path / "savepoint"
    runner, store = made(tmp_path, request, has_ended)
    store.starts.prepare()
    store.store(stored(CheckpointProperties(target=str(path), behind=BehindBarrier.HOLD)))
    monkeypatch.setattr(SavepointStoreRunner, "begin", fails_first)
    inherited = JobOperation("mine", OperationKind.STOP, str(path))
    asyncio.run(runner.settle_stop(inherited, SAVEPOINT_ID))
    assert inherited.checkpoint_id == SAVEPOINT_ID
    assert (path / "committed").exists()


def test_one_that_was_said_not_to_be_stored_is_not_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap that writes its manifest is not answered, and is made when the files that it names are removed."""
    swap, late = LocalStore.compare_and_swap, []

    def unanswered(store: LocalStore, path: str, expected: bytes | None, new: bytes) -> bool:
        if path == MANIFEST_PATH and not late:
            late.append((store, path, expected, new))
            raise SwapUnanswered("no answer yet")
        return swap(store, path, expected, new)

    async def request(_id: str, _properties: CheckpointProperties) -> int:
        raise AssertionError("it is being stored")

    posted: list[Any] = []
    runner, store = made(tmp_path, request, never, post=posted.append)
    path = str(tmp_path / "savepoint")
    wanted = stored(CheckpointProperties(CheckpointKind.SAVEPOINT, path, is_full=True))
    monkeypatch.setattr(LocalStore, "compare_and_swap", unanswered)
    monkeypatch.setattr(store, "verify", lambda: None)
    monkeypatch.setattr(store, "_announce", lambda _: None)

    async def scenario() -> None:
        await runner.store(WriteManifest(wanted), {})
        await runner.discard(c.DiscardSavepoint(SAVEPOINT_ID, path))

    asyncio.run(scenario())
    assert [type(one) for one in posted] == [c.StoreOutcomeUnknown, c.CheckpointNotStored]
    [call] = late
    assert not swap(*call), "it was given up for good"
