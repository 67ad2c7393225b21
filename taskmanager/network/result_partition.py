"""The output of one subtask on one edge: partitions batches and collects them per consumer (pure).

A record leaves its chain here. ``emit`` hands each consumer's rows to its subpartition; the subtask
asks ``is_available`` before it steps its chain, so back-pressure travels from a consumer without
credit to the source. What is collected leaves when a batch is full, when the subtask goes idle
(``flush``) or at the buffer timeout (``flush_if_due``).

All methods run on the mailbox thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
from typing_extensions import override

from common.elements import ControlElement, EndOfData, EndOfPartition, WrittenFiles
from penstock.errors import InvariantViolation, PartitionUnavailable, StreamError
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2
from taskmanager.network.batch_codec import SizeEstimator
from taskmanager.network.partitioner import Partitioner
from taskmanager.network.pipelined import PartitionLoad, PipelinedSubpartition
from taskmanager.network.subpartition import (
    ReadablePartition,
    Refusal,
    Subpartition,
    SubpartitionReader,
    SubpartitionView,
)

CUT_BYTES_MAX: Final = 32 << 20
"""Size of the batches that are kept in memory for the sake of some of their rows."""


class ExchangeCounters(Protocol):
    """The part of a subtask's counters that the exchange keeps."""

    records_in: int
    records_out: int
    bytes_in: int
    bytes_out: int


@dataclass(slots=True)
class PartitionMetrics:
    """What one result partition has taken and sent."""

    records_out: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True)
class PartitionContext:
    """What every result partition is made of.

    Attributes:
        partition_id: how consumers ask for it.
        partitioner: decides which consumer gets which rows.
        subpartition_count: consumers.
        batch_rows: rows of a full batch.
        batch_bytes_max: a batch being collected is cut beyond this size.
        buffer_timeout_ms: how long rows may wait for their batch to fill; 0 = not at all.
        now_ns: monotonic time.
        on_available: the partition may be able to take a batch again, or has been consumed.
        on_error: serving a consumer failed outside of a call of the subtask.
        on_release: called once when the partition is released.
        waits_for_readers: nothing is to be made before every consumer has begun to read.
    """

    partition_id: PartitionId
    partitioner: Partitioner
    subpartition_count: int
    batch_rows: int
    batch_bytes_max: int
    buffer_timeout_ms: int
    counters: ExchangeCounters
    now_ns: Callable[[], int]
    on_available: Callable[[], None]
    on_error: Callable[[Exception], None]
    on_release: Callable[[], None]
    waits_for_readers: bool = False


