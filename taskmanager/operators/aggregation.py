"""The aggregates of one operator: what they read of a batch, and how results come of their state.

``Aggregation`` is the translation between columns and accumulators; all that it keeps is how many rows
it has numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.aggregates.aggregate_layout import (
    AccumulatorSlot,
    GroupColumnSpec,
    SlotResult,
    aggregate_layout,
)
from penstock.aggregates.aggregates import CUSTOM, Aggregate
from penstock.errors import BadRecord
from penstock.graph.window_schemas import first_accumulator, value_column
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import (
    BoolArray,
    Int64Array,
    fixed_array,
    fixed_values,
    null_rows,
    plain_array,
)
from taskmanager.kernels import AccumulatorKind, AccumulatorOverflowError
from taskmanager.operators.custom_aggregate import CustomAggregate
from taskmanager.operators.key_columns import KeyColumns, as_type
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.operator_progress import ArrivalCounter
from taskmanager.operators.user_function import load_function
from taskmanager.state.group_column import GroupColumn
from taskmanager.state.group_columns import group_column
from taskmanager.state.group_table import TableRows

Values = npt.NDArray[Any]
Rows = slice | Int64Array

_WIDER_SUM = "cast the column to decimal(38, 0), whose sums are exact in any order, or to float64 before it is summed"


@dataclass(slots=True)
class AggregateInputs:
    """What the aggregates read of n rows.

    Attributes:
        values: per slot the values (int64, uint64 or float64), None for counts.
        valid: per slot which values are there, None = all.
        columns: per group column an Arrow array, or a batch for aggregates of rows.
        sequence: int64[n], the rows' places in the order of arrival; empty without group columns.
        is_partial: the rows are partial rows: ``values`` are accumulators to merge.
    """

    values: list[Values | None]
    valid: list[BoolArray | None]
    columns: list[Any]
    sequence: Int64Array
    is_partial: bool = False

    def select(self, rows: Rows) -> AggregateInputs:
        """The inputs of some of the rows."""
        return AggregateInputs(
            [None if v is None else v[rows] for v in self.values],
            [None if v is None else v[rows] for v in self.valid],
            [_select(column, rows) for column in self.columns],
            self.sequence[rows] if self.columns else self.sequence,
            self.is_partial,
        )


def _select(column: Any, rows: Rows) -> Any:
    if isinstance(rows, slice):
        return column.slice(rows.start, rows.stop - rows.start)
    return column.take(pa.array(rows))


class Aggregation:
    """The aggregates of an operator, bound to the schema of its input.

    Args:
        protos: the aggregates as they travelled.
        operator: the operator they belong to (name and schemas).
        keys: for errors that name a key.
    """

    def __init__(
        self, protos: Sequence[graph_pb2.Aggregate], operator: graph_pb2.Operator, keys: KeyColumns
    ) -> None:
        schema = schema_from_bytes(operator.input_schema)
        outputs = schema_from_bytes(operator.output_schema)
        self._operator = operator.name
        self._is_running = operator.HasField("running_aggregate")
        self._keys = keys
        aggregates = {
            proto.name: Aggregate.from_proto(
                proto,
                load_function=lambda function: load_function(function, operator.name),
                output_type=_declared_type(outputs, proto),
            )
            for proto in protos
        }
        self.layout = aggregate_layout(aggregates, schema)
        self.kinds = [slot.kind for slot in self.layout.slots]
        self._arrivals = ArrivalCounter()
        self._counts_arrivals = bool(self.layout.group_columns)

    def open(self, context: OperatorContext) -> None:
        """Goes on numbering rows where a restored operator has stopped."""
        if self._counts_arrivals:
            self._arrivals.open(context)

    def prepare_snapshot(self) -> None:
        """Makes the numbering part of the snapshot."""
        if self._counts_arrivals:
            self._arrivals.keep()

    def new_columns(self) -> list[GroupColumn]:
        """Empty group columns for a new table."""
        return [self._new_column(spec) for spec in self.layout.group_columns]

    def _new_column(self, spec: GroupColumnSpec) -> GroupColumn:
        if spec.function == CUSTOM:
            return CustomAggregate(spec, self._operator)
        return group_column(spec)

    def inputs(self, batch: pa.RecordBatch) -> AggregateInputs:
        """What the aggregates read of a batch of rows."""
        inputs = self.numbers(batch)
        columns: list[Any] = [
            batch if spec.column is None else plain_array(batch.column(spec.column))
            for spec in self.layout.group_columns
        ]
        return self._with_columns(inputs, columns, batch.num_rows)

    def _with_columns(
        self, inputs: AggregateInputs, columns: list[Any], rows: int
    ) -> AggregateInputs:
        if columns:
            inputs.columns, inputs.sequence = columns, self._arrivals.take(rows)
        return inputs

    def numbers(self, batch: pa.RecordBatch) -> AggregateInputs:
        """What the slots read of a batch of rows."""
        values: list[Values | None] = []
        valid: list[BoolArray | None] = []
        read: dict[str, tuple[pa.Array, BoolArray | None]] = {}
        numbers: dict[tuple[str, np.dtype[Any]], Values] = {}
        for slot, kind in zip(self.layout.slots, self.kinds, strict=True):
            if slot.column is None:
                values.append(None)
                valid.append(np.zeros(batch.num_rows, np.bool_) if slot.tells_begun else None)
                continue
            if slot.column not in read:
                array = plain_array(batch.column(slot.column))
                nulls = null_rows(array)
                read[slot.column] = array, None if nulls is None else ~nulls
            array, is_valid = read[slot.column]
            valid.append(is_valid)
            if kind is AccumulatorKind.COUNT:
                values.append(None)
                continue
            what = slot.column, kind.dtype
            if what not in numbers:
                numbers[what] = self._numbers(slot, array)
            values.append(numbers[what])
        return AggregateInputs(values, valid, [], np.empty(0, np.int64))

    def partial_inputs(self, batch: pa.RecordBatch) -> AggregateInputs:
        """What the aggregates read of a partial batch (``penstock.graph.window_schemas``)."""
        values: list[Values | None] = []
        valid: list[BoolArray | None] = []
        first = first_accumulator(batch.schema)
        for i in range(first, first + len(self.kinds)):
            column = batch.column(i)
            nulls = null_rows(column)
            values.append((column if nulls is None else column.fill_null(0)).to_numpy())
            valid.append(None if nulls is None else ~nulls)
        inputs = AggregateInputs(values, valid, [], np.empty(0, np.int64), True)
        columns = [batch.column(value_column(spec)) for spec in self.layout.group_columns]
        return self._with_columns(inputs, columns, batch.num_rows)

    def _numbers(self, slot: AccumulatorSlot, array: pa.Array) -> Values:
        if slot.kind.dtype == np.float64:
            if not pt.is_float64(array.type):
                array = array.cast(pa.float64(), safe=False)
            if array.null_count:
                array = array.fill_null(0.0)
            return array.to_numpy()
        words = fixed_values(array)
        if slot.kind.dtype == np.uint64:
            return words.view(np.uint64)
        if pt.is_uint64(array.type) and len(words) and words.min() < 0:
            raise BadRecord(
                f"the sum of column {slot.column!r} is an int64, but a value is "
                f"{int(words.view(np.uint64).max())}: {_WIDER_SUM}",
                operator=self._operator,
            )
        return words

    def results(self, rows: TableRows) -> list[pa.Array]:
        """The aggregates' output columns."""
        columns = [
            rows.columns[result] if isinstance(result, int) else _slot_result(result, rows)
            for result in self.layout.results
        ]
        if self._is_running:
            return columns
        return [
            column if begun < 0 else _where_it_has_seen_all(column, rows.accumulators[begun])
            for column, begun in zip(columns, self.layout.begun, strict=True)
        ]

    def overflow(self, error: AccumulatorOverflowError, keys: KeyBatch) -> BadRecord:
        """The error of a sum that left the range of int64."""
        return self.overflow_in(error.accumulator, self._keys.describe(keys, error.row))

    def overflow_in(self, slot: int, key: str) -> BadRecord:
        """The same, for a slot and a key that is already described."""
        names = [
            r.name for r in self.layout.results if isinstance(r, SlotResult) and r.slot == slot
        ]
        column = self.layout.slots[slot].column
        return BadRecord(
            f"aggregate {', '.join(names)}: the sum of column {column!r} leaves the range of int64"
            f"{f' for key {key}' if key else ''}, all of it or that of the rows so far; {_WIDER_SUM}",
            operator=self._operator,
            row=key,
        )


