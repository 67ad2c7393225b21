"""``with_event_time``: gives rows their event time and the stream its watermarks.

Watermarks leave when the input goes idle and otherwise at most once per
``pipeline.auto-watermark-interval``, since each of them ends the batches that are being filled in
front of an exchange. Where rows come in any order (batch mode, or out of Spark) they leave when more is known of the rows to
come, ahead of the next of them; in streaming mode, where others may go on behind their end, that end says what time it is.

Nothing of this is part of a checkpoint. After a restore every origin begins anew: a split that is read on
in the middle holds the watermark back until it is opened, and from then on counts with the rows that are
read on, so no watermark passes an unread row that it would not have passed before. What was late stays
late, since the operators that decide it keep their own watermark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from typing_extensions import override

from common.clock import SteadyMs, steady_ms
from common.elements import (
    MAX_TIMESTAMP_MS,
    MIN_TIMESTAMP_MS,
    TIME_LIMIT_MS,
    OperatorOutput,
    OriginEnded,
    SideOutput,
    StreamStatus,
    Watermark,
)
from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.rows.column_values import row_text
from penstock.rows.schema import schema_from_bytes, user_batch
from taskmanager.alignment.watermark_generator import WatermarkGenerator
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.operator import NOTHING, Handling, Operator, OperatorContext

_MS_PER_DAY = 86_400_000


class EventTimeOperator(Operator):
    """Appends the event-time column and generates watermarks per origin."""

    handling = Handling.ONE_TO_ONE

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._spec = spec.event_time
        self._policy = BadRecordPolicy(spec)
        self._schema = schema_from_bytes(spec.output_schema)
        self._column_index = schema_from_bytes(spec.input_schema).get_field_index(self._spec.column)
        self._idle_timeout_ms = 0 if self._spec.in_any_order else self._spec.idle_timeout_ms
        self._emitted_ms = MIN_TIMESTAMP_MS
        self._last_emitted_ns = 0
        self._was_idle = False

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._policy.open(context)
        self._generator = WatermarkGenerator(
            context.origins,
            self._spec.out_of_orderness_ms,
            self._idle_timeout_ms,
            in_any_order=self._spec.in_any_order,
        )
        self._says_at_end = context.config.runtime_mode != "batch"
        self._interval_ns = context.config.auto_watermark_interval_ms * 1_000_000
        if self._idle_timeout_ms:
            context.call_after(self._idle_timeout_ms)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        event_times = to_event_time(batch.column(self._column_index))
        if event_times.null_count:
            yield from self._report_bad(batch, event_times)
            good = event_times.is_valid()
            batch, event_times = batch.filter(good), event_times.filter(good)
            if not batch.num_rows:
                return
        now_ms = steady_ms(self.context.clock)
        self._generator.rows_seen(pc.max(event_times).as_py(), now_ms)
        if self._spec.in_any_order:
            yield from self._emit_watermark(now_ms)
            yield self._with_times(batch, event_times)
            return
        if self._was_idle:
            self._generator.advance(now_ms)
            yield from self._update_status()
        yield self._with_times(batch, event_times)
        now_ns = self.context.clock.monotonic_ns()
        if now_ns - self._last_emitted_ns >= self._interval_ns:
            yield from self._emit_watermark(now_ms)

    def _with_times(self, batch: pa.RecordBatch, event_times: pa.Array) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*batch.columns, event_times], schema=self._schema)

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        # Event time starts here: what comes from further up means other times. Only the end counts.
        return self._end() if watermark.timestamp_ms == MAX_TIMESTAMP_MS else NOTHING

    def _end(self) -> Iterator[OperatorOutput]:
        """The end of time, behind what the rows have come to: others may go on from there."""
        if self._says_at_end:
            self._generator.all_ended()
            yield from self._emit_watermark(steady_ms(self.context.clock))
        self.context.counters.watermark_ms = MAX_TIMESTAMP_MS
        yield Watermark(MAX_TIMESTAMP_MS)

    @override
    def on_stream_status(self, status: StreamStatus) -> Iterable[OperatorOutput]:
        return NOTHING

    @override
    def on_origin_ended(self, ended: OriginEnded) -> Iterator[OperatorOutput]:
        now_ms = steady_ms(self.context.clock)
        self._generator.origin_ended(ended.origin, now_ms)
        yield from self._emit_watermark(now_ms)
        yield ended

    @override
    def on_idle(self) -> Iterable[OperatorOutput]:
        return self._emit_watermark(steady_ms(self.context.clock))

    @override
    def on_pause_over(self) -> Iterator[OperatorOutput]:
        now_ms = steady_ms(self.context.clock)
        for origin in self.context.origins.open:
            self._generator.watch_from(origin, now_ms)
        yield from self._emit_watermark(now_ms)
        next_idle_ms = (self._generator.next_idle_at_ms() or now_ms) - now_ms
        self.context.call_after(max(next_idle_ms, 1, self._idle_timeout_ms // 4))

    def _emit_watermark(self, now_ms: SteadyMs) -> Iterator[OperatorOutput]:
        self._generator.advance(now_ms)
        if self._generator.watermark_ms > self._emitted_ms:
            self._emitted_ms = self._generator.watermark_ms
            self._last_emitted_ns = self.context.clock.monotonic_ns()
            self.context.counters.watermark_ms = self._emitted_ms
            yield Watermark(self._emitted_ms)
        yield from self._update_status()

    def _update_status(self) -> Iterator[OperatorOutput]:
        if self._generator.is_idle != self._was_idle:
            self._was_idle = self._generator.is_idle
            yield StreamStatus(active=not self._was_idle)

    def _report_bad(self, batch: pa.RecordBatch, event_times: pa.Array) -> Iterator[SideOutput]:
        """Hands the rows without an event time to the error policy."""
        for index in pc.indices_nonzero(event_times.is_null()).to_pylist():
            self._policy.handle(index, partial(self._failure, batch, index))
        return self._policy.side_output(batch)

    def _failure(self, batch: pa.RecordBatch, index: int) -> BadRecord:
        why = _why_none(batch.column(self._column_index)[index])
        row = row_text(user_batch(batch), index)
        return BadRecord(f"{self._spec.column} {why}", row=row)


def to_event_time(column: pa.Array) -> pa.Array:
    """Event times in milliseconds since the epoch.

    Args:
        column: integers (milliseconds), timestamps or dates; any other type has no event times.

    Returns:
        int64, null where there is none: at nulls and beyond ``TIME_LIMIT_MS``.
    """
    kind = column.type
    if pt.is_date32(kind):
        return pc.multiply(column.view(pa.int32()).cast(pa.int64()), _MS_PER_DAY)
    if pt.is_integer(kind):
        return _within(column, TIME_LIMIT_MS).cast(pa.int64())
    if pt.is_date64(kind):
        return _within(column.view(pa.int64()), TIME_LIMIT_MS)
    if not pt.is_timestamp(kind):
        return pa.nulls(len(column), pa.int64())
    numbers = column.view(pa.int64())
    if kind.unit == "s":
        return pc.multiply(_within(numbers, TIME_LIMIT_MS // 1000), 1000)
    if kind.unit == "ms":
        return _within(numbers, TIME_LIMIT_MS)
    return _floor_divide(numbers, 1000 if kind.unit == "us" else 1_000_000)


def _within(numbers: pa.Array, limit: int) -> pa.Array:
    """The numbers, null where they lie beyond the limit in either direction."""
    low, high = pc.min_max(numbers).values()
    if not low.is_valid or (low.as_py() >= -limit and high.as_py() <= limit):
        return numbers
    good = pc.less_equal(numbers, pa.scalar(limit, numbers.type))
    if pt.is_signed_integer(numbers.type):
        good = pc.and_(good, pc.greater_equal(numbers, pa.scalar(-limit, numbers.type)))
    return pc.if_else(good, numbers, pa.scalar(None, numbers.type))


def _floor_divide(numbers: pa.Array, divisor: int) -> pa.Array:
    floored = numbers.fill_null(0).to_numpy() // divisor
    mask = numbers.is_null().to_numpy(zero_copy_only=False) if numbers.null_count else None
    return pa.array(floored, mask=mask)


def _why_none(value: pa.Scalar) -> str:
    """What is wrong with a value that is no event time."""
    kind = value.type
    if not value.is_valid:
        return "is null: the row has no event time"
    if not (pt.is_integer(kind) or pt.is_temporal(kind)):
        return (
            f"is {value.as_py()} ({kind}): an event time is an integer (milliseconds since the epoch), a "
            "timestamp or a date; convert the column first, for example with .cast('int64')"
        )
    number = value.as_py() if pt.is_integer(kind) else value.value
    return f"is {number} ({kind}): event times lie within 2**62 ms of the epoch"
