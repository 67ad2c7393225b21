"""Subtasks of one operator on the RocksDB backend, with a checkpoint store in memory, stepped by hand."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from common.clock import SystemClock
from penstock.errors import StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.key_groups import key_group_range
from taskmanager.state.backend import BackendEnvironment, BackendSnapshot
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.slot_memory_store import slot_memory
from taskmanager.state.rocksdb.store import RocksDBStateBackend

MAX_PARALLELISM = 8
_IN_MEMORY = Path("/dev/shm")


@contextmanager
def fast_directory() -> Iterator[Path]:
    """A directory on which syncing costs nothing, where there is one."""
    parent = _IN_MEMORY if _IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def starved_backend(environment: BackendEnvironment) -> RocksDBStateBackend:
    """A backend that hardly has a cache: nearly everything is read from the database."""
    slot_memory(environment.memory)._cache_bytes = 3000
    return RocksDBStateBackend(environment)


class BlobStore(SnapshotReader):
    """Bytes of snapshots by path; counts what was uploaded."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.uploaded: list[str] = []

    def write(self, snapshot: BackendSnapshot) -> checkpoint_pb2.KeyedStateSnapshot:
        """Writes the blobs of a snapshot and lets it describe itself."""
        handles: dict[str, checkpoint_pb2.StateHandle] = {}
        for blob in snapshot.blobs():
            content = b"".join(bytes(part) for part in blob.chunks())
            path = f"{len(self.files)}-{blob.name}"
            self.files[path] = content
            self.uploaded.append(blob.name)
            handles[blob.name] = checkpoint_pb2.StateHandle(
                path=path, size_bytes=len(content), checksum=zlib.crc32(content)
            )
        return snapshot.describe(handles)

    @override
    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        if handle.path not in self.files:
            raise StoreNotFound(handle.path)
        return self.files[handle.path]

    @override
    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        return self.read(handle)[offset : offset + size_bytes]


@dataclass
class Checkpoint:
    """A checkpoint of all subtasks.

    Attributes:
        pending: per subtask what was frozen.
        written: per subtask its description, once it is written.
    """

    checkpoint_id: int
    pending: list[BackendSnapshot]
    written: list[checkpoint_pb2.KeyedStateSnapshot] | None = None
    is_over: bool = False
    content: object = None

    @property
    def snapshots(self) -> list[checkpoint_pb2.KeyedStateSnapshot]:
        """The description of each subtask's snapshot, which must be written."""
        assert self.written is not None
        return self.written


@dataclass
class Cluster:
    """The subtasks of an operator.

    Args:
        directory: for the databases.
        cache_bytes: budget of the caches of each subtask; None = as usual.
    """

    directory: Path
    cache_bytes: int | None = None
    store: BlobStore = field(default_factory=BlobStore)
    backends: list[RocksDBStateBackend] = field(default_factory=list)
    is_incremental: bool = True
    _opened: int = 0
    _checkpoints: int = 0

    def start(
        self, parallelism: int, restored: list[checkpoint_pb2.KeyedStateSnapshot] | None = None
    ) -> None:
        """Opens the backends; what was there before is abandoned as by a kill."""
        self.backends = []
        for subtask in range(parallelism):
            self._opened += 1
            memory = ManagedMemory(64 << 20)
            if self.cache_bytes is not None:
                slot_memory(memory)._cache_bytes = self.cache_bytes
            groups = key_group_range(subtask, parallelism, MAX_PARALLELISM)
            mine = [
                snapshot
                for snapshot in restored or []
                if snapshot.first_key_group < groups.stop
                and snapshot.last_key_group >= groups.start
            ]
            environment = BackendEnvironment(
                operator_uid="uid",
                operator_name="operator",
                subtask_index=subtask,
                parallelism=parallelism,
                max_parallelism=MAX_PARALLELISM,
                clock=SystemClock(),
                memory=memory,
                work_directory=self.directory / f"{self._opened}",
                is_incremental=self.is_incremental,
                restored=tuple(mine),
                reader=self.store,
            )
            self.backends.append(RocksDBStateBackend(environment))

    def each(self, action: Callable[[RocksDBStateBackend], object]) -> None:
        """Does something with every subtask's backend."""
        for backend in self.backends:
            action(backend)

    def freeze(self) -> Checkpoint:
        """The synchronous part of a checkpoint."""
        self._checkpoints += 1
        number = self._checkpoints
        return Checkpoint(number, [backend.snapshot(number) for backend in self.backends])

    def write(self, checkpoint: Checkpoint) -> None:
        """The asynchronous part."""
        checkpoint.written = [self.store.write(snapshot) for snapshot in checkpoint.pending]

    def checkpoint(self) -> Checkpoint:
        """A whole checkpoint that completes."""
        checkpoint = self.freeze()
        self.write(checkpoint)
        self.each(lambda backend: backend.checkpoint_completed(checkpoint.checkpoint_id))
        return checkpoint

    def close(self) -> None:
        """Closes all backends."""
        self.each(lambda backend: backend.close())
