"""Windows that hold their rows, for a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes
from taskmanager.kernels import RecordTable, distinct
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.operator_progress import ArrivalCounter
from taskmanager.operators.window_contents import (
    FiredInstances,
    InstanceContents,
    Int64Array,
    Rows,
    SliceContents,
    result_time,
)
from taskmanager.operators.window_function_runner import WindowFunctionRunner, WindowRows
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.instances import InstanceState
from taskmanager.state.row_table import RowDescriptor, RowTable, parts_of
from taskmanager.state.value_log import GroupedLog

_SLICES = "slices"
_FIRING = "firing"


@dataclass(frozen=True, slots=True)
class SequencedRows:
    """A batch with the rows' places in the order of arrival."""

    batch: pa.RecordBatch
    sequence: Int64Array

    def select(self, rows: Rows | None) -> SequencedRows:
        """Some of the rows, None = all."""
        if rows is None:
            return self
        if isinstance(rows, slice):
            batch = self.batch.slice(rows.start, rows.stop - rows.start)
        else:
            batch = self.batch.take(pa.array(rows))
        return SequencedRows(batch, self.sequence[rows])


class FunctionSlices(SliceContents[SequencedRows]):
    """Rows of tumbling and sliding windows: batches per slice, grouped by key at the firing."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._runner = WindowFunctionRunner(spec)
        keys = spec.window_function.keys
        schema = schema_from_bytes(spec.input_schema)
        self._keys = KeyColumns(keys, schema)
        self._descriptor = RowDescriptor(schema, tuple(keys))
        self._arrivals = ArrivalCounter()

    @override
    def restore(self, state: KeyedStateBackend) -> None:
        for namespace in state.namespaces(_SLICES):
            state.row_table(_SLICES, namespace, self._descriptor)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._arrivals.open(context)
        self._runner.open(context)

    @override
    def slices(self) -> list[int]:
        return self.context.state.namespaces(_SLICES)

    @override
    def prepare_snapshot(self) -> None:
        assert not self.context.state.namespaces(_FIRING), "a window is firing"
        self._arrivals.keep()

    @override
    def close(self) -> None:
        self._runner.close()

    @override
    def prepare(self, batch: pa.RecordBatch) -> SequencedRows:
        return SequencedRows(batch, self._arrivals.take(batch.num_rows))

    @override
    def add(self, start: int, prepared: SequencedRows, rows: Rows | None) -> None:
        part = prepared.select(rows)
        self._table(_SLICES, start).add(part.batch, part.sequence)

    @override
    def begin_firing(self, end: int, slices: Sequence[int], last_use: Sequence[bool]) -> None:
        firing = self._table(_FIRING, end)
        firing.extend([self._table(_SLICES, start) for start in slices])

    @override
    def emit_firing(self, start: int, end: int) -> Iterator[OperatorOutput]:
        for part in parts_of([self._table(_FIRING, end)]):
            rows = self.unfired(part, end)
            if not rows.num_rows:
                continue
            for _, output in self._runner.run(self._group(rows, start, end)):
                yield output
        self.context.state.drop(_FIRING, end)

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
        for batch in parts_of([self._table(_SLICES, slice_start) for slice_start in slices]):
            rows = batch.filter(pa.array(touched.contains(self._keys.encode(batch))))
            if rows.num_rows:
                for _, output in self._runner.run(self._group(rows, start, end)):
                    yield output

    @override
    def drop(self, start: int) -> None:
        self.context.state.drop(_SLICES, start)

    def _table(self, name: str, namespace: int) -> RowTable:
        return self.context.state.row_table(name, namespace, self._descriptor)

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


class FunctionInstances(InstanceContents[GroupedLog]):
    """Rows of sessions and count windows, each with the number of its window."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._runner = WindowFunctionRunner(spec)
        self._type = pa.struct(list(schema_from_bytes(spec.input_schema)))
        self._arrivals = ArrivalCounter()

    @override
    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        super().open(context, state)
        self._arrivals.open(context)
        self._runner.open(context)

    @override
    def new_state(self) -> GroupedLog:
        return GroupedLog(self._type)

    @override
    def prepare_snapshot(self) -> None:
        self._arrivals.keep()

    @override
    def close(self) -> None:
        self._runner.close()

    @override
    def add(self, instances: Int64Array, batch: pa.RecordBatch) -> None:
        sequence = self._arrivals.take(batch.num_rows)
        values = pa.StructArray.from_arrays(batch.columns, fields=list(self._type))
        self._state.append(instances, sequence, values)

    @override
    def merge(self, source: Int64Array, target: Int64Array) -> None:
        log = self._state
        log.merge(log, source, target)
        log.clear(source)

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

    @override
    def clear(self, instances: Int64Array) -> None:
        self._state.clear(instances)
