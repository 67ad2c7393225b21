"""Columns of groups whose values are no numbers: first, last, lists, strings, decimals.

See ``group_column`` for what they have in common.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.errors import BadRecord
from penstock.rows.ordering import sorted_rows
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.state.distinct_count import DistinctCount
from taskmanager.state.group_column import GroupColumn, valid_rows
from taskmanager.state.slot_column import SequencedColumn, SlotColumn
from taskmanager.state.value_log import FrozenStates, GroupedLog
from taskmanager.state.wide_columns import wide_type


class FirstOrLast(SequencedColumn):
    """The value that arrived first or last, nulls skipped."""

    def __init__(self, spec: GroupColumnSpec) -> None:
        super().__init__(spec)
        self._is_last = spec.function == "last"

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        self._reserve(groups)
        rows = np.arange(len(groups)) if not values.null_count else valid_rows(values)
        if not self._is_last:
            rows = rows[::-1]
        # The last of several writes to one element stays, so that each group finds its winner.
        best = np.empty(len(self._position), np.int64)
        best[groups[rows]] = rows
        winners = rows[best[groups[rows]] == rows]
        self._replace(groups[winners], sequence[winners], values, winners)

    @override
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        assert isinstance(other, FirstOrLast)
        self._reserve(target)
        other._reserve(source)
        present = other._position[source] >= 0
        source, target = source[present], target[present]
        sequence = other._sequence[source]
        order = np.argsort(sequence, kind="stable")
        order = order if self._is_last else order[::-1]
        best = np.empty(len(self._position), np.int64)
        best[target[order]] = order
        winners = order[best[target[order]] == order]
        values = other._log.take(other._position[source[winners]])
        self._replace(target[winners], sequence[winners], values, np.arange(len(winners)))

    def _replace(
        self, groups: Int64Array, sequence: Int64Array, values: pa.Array, rows: Int64Array
    ) -> None:
        """Stores ``values[rows]`` where they come before (or after) what the groups hold."""
        held = self._sequence[groups]
        better = sequence > held if self._is_last else sequence < held
        better |= self._position[groups] < 0
        groups = groups[better]
        self._sequence[groups] = sequence[better]
        self._store(groups, values.take(pa.array(rows[better])))


class Folded(SlotColumn):
    """Smallest, largest or sum of values that are no machine numbers: strings, binary, decimals."""

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        self._reserve(groups)
        if values.null_count:
            rows = valid_rows(values)
            groups, values = groups[rows], values.take(pa.array(rows))
        self._fold(groups, values)

    @override
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        assert isinstance(other, Folded)
        self._reserve(target)
        other._reserve(source)
        present = other._position[source] >= 0
        source, target = source[present], target[present]
        self._fold(target, other._log.take(other._position[source]))

    def _fold(self, groups: Int64Array, values: pa.Array) -> None:
        if not len(groups):
            return
        unique, part = self._by_group(groups, values)
        held = self._position[unique] >= 0
        if held.any():
            old = self._log.take(self._position[unique])
            part = self._combine(old, part, held)
        self._store(unique, part)

    def _by_group(self, groups: Int64Array, values: pa.Array) -> tuple[Int64Array, pa.Array]:
        if self.spec.function == "sum":
            values = self._checked_cast(values, self._value_type)
            table = pa.table({"group": groups, "value": values})
            grouped = table.group_by("group").aggregate([("value", "sum")])
            part = grouped.column("value_sum").combine_chunks()
            return grouped.column("group").to_numpy(), self._checked_cast(part, self._value_type)
        # Sorted by group and value, the extreme is the first of each group.
        table = pa.table({"group": groups, "value": values})
        direction = "ascending" if self.spec.function == "min" else "descending"
        order = sorted_rows(table, [("group", "ascending"), ("value", direction)])
        sorted_groups = groups[order]
        firsts = np.flatnonzero(np.diff(sorted_groups, prepend=-1))
        return sorted_groups[firsts], values.take(pa.array(order[firsts]))

    def _combine(self, old: pa.Array, part: pa.Array, held: BoolArray) -> pa.Array:
        if self.spec.function == "sum":
            return self._checked_cast(pc.add(pc.fill_null(old, 0), part), self._value_type)
        compare = pc.less if self.spec.function == "min" else pc.greater
        keep_old = pc.fill_null(compare(old, part), False)
        extreme = pc.if_else(pc.and_(keep_old, pa.array(held)), old, part)
        return self._checked_cast(extreme, self._value_type)  # if_else widens small decimals

    @override
    def results(self, groups: Int64Array) -> pa.Array:
        self._reserve(groups)
        values = self._log.take(self._position[groups])
        return self._checked_cast(values, self.spec.output_type)

    def _checked_cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        if values.type in (kind, wide_type(kind)):
            return values
        try:
            return values.cast(kind)
        except pa.ArrowInvalid as error:
            raise self._overflow() from error

    def _overflow(self) -> BadRecord:
        return BadRecord(
            f"aggregate {self.spec.name!r}: the sum of column {self.spec.column!r} has more digits "
            f"than {self.spec.output_type} holds; cast the column to a float before the aggregation"
        )


class CollectedList(GroupColumn):
    """All values, in order of arrival, nulls skipped."""

    def __init__(self, spec: GroupColumnSpec) -> None:
        super().__init__(spec)
        assert spec.input_type is not None
        self._log = GroupedLog(spec.input_type)

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        if values.null_count:
            rows = valid_rows(values)
            groups, sequence = groups[rows], sequence[rows]
            values = values.take(pa.array(rows))
        self._log.append(groups, sequence, values)

    @override
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        assert isinstance(other, CollectedList)
        self._log.merge(other._log, source, target)

    @override
    def clear(self, groups: Int64Array) -> None:
        self._log.clear(groups)

    @override
    def results(self, groups: Int64Array) -> pa.Array:
        counts, _, values = self._log.gather(groups)
        offsets = np.zeros(len(groups) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        lists = pa.ListArray.from_arrays(pa.array(offsets), values)
        is_wide = values.type != self.spec.input_type
        return lists if is_wide else lists.cast(self.spec.output_type)

    @override
    def freeze(self, groups: Int64Array) -> FrozenStates:
        (states,) = self._log.freeze(groups)
        return states

    @override
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        self._log.restore(groups, [states])

    @property
    @override
    def memory_bytes(self) -> int:
        return self._log.memory_bytes()


_COLUMN_TYPES: dict[str, type[FirstOrLast | Folded | DistinctCount | CollectedList]] = {
    "first": FirstOrLast,
    "last": FirstOrLast,
    "min": Folded,
    "max": Folded,
    "sum": Folded,
    "count_distinct": DistinctCount,
    "collect_list": CollectedList,
}


def group_column(spec: GroupColumnSpec) -> GroupColumn:
    """An empty column for a built-in aggregate."""
    return _COLUMN_TYPES[spec.function](spec)
