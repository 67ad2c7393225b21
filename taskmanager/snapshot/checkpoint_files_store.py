"""Where the snapshots of an attempt are written to and read from: the job's directory in the store."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from typing_extensions import override

from common.pb import internal_pb2
from penstock.errors import TaskFailure
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader, SnapshotWriter
from penstock.storage.object_store import ObjectStore
from penstock.storage.snapshot_files import (
    PackedSnapshotWriter,
    StoreSnapshotReader,
    snapshot_file_name,
)


class CheckpointFiles:
    """Makes writers for the checkpoints of one attempt, and reads what earlier attempts wrote.

    Args:
        store: the job's directory; None = snapshots travel inline.
        inline_max_bytes: snapshots up to this size travel inline anyway.
        jobmanager_max_bytes: what the JobManager holds at most, where all travel inline.
        has_ended: asked before each read; nothing is read for an attempt that has ended.
    """

    def __init__(
        self,
        store: ObjectStore | None,
        attempt: internal_pb2.AttemptId,
        inline_max_bytes: int,
        jobmanager_max_bytes: int | None = None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._inline_max_bytes = inline_max_bytes
        self._jobmanager_max_bytes = jobmanager_max_bytes
        self.reader: SnapshotReader = _EndingReader(StoreSnapshotReader(self._store), has_ended)

    def writer(self, checkpoint_id: int) -> SnapshotWriter:
        """A writer for the snapshot that a checkpoint takes of the attempt."""
        attempt = self._attempt
        name = snapshot_file_name(
            checkpoint_id,
            attempt.vertex,
            attempt.subtask_index,
            attempt.attempt,
            uuid.uuid4().hex[:12],
        )
        return PackedSnapshotWriter(
            self._store,
            name,
            self._inline_max_bytes,
            total_inline_max_bytes=self._jobmanager_max_bytes,
        )

    def restored_lists(
        self, restored: internal_pb2.RestoredOperator
    ) -> list[checkpoint_pb2.OperatorStateSnapshot]:
        """Lists of an operator with their items in place.

        Raises:
            StreamError: a file of theirs is missing or damaged.
        """
        lists = []
        for held in restored.lists:
            found = checkpoint_pb2.OperatorStateSnapshot()
            found.CopyFrom(held)
            if held.HasField("handle"):
                content = checkpoint_pb2.OperatorStateItems.FromString(
                    self.reader.read(held.handle)
                )
                found.items.extend(content.items)
                found.ClearField("handle")
            lists.append(found)
        return lists


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

    def _check(self) -> None:
        if self._has_ended():
            raise TaskFailure("the attempt ended while its state was being read")
