"""``with_event_time``: gives rows their event time and the stream its watermarks.

Watermarks leave when the input goes idle and otherwise at most once per
``pipeline.auto-watermark-interval``, since each of them ends the batches that are being filled in
front of an exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from common.elements import (
    MAX_TIMESTAMP_MS,
    MIN_TIMESTAMP_MS,
    OperatorOutput,
    OriginEnded,
    SideOutput,
    StreamStatus,
    Watermark,
)
from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.schema import EVENT_TIME, schema_from_bytes, user_batch
from taskmanager.alignment.watermark_generator import WatermarkGenerator
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext

_EVENT_TIME_FIELD = pa.field(EVENT_TIME, pa.int64(), nullable=False)


class EventTimeOperator(Operator):
    """Appends the event-time column and generates watermarks per origin."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._spec = spec.event_time
        self._on_error = spec.on_error
        self._schema = schema_from_bytes(spec.output_schema)
        self._name = spec.name
        self._column_index = schema_from_bytes(spec.input_schema).get_field_index(self._spec.column)
        self._emitted_ms = MIN_TIMESTAMP_MS
        self._last_emitted_ns = 0
        self._was_idle = False

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._generator = WatermarkGenerator(
            context.origins, self._spec.out_of_orderness_ms, self._spec.idle_timeout_ms
        )
        self._interval_ns = context.config.auto_watermark_interval_ms * 1_000_000
        if self._spec.idle_timeout_ms:
            context.register_timer(context.clock.now_ms() + self._spec.idle_timeout_ms)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        column = batch.column(self._column_index)
        if column.null_count:
            batch, bad = self._without_nulls(batch, column)
            if bad is not None:
                yield bad
            if not batch.num_rows:
                return
            column = batch.column(self._column_index)
        event_times = to_event_time(column)
        now_ms = self.context.clock.now_ms()
        self._generator.rows_seen(pc.max(event_times).as_py(), now_ms)
        columns = [*batch.columns, event_times]
        if self._was_idle:
            self._generator.advance(now_ms)
            yield from self._update_status()
        yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
        now_ns = self.context.clock.monotonic_ns()
        if now_ns - self._last_emitted_ns >= self._interval_ns:
            yield from self._emit_watermark(now_ms)

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        # Event time starts here: what comes from further up means other times. Only the end counts.
        if watermark.timestamp_ms != MAX_TIMESTAMP_MS:
            return NOTHING
        self.context.counters.watermark_ms = watermark.timestamp_ms
        return (watermark,)

    @override
    def on_stream_status(self, status: StreamStatus) -> Iterable[OperatorOutput]:
        return NOTHING

    @override
    def on_origin_ended(self, ended: OriginEnded) -> Iterator[OperatorOutput]:
        now_ms = self.context.clock.now_ms()
        self._generator.origin_ended(ended.origin, now_ms)
        yield from self._emit_watermark(now_ms)
        yield ended

    @override
    def on_idle(self) -> Iterable[OperatorOutput]:
        return self._emit_watermark(self.context.clock.now_ms())

    @override
    def on_timer(self, now_ms: int) -> Iterator[OperatorOutput]:
        for origin in self.context.origins.open:
            self._generator.watch_from(origin, now_ms)
        yield from self._emit_watermark(now_ms)
        next_idle_at_ms = self._generator.next_idle_at_ms() or 0
        self.context.register_timer(
            max(next_idle_at_ms, now_ms + max(1, self._spec.idle_timeout_ms // 4))
        )

    def _emit_watermark(self, now_ms: int) -> Iterator[OperatorOutput]:
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

    def _without_nulls(
        self, batch: pa.RecordBatch, column: pa.Array
    ) -> tuple[pa.RecordBatch, SideOutput | None]:
        is_null = column.is_null()
        bad = user_batch(batch.filter(is_null))
        message = f"{self._spec.column} is null: it has no event time"
        if self._on_error.action == graph_pb2.ERROR_ACTION_FAIL:
            raise BadRecord(message, operator=self._name, row=str(bad.slice(0, 1).to_pylist()[0]))
        self.context.counters.bad_records += bad.num_rows
        good = batch.filter(pc.invert(is_null))
        if self._on_error.action == graph_pb2.ERROR_ACTION_SKIP:
            return good, None
        bad = bad.append_column("error", pa.array([message] * bad.num_rows, pa.string()))
        return good, SideOutput(self._on_error.tag, bad)


def to_event_time(column: pa.Array) -> pa.Array:
    """Integers (milliseconds), timestamps or dates as int64 milliseconds since the epoch."""
    kind = column.type
    if pa.types.is_int64(kind):
        return column
    if pa.types.is_timestamp(kind):
        if kind.unit != "ms":
            column = pc.floor_temporal(column, unit="millisecond").cast(
                pa.timestamp("ms", kind.tz), safe=False
            )
        return column.cast(pa.int64())
    if pa.types.is_date(kind):
        return column.cast(pa.timestamp("ms")).cast(pa.int64())
    return column.cast(pa.int64())
