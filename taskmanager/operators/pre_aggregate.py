"""The partial phase of an aggregation: makes batches smaller before they cross a network.

A batch leaves as it came, or as a partial batch (``penstock.graph.window_schemas``) that stands for the same
rows. Where keys are too many for that to shrink a batch, it stops trying for a number of batches that
doubles with every failure; then it tries again, since keys change. A running aggregate emits once per
key and batch, so here every batch is aggregated for itself; windows: ``window_pre_aggregate.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.graph.window_schemas import partial_schema
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import (
    AccumulatorOverflowError,
    RecordTable,
    distinct,
)
from taskmanager.kernels.record_table import GatheredRows
from taskmanager.operators.aggregation import Aggregation, accumulator_columns
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import Operator
from taskmanager.operators.partial_keys import parts_of, words_of_batch

_WORTHWHILE = 0.5
_FIRST_REST_BATCHES = 16
_LONGEST_REST_BATCHES = 1024
_SAMPLE_ROWS = 1024
_HOPELESS = 0.95
"""Share of different keys in a sample from which on the whole batch is not tried."""


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


class RunningPreAggregateOperator(Operator):
    """Replaces each batch in front of a running aggregate by a partial batch.

    Args:
        spec: the operator; both its schemas are those of the rows.
        aggregates: those that partial rows can stand for.
    """

    def __init__(
        self,
        spec: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
    ) -> None:
        schema = schema_from_bytes(spec.input_schema)
        self._aggregation = Aggregation(aggregates, spec, KeyColumns(keys, schema))
        self._parts = parts_of(keys, self._aggregation.layout.counted_columns(), schema)
        self._schema = partial_schema(self._aggregation.layout, schema, keys, is_window=False)
        self._has_event_time = EVENT_TIME in schema.names
        self._gauge = ReductionGauge()
        types = self._parts[0].types if len(self._parts) == 1 else [pa.int64()]
        self._table = RecordTable(types, self._aggregation.kinds)

    @override
    def process(self, batch: pa.RecordBatch) -> tuple[OperatorOutput, ...]:
        if not self._gauge.should_try():
            return (batch,)
        parts = [part.encode(batch) for part in self._parts]
        partial = None if looks_hopeless(parts) else self._aggregated(batch, parts)
        rows_out = batch.num_rows if partial is None else partial.num_rows
        if not self._gauge.tried(batch.num_rows, rows_out) or partial is None:
            return (batch,)
        return (partial,)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        assert not len(self._table), "every batch leaves at once"

    def _aggregated(self, batch: pa.RecordBatch, parts: Sequence[KeyBatch]) -> pa.RecordBatch:
        keys = words_of_batch(parts)
        first, group_of = distinct(keys)
        last = np.sort(last_rows(group_of, len(first)))  # the newest row of a key is its last
        columns = (array for part in self._parts for array in part.arrays(batch))
        arrays = [array.take(pa.array(last)) for array in columns]
        if self._aggregation.kinds:
            rows = self._numbers(batch, parts[0], keys, last)
            arrays += accumulator_columns(rows.accumulators, rows.validity)
        if self._has_event_time:
            arrays.append(batch.column(EVENT_TIME).take(pa.array(last)))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _numbers(
        self, batch: pa.RecordBatch, named: KeyBatch, keys: KeyBatch, wanted: Int64Array
    ) -> GatheredRows:
        """The accumulators of the keys of some rows.

        Args:
            named: the keys without values, for errors.
        """
        inputs = self._aggregation.numbers(batch)
        try:
            self._table.accumulate(keys, inputs.values, inputs.valid)
        except AccumulatorOverflowError as error:
            raise self._aggregation.overflow(error, named) from error
        rows = self._table.gather(keys.take(wanted))
        self._table.clear()
        return rows


def looks_hopeless(parts: Sequence[KeyBatch]) -> bool:
    """True where a sample of the batch has nearly as many keys as rows."""
    if len(parts[0]) <= 2 * _SAMPLE_ROWS:
        return False
    first, _ = distinct(words_of_batch([part.slice(0, _SAMPLE_ROWS) for part in parts]))
    return len(first) > _HOPELESS * _SAMPLE_ROWS


def last_rows(group_of: Int64Array, groups: int) -> Int64Array:
    """The last row of each group, int64[groups], of the group of each row."""
    last = np.empty(groups, np.int64)
    last[group_of] = np.arange(len(group_of))  # of several writes to one element the last stays
    return last
