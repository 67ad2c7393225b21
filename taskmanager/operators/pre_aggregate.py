"""The partial phase of an aggregation: makes batches smaller before they cross a network.

There is no state: every batch leaves as it came, or as a partial batch (``penstock.window_schemas``)
that stands for the same rows. Where keys are too many for that to shrink a batch, it stops trying for a
number of batches that doubles with every failure; then it tries again, since keys change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.pb import graph_pb2
from penstock.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from penstock.window_schemas import partial_schema_of
from penstock.windows import slice_ms
from taskmanager.kernels import (
    AccumulatorKind,
    AccumulatorOverflowError,
    RecordTable,
    distinct,
    split_by_slice,
)
from taskmanager.operators.aggregation import AggregateInputs, Aggregation, accumulator_columns
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import Operator
from taskmanager.state.row_table import concatenated

Int64Array = npt.NDArray[np.int64]

_WORTHWHILE = 0.5
_FIRST_REST_BATCHES = 16
_LONGEST_REST_BATCHES = 1024
_SAMPLE_ROWS = 1024
_HOPELESS = 0.95
"""Share of different keys in a sample from which on the whole batch is not tried."""

_SLICES_MAX = 64
"""A batch that lies in more slices is not worth taking apart."""


class ReductionGauge:
    """Decides whether batches are worth aggregating, by what the last attempt came to."""

    def __init__(self) -> None:
        self._rest = 0
        self._next_rest = _FIRST_REST_BATCHES

    def should_try(self) -> bool:
        """Whether to try the next batch."""
        if self._rest:
            self._rest -= 1
            return False
        return True

    def tried(self, rows_in: int, rows_out: int) -> bool:
        """Takes note of an attempt; True where it was worth it."""
        if rows_out <= _WORTHWHILE * rows_in:
            self._next_rest = _FIRST_REST_BATCHES
            return True
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST_BATCHES)
        return False


class PreAggregateOperator(Operator):
    """Replaces batches by partial batches.

    Args:
        spec: the operator; both its schemas are those of the rows.
        keys: the key columns.
        aggregates: decomposable ones.
        window: tumbling or sliding in event time, None for running aggregates.
    """

    def __init__(
        self,
        spec: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
        window: graph_pb2.WindowSpec | None,
    ) -> None:
        schema = schema_from_bytes(spec.input_schema)
        self._keys = KeyColumns(keys, schema)
        self._aggregation = Aggregation(aggregates, spec, self._keys)
        is_window = window is not None
        self._schema = partial_schema_of(
            self._aggregation.layout, schema, keys, is_window=is_window
        )
        self._has_event_time = EVENT_TIME in schema.names
        self._slice_ms = slice_ms(window) if window is not None else 0
        self._offset_ms = window.offset_ms % self._slice_ms if window is not None else 0
        self._gauge = ReductionGauge()
        kinds = self._aggregation.kinds
        if is_window:
            kinds = [*kinds, AccumulatorKind.COUNT]  # the rows that each partial row stands for
        self._table = RecordTable(self._keys.types, kinds)

    @override
    def process(self, batch: pa.RecordBatch) -> tuple[OperatorOutput, ...]:
        if not self._gauge.should_try():
            return (batch,)
        partial = self._aggregated(batch)
        rows_out = batch.num_rows if partial is None else partial.num_rows
        if not self._gauge.tried(batch.num_rows, rows_out) or partial is None:
            return (batch,)
        return (partial,)

    def _aggregated(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The partial batch, None where it would not be smaller."""
        keys = self._keys.encode(batch)
        if batch.num_rows > 2 * _SAMPLE_ROWS:
            first, _ = distinct(keys.slice(0, _SAMPLE_ROWS))
            if len(first) > _HOPELESS * _SAMPLE_ROWS:
                return None
        if self._slice_ms:
            return self._aggregated_by_slice(batch, keys)
        inputs = self._aggregation.inputs(batch)
        self._accumulate(keys, inputs)
        first, group_of = distinct(keys)
        rows = self._table.gather(keys.take(first))
        self._table.clear()
        arrays = [array.take(pa.array(first)) for array in self._keys.arrays(batch)]
        arrays += accumulator_columns(rows.accumulators, rows.validity)
        if self._has_event_time:
            last = last_rows(group_of, len(first))
            arrays.append(batch.column(EVENT_TIME).take(pa.array(last)))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _aggregated_by_slice(self, batch: pa.RecordBatch, keys: KeyBatch) -> pa.RecordBatch | None:
        times = batch.column(EVENT_TIME).to_numpy()
        split = split_by_slice(times, self._slice_ms, self._offset_ms)
        if len(split.starts) > _SLICES_MAX:
            return None
        inputs = self._aggregation.inputs(batch)
        if split.order is None:
            return self._slice_batch(int(split.starts[0]), keys, inputs)
        parts = []
        for i, start in enumerate(split.starts.tolist()):
            rows = split.order[split.bounds[i] : split.bounds[i + 1]]
            parts.append(self._slice_batch(start, keys.take(rows), inputs.select(rows)))
        return concatenated(parts)

    def _slice_batch(self, start: int, keys: KeyBatch, inputs: AggregateInputs) -> pa.RecordBatch:
        """The partial batch of rows that lie in one slice."""
        self._accumulate(keys, inputs)
        rows = self._table.rows()
        self._table.clear()
        arrays = [
            *rows.keys.to_arrays(),
            pa.repeat(pa.scalar(start, pa.int64()), len(rows.keys)),
            pa.array(rows.accumulators[-1]),
            *accumulator_columns(rows.accumulators[:-1], rows.validity[:-1]),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _accumulate(self, keys: KeyBatch, inputs: AggregateInputs) -> None:
        values, valid = inputs.values, inputs.valid
        if self._slice_ms:
            values, valid = [*values, None], [*valid, None]
        try:
            self._table.accumulate(keys, values, valid)
        except AccumulatorOverflowError as error:
            raise self._aggregation.overflow(error, keys) from error


def last_rows(group_of: Int64Array, groups: int) -> Int64Array:
    """The last row of each group, int64[groups], of the group of each row."""
    last = np.empty(groups, np.int64)
    last[group_of] = np.arange(len(group_of))  # of several writes to one element the last stays
    return last
