"""The partial phase of an aggregation in event-time windows: aggregates slices before the exchange.

Rows are aggregated per slice and key until their slice has ended; then its partial rows leave. A row whose slice
has ended when it comes leaves at once, as it is. So a row is late behind the exchange exactly when it would be without
this operator: nothing of a slice waits here while a watermark passes that ends the slice.

Where the bound of the event times is known (``out_of_orderness_ms``), the rows themselves say which slices have
ended: those that end at or before the largest event time minus the bound, since no watermark before the next row is
past that. Then what leaves, and in which order, is a function of the sequence of rows alone, never of how
they are cut into batches, of watermarks, barriers, idleness or time; a producer that is restarted sends the same again:

- the slices that a row ends leave ahead of it, as does everything that waits where a bundle is over
  (``bundle_gauge.py``), and at the end of a split or channel;
- barriers let nothing leave: what waits is part of the snapshot. Only the barrier of a savepoint lets everything leave ahead
  of it, so that no savepoint depends on how the job that starts from it is optimised; until the next completed checkpoint
  that is no function of the rows (``Failover``).

Without a bound watermarks say which slices have ended. In either case what waits leaves ahead of a watermark that ends it
and ahead of the status idle, behind which watermarks of others count.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import (
    MAX_TIMESTAMP_MS,
    CheckpointBarrier,
    ControlElement,
    OperatorOutput,
    OriginEnded,
    StreamStatus,
    Watermark,
)
from penstock.graph.window_spec import slice_ms
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import slice_start, split_by_slice, time_bounds
from taskmanager.operators.aggregation import AggregateInputs
from taskmanager.operators.bundle_gauge import BundleGauge
from taskmanager.operators.ended_slices import EndedSlices
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.operators.slice_bundle import SliceBundle
from taskmanager.state.operator_state import SPLIT

Rows = slice | Int64Array

_TIME = struct.Struct("<q")
_NO_ROWS = np.empty(0, np.int64)


class _Batch:
    """A batch of rows, taken apart as far as that is needed."""

    def __init__(self, batch: pa.RecordBatch, bundle: SliceBundle) -> None:
        self.rows = batch
        self._bundle = bundle
        self._generation = -1

    @cached_property
    def times(self) -> Int64Array:
        return times_of(self.rows)

    @cached_property
    def _parts(self) -> list[KeyBatch]:
        return self._bundle.parts_of(self.rows)

    @property
    def keys(self) -> KeyBatch:
        """As they are now in the bundle."""
        if self._generation != self._bundle.generation:
            self._generation = self._bundle.generation
            self._keys = self._bundle.keys_of(self._parts)
        return self._keys

    @cached_property
    def _offsets(self) -> Int64Array | None:
        """Bytes of the keys, and of the values that are counted, ahead of each row; None = each takes the same."""
        offsets = [part.offsets for part in self._parts if part.offsets is not None]
        return sum(offsets[1:], offsets[0]) if offsets else None

    @cached_property
    def inputs(self) -> AggregateInputs:
        return self._bundle.inputs_of(self.rows)

    def key_bytes(self, begin: int, end: int) -> int:
        """Bytes of the keys of rows ``begin .. end - 1``; 0 where all keys have the same length."""
        offsets = self._offsets
        return 0 if offsets is None else int(offsets[end] - offsets[begin])

    def end_of_keys(self, begin: int, end: int, room_bytes: int) -> int:
        """Behind the last of rows ``begin .. end - 1`` up to which the keys have no more bytes than these."""
        offsets = self._offsets
        if offsets is None or int(offsets[end] - offsets[begin]) <= room_bytes:
            return end
        # A longer key than all before it may have made the room negative.
        limit = int(offsets[begin]) + max(room_bytes, 0)
        return int(np.searchsorted(offsets, limit, "right")) - 1

    def add_to(self, bundle: SliceBundle, start: int, rows: Rows) -> None:
        """Adds rows of one slice to the bundle."""
        if isinstance(rows, slice):
            if rows.stop - rows.start == self.rows.num_rows:
                bundle.add(start, self.keys, self.inputs)
                return
            keys = self.keys.slice(rows.start, rows.stop)
        else:
            keys = self.keys.take(rows)
        bundle.add(start, keys, self.inputs.select(rows))


class WindowPreAggregateOperator(Operator):
    """Replaces rows by partial rows, one per key, slice and bundle.

    Args:
        spec: the operator; both its schemas are those of the rows.
        aggregates: decomposable ones.
        window: tumbling or sliding in event time.
        out_of_orderness_ms: the bound of the event times, None = it is not known.
        gauge: how long bundles are.
    """

    def __init__(
        self,
        spec: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
        window: graph_pb2.WindowSpec,
        out_of_orderness_ms: int | None = None,
        gauge: BundleGauge | None = None,
    ) -> None:
        self._slice_ms = slice_ms(window)
        self._offset_ms = window.offset_ms % self._slice_ms
        self._ended = EndedSlices(self._slice_ms, self._offset_ms, out_of_orderness_ms)
        self._bundle = SliceBundle(spec, keys, aggregates)
        self._gauge = gauge or BundleGauge.of_rows(self._bundle.row_bytes)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        lists = context.operator_state
        self._kept_bundle = lists.list("bundle", SPLIT)
        self._kept_bundle.codec = "partial_rows/1"
        self._kept_gauge = lists.list("gauge", SPLIT)
        self._kept_gauge.codec = "bundle_gauge/1"
        self._kept_time = lists.list("largest_time", SPLIT)
        self._kept_time.codec = "time/1"
        for held in self._kept_bundle.items:
            self._bundle.restore(held)
        self._gauge.restore(self._kept_gauge.items)
        for kept in self._kept_time.items:
            self._ended.row_came(*_TIME.unpack(kept))

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._kept_bundle.items = [self._bundle.to_bytes()] if self._bundle.groups else []
        self._kept_gauge.items = [self._gauge.to_bytes()]
        self._kept_time.items = [_TIME.pack(self._ended.largest_ms)]

    @override
    def on_control(self, element: ControlElement) -> Iterator[OperatorOutput]:
        if isinstance(element, CheckpointBarrier) and element.properties.target:
            yield from self._take()
        yield element

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        if self._gauge.rest_rows < batch.num_rows:
            return self._aggregate(batch)
        self._rest(batch)
        return (batch,)

    @override
    def on_watermark(self, watermark: Watermark) -> Iterator[OperatorOutput]:
        self._ended.watermark_came(watermark.timestamp_ms)
        is_last = watermark.timestamp_ms == MAX_TIMESTAMP_MS
        yield from self._take(None if is_last else self._ended.open_from)
        yield watermark

    @override
    def on_stream_status(self, status: StreamStatus) -> Iterator[OperatorOutput]:
        if not status.active:
            yield from self._take()
        yield status

    @override
    def on_origin_ended(self, ended: OriginEnded) -> Iterator[OperatorOutput]:
        # The status idle may come here, or not, as it happens: so everything leaves either way.
        yield from self._take()
        yield ended

    @override
    def on_end_of_data(self) -> Iterable[OperatorOutput]:
        return self._take()

    def _rest(self, batch: pa.RecordBatch) -> None:
        """Takes note of rows that leave as they are."""
        self._gauge.rested(batch.num_rows)
        if self._ended.follows_rows:
            self._ended.row_came(time_bounds(times_of(batch))[1])

    def _aggregate(self, rows: pa.RecordBatch) -> Iterator[OperatorOutput]:
        """Takes rows into bundles, but for those that leave as they are."""
        batch, gauge = _Batch(rows, self._bundle), self._gauge
        begin, count = 0, rows.num_rows
        while begin < count:
            if gauge.rest_rows:
                part = rows.slice(begin, gauge.rest_rows)
                self._rest(part)
                yield part
                begin += part.num_rows
                continue
            room = min(count, begin + gauge.room)
            end = batch.end_of_keys(begin, room, gauge.room_bytes)
            if begin == end and gauge.is_empty:
                end += 1  # a key that is longer than a bundle is alone in one
            if begin < end:
                begin = yield from self._add(batch, begin, end)
            if begin < end or end < room or gauge.is_over(self._bundle.groups):
                yield from self._take()
                gauge.end()

    def _take(self, before: int | None = None) -> list[pa.RecordBatch]:
        """What leaves: the slices that start before a time, or all."""
        batches = self._bundle.take(before)
        self._gauge.sent(sum(batch.num_rows for batch in batches))
        return batches

    def _add(self, batch: _Batch, begin: int, end: int) -> Generator[OperatorOutput, None, int]:
        """Adds the rows ``begin .. end - 1``, or those ahead of the one that would open a slice too many.

        Returns:
            The first row that was not added.
        """
        times = batch.times[begin:end]
        lowest, highest = time_bounds(times)
        reached, first = self._ended.after_row(highest), self._bundle.first
        if lowest >= reached and (first is None or first >= reached):
            return (yield from self._add_part(batch, begin, end, lowest, highest))
        open_from = self._ended.after_rows(times)
        steps = np.flatnonzero(open_from[1:] != open_from[:-1]) + 1
        for start, stop in itertools.pairwise([0, *steps.tolist(), len(times)]):
            self._ended.open_from = int(open_from[start])
            yield from self._take(self._ended.open_from)
            part_bounds = time_bounds(times[start:stop])
            added = yield from self._add_part(batch, begin + start, begin + stop, *part_bounds)
            if added < begin + stop:
                return added
        return end

    def _add_part(
        self, batch: _Batch, begin: int, end: int, lowest: int, highest: int
    ) -> Generator[OperatorOutput, None, int]:
        """The same for rows that end no slice of the bundle, and none of theirs."""
        rows: Rows = slice(begin, end)
        late = _NO_ROWS
        if lowest < self._ended.open_from:
            is_late = batch.times[begin:end] < self._ended.open_from
            late, rows = begin + np.flatnonzero(is_late), begin + np.flatnonzero(~is_late)
        parts = self._by_slice(batch, rows, lowest, highest)
        new = sorted(_first(part) for start, part in parts if start not in self._bundle)
        if len(new) > self._gauge.slices_left:
            end = new[self._gauge.slices_left]
            if begin == end:
                return end
            part_bounds = time_bounds(batch.times[begin:end])
            return (yield from self._add_part(batch, begin, end, *part_bounds))
        for start, part in parts:
            batch.add_to(self._bundle, start, part)
        self._ended.row_came(highest)
        self._gauge.added(end - begin, len(new), batch.key_bytes(begin, end))
        if len(late):
            self._gauge.sent(len(late))
            yield batch.rows.take(pa.array(late))
        return end

    def _by_slice(
        self, batch: _Batch, rows: Rows, lowest: int, highest: int
    ) -> list[tuple[int, Rows]]:
        """Rows of a batch by the start of their slice."""
        start = slice_start(lowest, self._slice_ms, self._offset_ms)
        if isinstance(rows, slice) and highest < start + self._slice_ms:
            return [(start, rows)]
        times = batch.times[rows]
        if not len(times):
            return []
        split = split_by_slice(times, self._slice_ms, self._offset_ms)
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        if split.order is not None:
            numbers = numbers[split.order]
        return [
            (start, numbers[split.bounds[i] : split.bounds[i + 1]])
            for i, start in enumerate(split.starts.tolist())
        ]


def times_of(batch: pa.RecordBatch) -> Int64Array:
    """The event times of the rows of a batch."""
    times: Int64Array = batch.column(EVENT_TIME).to_numpy()
    return times


def _first(rows: Rows) -> int:
    """The first of some rows."""
    return int(rows.start if isinstance(rows, slice) else rows[0])
