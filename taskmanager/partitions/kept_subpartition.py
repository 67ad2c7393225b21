"""A subpartition whose rows are kept: the producer's side of a log and its readers (pure).

A reader that keeps up holds the producer back when it has no credit, as on a pipelined edge. An absent
reader does not, and one that is catching up slows it down at most (``log_view``): what bounds the log
then is the cache.

Invariants:
    - every reader gets what was emitted, in order, without gaps, from the row it asked for,
    - nothing that an attached reader has not been sent is dropped,
    - attached readers are of the newest attempt of the consumer that has asked,
    - nothing behind the barrier of the latest completed checkpoint is dropped, but to make room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa
from typing_extensions import override

from common.elements import (
    CheckpointBarrier,
    ControlElement,
    EndOfPartition,
    Watermark,
)
from penstock.errors import PartitionUnavailable, StreamError
from taskmanager.network.batch_builder import BatchBuilder
from taskmanager.network.pipelined import PartitionLoad
from taskmanager.network.subpartition import Refusal, Subpartition
from taskmanager.partitions.dealt_files import GivenFiles
from taskmanager.partitions.exchange_cache import CacheMember, ExchangeCache, WrittenFiles
from taskmanager.partitions.log_view import LogView
from taskmanager.partitions.retention import Retention
from taskmanager.partitions.spill_layout import SpillFile
from taskmanager.partitions.subpartition_log import LogFile, SpillRun, SubpartitionLog


class SubpartitionFiles(Protocol):
    """The files of one subpartition; what is done to them is done off the mailbox.

    One of the two callbacks of a call follows from the mailbox.

    Attributes:
        need_local_disk: they lie on the disk of the TaskManager.
    """

    need_local_disk: bool = True

    def write(
        self,
        sequence: int,
        first_row: int,
        batches: Sequence[pa.RecordBatch],
        on_written: Callable[[WrittenFiles], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Writes batches, to one file or more."""

    def take(
        self,
        sequence: int,
        first_row: int,
        files: GivenFiles,
        on_taken: Callable[[WrittenFiles], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Takes files as they are."""

    def read(
        self,
        file: LogFile,
        on_read: Callable[[list[pa.RecordBatch]], None],
        on_failed: Callable[[StreamError], None],
    ) -> None:
        """Reads the batches of a file."""

    def unlink(self, files: Sequence[SpillFile]) -> None:
        """Removes files; those who have read them keep what they have."""


class KeptSubpartition(Subpartition, CacheMember):
    """Keeps what was emitted for one consumer.

    Args:
        retention: how it is read, and where its rows may be.
        collector_limits: rows of a full batch, and bytes beyond which one is cut.
        cache: decides where its rows are.
        files: where they go.
        load: of the partition; the subpartition adds its own.
        first_row: offset of the first row.
        is_unread: nobody will read it; rows are only counted.
        on_sent: called with the bytes of each batch sent.
        on_unblocked: called when no reader holds the producer back any more, or all has been consumed.
        on_error: called when rows cannot be kept.
    """

    def __init__(
        self,
        retention: Retention,
        collector_limits: tuple[int, int],
        cache: ExchangeCache,
        files: SubpartitionFiles,
        load: PartitionLoad,
        *,
        first_row: int = 0,
        is_unread: bool = False,
        on_sent: Callable[[int], None],
        on_unblocked: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.log = SubpartitionLog(first_row)
        self.retention = retention
        self.is_sealing = False
        self.needs_local_disk = files.need_local_disk
        self.disk_bytes = 0
        self.barrier_row = first_row
        """Rows emitted before the last barrier."""
        self._collector = BatchBuilder(*collector_limits, self._put_batch, self._put_control)
        self._cache = cache
        self._files = files
        self._load = load
        self._is_unread = is_unread
        self._on_sent = on_sent
        self._on_unblocked = on_unblocked
        self._on_error = on_error
        self._views: list[LogView] = []
        self._reader_attempt = 0
        """The newest attempt of the consumer that has asked."""
        self._has_been_read = False
        self._is_consumed = is_unread
        self._is_finished = False
        self._is_released = False
        self._is_blocked = False
        self._flush_wanted = False
        self._unneeded_index = 0
        """No completed checkpoint needs what is before it."""
        self._settled_bytes = 0
        cache.join(self)

    # ------------------------------------------------------------ state

    @property
    @override
    def has_collected(self) -> bool:
        return not self._collector.is_empty

    @property
    @override
    def is_consumed(self) -> bool:
        return self._is_consumed

    @property
    def is_on_disk(self) -> bool:
        """True when no row is in memory."""
        return not self.log.memory_bytes and not self.log.is_writing

    @property
    @override
    def has_backlog(self) -> bool:
        if self._views:
            return any(not view.is_live for view in self._views)
        return not self._is_consumed and self.log.end_row > self.log.first_row

    @property
    def position(self) -> int:
        """Rows emitted before the last barrier, or at all once nothing follows."""
        return self.log.end_row if self._is_finished else self.barrier_row

    # ------------------------------------------------------------ producer's side

    @override
    def add(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        assert not self._is_finished, "rows after the end of the partition"
        if self._is_unread:
            self.log.skip(batch.num_rows)
        elif self._collector.add(batch, size_bytes):
            self._flush_wanted = False
            self._pump()

    def take_files(self, files: GivenFiles) -> None:
        """Rows that are in files, in their order: as if they had been added."""
        assert not self._is_finished, "files after the end of the partition"
        if self._is_unread or not files:
            self.log.skip(sum(rows for _, rows in files))
            return
        run = self.log.append_files([rows for _, rows in files])

        def taken(described: WrittenFiles) -> None:
            self.written(run, described)

        def failed(error: StreamError) -> None:
            self.log.abandoned(run)
            self._cache.leave(self)
            self.fail(error)

        self._files.take(run.sequence, run.first_row, files, taken, failed)

    @override
    def add_control(self, element: ControlElement) -> None:
        assert not self._is_finished, "a control element after the end of the partition"
        if isinstance(element, Watermark) and self._collector.hold(element):
            return
        self._cut()
        self._is_finished = isinstance(element, EndOfPartition)
        if not self._is_unread:
            self._put_control(element)
        if isinstance(element, CheckpointBarrier):
            self.barrier_row = self.log.end_row
            self.log.mark(element.checkpoint_id)
        self._pump()

    @override
    def let_go(self) -> None:
        self._collector.let_go()

    @override
    def flush(self) -> None:
        """Where no reader is waiting for it, what is collected may as well grow."""
        if self._collector.is_empty:
            return
        if self._is_awaited:
            self._cut()
            self._pump()
        else:
            self._flush_wanted = True

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Lets go what is before the barrier of a completed checkpoint."""
        self._unneeded_index = max(self._unneeded_index, self.log.completed(checkpoint_id))
        self._trim()

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete."""
        self.log.aborted(checkpoint_id)

    def seal(self) -> None:
        """Everything goes to files now."""
        self.is_sealing = True
        self._cache.make_room()

    @override
    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        self._is_finished = True
        self._collector.clear()
        views, self._views = self._views, []
        for view in views:
            view.released()
        self._set_blocked(is_blocked=False)
        self._cache.leave(self)
        self.log.drop(self.log.end_index)
        self._settle(disk_change=-self.disk_bytes)

    # ------------------------------------------------------------ consumers' side

    @override
    def view(self, first_row: int, on_unavailable: Refusal, reader_attempt: int = 0) -> LogView:
        log = self.log
        if reader_attempt < self._reader_attempt:
            raise PartitionUnavailable("a later attempt of its consumer reads it")
        if self._is_unread:
            raise PartitionUnavailable("its consumer has finished, so that its rows are not kept")
        is_beyond = self._is_finished and first_row > log.end_row
        if self._is_released or first_row < log.first_row or is_beyond:
            raise PartitionUnavailable(
                f"it has the rows {log.first_row} to {log.end_row}, and cannot be read from row"
                f" {first_row}; its producer must run again"
            )
        self._has_been_read = True
        self._end_older_views(reader_attempt)
        return LogView(
            log,
            first_row,
            reader_attempt=reader_attempt,
            read_file=self._files.read,
            on_sent=self._on_sent,
            on_progress=self._progressed,
            on_attached=self._views.append,
            on_detached=self._detached,
            on_unavailable=on_unavailable,
        )

    def _end_older_views(self, reader_attempt: int) -> None:
        """An attempt that has been replaced need not have ended: where its host is frozen, or cut off from
        the JobManager alone, its connection lives on, and it would hold the producer back for ever."""
        self._reader_attempt = reader_attempt
        for view in [view for view in self._views if view.reader_attempt < reader_attempt]:
            self._views.remove(view)
            view.released()

    def _progressed(self) -> None:
        self._pump()
        self._cache.reader_progressed()

    def _detached(self, view: LogView, is_complete: bool) -> None:
        self._views.remove(view)
        was_consumed, self._is_consumed = self._is_consumed, self._is_consumed or is_complete
        self._pump()
        self._cache.reader_progressed()
        if self._is_consumed and not was_consumed:
            self._on_unblocked()

    # ------------------------------------------------------------ the cache's side

    @override
    def drop_oldest(self) -> bool:
        log = self.log
        if self._views:
            limit = min(view.index for view in self._views)
        elif self._is_consumed or (
            self.retention is Retention.CACHING_MEMORY and self._has_been_read
        ):
            limit = log.end_index
        else:
            return False
        end = log.oldest_batch_end(limit)
        if end is None:
            return False
        self._drop(end)
        return True

    @override
    def write(
        self,
        run: SpillRun,
        on_written: Callable[[WrittenFiles], None],
        on_failed: Callable[[], None],
    ) -> None:
        def failed(error: StreamError) -> None:
            self.log.abandoned(run)
            self._cache.leave(self)
            on_failed()
            self._settle()
            self.fail(error)

        self._files.write(run.sequence, run.first_row, run.batches, on_written, failed)

    @override
    def written(self, run: SpillRun, files: WrittenFiles) -> list[LogFile]:
        unneeded = self.log.written(run, files)
        kept_bytes = sum(file.size_bytes for file, _ in files)
        if unneeded:
            kept_bytes -= sum(file.file.size_bytes for file in unneeded)
            self._unlink(unneeded)
        self._settle(disk_change=0 if self._is_released else kept_bytes)
        if self.is_sealing and self.is_on_disk:
            self._on_unblocked()
        return unneeded

    @override
    def fail(self, error: StreamError) -> None:
        if not self._is_released:
            self._on_error(error)

    # ------------------------------------------------------------ internals

    @property
    def _is_awaited(self) -> bool:
        """True when a reader has got everything and nothing holds it back."""
        return any(view.is_live and view.is_caught_up for view in self._views)

    def _cut(self) -> None:
        self._flush_wanted = False
        self._collector.cut()

    def _put_batch(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        self.log.append_batch(batch, size_bytes)

    def _put_control(self, element: ControlElement) -> None:
        if self.log.append_control(element):
            for view in self._views:
                view.step_back()

    def _pump(self) -> None:
        """Sends to every reader what it can take, then lets go what nobody needs."""
        for view in tuple(self._views):
            view.pump()
        if self._flush_wanted and self._is_awaited:
            self._cut()
            for view in tuple(self._views):
                view.pump()
        self._trim()
        self._settle()
        self._set_blocked(is_blocked=any(view.holds_back for view in self._views))

    def _set_blocked(self, *, is_blocked: bool) -> None:
        if is_blocked == self._is_blocked:
            return
        self._is_blocked = is_blocked
        self._load.waiting_batches += 1 if is_blocked else -1
        if not is_blocked and not self._is_released:
            self._on_unblocked()

    def _trim(self) -> None:
        index = min((view.index for view in self._views), default=self._unneeded_index)
        index = min(index, self._unneeded_index)
        if index > self.log.first_index:
            self._drop(index)

    def _drop(self, index: int) -> None:
        files = self.log.drop(index)
        if files:
            self._unlink(files)
        self._settle(disk_change=-sum(file.file.size_bytes for file in files))

    def _unlink(self, files: Sequence[LogFile]) -> None:
        self._files.unlink([file.file for file in files])

    def _settle(self, disk_change: int = 0) -> None:
        """Tells the cache what has changed."""
        change = self.log.memory_bytes - self._settled_bytes
        if not self.needs_local_disk:
            disk_change = 0
        if change or disk_change:
            self._settled_bytes = self.log.memory_bytes
            self.disk_bytes += disk_change
            self._cache.settle(change, disk_change)
