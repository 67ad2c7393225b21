"""One subpartition of a pipelined result partition: what one consumer reads (pure).

Slices for the consumer are collected (``batch_builder``). Cut batches and control elements wait in
order until the reader (the consumer's end: a connection's channel, or the input channel of a gate in
the same process) has credit for them.

Invariants:
    - order: rows and control elements arrive as they were added (but see there for watermarks),
    - row offsets are contiguous from 0,
    - ``is_blocked`` is True while a cut batch waits for the reader, or the reader is awaited; the chain is not stepped then,
      so memory is one batch being collected, one that waits, and the overdraft of one step,
    - nothing follows ``EndOfPartition``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from typing_extensions import override

from common.elements import (
    ControlElement,
    EndOfPartition,
    Watermark,
)
from penstock.errors import PartitionUnavailable
from taskmanager.network.batch_builder import BatchBuilder
from taskmanager.network.subpartition import (
    PreparedBatch,
    Refusal,
    Subpartition,
    SubpartitionReader,
    SubpartitionView,
)


@dataclass(slots=True)
class PartitionLoad:
    """Batches that wait for a reader, over all subpartitions of a partition."""

    waiting_batches: int = 0


@dataclass(slots=True)
class _Waiting:
    batch: pa.RecordBatch
    size_bytes: int
    prepared: PreparedBatch | None = None


class PipelinedSubpartition(Subpartition, SubpartitionView):
    """Rows and control elements for one consumer, bounded by its credit.

    Args:
        index: which subpartition of its partition this is.
        batch_rows: rows of a full batch.
        batch_bytes_max: a batch being collected is cut beyond this size.
        load: of the partition; the subpartition adds its own.
        on_sent: called with the bytes of each batch sent.
        on_unblocked: called when the last waiting batch has gone, or all has been consumed.
        waits_for_reader: nothing is to be made for the consumer before it begins to read.
    """

    def __init__(
        self,
        index: int,
        batch_rows: int,
        batch_bytes_max: int,
        load: PartitionLoad,
        on_sent: Callable[[int], None],
        on_unblocked: Callable[[], None],
        *,
        waits_for_reader: bool = False,
    ) -> None:
        self.index = index
        self._collector = BatchBuilder(
            batch_rows, batch_bytes_max, self._put_batch, self._put_control
        )
        self._load = load
        self._on_sent = on_sent
        self._on_unblocked = on_unblocked
        self._flush_wanted = False
        self._queue: deque[_Waiting | ControlElement] = deque()
        self._waiting_batches = 0
        self._sent_rows = 0
        self._sent_anything = False
        self._reader: SubpartitionReader | None = None
        self._is_finished = False
        self._is_consumed = False
        self._waits_for_reader = waits_for_reader
        if waits_for_reader:
            load.waiting_batches += 1

    @property
    def is_blocked(self) -> bool:
        """True while a batch waits for the reader, or the reader is awaited."""
        return self._waiting_batches > 0 or self._waits_for_reader

    @property
    @override
    def has_collected(self) -> bool:
        """True while rows wait for their batch to fill."""
        return not self._collector.is_empty

    @property
    @override
    def is_consumed(self) -> bool:
        """True once the consumer has read everything, ``EndOfPartition`` included."""
        return self._is_consumed

    @property
    def is_unconfirmed(self) -> bool:
        """True while everything has been sent and the consumer has not said that it has read it."""
        return self._is_finished and not self._queue and not self._is_consumed

    @property
    def has_sent(self) -> bool:
        """True once something has gone to a reader: it cannot be read from its start any more."""
        return self._sent_anything

    @property
    def has_reader(self) -> bool:
        """True while a consumer is attached."""
        return self._reader is not None

    # ------------------------------------------------------------ producer's side

    @override
    def add(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        """Takes rows; they leave at once when they make a full batch."""
        assert not self._is_finished, "rows after the end of the partition"
        if self._collector.add(batch, size_bytes):
            self._flush_wanted = False
            self.pump()

    @override
    def add_control(self, element: ControlElement) -> None:
        """Takes a control element behind the rows taken before."""
        assert not self._is_finished, "a control element after the end of the partition"
        if isinstance(element, Watermark) and self._collector.hold(element):
            return
        self._cut()
        self._put_control(element)
        self._is_finished = isinstance(element, EndOfPartition)
        self.pump()

    @override
    def let_go(self) -> None:
        self._collector.let_go()

    @override
    def flush(self) -> None:
        """Sends what is collected now; while batches wait it goes on collecting until they left."""
        if self._collector.is_empty:
            return
        if self.is_blocked:
            self._flush_wanted = True
            return
        self._cut()
        self.pump()

    @override
    def release(self) -> None:
        """The producer's attempt has ended: drops what is left."""
        reader, self._reader = self._reader, None
        self._queue.clear()
        self._collector.clear()
        self._count_waiting(-self._waiting_batches)
        self._end_wait()
        self._is_finished = True
        if reader is not None:
            reader.partition_released()

    # ------------------------------------------------------------ consumer's side

    @override
    def view(
        self, first_row: int, on_unavailable: Refusal, reader_attempt: int = 0
    ) -> SubpartitionView:
        """The subpartition itself: it has one consumer, and can be read once."""
        if self.has_reader or self.has_sent or first_row:
            raise PartitionUnavailable(
                "it is pipelined and has been read already; its producer must run again"
            )
        return self

    @override
    def attach(self, reader: SubpartitionReader) -> None:
        """A consumer begins to read; the subpartition has no reader."""
        assert self._reader is None, "a subpartition has one reader at a time"
        self._reader = reader
        was_awaited = self._waits_for_reader
        self._end_wait()
        self.pump()
        if was_awaited and not self.is_blocked:
            self.flush()
            self._on_unblocked()

    @override
    def detach(self, *, is_complete: bool) -> None:
        """The consumer has read everything, or has gone before that: nothing is sent any more."""
        self._reader = None
        for waiting in self._queue:
            if isinstance(waiting, _Waiting):
                waiting.prepared = None
        if is_complete:
            self._is_consumed = True
            self._on_unblocked()

    @override
    def serve(self) -> None:
        self.pump()

    @override
    def connection_lost(self, reason: str) -> None:
        """The consumer fails and says so where it was still reading.

        One that may have read everything has ended, so that nobody but the producer can tell that its
        end was never confirmed.

        Raises:
            PartitionUnavailable: nobody knows whether everything has been read.
        """
        self.detach(is_complete=False)
        if self.is_unconfirmed:
            raise PartitionUnavailable(f"its end was sent, and not confirmed: {reason}")

    def pump(self) -> None:
        """Sends what waits as far as there is credit."""
        reader = self._reader
        if reader is None:
            return
        was_blocked = self.is_blocked
        queue = self._queue
        while queue:
            head = queue[0]
            if isinstance(head, _Waiting):
                prepared = head.prepared
                if prepared is None:
                    prepared = head.prepared = reader.prepare(head.batch, head.size_bytes)
                if not reader.may_send(prepared.charge_bytes):
                    break
                queue.popleft()
                self._count_waiting(-1)
                row_offset = self._sent_rows
                self._sent_rows += head.batch.num_rows
                self._sent_anything = True
                self._on_sent(prepared.size_bytes)
                reader.send_batch(prepared, row_offset)
            else:
                queue.popleft()
                self._sent_anything = True
                reader.send_control(head)
            if not queue and self._flush_wanted:
                self._cut()
        if was_blocked and not self.is_blocked:
            self._on_unblocked()

    # ------------------------------------------------------------ internals

    def _cut(self) -> None:
        self._flush_wanted = False
        self._collector.cut()

    def _put_batch(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        self._queue.append(_Waiting(batch, size_bytes))
        self._count_waiting(1)

    def _put_control(self, element: ControlElement) -> None:
        queue, takes_place = self._queue, isinstance(element, Watermark) and element.takes_place
        if queue and takes_place and isinstance(queue[-1], Watermark):
            queue[-1] = element
        else:
            queue.append(element)

    def _end_wait(self) -> None:
        if self._waits_for_reader:
            self._waits_for_reader = False
            self._load.waiting_batches -= 1

    def _count_waiting(self, change: int) -> None:
        self._waiting_batches += change
        self._load.waiting_batches += change
