"""Where the snapshots of an attempt are written to and read from: the job's directory in the store."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock

import structlog
from typing_extensions import override

from common.pb import internal_pb2
from penstock.errors import TaskFailure
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import HandleRange, SnapshotCopy, SnapshotReader, SnapshotWriter
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import open_store
from penstock.storage.savepoint import STATE_DIRECTORY
from penstock.storage.snapshot_files import (
    PackedSnapshotWriter,
    StoreSnapshotReader,
    snapshot_file_name,
)
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.snapshot.local_copies_store import LocalCopies, Place
from taskmanager.snapshot.local_first_store import LocalFirstReader
from taskmanager.state.operator_state import with_items

_log = structlog.get_logger()


def random_name() -> str:
    """What no other process calls anything."""
    return uuid.uuid4().hex[:12]


class SnapshotFiles:
    """Makes writers for the checkpoints of one attempt, and reads what earlier attempts wrote.

    Args:
        store: the job's directory; None = snapshots travel inline.
        inline_max_bytes: snapshots up to this size travel inline anyway.
        jobmanager_max_bytes: what the JobManager holds at most, where all travel inline.
        has_ended: asked before each read; nothing is read for an attempt that has ended.
        backups: takes copies of what is written; None = there are none.
        local: copies that are read where they are undamaged; None = none are.
        opened: opens the stores that handles name, and the directories of savepoints.
        new_name: makes what tells files of one checkpoint and attempt apart.

    Attributes:
        reader: reads what earlier attempts wrote.
    """

    def __init__(
        self,
        store: ObjectStore | None,
        attempt: internal_pb2.AttemptId,
        inline_max_bytes: int,
        jobmanager_max_bytes: int | None = None,
        has_ended: Callable[[], bool] = lambda: False,
        *,
        backups: LocalCopies | None = None,
        local: LocalCopies | None = None,
        counters: SubtaskCounters | None = None,
        opened: Callable[[str], ObjectStore] = open_store,
        new_name: Callable[[], str] = random_name,
    ) -> None:
        self._store = store
        self._new_name = new_name
        self._opened = opened
        self._attempt = attempt
        self._inline_max_bytes = inline_max_bytes
        self._jobmanager_max_bytes = jobmanager_max_bytes
        self._backups = backups
        self._counters = counters or SubtaskCounters()
        self._places: dict[int, set[Place]] = {}
        """Of the snapshots that were written, by checkpoint: where their blobs are."""
        self._places_lock = Lock()
        self._local_first = LocalFirstReader(StoreSnapshotReader(store, opened), local)
        self.reader: SnapshotReader = _EndingReader(self._local_first, has_ended)

    def writer(self, checkpoint_id: int, target: str = "") -> SnapshotWriter:
        """A writer for the snapshot that a checkpoint takes of the attempt, or a savepoint.

        Args:
            target: the directory of the savepoint; "" = it is the job's own.
        """
        attempt = self._attempt
        name = snapshot_file_name(
            checkpoint_id,
            attempt.vertex,
            attempt.subtask_index,
            attempt.attempt,
            self._new_name(),
        )
        if target:
            return PackedSnapshotWriter(
                self._opened(target), name, self._inline_max_bytes, directory=STATE_DIRECTORY
            )
        return PackedSnapshotWriter(
            self._store,
            name,
            self._inline_max_bytes,
            total_inline_max_bytes=self._jobmanager_max_bytes,
            begin_copy=self._begin_copy if self._backups is not None else None,
        )

    def _begin_copy(self, path: str) -> SnapshotCopy:
        assert self._backups is not None
        return self._backups.begin(path, self._count_failure)

    def _count_failure(self) -> None:
        self._counters.local_backup_failures += 1

    def written(self, checkpoint_id: int, snapshot: checkpoint_pb2.SubtaskSnapshot) -> None:
        """A snapshot is complete but for its acknowledgement; any thread."""
        if self._backups is not None:
            places = {(handle.path, handle.offset) for handle in _handles(snapshot) if handle.path}
            with self._places_lock:
                self._places[checkpoint_id] = places

    def completed(self, checkpoint_id: int) -> Callable[[], None] | None:
        """A checkpoint is complete; what is left to do on an I/O thread: older copies go."""
        with self._places_lock:
            needed = self._places.get(checkpoint_id)
            for done in [known for known in self._places if known <= checkpoint_id]:
                del self._places[done]
        if needed is None or self._backups is None:
            return None
        return partial(self._retain, self._backups, checkpoint_id, needed)

    def _retain(self, backups: LocalCopies, checkpoint_id: int, needed: set[Place]) -> None:
        attempt = self._attempt
        try:
            backups.retain(attempt.vertex, attempt.subtask_index, checkpoint_id, needed)
        except OSError as error:
            _log.warning(
                "local_copy.not_removed",
                vertex=attempt.vertex,
                subtask_index=attempt.subtask_index,
                reason=str(error),
            )

    def count_restored(self) -> tuple[int, int]:
        """What has been read so far, from copies and from the store: bytes, put into the counters."""
        counters, reader = self._counters, self._local_first
        counters.restored_local_bytes = reader.local_bytes
        counters.restored_store_bytes = reader.store_bytes
        return reader.local_bytes, reader.store_bytes

    def restored_lists(
        self, restored: internal_pb2.RestoredOperator
    ) -> list[checkpoint_pb2.OperatorStateSnapshot]:
        """Lists of an operator with their items in place.

        Raises:
            StreamError: a file of theirs is missing or damaged.
        """
        return [with_items(held, self.reader) for held in restored.lists]


def _handles(
    snapshot: checkpoint_pb2.SubtaskSnapshot,
) -> Iterator[checkpoint_pb2.StateHandle]:
    for operator in snapshot.operators:
        for file in operator.keyed.files:
            yield file.handle
        for held in operator.lists:
            yield held.handle


class _EndingReader(SnapshotReader):
    """Reads until the attempt has ended."""

    def __init__(self, reader: SnapshotReader, has_ended: Callable[[], bool]) -> None:
        self._reader = reader
        self._has_ended = has_ended

    @override
    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        self._check()
        return self._reader.read(handle)

    @override
    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        self._check()
        return self._reader.read_range(handle, offset, size_bytes)

    @override
    def read_ranges(self, wanted: Iterable[HandleRange]) -> Generator[bytes]:
        self._check()
        for content in self._reader.read_ranges(wanted):
            yield content
            self._check()

    @override
    def fetch(self, handle: checkpoint_pb2.StateHandle, target: Path) -> None:
        self._check()
        self._reader.fetch(handle, target)

    @override
    def fetch_all(self, wanted: Mapping[Path, checkpoint_pb2.StateHandle]) -> None:
        self._check()
        self._reader.fetch_all(wanted)

    @override
    def remove_damaged(self) -> bool:
        return self._reader.remove_damaged()

    def _check(self) -> None:
        if self._has_ended():
            raise TaskFailure("the attempt ended while its state was being read")
