"""Aim: local copies of snapshots are what the latest completed checkpoint needs and nothing else, are read where
they are undamaged, and never change what is read or whether a snapshot succeeds.

Method: snapshots are written as an attempt writes them, into a store in memory; chains of checkpoints are drawn.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pb import internal_pb2
from penstock.errors import StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.memory_store import MemoryStore
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.snapshot.local_copies_store import LocalCopies
from taskmanager.snapshot.snapshot_files_store import SnapshotFiles
from tests.support.examples import examples
from tests.support.two_threads import Interrupted

LIMIT_BYTES = 1 << 20
ATTEMPT = internal_pb2.AttemptId(job_id="job", vertex="a/b", subtask_index=1, attempt=2)


def content_of(name: str, checkpoint_id: int) -> bytes:
    return f"{name} of {checkpoint_id} ".encode() * 20


class Attempt:
    """Writes and reads snapshots, with copies below a directory."""

    def __init__(self, root: Path, store: MemoryStore) -> None:
        self.counters = SubtaskCounters()
        self.copies = LocalCopies([root], "job")
        self.files = SnapshotFiles(
            store, ATTEMPT, 0, backups=self.copies, local=self.copies, counters=self.counters
        )

    def write(self, checkpoint_id: int, names: list[str]) -> dict[str, checkpoint_pb2.StateHandle]:
        blobs = [Blob(name, lambda name=name: [content_of(name, checkpoint_id)]) for name in names]
        return dict(self.files.writer(checkpoint_id).write(blobs))

    def describe(self, checkpoint_id: int, handles: list[checkpoint_pb2.StateHandle]) -> None:
        snapshot = checkpoint_pb2.SubtaskSnapshot()
        files = snapshot.operators.add().keyed.files
        for handle in handles:
            files.add(handle=handle)
        self.files.written(checkpoint_id, snapshot)

    def complete(self, checkpoint_id: int) -> None:
        remove_older = self.files.completed(checkpoint_id)
        if remove_older is not None:
            remove_older()

    def held(self) -> set[tuple[str, int]]:
        directory = self.copies.directory(ATTEMPT.vertex, ATTEMPT.subtask_index)
        return {(f"shared/{path.parent.name}", int(path.name)) for path in directory.glob("*/*")}


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path, MemoryStore(LIMIT_BYTES))


def only_file(attempt: Attempt, handle: checkpoint_pb2.StateHandle) -> Path:
    path = attempt.copies.file_of(handle)
    assert path is not None
    return path


def test_a_copy_is_read_instead_of_the_store(attempt: Attempt) -> None:
    handle = attempt.write(1, ["x", "y"])["y"]
    assert attempt.files.reader.read(handle) == content_of("y", 1)
    assert attempt.files.reader.read_range(handle, 2, 5) == content_of("y", 1)[2:7]
    assert attempt.files.count_restored() == (handle.size_bytes + 5, 0)


def test_a_file_of_its_own_is_a_second_name_of_the_copy(attempt: Attempt, tmp_path: Path) -> None:
    handle = attempt.write(1, ["x"])["x"]
    attempt.files.reader.fetch(handle, tmp_path / "000012.sst")
    assert (tmp_path / "000012.sst").read_bytes() == content_of("x", 1)
    assert (tmp_path / "000012.sst").samefile(only_file(attempt, handle))


@pytest.mark.parametrize("damage", ["changed", "shorter", "longer", "gone", "directory"])
@pytest.mark.parametrize("way", ["read", "read_range", "fetch"])
def test_a_damaged_copy_is_read_from_the_store(
    attempt: Attempt, tmp_path: Path, damage: str, way: str
) -> None:
    handle = attempt.write(1, ["x"])["x"]
    content, path = content_of("x", 1), only_file(attempt, handle)
    if damage == "changed":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "shorter":
        path.write_bytes(content[:-1])
    elif damage == "longer":
        path.write_bytes(content + b"x")
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    reader = attempt.files.reader
    if way == "read":
        found = reader.read(handle)
    elif way == "read_range":
        found = reader.read_range(handle, 0, handle.size_bytes)
    else:
        reader.fetch(handle, tmp_path / "target")
        found = (tmp_path / "target").read_bytes()
    assert found == content
    # Bytes behind the end of a blob are nobody's: reading the blob itself does not come upon them.
    is_undamaged = damage == "longer" and way == "read"
    expected = (len(content), 0) if is_undamaged else (0, len(content))
    assert attempt.files.count_restored() == expected


def test_ranges_come_from_copies_as_far_as_there_are_any(attempt: Attempt) -> None:
    handles = list(attempt.write(1, ["x", "y", "z"]).values())
    only_file(attempt, handles[1]).unlink()
    wanted = [(handle, start, 5) for handle in handles for start in (0, 5)]
    found = [*attempt.files.reader.read_ranges(wanted)]
    assert found == [
        content_of(name, 1)[start : start + 5] for name in ("x", "y", "z") for start in (0, 5)
    ]
    assert attempt.files.count_restored() == (20, 10)


@pytest.mark.parametrize("damage", ["gone", "directory"])
def test_a_copy_that_goes_after_it_was_looked_at_is_read_from_the_store(
    attempt: Attempt, tmp_path: Path, damage: str
) -> None:
    """Copies are removed by others at any time: the daemon, a later attempt."""
    handle = attempt.write(1, ["x"])["x"]
    assert attempt.files.reader.read_range(handle, 0, 3) == content_of("x", 1)[:3]
    only_file(attempt, handle).unlink()
    if damage == "directory":
        only_file(attempt, handle).mkdir()
    attempt.files.reader.fetch(handle, tmp_path / "000012.sst")
    assert (tmp_path / "000012.sst").read_bytes() == content_of("x", 1)
    assert attempt.files.count_restored() == (3, handle.size_bytes)


def test_a_disk_that_takes_no_copy_does_not_fail_the_snapshot(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a directory")
    attempt = Attempt(tmp_path / "root", MemoryStore(LIMIT_BYTES))
    handles = attempt.write(1, ["x", "y"])
    assert attempt.files.reader.read(handles["x"]) == content_of("x", 1)
    assert attempt.counters.local_backup_failures == 1
    assert attempt.files.count_restored() == (0, handles["x"].size_bytes)


def test_what_is_not_in_the_store_leaves_no_copy(tmp_path: Path) -> None:
    class FullStore(MemoryStore):
        def put(self, path, chunks):
            for _ in chunks:
                pass
            raise StoreTransient("no space")

    attempt = Attempt(tmp_path, FullStore(LIMIT_BYTES))
    with pytest.raises(StoreTransient):
        attempt.write(1, ["x"])
    assert not attempt.held()


def test_a_snapshot_is_written_while_another_completes(attempt: Attempt) -> None:
    """They are written on I/O threads; completions come on the mailbox thread."""
    first, second = (list(attempt.write(number, ["x"]).values()) for number in (1, 2))
    attempt.describe(1, first)
    places = Interrupted(attempt.files._places, lambda: attempt.describe(2, second))
    attempt.files._places = places
    attempt.complete(1)
    places.end()
    attempt.complete(2)
    assert attempt.held() == {(handle.path, handle.offset) for handle in second}


@examples(60)
@given(data=st.data())
def test_the_copies_are_what_the_latest_completed_checkpoint_needs(data: st.DataObject) -> None:
    """Each checkpoint writes some blobs and refers to some of the last completed one; some are aborted, some
    complete late, and the attempt is replaced now and then."""
    root = Path(tempfile.mkdtemp())
    try:
        store = MemoryStore(LIMIT_BYTES)
        attempt = Attempt(root, store)
        completed: list[checkpoint_pb2.StateHandle] = []
        for checkpoint_id in range(1, data.draw(st.integers(1, 8)) + 1):
            kept = [handle for handle in completed if data.draw(st.booleans())]
            names = [f"b{index}" for index in range(data.draw(st.integers(0, 3)))]
            handles = kept + list(attempt.write(checkpoint_id, names).values())
            attempt.describe(checkpoint_id, handles)
            if data.draw(st.booleans()):
                attempt.complete(checkpoint_id)
                completed = handles
                assert attempt.held() == {(handle.path, handle.offset) for handle in completed}
            if data.draw(st.integers(0, 3)) == 0:
                attempt = Attempt(root, store)
            assert attempt.held() >= {(handle.path, handle.offset) for handle in completed}
            for handle in completed:
                attempt.files.reader.read(handle)
        assert attempt.files.count_restored()[1] == 0
    finally:
        shutil.rmtree(root)
