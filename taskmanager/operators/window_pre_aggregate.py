"""The partial phase of an aggregation in event-time windows: aggregates slices before the exchange.

Rows of several batches are aggregated together as long as more are coming: a bundle leaves when the
input goes idle, ahead of every control element (so lateness is what it would be without it), at the end,
or when it stands for ``_BUNDLE_ROWS_MAX`` rows. A bundle that does not shrink its first batch leaves
that batch as it came, and the next ones too for a while (``ReductionGauge``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from typing_extensions import override

from common.elements import ControlElement, OperatorOutput, StreamStatus, Watermark
from penstock.pb import graph_pb2
from penstock.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from penstock.window_schemas import partial_schema_of
from penstock.windows import slice_ms
from taskmanager.kernels import (
    AccumulatorKind,
    AccumulatorOverflowError,
    RecordTable,
    SliceSplit,
    split_by_slice,
)
from taskmanager.operators.aggregation import AggregateInputs, Aggregation, accumulator_columns
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import Operator
from taskmanager.operators.pre_aggregate import ReductionGauge, looks_hopeless

_BUNDLE_ROWS_MAX = 1 << 16

_SLICES_MAX = 64
"""A batch that lies in more slices is not worth taking apart."""


class WindowPreAggregateOperator(Operator):
    """Replaces batches by partial batches, one per slice and bundle.

    Args:
        spec: the operator; both its schemas are those of the rows.
        keys: the key columns.
        aggregates: decomposable ones.
        window: tumbling or sliding in event time.
    """

    def __init__(
        self,
        spec: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
        window: graph_pb2.WindowSpec,
    ) -> None:
        schema = schema_from_bytes(spec.input_schema)
        self._keys = KeyColumns(keys, schema)
        self._aggregation = Aggregation(aggregates, spec, self._keys)
        self._schema = partial_schema_of(self._aggregation.layout, schema, keys, is_window=True)
        self._slice_ms = slice_ms(window)
        self._offset_ms = window.offset_ms % self._slice_ms
        # The last one counts the rows that each partial row stands for.
        self._kinds = [*self._aggregation.kinds, AccumulatorKind.COUNT]
        self._gauge = ReductionGauge()
        self._slices: dict[int, RecordTable] = {}
        self._spare: list[RecordTable] = []
        self._bundle_rows = 0

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        is_first = not self._bundle_rows
        if is_first and not self._gauge.should_try():
            return (batch,)
        split = split_by_slice(batch.column(EVENT_TIME).to_numpy(), self._slice_ms, self._offset_ms)
        if len(split.starts) > _SLICES_MAX:
            return (*self._take_bundle(), batch)
        keys = self._keys.encode(batch)
        if is_first and looks_hopeless(keys):
            self._gauge.tried(batch.num_rows, batch.num_rows)
            return (batch,)
        self._add(split, keys, self._aggregation.inputs(batch))
        self._bundle_rows += batch.num_rows
        if is_first:
            groups = sum(len(table) for table in self._slices.values())
            if not self._gauge.tried(batch.num_rows, groups):
                self._drop_bundle()
                return (batch,)
        return self._take_bundle() if self._bundle_rows >= _BUNDLE_ROWS_MAX else ()

    @override
    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        return (*self._take_bundle(), watermark)

    @override
    def on_stream_status(self, status: StreamStatus) -> Iterable[OperatorOutput]:
        return (*self._take_bundle(), status)

    @override
    def on_control(self, element: ControlElement) -> Iterable[OperatorOutput]:
        return (*self._take_bundle(), element)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        assert not self._bundle_rows, "the bundle has left ahead of the barrier"

    @override
    def on_idle(self) -> Iterable[OperatorOutput]:
        return self._take_bundle()

    @override
    def on_end_of_data(self) -> Iterable[OperatorOutput]:
        return self._take_bundle()

    def _add(self, split: SliceSplit, keys: KeyBatch, inputs: AggregateInputs) -> None:
        if split.order is None:
            self._accumulate(int(split.starts[0]), keys, inputs)
            return
        for index, start in enumerate(split.starts.tolist()):
            rows = split.order[split.bounds[index] : split.bounds[index + 1]]
            self._accumulate(start, keys.take(rows), inputs.select(rows))

    def _accumulate(self, start: int, keys: KeyBatch, inputs: AggregateInputs) -> None:
        table = self._slices.get(start)
        if table is None:
            is_new = not self._spare
            table = RecordTable(self._keys.types, self._kinds) if is_new else self._spare.pop()
            self._slices[start] = table
        try:
            table.accumulate(keys, [*inputs.values, None], [*inputs.valid, None])
        except AccumulatorOverflowError as error:
            raise self._aggregation.overflow(error, keys) from error

    def _take_bundle(self) -> tuple[pa.RecordBatch, ...]:
        """The partial batches of the bundle, which is empty afterwards."""
        if not self._bundle_rows:
            return ()
        batches = tuple(self._partial_batches())
        self._drop_bundle()
        return batches

    def _partial_batches(self) -> Iterator[pa.RecordBatch]:
        for start, table in self._slices.items():
            rows = table.rows()
            arrays = [
                *rows.keys.to_arrays(),
                pa.repeat(pa.scalar(start, pa.int64()), len(rows.keys)),
                pa.array(rows.accumulators[-1]),
                *accumulator_columns(rows.accumulators[:-1], rows.validity[:-1]),
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _drop_bundle(self) -> None:
        for table in self._slices.values():
            table.clear()
            self._spare.append(table)
        self._slices.clear()
        self._bundle_rows = 0
