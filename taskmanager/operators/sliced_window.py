"""Tumbling and sliding windows in event and processing time: when rows count, and when windows fire.

A batch that lies in one slice, the usual case, is handled whole; others are taken apart by slice. Rows that are
scattered over many slices, as those of unsorted input are, are held until there are more of them: each slice
costs about as much for one row as for many. The contents of the slices are the business of ``SliceContents``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import MAX_TIMESTAMP_MS, TIME_LIMIT_MS, OperatorOutput, Watermark
from penstock.errors import BadRecord, InvariantViolation
from penstock.graph.window_schemas import SLICE, is_partial
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import SliceSplit, slice_starts, split_by_slice, time_bounds
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.late_rows import handle_late_rows
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext
from taskmanager.operators.operator_progress import WatermarkState
from taskmanager.operators.slice_timeline import SliceTimeline
from taskmanager.operators.window_contents import Rows, SliceContents

SCATTERED_ROWS_MAX = 32
"""Rows are scattered where a slice gets fewer than so many of a batch."""
HELD_ROWS_MAX = 131_072
HELD_BYTES_MAX = 16 << 20


class _SlicedWindowOperator(Operator):
    """What both time domains share."""

    is_by_clock: ClassVar[bool] = False
    """Whether its time is the machine's."""

    def __init__(
        self,
        spec: graph_pb2.Operator,
        window: graph_pb2.WindowSpec,
        contents: SliceContents[Any],
    ) -> None:
        self._name = spec.name
        self._keys = _keys_of(spec)
        self._window = window
        self._contents = contents
        self._timeline = SliceTimeline(window)

    @override
    def restore(self, context: OperatorContext) -> None:
        self._contents.restore(context.state)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._contents.open(context)
        self._watermark = WatermarkState(context, by_clock=self.is_by_clock)
        self._timeline.restore(self._watermark.restored_ms(), self._contents.slices())
        self._ranges = self._watermark.ranges()
        if self._is_behind:
            self._contents.only_unfired = self._unfired

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._watermark.keep(self._timeline.watermark_ms, self._ranges)
        self._contents.prepare_snapshot()

    @override
    def close(self) -> None:
        self._contents.close()

    @property
    def _is_behind(self) -> bool:
        """Whether some of the keys were further before a restore than the operator is."""
        return self._ranges.are_ahead(self._timeline.watermark_ms)

    def _watermarks_of(self, batch: pa.RecordBatch) -> Int64Array:
        """How far each row's key was before the restore: int64[n]."""
        return self._ranges.of_keys(KeyColumns(self._keys, batch.schema).encode(batch))

    def _unfired(self, rows: pa.RecordBatch, end: int) -> pa.RecordBatch:
        if not self._ranges.are_ahead(end - 2):
            return rows
        return rows.filter(pa.array(self._watermarks_of(rows) < end - 1))

    def _add(self, start: int, prepared: Any, rows: Rows | None) -> None:
        self._timeline.add(start)
        self._contents.add(start, prepared, rows)

    def _advance(self, time_ms: int) -> Iterator[OperatorOutput]:
        """Fires the windows that are due, the earliest first, then moves time on."""
        timeline, contents = self._timeline, self._contents
        while (end := timeline.next_due(time_ms)) is not None:
            slices = timeline.slices_of(end)
            timeline.fire_next(end)
            yield from contents.emit(end - timeline.size_ms, end, slices)
            self._expire()
        timeline.advance(time_ms)
        self._expire()

    def _expire(self) -> None:
        for start in self._timeline.expire():
            self._contents.drop(start)


def _keys_of(spec: graph_pb2.Operator) -> list[str]:
    """The key columns of an operator of windows, whatever the windows hold."""
    kind = spec.WhichOneof("spec")
    assert kind in ("window_aggregate", "window_function", "join"), "an operator of windows"
    return list(getattr(spec, kind).keys)