def accumulator_columns(
    numbers: Sequence[Values], validity: Sequence[BoolArray | None]
) -> list[pa.Array]:
    """The slots of g groups as the columns of a partial batch."""
    return [
        pa.array(values, mask=None if valid is None else ~valid)
        for values, valid in zip(numbers, validity, strict=True)
    ]


def _where_it_has_seen_all(column: pa.Array, begun: Values) -> pa.Array:
    """The values of an aggregate that was added later; null in windows that had begun by then."""
    has_begun = begun > 0
    return pc.if_else(has_begun, None, column) if has_begun.any() else column


def _slot_result(result: SlotResult, rows: TableRows) -> pa.Array:
    numbers, valid = rows.accumulators[result.slot], rows.validity[result.slot]
    empty = None if valid is None else ~valid
    if result.divisor >= 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            numbers = numbers / rows.accumulators[result.divisor]
    kind = result.output_type
    if numbers.dtype == np.float64:
        return as_type(pa.array(numbers, mask=empty), kind)
    if pt.is_int64(kind):
        return pa.array(numbers, mask=empty)
    return fixed_array(kind, numbers.view(np.int64), empty)


def _declared_type(schema: pa.Schema, proto: graph_pb2.Aggregate) -> pa.DataType | None:
    if proto.function != CUSTOM:
        return None
    return schema.field(proto.name).type
