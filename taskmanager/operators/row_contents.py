"""Windows that hold rows: what those of functions and those of joins have in common.

Rows of tumbling and sliding windows lie in a table per slice and input, those of sessions and count windows in a log.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_types import Int64Array
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.operator_progress import ArrivalCounter
from taskmanager.operators.window_contents import InstanceContents, Rows, SliceContents
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.instances import InstanceState
from taskmanager.state.row_table import RowDescriptor, RowTable
from taskmanager.state.value_log import GroupedLog


@dataclass(frozen=True, slots=True)
class SequencedRows:
    """A batch of one input with the rows' places in the order of arrival."""

    side: int
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
        return replace(self, batch=batch, sequence=self.sequence[rows])


class RowSlices(SliceContents[SequencedRows]):
    """Rows of tumbling and sliding windows: batches per slice and input.

    Args:
        slices: per input the name of the state of its slices.
        descriptors: per input what its rows are.
    """

    def __init__(self, slices: Sequence[str], descriptors: Sequence[RowDescriptor]) -> None:
        self._slices = slices
        self._descriptors = descriptors
        self._arrivals = ArrivalCounter()

    @override
    def restore(self, state: KeyedStateBackend) -> None:
        for name, descriptor in zip(self._slices, self._descriptors, strict=True):
            for namespace in state.namespaces(name):
                state.row_table(name, namespace, descriptor)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._arrivals.open(context)

    @override
    def slices(self) -> list[int]:
        state = self.context.state
        return sorted({one for name in self._slices for one in state.namespaces(name)})

    @override
    def prepare_snapshot(self) -> None:
        self._arrivals.keep()

    @override
    def prepare(self, batch: pa.RecordBatch) -> SequencedRows:
        side = self.context.origins.input_index if len(self._slices) > 1 else 0
        return SequencedRows(side, batch, self._arrivals.take(batch.num_rows))

    @override
    def add(self, start: int, prepared: SequencedRows, rows: Rows | None) -> None:
        part = prepared.select(rows)
        self._table(part.side, start).add(part.batch, part.sequence)

    @override
    def drop(self, start: int) -> None:
        for name in self._slices:
            self.context.state.drop(name, start)

    def _tables(self, side: int, slices: Sequence[int]) -> list[RowTable]:
        return [self._table(side, start) for start in slices]

    def _table(self, side: int, start: int) -> RowTable:
        return self.context.state.row_table(self._slices[side], start, self._descriptors[side])


class LoggedInstances(InstanceContents[GroupedLog]):
    """Rows of sessions and count windows, each with the number of its window.

    Args:
        row_type: what a row is in the log.
    """

    def __init__(self, row_type: pa.DataType) -> None:
        self._type = row_type
        self._arrivals = ArrivalCounter()

    @override
    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        super().open(context, state)
        self._arrivals.open(context)

    @override
    def new_state(self) -> GroupedLog:
        return GroupedLog(self._type)

    @override
    def prepare_snapshot(self) -> None:
        self._arrivals.keep()

    @override
    def add(self, instances: Int64Array, batch: pa.RecordBatch) -> None:
        sequence = self._arrivals.take(batch.num_rows)
        values = pa.StructArray.from_arrays(self._columns(batch), fields=list(self._type))
        self._state.append(instances, sequence, values)

    @abstractmethod
    def _columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """What is logged of a batch."""

    @override
    def merge(self, source: Int64Array, target: Int64Array) -> None:
        log = self._state
        log.merge(log, source, target)
        log.clear(source)

    @override
    def clear(self, instances: Int64Array) -> None:
        self._state.clear(instances)
