"""The in-memory backend driven by hand: snapshots written part by part, confirmed, aborted, restored."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from typing_extensions import override

from penstock.errors import StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from taskmanager.state.backend import BackendEnvironment
from taskmanager.state.hashmap.snapshot import HashMapSnapshot
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.state.memory import ManagedMemory

MAX_PARALLELISM = 128


class SteppedClock:
    """A clock that is set by hand."""

    def __init__(self, now_ms: int = 0) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        """The time it was set to."""
        return self.time_ms

    def monotonic_ns(self) -> int:
        """The same."""
        return self.time_ms * 1_000_000


class Files(SnapshotReader):
    """A store of files by path, that counts what is read."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.read_count = 0

    def put(self, path: str, data: bytes) -> checkpoint_pb2.StateHandle:
        """Stores a file."""
        self.content[path] = data
        return checkpoint_pb2.StateHandle(
            path=path, size_bytes=len(data), checksum=zlib.crc32(data)
        )

    @override
    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        """A whole file."""
        return self.read_range(handle, 0, handle.size_bytes)

    @override
    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        """A part of a file."""
        self.read_count += 1
        if handle.path not in self.content:
            raise StoreNotFound(handle.path)
        return self.content[handle.path][offset : offset + size_bytes]

    def keep_only(self, snapshots: Iterable[checkpoint_pb2.KeyedStateSnapshot]) -> None:
        """Deletes what no snapshot refers to."""
        used = {file.handle.path for snapshot in snapshots for file in snapshot.files}
        self.content = {path: data for path, data in self.content.items() if path in used}


class Writing:
    """A snapshot that is being written, step by step."""

    def __init__(self, snapshot: HashMapSnapshot, files: Files) -> None:
        self.snapshot = snapshot
        self._files = files
        self._written: list[bytes] = []
        self._name = ""
        self._parts = self._all_parts()

    def _all_parts(self) -> Iterator[bytes]:
        for blob in self.snapshot.blobs():
            self._name = blob.name
            for part in blob.chunks():
                yield bytes(part)

    def step(self) -> bool:
        """Writes the next part; False = there was none."""
        part = next(self._parts, None)
        if part is not None:
            self._written.append(part)
        return part is not None

    def finish(self) -> checkpoint_pb2.KeyedStateSnapshot:
        """Writes the rest and describes the snapshot, as it would be read again."""
        while self.step():
            pass
        handles = {}
        if self._name:
            handles[self._name] = self._files.put(self._name, b"".join(self._written))
        described = self.snapshot.describe(handles)
        return checkpoint_pb2.KeyedStateSnapshot.FromString(described.SerializeToString())

    @property
    def written_bytes(self) -> int:
        """Size of what was written for it."""
        return sum(map(len, self._written))


def environment(
    files: Files,
    restored: Iterable[checkpoint_pb2.KeyedStateSnapshot] = (),
    *,
    subtask_index: int = 0,
    parallelism: int = 1,
    is_incremental: bool = True,
    clock: SteppedClock | None = None,
    memory: ManagedMemory | None = None,
) -> BackendEnvironment:
    """What a backend is opened with."""
    return BackendEnvironment(
        operator_uid="uid",
        operator_name="operator",
        subtask_index=subtask_index,
        parallelism=parallelism,
        max_parallelism=MAX_PARALLELISM,
        clock=clock or SteppedClock(),
        memory=memory or ManagedMemory(1 << 40),
        work_directory=Path("unused"),
        is_incremental=is_incremental,
        restored=tuple(restored),
        reader=files,
    )


def take_snapshot(
    backend: HashMapStateBackend, checkpoint_id: int, files: Files
) -> checkpoint_pb2.KeyedStateSnapshot:
    """A whole snapshot at once, confirmed."""
    described = Writing(backend.snapshot(checkpoint_id), files).finish()
    backend.checkpoint_completed(checkpoint_id)
    return described
