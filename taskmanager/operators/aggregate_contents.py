"""Windows that hold aggregates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.graph.window_schemas import is_partial
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import AccumulatorOverflowError, RecordTable
from taskmanager.operators.aggregation import AggregateInputs, Aggregation
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.slice_tree import SliceTree
from taskmanager.operators.window_contents import (
    FiredInstances,
    InstanceContents,
    Int64Array,
    Rows,
    SliceContents,
    constant_time,
    result_time,
)
from taskmanager.state.backend import AggregateDescriptor, KeyedStateBackend
from taskmanager.state.group_table import GroupTable, TableRows
from taskmanager.state.instances import InstanceState, InstanceTable
from taskmanager.state.wide_columns import narrow_batches

_SLICES = "slices"
_FIRING = "firing"

_TREE_SHARE = 8
"""Nodes over slices take at most this part of the memory of a slot's states."""


@dataclass(frozen=True, slots=True)
class AggregateRows:
    """Keys and inputs of a batch."""

    keys: KeyBatch
    inputs: AggregateInputs

    def select(self, rows: Rows | None) -> AggregateRows:
        """Some of the rows, None = all."""
        if rows is None:
            return self
        if isinstance(rows, slice):
            return AggregateRows(self.keys.slice(rows.start, rows.stop), self.inputs.select(rows))
        return AggregateRows(self.keys.take(rows), self.inputs.select(rows))


class BoundAggregation:
    """The aggregation of an operator with its keys and its output schema."""

    def __init__(
        self,
        operator: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
    ) -> None:
        self.keys = KeyColumns(keys, schema_from_bytes(operator.input_schema))
        self.aggregation = Aggregation(aggregates, operator, self.keys)
        self.schema = schema_from_bytes(operator.output_schema)
        self.has_event_time = EVENT_TIME in self.schema.names
        self.descriptor = AggregateDescriptor(
            tuple(self.keys.types),
            tuple(self.aggregation.kinds),
            self.aggregation.new_columns,
            tuple(self.aggregation.layout.slot_uses()),
        )

    def prepare(self, batch: pa.RecordBatch) -> AggregateRows:
        """Keys and inputs of a batch of rows or partial rows."""
        aggregation = self.aggregation
        if is_partial(batch.schema):
            inputs = aggregation.partial_inputs(batch)
        else:
            inputs = aggregation.inputs(batch)
        return AggregateRows(self.keys.encode(batch), inputs)

    def results(
        self, rows: TableRows, window: list[pa.Array], event_times: pa.Array | None
    ) -> Iterator[pa.RecordBatch]:
        """The output of some keys: keys, window columns, aggregates, event times; one batch, or as many as text
        and lists of more than 2 GiB take."""
        arrays = [*self.keys.outputs(rows.keys), *window, *self.aggregation.results(rows)]
        if event_times is not None:
            arrays.append(event_times)
        return narrow_batches(arrays, self.schema)


