"""Aim: the directory of a savepoint holds all that its manifest names, or no manifest.

Method: stores on disk, with files of a job and files that tasks have written; also a store that copies nothing from
another, and one that is given up on before it answers.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.savepoint_store_runner import SavepointStoreRunner
from jobmanager.job.job_operation import JobOperation, OperationKind
from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StoreTransient, StreamError
from penstock.pb import checkpoint_pb2
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties
from penstock.storage.head import HEAD_PATH, decode_head
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import decode_manifest, properties_of, references
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectStore
from penstock.storage.savepoint import COMMITTED_PATH, MANIFEST_PATH
from tests.unit.jobmanager.test_checkpoint_store import DONE, files, wanted
from tests.unit.jobmanager.test_checkpoint_store import JOB as OF_JOB
from tests.unit.jobmanager.test_checkpoint_store import runner as job_runner
from tests.unit.jobmanager.test_savepoints_runner import made

JOB = "0" * 32


def manifest_of(
    *paths: str, content: bytes = b"state", job_id: str = JOB
) -> checkpoint_pb2.CheckpointManifest:
    """Names files of a backend, one at each path."""
    files = [
        checkpoint_pb2.StateFile(
            name=path,
            handle=checkpoint_pb2.StateHandle(
                path=path, size_bytes=len(content), checksum=zlib.crc32(content)
            ),
        )
        for path in paths
    ]
    keyed = checkpoint_pb2.KeyedStateSnapshot(files=files)
    operator = checkpoint_pb2.OperatorSnapshot(operator_uid="u", keyed=keyed)
    subtask = checkpoint_pb2.SubtaskSnapshot(vertex="v0", operators=[operator])
    return checkpoint_pb2.CheckpointManifest(job_id=job_id, checkpoint_id=7, subtasks=[subtask])


@pytest.fixture(params=["disk", "elsewhere"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """The job's directory, with one file."""
    store = MemoryStore(1 << 20) if request.param == "elsewhere" else LocalStore(tmp_path / "own")
    store.put("shared/1-v0-0-0-a", [b"state"])
    return store


def test_files_of_the_job_are_copied_and_named_anew(own: ObjectStore, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "s")
    runner = SavepointStoreRunner(JOB, str(tmp_path / "s"), own)
    begun = runner.begin()
    assert begun.is_elsewhere == isinstance(own, MemoryStore)
    target.put("state/7-v0-0-0-b", [b"state"])
    target.put("state/6-v0-0-0-c", [b"of an earlier try"])
    runner.complete(manifest_of("shared/1-v0-0-0-a", "state/7-v0-0-0-b"))
    stored = decode_manifest(target.get(MANIFEST_PATH))
    named = [reference.location.path for reference in references(stored)]
    assert named == ["state/1-v0-0-0-a", "state/7-v0-0-0-b"]
    assert [one.path for one in target.list("state/")] == named
    assert target.get("state/1-v0-0-0-a") == own.get("shared/1-v0-0-0-a") == b"state"
    again = runner.begin()
    assert again.checkpoint_id == 7
    runner.discard()  # what is complete stays
    assert runner.settle(7)
    assert target.get(MANIFEST_PATH)


def test_a_file_that_is_missing_keeps_the_manifest_from_being_written(tmp_path: Path) -> None:
    own, target = LocalStore(tmp_path / "own"), LocalStore(tmp_path / "s")
    runner = SavepointStoreRunner(JOB, str(tmp_path / "s"), own)
    runner.begin()
    with pytest.raises(StoreNotFound, match="own/shared"):
        runner.complete(manifest_of("shared/1-v0-0-0-a"))
    with pytest.raises(StoreNotFound, match="every TaskManager must share"):
        runner.complete(manifest_of("state/7-v0-0-0-b"))
    assert not target.list("")
    runner.discard()
    assert not (tmp_path / "s").exists()


def test_what_is_given_up_cannot_be_completed_any_more(own: ObjectStore, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "s")
    runner = SavepointStoreRunner(JOB, str(tmp_path / "s"), own)
    runner.begin()
    assert not runner.settle(7)
    with pytest.raises(StoreCorrupt, match="given up"):
        runner.complete(manifest_of("shared/1-v0-0-0-a"))
    runner.discard()
    assert [one.path for one in target.list("")] == [MANIFEST_PATH]
    with pytest.raises(StoreCorrupt, match="take another"):
        runner.begin()


def test_what_comes_too_late_goes_without_what_another_try_writes(tmp_path: Path) -> None:
    own, target = LocalStore(tmp_path / "own"), LocalStore(tmp_path / "s")
    runner = SavepointStoreRunner(JOB, str(tmp_path / "s"), own)
    runner.begin()
    target.put("state/6-v0-0-0-a", [b"late"])
    target.put("state/7-v0-0-0-b", [b"of another try"])
    runner.discard(files=("state/6-v0-0-0-a",))
    assert [one.path for one in target.list("")] == ["state/7-v0-0-0-b"]
    runner.complete(manifest_of("state/7-v0-0-0-b"))
    runner.discard(files=("state/7-v0-0-0-b",))  # what is complete stays
    assert target.get("state/7-v0-0-0-b")


