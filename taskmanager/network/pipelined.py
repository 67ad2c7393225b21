"""One subpartition of a pipelined result partition: what one consumer reads (pure).

Slices for the consumer are collected until they make a full batch, are flushed, or a control element
must go. Cut batches and control elements wait in order until the reader (the consumer's end: a
connection's channel, or the input channel of a gate in the same process) has credit for them.

A watermark overtaken by rows is harmless as long as none of these rows could have been late against
it, so a watermark does not cut the batch being collected where the rows that follow prove to be
younger than it (``keeps_lateness``); it then leaves right behind the batch. This keeps batches full
where every input batch brings a watermark.

Invariants:
    - order: rows and control elements arrive as they were added (but see above for watermarks),
    - row offsets are contiguous from 0,
    - ``is_blocked`` is True while a cut batch waits for the reader; the chain is not stepped then,
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
    CheckpointBarrier,
    ControlElement,
    EndOfData,
    EndOfPartition,
    Watermark,
)
from penstock.errors import PartitionUnavailable
from penstock.schema import EVENT_TIME
from taskmanager.network.subpartition import (
    PreparedBatch,
    Refusal,
    Subpartition,
    SubpartitionReader,
    SubpartitionView,
)

PARTIAL_METADATA = b"penstock.partial"
"""Schema metadata that marks partial aggregates."""
SLICE_METADATA = b"penstock.slice_ms"
"""Schema metadata of partial window aggregates: the width of a slice in milliseconds."""
SLICE_COLUMN = "__slice"


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
    """

    def __init__(
        self,
        index: int,
        batch_rows: int,
        batch_bytes_max: int,
        load: PartitionLoad,
        on_sent: Callable[[int], None],
        on_unblocked: Callable[[], None],
    ) -> None:
        self.index = index
        self._batch_rows = batch_rows
        self._batch_bytes_max = batch_bytes_max
        self._load = load
        self._on_sent = on_sent
        self._on_unblocked = on_unblocked
        self._pieces: list[pa.RecordBatch] = []
        self._piece_rows = 0
        self._piece_bytes = 0
        self._held_watermark: Watermark | None = None
        self._flush_wanted = False
        self._queue: deque[_Waiting | ControlElement] = deque()
        self._waiting_batches = 0
        self._sent_rows = 0
        self._sent_anything = False
        self._reader: SubpartitionReader | None = None
        self._is_finished = False
        self._is_consumed = False

    @property
    def is_blocked(self) -> bool:
        """True while a batch waits for the reader."""
        return self._waiting_batches > 0

    @property
    @override
    def has_collected(self) -> bool:
        """True while rows wait for their batch to fill."""
        return bool(self._pieces)

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
        if self._pieces and not self._fits(batch):
            self._cut()
            self.pump()
        rows = batch.num_rows
        self._pieces.append(batch)
        self._piece_rows += rows
        self._piece_bytes += size_bytes
        # Half a piece early rather than half a piece late: slices of p consumers are all alike.
        is_full = self._piece_rows + rows // 2 >= self._batch_rows
        if is_full or self._piece_bytes >= self._batch_bytes_max:
            self._cut()
            self.pump()

    @override
    def add_control(self, element: ControlElement) -> None:
        """Takes a control element behind the rows taken before."""
        assert not self._is_finished, "a control element after the end of the partition"
        if isinstance(element, Watermark) and self._pieces:
            self._held_watermark = element
            return
        self._cut()
        if (
            self._queue
            and isinstance(element, Watermark)
            and isinstance(self._queue[-1], Watermark)
        ):
            self._queue[-1] = element
        else:
            self._queue.append(element)
        self._is_finished = isinstance(element, EndOfPartition)
        self.pump()
        if isinstance(element, CheckpointBarrier | EndOfData):
            self._announce(element)

    @override
    def flush(self) -> None:
        """Sends what is collected now; while batches wait it goes on collecting until they left."""
        if not self._pieces:
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
        self._pieces.clear()
        self._count_waiting(-self._waiting_batches)
        self._is_finished = True
        if reader is not None:
            reader.partition_released()

    # ------------------------------------------------------------ consumer's side

    @override
    def view(self, first_row: int, on_unavailable: Refusal) -> SubpartitionView:
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
        self.pump()
        for element in self._queue:
            if isinstance(element, CheckpointBarrier | EndOfData):
                reader.announce(element)

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

    def _fits(self, batch: pa.RecordBatch) -> bool:
        if not batch.schema.equals(self._pieces[-1].schema, check_metadata=True):
            return False
        held = self._held_watermark
        return held is None or keeps_lateness(batch, held)

    def _cut(self) -> None:
        self._flush_wanted = False
        pieces = self._pieces
        if not pieces:
            return
        batches = _joined(pieces)
        for batch in batches:
            self._queue.append(_Waiting(batch, self._piece_bytes // len(batches)))
        self._count_waiting(len(batches))
        self._pieces = []
        self._piece_rows = self._piece_bytes = 0
        if self._held_watermark is not None:
            self._queue.append(self._held_watermark)
            self._held_watermark = None

    def _count_waiting(self, change: int) -> None:
        self._waiting_batches += change
        self._load.waiting_batches += change

    def _announce(self, element: ControlElement) -> None:
        reader = self._reader
        if reader is not None and (self._queue or reader.is_backlogged()):
            reader.announce(element)


def _joined(pieces: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The pieces as one batch; as they are where that cannot be (dictionaries that outgrow their index)."""
    if len(pieces) == 1:
        return pieces
    try:
        return [pa.concat_batches(pieces)]
    except pa.ArrowInvalid:
        return pieces


def keeps_lateness(batch: pa.RecordBatch, watermark: Watermark) -> bool:
    """True when no row of the batch could be late against the watermark.

    Such a watermark may as well arrive behind the batch. Rows younger than it are never late; in
    partial window aggregates a row stands for a slice, which is late only when it has ended.
    Streams without event time know no lateness.
    """
    schema = batch.schema
    slice_index = schema.get_field_index(SLICE_COLUMN)
    if slice_index >= 0:
        slice_ms = (schema.metadata or {}).get(SLICE_METADATA)
        if slice_ms is None:
            return False
        index, span_ms = slice_index, int(slice_ms) - 1
    else:
        index, span_ms = schema.get_field_index(EVENT_TIME), 0
        if index < 0:
            return True
    oldest = batch.column(index).to_numpy(zero_copy_only=False).min()
    return int(oldest) + span_ms > watermark.timestamp_ms
