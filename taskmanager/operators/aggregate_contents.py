"""Windows that hold one accumulator per key: aggregates, or what a function has made of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import AccumulatorOverflowError, RecordTable
from taskmanager.operators.accumulation import Accumulation, AggregateRows
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.slice_tree import SliceTree
from taskmanager.operators.window_contents import (
    FiredInstances,
    InstanceContents,
    Rows,
    SliceContents,
    constant_time,
    result_time,
)
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.group_table import GroupTable, TableRows
from taskmanager.state.instances import InstanceState, InstanceTable

_SLICES = "slices"
_FIRING = "firing"

_TREE_SHARE = 8
"""Nodes over slices take at most this part of the memory of a slot's states."""


class AggregateSlices(SliceContents[AggregateRows]):
    """Accumulators of tumbling and sliding windows: one table per slice."""

    def __init__(self, accumulation: Accumulation, slice_ms: int) -> None:
        self._accumulated = accumulation
        self._slice_ms = slice_ms

    @override
    def restore(self, state: KeyedStateBackend) -> None:
        for namespace in state.namespaces(_SLICES):
            state.group_table(_SLICES, namespace, self._accumulated.descriptor)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._accumulated.open(context)
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
        self._accumulated.close()

    @override
    def slices(self) -> list[int]:
        return self.context.state.namespaces(_SLICES)

    @override
    def prepare_snapshot(self) -> None:
        assert not self.context.state.namespaces(_FIRING), "a window is firing"
        self._accumulated.prepare_snapshot()

    @override
    def prepare(self, batch: pa.RecordBatch) -> AggregateRows:
        return self._accumulated.prepare(batch)

    @override
    def add(self, start: int, prepared: AggregateRows, rows: Rows | None) -> None:
        part = prepared.select(rows)
        try:
            self._table(_SLICES, start).update(part.keys, part.inputs)
        except AccumulatorOverflowError as error:
            raise self._accumulated.overflow(error, part.keys) from error
        self._tree.changed(start)

    @override
    def emit(self, start: int, end: int, slices: Sequence[int]) -> Iterator[OperatorOutput]:
        table = self._table(_SLICES, slices[0]) if len(slices) == 1 else self._window(end, slices)
        for rows in table.chunks(self.context.config.batch_rows):
            for results in self._results(rows, start, end):
                yield self.unfired(results, end)
        self.context.state.drop(_FIRING, end)

    def _window(self, end: int, slices: Sequence[int]) -> GroupTable:
        """The accumulators of the slices together, as state: they may be more than there is memory for."""
        target = self._table(_FIRING, end)
        target.use_common_order()
        for part in self._parts(slices):
            self._merge(target, part, None)
        return target

    @override
    def emit_updated(
        self,
        start: int,
        end: int,
        slices: Sequence[int],
        updated: Sequence[tuple[AggregateRows, Rows | None]],
    ) -> Iterator[OperatorOutput]:
        descriptor = self._accumulated.descriptor
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
        if not self._accumulated.descriptor.new_columns():
            try:
                return self._tree.parts(slices)
            except AccumulatorOverflowError:  # of a part of the window, whose sum may be in range
                self._tree.clear()
        return [self._table(_SLICES, start) for start in slices]

    def _together(self, tables: Sequence[GroupTable]) -> GroupTable:
        descriptor = self._accumulated.descriptor
        together = GroupTable(descriptor.key_types, descriptor.kinds, [])
        together.use_common_order()
        for table in tables:
            together.merge(table)
        return together

    def _table(self, name: str, namespace: int) -> GroupTable:
        return self.context.state.group_table(name, namespace, self._accumulated.descriptor)

    def _merge(self, target: GroupTable, source: GroupTable, only: KeyBatch | None) -> None:
        try:
            target.merge(source, only)
        except AccumulatorOverflowError as error:
            raise self._accumulated.overflow(error, source.keys(only)) from error

    def _results(self, rows: TableRows, start: int, end: int) -> Iterator[pa.RecordBatch]:
        count = len(rows.keys[0])
        window = [constant_time(start, count), constant_time(end, count)]
        event_times = None
        if self._accumulated.has_event_time:
            event_times = pa.array(np.full(count, result_time(end)))
        return self._accumulated.results(rows, window, event_times)


class AggregateInstances(InstanceContents[InstanceTable]):
    """Accumulators of sessions and count windows."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulated = accumulation

    @override
    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        super().open(context, state)
        self._accumulated.open(context)

    @override
    def close(self) -> None:
        self._accumulated.close()

    @override
    def new_state(self) -> InstanceTable:
        descriptor = self._accumulated.descriptor
        return InstanceTable(descriptor.kinds, descriptor.new_columns(), descriptor.uses)

    @override
    def prepare_snapshot(self) -> None:
        self._accumulated.prepare_snapshot()

    @override
    def add(self, instances: Int64Array, batch: pa.RecordBatch) -> None:
        try:
            self._state.update(instances, self._accumulated.inputs(batch))
        except AccumulatorOverflowError as error:
            keys = self._accumulated.keys.encode(batch)
            raise self._accumulated.overflow(error, keys) from error

    @override
    def merge(self, source: Int64Array, target: Int64Array) -> None:
        try:
            self._state.merge(source, target)
        except AccumulatorOverflowError as error:
            raise self._accumulated.overflow(error, None) from error

    @override
    def emit(self, fired: FiredInstances) -> Iterator[tuple[int, OperatorOutput]]:
        size = self.context.config.batch_rows
        for start in range(0, len(fired), size):
            part = fired.slice(start, min(start + size, len(fired)))
            rows = self._state.rows(part.instances, part.keys)
            event_times = None
            if self._accumulated.has_event_time and part.event_times is not None:
                event_times = pa.array(part.event_times)
            done = start
            for result in self._accumulated.results(rows, part.window_columns(), event_times):
                done += result.num_rows
                yield done, result

    @override
    def clear(self, instances: Int64Array) -> None:
        self._state.clear(instances)