class AggregateSlices(SliceContents[AggregateRows]):
    """Aggregates of tumbling and sliding windows: one table per slice.

    Args:
        operator: the specification.
        keys: names of the key columns.
        aggregates: what is aggregated.
        slice_ms: length of a slice.
    """

    def __init__(
        self,
        operator: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
        slice_ms: int,
    ) -> None:
        self._bound = BoundAggregation(operator, keys, aggregates)
        self._slice_ms = slice_ms

    @override
    def restore(self, state: KeyedStateBackend) -> None:
        for namespace in state.namespaces(_SLICES):
            state.group_table(_SLICES, namespace, self._bound.descriptor)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._bound.aggregation.open(context)
        self._tree = SliceTree(
            self._slice_ms,
            lambda start: self._table(_SLICES, start),
            self._together,
            GroupTable.memory_bytes,
            context.memory.limit_bytes // _TREE_SHARE,
        )
        self._memory_user = context.memory.register(
            f"{context.operator_name}: windows", self._tree.memory_bytes
        )

    @override
    def close(self) -> None:
        self.context.memory.unregister(self._memory_user)

    @override
    def slices(self) -> list[int]:
        return self.context.state.namespaces(_SLICES)

    @override
    def prepare_snapshot(self) -> None:
        assert not self.context.state.namespaces(_FIRING), "a window is firing"
        self._bound.aggregation.prepare_snapshot()

    @override
    def prepare(self, batch: pa.RecordBatch) -> AggregateRows:
        return self._bound.prepare(batch)

    @override
    def add(self, start: int, prepared: AggregateRows, rows: Rows | None) -> None:
        part = prepared.select(rows)
        try:
            self._table(_SLICES, start).update(part.keys, part.inputs)
        except AccumulatorOverflowError as error:
            raise self._bound.aggregation.overflow(error, part.keys) from error
        self._tree.changed(start)

    @override
    def begin_firing(self, end: int, slices: Sequence[int], last_use: Sequence[bool]) -> None:
        if len(slices) == 1 and last_use[0]:
            self.context.state.move(_SLICES, slices[0], _FIRING, end)
            return
        target = self._table(_FIRING, end)
        target.use_common_order()
        for part in self._parts(slices):
            self._merge(target, part, None)

    @override
    def emit_firing(self, start: int, end: int) -> Iterator[OperatorOutput]:
        for rows in self._table(_FIRING, end).chunks(self.context.config.batch_rows):
            for results in self._results(rows, start, end):
                yield self.unfired(results, end)
        self.context.state.drop(_FIRING, end)

    @override
    def emit_updated(
        self,
        start: int,
        end: int,
        slices: Sequence[int],
        updated: Sequence[tuple[AggregateRows, Rows | None]],
    ) -> Iterator[OperatorOutput]:
        descriptor = self._bound.descriptor
        touched = RecordTable(descriptor.key_types, [], with_index=True)
        for prepared, rows in updated:
            touched.lookup_or_insert(prepared.select(rows).keys)
        merged = GroupTable(descriptor.key_types, descriptor.kinds, descriptor.new_columns())
        for part in self._parts(slices):
            self._merge(merged, part, touched.key_batch())
        for chunk in merged.chunks(self.context.config.batch_rows):
            yield from self._results(chunk, start, end)

    @override
    def drop(self, start: int) -> None:
        self._tree.changed(start)
        self.context.state.drop(_SLICES, start)

    def _parts(self, slices: Sequence[int]) -> list[GroupTable]:
        """Tables with what a window of these slices holds, in the order of their time."""
        if not self._bound.aggregation.new_columns():
            try:
                return self._tree.parts(slices)
            except AccumulatorOverflowError:  # of a part of the window, whose sum may be in range
                self._tree.clear()
        return [self._table(_SLICES, start) for start in slices]

    def _together(self, tables: Sequence[GroupTable]) -> GroupTable:
        descriptor = self._bound.descriptor
        together = GroupTable(descriptor.key_types, descriptor.kinds, [])
        together.use_common_order()
        for table in tables:
            together.merge(table)
        return together

    def _table(self, name: str, namespace: int) -> GroupTable:
        return self.context.state.group_table(name, namespace, self._bound.descriptor)

    def _merge(self, target: GroupTable, source: GroupTable, only: KeyBatch | None) -> None:
        try:
            target.merge(source, only)
        except AccumulatorOverflowError as error:
            raise self._bound.aggregation.overflow(error, source.keys(only)) from error

    def _results(self, rows: TableRows, start: int, end: int) -> Iterator[pa.RecordBatch]:
        count = len(rows.keys[0])
        window = [constant_time(start, count), constant_time(end, count)]
        event_times = None
        if self._bound.has_event_time:
            event_times = pa.array(np.full(count, result_time(end)))
        return self._bound.results(rows, window, event_times)


class AggregateInstances(InstanceContents[InstanceTable]):
    """Aggregates of sessions and count windows."""

    def __init__(
        self,
        operator: graph_pb2.Operator,
        keys: Sequence[str],
        aggregates: Sequence[graph_pb2.Aggregate],
    ) -> None:
        self._bound = BoundAggregation(operator, keys, aggregates)

    @override
    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        super().open(context, state)
        self._bound.aggregation.open(context)

    @override
    def new_state(self) -> InstanceTable:
        descriptor = self._bound.descriptor
        return InstanceTable(descriptor.kinds, descriptor.new_columns(), descriptor.uses)

    @override
    def prepare_snapshot(self) -> None:
        self._bound.aggregation.prepare_snapshot()

    @override
    def add(self, instances: Int64Array, batch: pa.RecordBatch) -> None:
        try:
            self._state.update(instances, self._bound.aggregation.inputs(batch))
        except AccumulatorOverflowError as error:
            keys = self._bound.keys.encode(batch)
            raise self._bound.aggregation.overflow(error, keys) from error

    @override
    def merge(self, source: Int64Array, target: Int64Array) -> None:
        try:
            self._state.merge(source, target)
        except AccumulatorOverflowError as error:
            raise self._bound.aggregation.overflow_in(error.accumulator, "") from error

    @override
    def emit(self, fired: FiredInstances) -> Iterator[tuple[int, OperatorOutput]]:
        size = self.context.config.batch_rows
        for start in range(0, len(fired), size):
            part = fired.slice(start, min(start + size, len(fired)))
            rows = self._state.rows(part.instances, part.keys)
            event_times = None
            if self._bound.has_event_time and part.event_times is not None:
                event_times = pa.array(part.event_times)
            done = start
            for result in self._bound.results(rows, part.window_columns(), event_times):
                done += result.num_rows
                yield done, result

    @override
    def clear(self, instances: Int64Array) -> None:
        self._state.clear(instances)