@pytest.mark.parametrize(
    ("path", "content", "error", "said"),
    [
        ("notes.txt", [b"mine"], JobRejected, r"not empty: notes\.txt"),
        ("shared/1-v0-0-0-a", [b"x"], JobRejected, "not empty: shared"),
        ("state/7-v0-0-0-b", [b"left"], None, ""),
        (MANIFEST_PATH, [b"something"], StoreCorrupt, "manifest"),
    ],
)
def test_what_is_there_already(
    tmp_path: Path, path: str, content: Iterable[bytes], error: type[Exception] | None, said: str
) -> None:
    LocalStore(tmp_path / "s").put(path, content)
    runner = SavepointStoreRunner(JOB, str(tmp_path / "s"), MemoryStore(10))
    if error is None:
        runner.begin()
    else:
        with pytest.raises(error, match=said):
            runner.begin()


def test_a_savepoint_gets_no_directory_inside_of_another(own: ObjectStore, tmp_path: Path) -> None:
    first = SavepointStoreRunner(JOB, str(tmp_path / "s"), own)
    first.begin()
    first.complete(manifest_of("shared/1-v0-0-0-a"))
    (tmp_path / "link").symlink_to(tmp_path / "s")
    for spelt in ("s/t", "s/state//t", "link/t"):
        inside = SavepointStoreRunner(JOB, f"{tmp_path}/{spelt}", own)
        with pytest.raises(
            JobRejected, match=rf"inside of the savepoint {tmp_path}/s: .* outside of it"
        ):
            inside.begin()
    assert first.begin().checkpoint_id == 7
    SavepointStoreRunner(JOB, str(tmp_path / "t"), own).begin()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    runner = SavepointStoreRunner(JOB, str(tmp_path / "file" / "s"), MemoryStore(10))
    with pytest.raises(StoreTransient, match="file"):
        runner.begin()


def test_a_store_copies_by_second_names(tmp_path: Path) -> None:
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    source.put("x/1", [b"one"])
    assert target.can_copy_from(source)
    assert not target.can_copy_from(MemoryStore(10))
    target.copy_from(source, {"x/1": "y/2"})
    assert (tmp_path / "a" / "x" / "1").samefile(tmp_path / "b" / "y" / "2")
    target.copy_from(source, {"x/1": "y/2"})
    source.delete("x/1")
    assert target.get("y/2") == b"one"
    with pytest.raises(StoreNotFound, match="a/x/1"):
        target.copy_from(source, {"x/1": "y/3"})


def stopping(target: Path, checkpoint_id: int) -> c.StoreCheckpoint:
    properties = CheckpointProperties(target=str(target), behind=BehindBarrier.HOLD)
    return replace(wanted(checkpoint_id, retained=(1,)), properties=properties)


def test_a_stop_writes_its_savepoint_then_head_and_whoever_goes_on_from_it_only_ends(
    tmp_path: Path,
) -> None:
    store, target = LocalStore(tmp_path / "own"), LocalStore(tmp_path / "s")
    first = job_runner(store)
    first.starts.prepare()
    files(store)
    first.store(wanted(1), DONE)
    assert isinstance(first.store(stopping(tmp_path / "s", 2), DONE), c.CheckpointStored)
    saved = decode_manifest(target.get(MANIFEST_PATH))
    assert properties_of(saved.properties).is_savepoint
    assert {one.location.path for one in references(saved)} == {"state/a", "state/l"}
    successor = job_runner(store, epoch=2).starts.prepare()
    assert [kept.is_stop for kept in successor.retained] == [False, True]


class Killed(BaseException):
    """The JobManager's process has ended."""


