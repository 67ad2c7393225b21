"""Windows that hold their rows, for a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from taskmanager.kernels import RecordTable, distinct
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.row_contents import LoggedInstances, RowSlices, SequencedRows
from taskmanager.operators.window_contents import (
    FiredInstances,
    Rows,
    result_time,
)
from taskmanager.operators.window_function_runner import WindowFunctionRunner, WindowRows
from taskmanager.state.instances import InstanceState
from taskmanager.state.row_table import RowDescriptor, parts_of

_SLICES = ("slices",)


class FunctionSlices(RowSlices):
    """Rows of tumbling and sliding windows: grouped by key at the firing."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        keys = spec.window_function.keys
        schema = schema_from_bytes(spec.input_schema)
        super().__init__(_SLICES, [RowDescriptor(schema, tuple(keys))])
        self._runner = WindowFunctionRunner(spec)
        self._keys = KeyColumns(keys, schema)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._runner.open(context)

    @override
    def close(self) -> None:
        self._runner.close()

    @override
    def emit(self, start: int, end: int, slices: Sequence[int]) -> Iterator[OperatorOutput]:
        for part in parts_of(self._tables(0, slices)):
            rows = self.unfired(part, end)
            if not rows.num_rows:
                continue
            for _, output in self._runner.run(self._group(rows, start, end)):
                yield output

    @override
    def emit_updated(
        self,
        start: int,
        end: int,
        slices: Sequence[int],
        updated: Sequence[tuple[SequencedRows, Rows | None]],
    ) -> Iterator[OperatorOutput]:
        touched = RecordTable(self._keys.types, [], with_index=True)
        for prepared, rows in updated:
            touched.lookup_or_insert(self._keys.encode(prepared.select(rows).batch))
        for batch in parts_of(self._tables(0, slices)):
            rows = batch.filter(pa.array(touched.contains(self._keys.encode(batch))))
            if rows.num_rows:
                for _, output in self._runner.run(self._group(rows, start, end)):
                    yield output

    def _group(self, batch: pa.RecordBatch, start: int, end: int) -> WindowRows:
        """The rows key by key, keys in order of their first row."""
        first, key_of = distinct(self._keys.encode(batch))
        order = np.argsort(key_of, kind="stable")
        bounds = np.zeros(len(first) + 1, np.int64)
        np.cumsum(np.bincount(key_of, minlength=len(first)), out=bounds[1:])
        keys = [array.take(pa.array(first)) for array in self._keys.arrays(batch)]
        shape = len(first)
        return WindowRows(
            batch.take(pa.array(order)),
            bounds,
            keys,
            np.full(shape, start, np.int64),
            np.full(shape, end, np.int64),
            np.full(shape, result_time(end), np.int64),
        )


class FunctionInstances(LoggedInstances):
    """Rows of sessions and count windows, for a function."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(pa.struct(list(schema_from_bytes(spec.input_schema))))
        self._runner = WindowFunctionRunner(spec)

    @override
    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        super().open(context, state)
        self._runner.open(context)

    @override
    def close(self) -> None:
        self._runner.close()

    @override
    def _columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        columns: list[pa.Array] = batch.columns
        return columns

    @override
    def emit(self, fired: FiredInstances) -> Iterator[tuple[int, OperatorOutput]]:
        counts, _, values = self._state.gather(fired.instances)
        bounds = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=bounds[1:])
        yield from self._runner.run(
            WindowRows(
                pa.RecordBatch.from_struct_array(values),
                bounds,
                fired.keys,
                fired.starts,
                fired.ends,
                fired.event_times,
            )
        )
