"""Result partitions that are kept: read while they are written, or when they are complete (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from typing_extensions import override

from common.elements import CheckpointBarrier, CheckpointCancelled, ControlElement, WrittenFiles
from penstock.errors import InvariantViolation, StreamError
from penstock.pb import checkpoint_pb2
from taskmanager.network.result_partition import PartitionContext, ResultPartition
from taskmanager.partitions.dealt_files import dealt
from taskmanager.partitions.exchange_cache import ExchangeCache, Producer
from taskmanager.partitions.kept_subpartition import KeptSubpartition, SubpartitionFiles
from taskmanager.partitions.retention import Retention
from taskmanager.partitions.spill_layout import PartitionIndex, SubpartitionIndex
from taskmanager.partitions.subpartition_log import ControlEntry, SubpartitionLog


class PartitionFiles(Protocol):
    """The files of one partition; what is done to them is done off the mailbox."""

    def subpartition(self, index: int) -> SubpartitionFiles:
        """The files of a subpartition."""

    def seal(
        self,
        subpartitions: tuple[SubpartitionIndex, ...],
        on_sealed: Callable[[PartitionIndex], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Writes the index; one of the callbacks follows, from the mailbox."""

    def remove(self) -> None:
        """Removes everything, once nothing is being written."""


class KeptPartition(ResultPartition, Producer):
    """A partition that consumers may read again (``CACHING``, ``CACHING_MEMORY``).

    It outlives its attempt where that finishes.

    Args:
        retention: which kind.
        cache: of the slot process.
        first_rows: subpartition -> offset of its first row, 0 where it is not named.
        unread: subpartitions that nobody will read.
    """

    def __init__(
        self,
        context: PartitionContext,
        retention: Retention,
        cache: ExchangeCache,
        files: PartitionFiles,
        *,
        first_rows: Mapping[int, int],
        unread: Collection[int] = (),
    ) -> None:
        self.retention = retention
        self.is_retired = False
        self._has_ended = False
        self._cache = cache
        self._files = files
        self._first_rows = first_rows
        self._unread = unread
        super().__init__(context)

    @override
    def _new_subpartitions(self) -> Sequence[KeptSubpartition]:
        context = self._context
        self._kept = [
            KeptSubpartition(
                self.retention,
                (context.batch_rows, context.batch_bytes_max),
                self._cache,
                self._files.subpartition(index),
                self._load,
                first_row=self._first_rows.get(index, 0),
                is_unread=index in self._unread,
                on_sent=self._count_sent,
                on_unblocked=self._subpartition_unblocked,
                on_error=self._serving_failed,
            )
            for index in range(context.subpartition_count)
        ]
        return self._kept

    @override
    def is_available(self) -> bool:
        return super().is_available() and not self._cache.blocks(self)

    @property
    @override
    def has_backlog(self) -> bool:
        return any(subpartition.has_backlog for subpartition in self._kept)

    @override
    def room_came(self) -> None:
        if not self._is_released and not self.is_retired:
            self._context.on_available()

    @override
    def positions(self) -> list[checkpoint_pb2.ChannelPosition]:
        return [
            checkpoint_pb2.ChannelPosition(
                edge_id=self.partition_id.edge_id, index=index, rows=subpartition.position
            )
            for index, subpartition in enumerate(self._kept)
        ]

    @override
    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for subpartition in self._kept:
            subpartition.checkpoint_completed(checkpoint_id)

    @override
    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        for subpartition in self._kept:
            subpartition.checkpoint_aborted(checkpoint_id)

    @override
    def is_drained(self) -> bool:
        """It is kept, so nobody has to wait until consumers have read it."""
        return self._has_ended

    @override
    def finish(self) -> None:
        super().finish()
        self._has_ended = True

    @override
    def retire(self) -> None:
        """Stays, for consumers that read it again, until it is released."""
        self.is_retired = True
        self._flush_deadline_ns = None

    @override
    def release(self) -> None:
        if not self._is_released:
            super().release()
            self._files.remove()


