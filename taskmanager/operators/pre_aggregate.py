"""The partial phase of an aggregation: makes batches smaller before they cross a network.

There is no state: every batch leaves as it came, or as a partial batch (``penstock.window_schemas``)
that stands for the same rows. Where keys are too many for that to shrink a batch, it stops trying for a
number of batches that doubles with every failure; then it tries again, since keys change.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.pb import graph_pb2
from penstock.schema import EVENT_TIME, schema_from_bytes
from penstock.window_schemas import partial_schema_of
from taskmanager.kernels import (
    AccumulatorKind,
    AccumulatorOverflowError,
    RecordTable,
    distinct,
    encode_keys,
    slice_span,
    slice_starts,
)
from taskmanager.operators.aggregation import Aggregation, accumulator_columns
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import Operator

Int64Array = npt.NDArray[np.int64]

_WORTHWHILE = 0.5
_FIRST_REST_BATCHES = 16
_LONGEST_REST_BATCHES = 1024
_SAMPLE_ROWS = 1024


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
        self._is_window = window is not None
        self._schema = partial_schema_of(
            self._aggregation.layout, schema, keys, is_window=self._is_window
        )
        self._has_event_time = not self._is_window and EVENT_TIME in schema.names
        self._slice_ms = gcd(window.size_ms, window.slide_ms) if window is not None else 0
        self._offset_ms = window.offset_ms % self._slice_ms if window is not None else 0
        self._gauge = ReductionGauge()
        kinds = [*self._aggregation.kinds]
        if self._is_window:
            kinds.append(AccumulatorKind.COUNT)
        self._kinds = kinds
        self._tables: dict[bool, RecordTable] = {}

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
        """The partial batch, None where a sample shows that it would not be smaller."""
        columns = self._keys.arrays(batch)
        slices = self._slice_column(batch)
        if isinstance(slices, pa.Array):
            columns = [*columns, slices]
        keys = encode_keys(columns)
        if batch.num_rows > 2 * _SAMPLE_ROWS:
            first, _ = distinct(keys.slice(0, _SAMPLE_ROWS))
            if len(first) > 0.95 * _SAMPLE_ROWS:
                return None
        inputs = self._aggregation.inputs(batch)
        values, valid = inputs.values, inputs.valid
        if self._is_window:
            values, valid = [*values, None], [*valid, None]
        table = self._table([column.type for column in columns], isinstance(slices, pa.Array))
        try:
            table.accumulate(keys, values, valid)
        except AccumulatorOverflowError as error:
            raise self._aggregation.overflow(error, keys) from error
        if self._is_window:
            rows = table.rows()
            key_arrays, numbers, validity = rows.keys.to_arrays(), rows.accumulators, rows.validity
            if isinstance(slices, int):
                key_arrays.append(pa.repeat(pa.scalar(slices, pa.int64()), len(table)))
            key_arrays.append(pa.array(numbers.pop()))
            event_times = []
        else:
            first, group_of = distinct(keys)
            gathered = table.gather(keys.take(first))
            key_arrays = [column.take(pa.array(first)) for column in columns]
            numbers, validity = gathered.accumulators, gathered.validity
            event_times = self._event_times(batch, last_rows(group_of, len(first)))
        slots = accumulator_columns(numbers, validity)
        table.clear()
        return pa.RecordBatch.from_arrays([*key_arrays, *slots, *event_times], schema=self._schema)

    def _event_times(self, batch: pa.RecordBatch, rows: Int64Array) -> list[pa.Array]:
        """The event time of each key's last row, where it is carried."""
        if not self._has_event_time:
            return []
        return [batch.column(EVENT_TIME).take(pa.array(rows))]

    def _slice_column(self, batch: pa.RecordBatch) -> pa.Array | int | None:
        """The slice of each row, or the one slice of all; None without windows."""
        if not self._is_window:
            return None
        times = batch.column(EVENT_TIME).to_numpy()
        first, last = slice_span(times, self._slice_ms, self._offset_ms)
        if first == last:
            return first
        return pa.array(slice_starts(times, self._slice_ms, self._offset_ms))

    def _table(self, key_types: Sequence[pa.DataType], with_slices: bool) -> RecordTable:
        table = self._tables.get(with_slices)
        if table is None:
            table = self._tables[with_slices] = RecordTable(key_types, self._kinds)
        return table


def last_rows(group_of: Int64Array, groups: int) -> Int64Array:
    """The last row of each group, int64[groups], of the group of each row."""
    last = np.empty(groups, np.int64)
    last[group_of] = np.arange(len(group_of))  # of several writes to one element the last stays
    return last