class EventTimeWindowOperator(_SlicedWindowOperator):
    """Windows of event time, which watermarks fire."""

    def __init__(
        self,
        spec: graph_pb2.Operator,
        window: graph_pb2.WindowSpec,
        contents: SliceContents[Any],
    ) -> None:
        super().__init__(spec, window, contents)
        self._held: list[pa.RecordBatch] = []
        """Scattered rows that are in time and in no slice yet; watermarks and snapshots come behind them."""
        self._held_rows = 0
        self._held_bytes = 0

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        if self._is_behind:
            return self._process_behind(batch)
        return self._process(batch, self._timeline.watermark_ms)

    def _process_behind(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        """Rows are late, and make windows fire again, by the watermark that their key had before the restore."""
        watermarks = np.maximum(self._watermarks_of(batch), self._timeline.watermark_ms)
        for watermark_ms in np.unique(watermarks).tolist():
            rows = batch.filter(pa.array(watermarks == watermark_ms))
            yield from self._process(rows, watermark_ms)

    def _process(self, batch: pa.RecordBatch, watermark_ms: int) -> Iterable[OperatorOutput]:
        timeline = self._timeline
        times, earliest = self._times(batch)
        smallest, largest = time_bounds(times)
        if smallest < earliest or largest > TIME_LIMIT_MS:
            raise BadRecord(
                f"an event time of {smallest if smallest < 0 else largest} ms is out of range",
                operator=self._name,
            )
        first, last = timeline.slice_of(smallest), timeline.slice_of(largest)
        if first == last and first >= timeline.first_in_time_slice(watermark_ms):
            self._add_held()  # rows of a slice stay in the order in which they came
            prepared = self._contents.prepare(batch)
            self._add(first, prepared, None)
            return self._emit_updated(prepared, [(first, None)], watermark_ms)
        return self._process_parts(batch, times, first, watermark_ms)

    def _times(self, batch: pa.RecordBatch) -> tuple[Int64Array, int]:
        """What says where the rows lie (the start of a slice lies in it), and the earliest it may be."""
        if is_partial(batch.schema):
            first = self._timeline.slice_of(-TIME_LIMIT_MS)
            return batch.column(SLICE).to_numpy(), first
        return batch.column(EVENT_TIME).to_numpy(), -TIME_LIMIT_MS

    def _process_parts(
        self, batch: pa.RecordBatch, times: Int64Array, first: int, watermark_ms: int
    ) -> Iterator[OperatorOutput]:
        timeline = self._timeline
        size_ms, offset_ms = timeline.slice_ms, timeline.offset_ms
        in_time = timeline.first_in_time_slice(watermark_ms)
        if first < in_time:
            is_late = slice_starts(times, size_ms, offset_ms) < in_time
            late = batch.filter(pa.array(is_late))
            batch, times = batch.filter(pa.array(~is_late)), times[~is_late]
            yield from handle_late_rows(late, self._window, self.context)
            if not len(times):
                return
        split = split_by_slice(times, size_ms, offset_ms)
        if not self._hold(batch, len(split.starts)):
            self._add_held()
            yield from self._add_parts(batch, split, watermark_ms)

    def _hold(self, batch: pa.RecordBatch, slice_count: int) -> bool:
        """Keeps scattered rows for later; False where they are to be added now.

        Where windows that have fired may fire again, or rows come from two inputs, each is added as it comes.
        """
        is_scattered = batch.num_rows < slice_count * SCATTERED_ROWS_MAX
        may_wait = self._contents.has_one_input and not self._window.allowed_lateness_ms
        if not (is_scattered and may_wait):
            return False
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows >= HELD_ROWS_MAX or self._held_bytes >= HELD_BYTES_MAX:
            self._add_held()
        return True

    def _add_held(self) -> None:
        """Puts the rows that are held into their slices."""
        if not self._held:
            return
        held, self._held = self._held, []
        self._held_rows = self._held_bytes = 0
        timeline = self._timeline
        with suppress(
            pa.ArrowInvalid
        ):  # dictionaries that together outgrow their index: one by one
            held = [pa.concat_batches(held)]
        for batch in held:
            times, _ = self._times(batch)
            split = split_by_slice(times, timeline.slice_ms, timeline.offset_ms)
            for _ in self._add_parts(batch, split, timeline.watermark_ms):
                raise InvariantViolation("rows that are held make no window fire again")

    def _add_parts(
        self, batch: pa.RecordBatch, split: SliceSplit, watermark_ms: int
    ) -> Iterable[OperatorOutput]:
        prepared = self._contents.prepare(batch)
        parts: list[tuple[int, Rows | None]] = []
        for i, start in enumerate(split.starts.tolist()):
            rows = (
                None if split.order is None else split.order[split.bounds[i] : split.bounds[i + 1]]
            )
            self._add(start, prepared, rows)
            parts.append((start, rows))
        return self._emit_updated(prepared, parts, watermark_ms)

    def _emit_updated(
        self, prepared: Any, parts: list[tuple[int, Rows | None]], watermark_ms: int
    ) -> Iterable[OperatorOutput]:
        """Fires again the windows that had fired by that watermark, before these rows came."""
        if not self._window.allowed_lateness_ms:
            return NOTHING
        updated: dict[int, list[tuple[Any, Rows | None]]] = {}
        for start, rows in parts:
            for end in self._timeline.fired_windows_of(start, watermark_ms):
                updated.setdefault(end, []).append((prepared, rows))
        return self._emit_windows(updated) if updated else NOTHING

    def _emit_windows(
        self, updated: dict[int, list[tuple[Any, Rows | None]]]
    ) -> Iterator[OperatorOutput]:
        for end, parts in sorted(updated.items()):
            slices = self._timeline.slices_of(end)
            start = end - self._timeline.size_ms
            yield from self._contents.emit_updated(start, end, slices, parts)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._add_held()
        super().prepare_snapshot(checkpoint_id)

    @override
    def on_watermark(self, watermark: Watermark) -> Iterator[OperatorOutput]:
        self._add_held()
        yield from self._advance(watermark.timestamp_ms)
        yield watermark


class ProcessingTimeWindowOperator(_SlicedWindowOperator):
    """Windows of the machine's clock, which timers fire; what is open fires at the end of data."""

    is_by_clock = True

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._register_timer()

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        now_ms = max(self.context.clock.now_ms(), self._timeline.watermark_ms + 1)
        self._add(self._timeline.slice_of(now_ms), self._contents.prepare(batch), None)
        self._register_timer()
        return NOTHING

    @override
    def on_timer(self, now_ms: int) -> Iterator[OperatorOutput]:
        yield from self._advance(now_ms - 1)
        self._register_timer()

    @override
    def on_end_of_data(self) -> Iterator[OperatorOutput]:
        yield from self._advance(MAX_TIMESTAMP_MS)

    def _register_timer(self) -> None:
        end = self._timeline.next_due(MAX_TIMESTAMP_MS)
        if end is not None:
            self.context.register_timer(end)