class Kills:
    """Ends a process at one of its writes, in front of it or behind it.

    Attributes:
        left: writes until then.
    """

    def __init__(self, patch: pytest.MonkeyPatch, left: int, *, is_behind: bool) -> None:
        self.left = left
        self._is_behind = is_behind
        for name in ("put", "compare_and_swap", "copy_from", "delete"):
            patch.setattr(LocalStore, name, self._killing(getattr(LocalStore, name)))

    def _killing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def killing(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0 and not self._is_behind:
                raise Killed
            result = write(*arguments)
            if self.left < 0:
                raise Killed
            return result

        return killing


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_stop_that_is_cut_off_anywhere_is_done_or_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    """HEAD says that the job has ended, and its savepoint is whole, or neither: never one without the other."""
    ends: list[bool] = []
    for left in count():
        directory, is_killed = tmp_path / str(left), False
        store, path = LocalStore(directory / "own"), directory / "s"
        first = job_runner(store)
        first.starts.prepare()
        files(store)
        first.store(wanted(1), DONE)
        with monkeypatch.context() as patch:
            Kills(patch, left, is_behind=is_behind)
            try:
                first.store(stopping(path, 2), DONE)
                first.savepoint(str(path)).mark_committed()
            except Killed:
                is_killed = True
        is_open = is_killed and not (path / COMMITTED_PATH).exists()
        runner, successor = made(directory, _nothing, _at_once, OF_JOB, leader_epoch=2)
        newest = successor.starts.prepare().retained[-1]
        operation = JobOperation("mine", OperationKind.STOP, str(path))
        settling = runner.settle_stop(operation, newest.checkpoint_id if newest.is_stop else 0)
        if newest.is_stop:
            runner.end(is_finished=True)  # tasks that begin from it commit, and end
            asyncio.run(settling)
            saved = decode_manifest(LocalStore(path).get(MANIFEST_PATH))
            assert saved.checkpoint_id == operation.checkpoint_id == 2
            assert (path / COMMITTED_PATH).exists()
            assert all((path / one.location.path).is_file() for one in references(saved))
        else:
            assert is_open  # whoever starts from what is there until then is asked about its output
            with pytest.raises(StreamError, match="the job was not stopped, and runs on"):
                asyncio.run(settling)
            assert not path.exists()
        ends.append(newest.is_stop)
        if not is_killed:
            break
    assert ends == sorted(ends)  # from one write on it is done
    assert {True, False} == set(ends)
    assert len(ends) > 4


async def _at_once(_pause_s: float) -> bool:
    return False


async def _nothing(*_: object) -> Any:
    raise AssertionError("nobody asks for anything")


def saving(target: Path, checkpoint_id: int) -> c.StoreCheckpoint:
    properties = CheckpointProperties(target=str(target))
    return replace(wanted(checkpoint_id), properties=properties)


class HeadFirst(LocalStore):
    """Notes what HEAD names when the manifest of a savepoint is written; the first time it cannot be.

    Attributes:
        seen: the newest checkpoint then, each time.
    """

    def __init__(self, directory: Path, own: LocalStore) -> None:
        super().__init__(directory)
        self._own = own
        self.seen: list[int] = []

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, content: bytes) -> bool:
        if path == MANIFEST_PATH:
            head = decode_head(self._own.get(HEAD_PATH))
            self.seen.append(head.retained[-1].checkpoint_id)
            if len(self.seen) == 1:
                raise StoreTransient("slow down")
        return super().compare_and_swap(path, expected, content)


def test_a_savepoint_of_a_checkpoint_is_there_once_head_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = LocalStore(tmp_path / "own"), tmp_path / "s"
    target = HeadFirst(path, store)
    runner = job_runner(store)
    monkeypatch.setattr(
        runner.saved,
        "_open",
        lambda uri: SavepointStoreRunner(OF_JOB, uri, store, open=lambda _: target),
    )
    runner.starts.prepare()
    files(store)
    runner.store(wanted(1), DONE)
    assert isinstance(runner.store(saving(path, 2), DONE), c.CheckpointStored)
    assert not (path / MANIFEST_PATH).exists()  # and so it is no savepoint yet
    assert not runner.saved.is_written(2)
    # The checkpoint goes meanwhile, with its files.
    for written in list(store.list("shared/")):
        store.delete(written.path)
    assert runner.saved.write(2) == 2
    assert target.seen == [2, 2]
    assert runner.saved.is_written(2)
    assert runner.saved.write(2) == 2
    saved = decode_manifest(target.get(MANIFEST_PATH))
    assert properties_of(saved.properties).is_savepoint
    assert {one.location.path for one in references(saved)} == {"state/a", "state/l"}
    assert {one.path for one in target.list("state/")} == {"state/a", "state/l"}


def test_a_checkpoint_whose_savepoint_cannot_be_made_leaves_head_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "own")
    first = job_runner(store)
    first.starts.prepare()
    files(store)
    first.store(wanted(1), DONE)
    (tmp_path / "file").write_text("no directory")
    told = first.store(saving(tmp_path / "file", 2), DONE)
    assert isinstance(told, c.CheckpointNotStored)
    assert "file" in told.error
    found = job_runner(store, epoch=2).starts.prepare()
    assert [kept.checkpoint_id for kept in found.retained] == [1]


def test_one_that_an_earlier_leader_has_written_under_that_name_counts(tmp_path: Path) -> None:
    store, path = LocalStore(tmp_path / "own"), tmp_path / "s"
    old = job_runner(store)
    old.starts.prepare()
    files(store)
    old.store(saving(path, 1), DONE)
    new = job_runner(store, epoch=2)
    new.starts.prepare()
    new.store(saving(path, 2), DONE)
    assert new.saved.write(2) == 1
    assert decode_manifest(LocalStore(path).get(MANIFEST_PATH)).checkpoint_id == 1


def test_a_stop_whose_savepoint_cannot_be_written_leaves_head_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "own")
    first = job_runner(store)
    first.starts.prepare()
    files(store)
    first.store(wanted(1), DONE)
    (tmp_path / "file").write_text("no directory")
    told = first.store(stopping(tmp_path / "file", 2), DONE)
    assert isinstance(told, c.CheckpointNotStored)
    assert "file" in told.error
    found = job_runner(store, epoch=2).starts.prepare()
    assert [(kept.checkpoint_id, kept.is_stop) for kept in found.retained] == [(1, False)]
