"""``reduce`` on windows: the rows of a key become one as they come, two by two.

A window holds one row per key, as Arrow values: the function is called once per batch and key with what is held
and the batch's rows. Parts of a window that were kept apart (slices of a sliding window, sessions that a row
joins) become one in the order in which their first rows came.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.errors import BadRecord, TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.column_values import is_never_changed, record_as_dict, short_repr
from penstock.rows.rows import (
    Row,
    RowBuilder,
    RowMismatch,
    lazy_columns,
    make_row,
    row_class,
    row_maker,
)
from penstock.rows.schema import is_optional, schema_from_bytes, user_schema
from penstock.storage.key_encoding import KeyBatch, bounds_of
from penstock.storage.key_types import Int64Array, plain_array, value_type
from taskmanager.kernels import AccumulatorOverflowError
from taskmanager.operators.accumulation import Accumulation
from taskmanager.operators.aggregation import AggregateInputs
from taskmanager.operators.key_columns import as_type
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.operator_progress import ArrivalCounter
from taskmanager.operators.user_function import UserFunctionHandle
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_column import GroupColumn
from taskmanager.state.group_table import TableRows
from taskmanager.state.row_table import concatenated
from taskmanager.state.slot_column import SequencedColumn
from taskmanager.state.wide_columns import concatenated_array

_FUNCTION = "reduce"


class Reduction(Accumulation):
    """The reduce function of an operator over windows."""

    def __init__(self, operator: graph_pb2.Operator) -> None:
        spec = operator.window_function
        super().__init__(operator, spec.keys)
        self._reducer = RowReducer(operator)
        self._arrivals = ArrivalCounter()
        schema = self._reducer.schema
        self._columns = [name for name in schema.names if name not in self.keys.names]
        stored = pa.struct([field.with_type(value_type(field.type)) for field in schema])
        column = GroupColumnSpec("row", _FUNCTION, None, stored, stored)
        self.descriptor = AggregateDescriptor(
            tuple(self.keys.types), (), lambda: [ReducedRows(column, self._reducer.fold)], ()
        )

    @override
    def open(self, context: OperatorContext) -> None:
        self._arrivals.open(context)
        self._reducer.open(context)

    @override
    def close(self) -> None:
        self._reducer.close()

    @override
    def prepare_snapshot(self) -> None:
        self._arrivals.keep()

    @override
    def inputs(self, batch: pa.RecordBatch) -> AggregateInputs:
        sequence = self._arrivals.take(batch.num_rows)
        rows = batch.select(self._reducer.schema.names)
        return AggregateInputs([], [], [rows], sequence)

    @override
    def values(self, rows: TableRows) -> list[pa.Array]:
        fields = self._reducer.schema
        [reduced] = rows.columns
        return [as_type(reduced.field(name), fields.field(name).type) for name in self._columns]

    @override
    def overflow(self, error: AccumulatorOverflowError, keys: KeyBatch | None) -> BadRecord:
        raise AssertionError("a table of rows sums nothing") from error


class ReducedRows(SequencedColumn):
    """One row per group, with the place of the first of those that it was made of.

    Args:
        spec: of the column; its values are structs.
        fold: makes one row of the rows of each of n groups: the rows, group by group in order of arrival, and
            int64[n + 1] where each group begins.
    """

    def __init__(
        self, spec: GroupColumnSpec, fold: Callable[[pa.RecordBatch, Int64Array], pa.RecordBatch]
    ) -> None:
        super().__init__(spec)
        self._fold_rows = fold

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: Any) -> None:
        self._fold(groups, sequence, self._structs(values))

    def _structs(self, batch: pa.RecordBatch) -> pa.Array:
        arrays = [plain_array(column) for column in batch.columns]
        kinds = zip(self._value_type, arrays, strict=True)
        fields = [field.with_type(array.type) for field, array in kinds]
        return pa.StructArray.from_arrays(arrays, fields=fields)

    @override
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        assert isinstance(other, ReducedRows)
        other._reserve(source)
        positions = other._position[source]
        present = positions >= 0
        rows = other._log.take(positions[present])
        self._fold(target[present], other._sequence[source[present]], rows)

    def _fold(self, groups: Int64Array, sequence: Int64Array, rows: pa.Array) -> None:
        """Adds n rows."""
        self._reserve(groups)
        touched = np.unique(groups)
        held = touched[self._position[touched] >= 0]
        if len(held):
            groups = np.concatenate([held, groups])
            sequence = np.concatenate([self._sequence[held], sequence])
            rows = concatenated_array([self._log.take(self._position[held]), rows])
        order = np.lexsort((sequence, groups))
        bounds = bounds_of(np.unique(groups, return_counts=True)[1].astype(np.int64))
        firsts = order[bounds[:-1]]
        lengths = np.diff(bounds)
        alone = lengths == 1
        self._sequence[touched] = sequence[firsts]
        if alone.any():
            self._store(touched[alone], rows.take(pa.array(firsts[alone])))
        if not alone.all():
            many = order[np.repeat(~alone, lengths)]
            batch = pa.RecordBatch.from_struct_array(rows.take(pa.array(many)))
            folded = self._fold_rows(batch, bounds_of(lengths[~alone]))
            self._store(touched[~alone], self._structs(folded))


class RowReducer:
    """Calls the user's function."""

    def __init__(self, operator: graph_pb2.Operator) -> None:
        self._name = operator.name
        self._handle = UserFunctionHandle(operator.name, operator.window_function.function)
        self.schema = user_schema(schema_from_bytes(operator.input_schema))
        self._make_row = _row_maker(self.schema, set(operator.window_function.keys))
        self._builder = RowBuilder(self.schema)
        self._may_change = [
            i for i, field in enumerate(self.schema) if not is_never_changed(field.type)
        ]

    def open(self, context: OperatorContext) -> None:
        """Loads and opens the function."""
        self._handle.open(context)

    def close(self) -> None:
        """Closes the function."""
        self._handle.close()

    def fold(self, batch: pa.RecordBatch, bounds: Int64Array) -> pa.RecordBatch:
        """One row per group; see ``ReducedRows``.

        Raises:
            TaskFailure: the function raised, or returned something that is no row of the schema.
        """
        arrays = [
            as_type(array, field.type)
            for array, field in zip(batch.columns, self.schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        chosen = self._call(batch, bounds)
        if not len(self._builder):
            return batch.take(pa.array(chosen, pa.int64()))
        try:
            made = self._builder.build()
        except RowMismatch as error:
            raise TaskFailure(
                f"operator {self._name!r}: the result of {self._handle.name} does not fit: {error}",
                operator=self._name,
                row=error.row,
            ) from error
        return concatenated([batch, made]).take(pa.array(chosen, pa.int64()))

    def _call(self, batch: pa.RecordBatch, bounds: Int64Array) -> list[int]:
        """Which row each group comes to: one of the batch, or one of those behind it, which the builder has got: also one
        of the batch of which a list or the like was read, and may have been changed."""
        function, make, names = self._handle.function, self._make_row, tuple(self.schema.names)
        kind, columns, new = row_class(batch), lazy_columns(batch), object.__new__
        chosen: list[int] = []
        reduced = row = make_row(kind, columns, 0)
        try:
            for start, stop in itertools.pairwise(bounds.tolist()):
                reduced = make_row(kind, columns, start)
                # One by one: the garbage collector goes through all rows that are there.
                for index in range(start + 1, stop):
                    row = new(kind)
                    row._penstock_columns = columns
                    row._penstock_index = index
                    result = function(reduced, row)
                    reduced = result if isinstance(result, Row) else make(result, reduced)
                is_given = reduced._penstock_columns is columns
                if is_given and not any(columns[i] is not None for i in self._may_change):
                    chosen.append(reduced._penstock_index)
                    continue
                chosen.append(batch.num_rows + len(self._builder))
                as_tuple = not is_given and len(names) > 1 and Row.keys(reduced) == names
                self._builder.append(tuple(Row.as_dict(reduced).values()) if as_tuple else reduced)
        except Exception as error:
            self._builder.clear()
            raise self._handle.failure(error, row=(reduced, row)) from error
        return chosen


def _row_maker(schema: pa.Schema, keys: Collection[str]) -> Callable[[object, Row], Row]:
    """A function that makes a row of what a reduce function returned.

    Keys may be left out: they are those of the window. Optional columns that are left out are null.
    """
    names = tuple(schema.names)
    new_row = row_maker(names)
    known = frozenset(names)
    needed = {f.name for f in schema if f.name not in keys and not is_optional(f)}

    def make(result: object, before: Row) -> Row:
        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            if len(result) != len(names):
                raise TypeError(
                    f"reduce returned a tuple of {len(result)} values for {len(names)} columns"
                )
            record: Any = dict(zip(names, result, strict=True))
        else:
            record = record_as_dict(result)
        if record is None:
            raise TypeError(
                f"reduce must return a row with the columns {', '.join(names)} (a row, a dict, a "
                f"dataclass instance or a tuple), got {short_repr(result)}"
            )
        unknown = [str(name) for name in record if name not in known]
        if unknown:
            raise TypeError(
                f"reduce returned the columns {', '.join(unknown)}, which its rows do not have; "
                f"they have {', '.join(names)}"
            )
        missing = [name for name in names if name in needed and name not in record]
        if missing:
            raise TypeError(
                f"reduce returned no column {', '.join(missing)} (a null is given as None); its rows have "
                f"{', '.join(names)}"
            )
        return new_row(
            [
                before[name] if name in keys and name not in record else record.get(name)
                for name in names
            ]
        )

    return make
