"""The output of one subtask on one edge: partitions batches and collects them per consumer (pure).

A record leaves its chain here. ``emit`` hands each consumer's rows to its subpartition; the subtask
asks ``is_available`` before it steps its chain, so back-pressure travels from a consumer without
credit to the source. What is collected leaves when a batch is full, when the subtask goes idle
(``flush``) or at the buffer timeout (``flush_if_due``).

All methods run on the mailbox thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from typing_extensions import override

from common.elements import ControlElement, EndOfPartition
from penstock.errors import PartitionUnavailable, StreamError
from penstock.partition_id import PartitionId
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


class ResultPartition(ReadablePartition):
    """Takes the batches of one subtask for one edge.

    Args:
        partition_id: how consumers ask for it.
        partitioner: decides which consumer gets which rows.
        subpartition_count: consumers.
        batch_rows: rows of a full batch.
        batch_bytes_max: a batch being collected is cut beyond this size.
        buffer_timeout_ms: how long rows may wait for their batch to fill; 0 = not at all.
        counters: of the subtask.
        now_ns: monotonic time.
        on_available: the partition may be able to take a batch again, or has been consumed.
        on_error: serving a consumer failed outside of a call of the subtask.
        on_release: called once when the partition is released.
    """

    def __init__(
        self,
        partition_id: PartitionId,
        partitioner: Partitioner,
        *,
        subpartition_count: int,
        batch_rows: int,
        batch_bytes_max: int,
        buffer_timeout_ms: int,
        counters: ExchangeCounters,
        now_ns: Callable[[], int],
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        self.partition_id = partition_id
        self.metrics = PartitionMetrics()
        self._partitioner = partitioner
        self._buffer_timeout_ns = buffer_timeout_ms * 1_000_000
        self._counters = counters
        self._now_ns = now_ns
        self._on_available = on_available
        self._on_release = on_release
        self._sizes = SizeEstimator()
        self._load = PartitionLoad()
        self._flush_deadline_ns: int | None = None
        self._is_released = False
        self._on_error = on_error
        self.subpartitions: list[Subpartition] = [
            PipelinedSubpartition(
                index,
                batch_rows,
                batch_bytes_max,
                self._load,
                self._count_sent,
                self._subpartition_unblocked,
            )
            for index in range(subpartition_count)
        ]

    @property
    def flush_deadline_ns(self) -> int | None:
        """Monotonic time at which ``flush_if_due`` has something to do; None = nothing waits."""
        return self._flush_deadline_ns

    def is_available(self) -> bool:
        """True when every consumer can take a batch."""
        return self._load.waiting_batches == 0

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
        if has_collected and self._flush_deadline_ns is None:
            if self._buffer_timeout_ns == 0:
                self.flush()
            else:
                self._flush_deadline_ns = self._now_ns() + self._buffer_timeout_ns

    def emit_control(self, element: ControlElement) -> None:
        """Takes a control element for every consumer, behind the rows taken before."""
        for subpartition in self.subpartitions:
            subpartition.add_control(element)

    def flush(self) -> None:
        """Sends what is collected (the subtask goes idle)."""
        self._flush_deadline_ns = None
        for subpartition in self.subpartitions:
            subpartition.flush()

    def flush_if_due(self, now_ns: int) -> None:
        """Sends what is collected when the buffer timeout has ended."""
        if self._flush_deadline_ns is not None and now_ns >= self._flush_deadline_ns:
            self.flush()

    def finish(self) -> None:
        """Ends the partition behind what is queued; nothing may be emitted any more."""
        self._flush_deadline_ns = None
        self.emit_control(EndOfPartition())

    def is_drained(self) -> bool:
        """True once every consumer has read everything up to the end of the partition."""
        return all(subpartition.is_consumed for subpartition in self.subpartitions)

    def release(self) -> None:
        """Drops what is left and forgets the consumers; they are not told."""
        if self._is_released:
            return
        self._is_released = True
        self._flush_deadline_ns = None
        for subpartition in self.subpartitions:
            subpartition.release()
        self._on_release()

    @override
    def view(self, index: int, first_row: int, on_unavailable: Refusal) -> SubpartitionView:
        count = len(self.subpartitions)
        if not 0 <= index < count:
            raise PartitionUnavailable(
                f"partition {self.partition_id} has {count} subpartitions, not one of index {index}",
                partition=self.partition_id,
            )
        try:
            view = self.subpartitions[index].view(first_row, on_unavailable)
        except PartitionUnavailable as error:
            raise PartitionUnavailable(
                f"subpartition {index} of {self.partition_id}: {error}",
                partition=self.partition_id,
            ) from error
        return _GuardedView(view, self.partition_id, self._serving_failed)

    def _serving_failed(self, error: Exception) -> None:
        if not self._is_released:
            self._on_error(error)

    def _count_sent(self, size_bytes: int) -> None:
        self.metrics.bytes_out += size_bytes
        self._counters.bytes_out += size_bytes

    def _subpartition_unblocked(self) -> None:
        if not self._is_released and (self.is_available() or self.is_drained()):
            self._on_available()


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