class BlockingPartition(KeptPartition):
    """A partition that is read when it is complete, by other processes, from files.

    Nothing checkpoints do changes it: barriers do not enter it, and no row goes before it is released.

    Args:
        takes_files: its rows may be given as files, which are dealt out to the consumers.
    """

    is_served_here = False

    def __init__(
        self,
        context: PartitionContext,
        cache: ExchangeCache,
        files: PartitionFiles,
        *,
        first_rows: Mapping[int, int],
        unread: Collection[int] = (),
        takes_files: bool = False,
    ) -> None:
        self._takes_files = takes_files
        self._is_sealing = self._is_sealed = False
        super().__init__(
            context, Retention.BLOCKING, cache, files, first_rows=first_rows, unread=unread
        )

    @override
    def emit_control(self, element: ControlElement) -> None:
        if isinstance(element, CheckpointBarrier):
            for subpartition in self._kept:
                subpartition.barrier_row = subpartition.log.end_row
        elif not isinstance(element, CheckpointCancelled):
            super().emit_control(element)

    @override
    def takes_files(self, written: WrittenFiles) -> bool:
        if not self._takes_files:
            return False
        on_disk = [one for one in self._kept if one.needs_local_disk]
        if on_disk and not self._cache.has_disk(written.size_bytes):
            return False  # what becomes of rows then, the cache knows
        return dealt(written.files, len(self._kept)) is not None

    @override
    def emit_files(self, written: WrittenFiles) -> None:
        shares = dealt(written.files, len(self._kept))
        assert shares is not None, "it has been asked"
        rows = sum(count for _, count in written.files)
        self.metrics.records_out += rows
        self._counters.records_out += rows
        for subpartition, files in zip(self._kept, shares, strict=True):
            subpartition.take_files(files)

    @override
    def flush(self) -> None:
        """Nobody waits for what is collected."""
        self._flush_deadline_ns = None

    @override
    def end_data(self) -> None:
        """Consumers start when it is complete, whatever else its subtask still waits for."""
        super().end_data()
        super().finish()
        self._is_sealing = True
        for subpartition in self._kept:
            subpartition.seal()
        self._seal_if_written()

    @override
    def finish(self) -> None:
        """It has ended with its data."""

    @property
    @override
    def is_complete(self) -> bool:
        return self._is_sealed

    @override
    def is_drained(self) -> bool:
        """True once it is complete on disk."""
        return self._is_sealed

    @override
    def retire(self) -> None:
        """The files stay, without this process."""
        super().retire()
        super(KeptPartition, self).release()

    @override
    def _subpartition_unblocked(self) -> None:
        if self._is_sealing and not self._is_released:
            self._seal_if_written()
        else:
            super()._subpartition_unblocked()

    def _seal_if_written(self) -> None:
        if self._is_sealing and all(subpartition.is_on_disk for subpartition in self._kept):
            self._is_sealing = False
            self._files.seal(
                tuple(_index_of(subpartition.log) for subpartition in self._kept),
                self._sealed,
                self._serving_failed,
            )

    def _sealed(self, index: PartitionIndex) -> None:
        self._is_sealed, self.sealed_bytes = True, index.size_bytes
        if not self._is_released:
            self._context.on_available()


class NoFiles(PartitionFiles, SubpartitionFiles):
    """Of partitions in a process without a spill directory: there are never any files."""

    @override
    def subpartition(self, index: int) -> SubpartitionFiles:
        return self

    @override
    def remove(self) -> None:
        pass

    @override
    def unlink(self, files: Sequence[object]) -> None:
        pass

    @override
    def write(self, *_arguments: object) -> None:
        raise InvariantViolation("rows are written in a process without a spill directory")

    @override
    def take(self, *_arguments: object) -> None:
        raise InvariantViolation("files are taken in a process without a spill directory")

    @override
    def read(self, *_arguments: object) -> None:
        raise InvariantViolation("rows are read in a process without a spill directory")

    @override
    def seal(self, *_arguments: object) -> None:
        raise InvariantViolation("a partition is sealed in a process without a spill directory")


def _index_of(log: SubpartitionLog) -> SubpartitionIndex:
    return SubpartitionIndex(
        log.first_row_of_all,
        tuple(file.file for file in log.files),
        tuple(
            (entry.row, entry.element) for entry in log.entries() if isinstance(entry, ControlEntry)
        ),
    )