class ResultPartition(ReadablePartition):
    """Takes the batches of one subtask for one edge; this one is pipelined.

    Attributes:
        is_served_here: consumers read it from the process of its producer.
        sealed_bytes: of its files, where it is read when it is complete, and is; else 0.
    """

    is_served_here = True
    sealed_bytes = 0

    def __init__(self, context: PartitionContext) -> None:
        self.partition_id = context.partition_id
        self.metrics = PartitionMetrics()
        self._context = context
        self._partitioner = context.partitioner
        self._counters = context.counters
        self._buffer_timeout_ns = context.buffer_timeout_ms * 1_000_000
        self._sizes = SizeEstimator()
        self._cut_bytes = 0
        """Of batches that rows which are being collected may be parts of."""
        self._load = PartitionLoad()
        self._flush_deadline_ns: int | None = None
        self._is_released = False
        self.subpartitions: Sequence[Subpartition] = self._new_subpartitions()

    def _new_subpartitions(self) -> Sequence[Subpartition]:
        context = self._context
        return [
            PipelinedSubpartition(
                index,
                context.batch_rows,
                context.batch_bytes_max,
                self._load,
                self._count_sent,
                self._subpartition_unblocked,
                waits_for_reader=context.waits_for_readers,
            )
            for index in range(context.subpartition_count)
        ]

    @property
    def flush_deadline_ns(self) -> int | None:
        """Monotonic time at which ``flush_if_due`` has something to do; None = nothing waits."""
        return self._flush_deadline_ns

    def is_available(self) -> bool:
        """True when every consumer can take a batch."""
        return self._load.waiting_batches == 0

    @property
    def waiting_batches(self) -> int:
        """Batches that wait for credit."""
        return self._load.waiting_batches

    def emit(self, batch: pa.RecordBatch) -> None:
        """Takes a batch; the rows of one consumer keep their order."""
        rows = batch.num_rows
        if not rows:
            return
        self.metrics.records_out += rows
        self._counters.records_out += rows
        size_bytes = self._sizes.size_bytes(batch)
        subpartitions = self.subpartitions
        has_collected = False
        for index, piece in self._partitioner.partition(batch):
            subpartition = subpartitions[index]
            subpartition.add(piece, size_bytes * piece.num_rows // rows)
            has_collected = has_collected or subpartition.has_collected
        self._bound_cut(size_bytes)
        if has_collected and self._flush_deadline_ns is None:
            if self._buffer_timeout_ns == 0:
                self.flush()
            else:
                self._flush_deadline_ns = self._context.now_ns() + self._buffer_timeout_ns

    def _bound_cut(self, size_bytes: int) -> None:
        """Consumers that get few rows of each batch would keep all batches in memory until theirs are full."""
        self._cut_bytes += size_bytes
        if self._cut_bytes > CUT_BYTES_MAX:
            self._cut_bytes = 0
            for subpartition in self.subpartitions:
                subpartition.let_go()

    def emit_control(self, element: ControlElement) -> None:
        """Takes a control element for every consumer, behind the rows taken before."""
        for subpartition in self.subpartitions:
            subpartition.add_control(element)

    def takes_files(self, written: WrittenFiles) -> bool:
        """Whether consumers can be given these files in the place of their rows."""
        return False

    def emit_files(self, written: WrittenFiles) -> None:
        """Takes files whose rows are as if they had been emitted."""
        raise InvariantViolation(f"{self.partition_id} takes no files, and is given {written}")

    def flush(self) -> None:
        """Sends what is collected (the subtask goes idle)."""
        self._flush_deadline_ns = None
        for subpartition in self.subpartitions:
            subpartition.flush()

    def flush_if_due(self, now_ns: int) -> None:
        """Sends what is collected when the buffer timeout has ended."""
        if self._flush_deadline_ns is not None and now_ns >= self._flush_deadline_ns:
            self.flush()

    def end_data(self) -> None:
        """No row will follow; barriers may."""
        self.emit_control(EndOfData())

    @property
    def is_complete(self) -> bool:
        """False while it must be made readable before its subtask may say that its data has ended."""
        return True

    def finish(self) -> None:
        """Ends the partition behind what is queued; nothing may be emitted any more."""
        self._flush_deadline_ns = None
        self.emit_control(EndOfPartition())

    def is_drained(self) -> bool:
        """True once every consumer has read everything up to the end of the partition."""
        return all(subpartition.is_consumed for subpartition in self.subpartitions)

    def retire(self) -> None:
        """The attempt has finished: what consumers may ask for again stays, in another's care."""
        self.release()

    def release(self) -> None:
        """Drops what is left and forgets the consumers; they are not told."""
        if self._is_released:
            return
        self._is_released = True
        self._flush_deadline_ns = None
        for subpartition in self.subpartitions:
            subpartition.release()
        self._context.on_release()

    @override
    def view(
        self, index: int, first_row: int, on_unavailable: Refusal, reader_attempt: int = 0
    ) -> SubpartitionView:
        count = len(self.subpartitions)
        if not 0 <= index < count:
            raise PartitionUnavailable(
                f"partition {self.partition_id} has {count} subpartitions, not one of index {index}",
                partition=self.partition_id,
            )

        def named(error: PartitionUnavailable) -> PartitionUnavailable:
            return PartitionUnavailable(
                f"subpartition {index} of {self.partition_id}: {error}",
                partition=self.partition_id,
            )

        try:
            view = self.subpartitions[index].view(
                first_row, lambda error: on_unavailable(named(error)), reader_attempt
            )
        except PartitionUnavailable as error:
            raise named(error) from error
        return _GuardedView(view, self.partition_id, self._serving_failed)

    def positions(self) -> list[checkpoint_pb2.ChannelPosition]:
        """Where an edge that keeps its rows was at the barrier that passed last, without checksums."""
        return []

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete: what is before its barrier need not be kept."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete."""

    def _serving_failed(self, error: Exception) -> None:
        if not self._is_released:
            self._context.on_error(error)

    def _count_sent(self, size_bytes: int) -> None:
        self.metrics.bytes_out += size_bytes
        self._counters.bytes_out += size_bytes

    def _subpartition_unblocked(self) -> None:
        if not self._is_released and (self.is_available() or self.is_drained()):
            self._context.on_available()


@dataclass(slots=True)
class _GuardedView(SubpartitionView):
    """Serves a consumer outside of the producer's own steps.

    What cannot be sent (a batch that does not encode) fails the producer, not the consumer on whose
    behalf it is sent.
    """

    view: SubpartitionView
    partition_id: PartitionId
    on_error: Callable[[Exception], None]

    @override
    def attach(self, reader: SubpartitionReader) -> None:
        self._guard(lambda: self.view.attach(reader))

    @override
    def serve(self) -> None:
        self._guard(self.view.serve)

    @override
    def detach(self, *, is_complete: bool) -> None:
        self._guard(lambda: self.view.detach(is_complete=is_complete))

    @override
    def connection_lost(self, reason: str) -> None:
        self._guard(lambda: self.view.connection_lost(reason))

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except PartitionUnavailable as error:
            self.on_error(PartitionUnavailable(f"{self.partition_id}: {error}"))
        except (pa.ArrowException, StreamError) as error:
            self.on_error(error)
