"""How many different values a group has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import RecordTable, encode_keys
from taskmanager.state.group_column import GroupColumn, valid_rows
from taskmanager.state.slot_arrays import grown
from taskmanager.state.value_log import FrozenStates, ValueLog, ranges_of

_COMPACT_ABOVE = 1 << 15


class DistinctCount(GroupColumn):
    """How many different values a group has: a table of (group, value) and a count per group.

    In the table a group goes by a number of its own, which it gets anew after ``clear``: what a cleared
    group leaves behind belongs to nobody, and is dropped when it is more than what is alive.
    Values and numbers are kept a second time, by index in the table: they are only ever added to, so that
    freezing a group copies nothing.
    """

    def __init__(self, spec: GroupColumnSpec) -> None:
        super().__init__(spec)
        assert spec.input_type is not None
        self._key_types = [pa.int64(), spec.input_type]
        self._pairs = RecordTable(self._key_types, [], with_index=True)
        self._values = ValueLog(spec.input_type)
        self._number_of_pair = np.empty(64, np.int64)
        self._count = np.zeros(64, np.int64)
        self._number = np.full(64, -1, np.int64)
        self._next_number = 0
        self._dead_count = 0

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        if values.null_count:
            rows = valid_rows(values)
            groups, values = groups[rows], values.take(pa.array(rows))
        self._add(groups, values)

    def _add(self, groups: Int64Array, values: pa.Array) -> None:
        if not len(groups):
            return
        self._reserve(groups)
        unnumbered = np.unique(groups[self._number[groups] < 0])
        self._number[unnumbered] = np.arange(len(unnumbered)) + self._next_number
        self._next_number += len(unnumbered)
        before = len(self._pairs)
        pairs = encode_keys([pa.array(self._number[groups]), values])
        index = self._pairs.lookup_or_insert(pairs)
        new = index >= before
        if new.any():
            _, rows = np.unique(index[new], return_index=True)
            rows = np.flatnonzero(new)[rows]
            np.add.at(self._count, groups[rows], 1)
            self._append_pairs(groups[rows], values.take(pa.array(rows)))

    def _append_pairs(self, groups: Int64Array, values: pa.Array) -> None:
        start = self._values.append(values)
        stop = start + len(values)
        self._number_of_pair = grown(self._number_of_pair, stop)
        self._number_of_pair[start:stop] = self._number[groups]

    def _reserve(self, groups: Int64Array) -> None:
        bound = int(groups.max(initial=-1)) + 1
        self._count = grown(self._count, bound)
        self._number = grown(self._number, bound, -1)

    @override
    def merge(self, other: GroupColumn, source: Int64Array, target: Int64Array) -> None:
        assert isinstance(other, DistinctCount)
        other._reserve(source)
        present = other._number[source] >= 0
        if not present.any():
            return
        target_of = np.full(other._next_number, -1, np.int64)
        target_of[other._number[source[present]]] = target[present]
        moved = target_of[other._number_of_pair[: len(other._values)]]
        rows = np.flatnonzero(moved >= 0)
        self._add(moved[rows], other._values.take(rows))

    @override
    def clear(self, groups: Int64Array) -> None:
        self._reserve(groups)
        self._dead_count += int(self._count[groups].sum())
        self._count[groups] = 0
        self._number[groups] = -1
        if self._dead_count > max(len(self._pairs) // 2, _COMPACT_ABOVE):
            self._compact()

    def _compact(self) -> None:
        live = np.flatnonzero(self._number >= 0)
        group_of = np.full(self._next_number, -1, np.int64)
        group_of[self._number[live]] = live
        groups = group_of[self._number_of_pair[: len(self._values)]]
        rows = np.flatnonzero(groups >= 0)
        values = self._values.take(rows)
        self._pairs = RecordTable(self._key_types, [], with_index=True)
        self._values = ValueLog(self._key_types[1])
        self._number_of_pair = np.empty(64, np.int64)
        self._count[:] = 0
        self._number[:] = -1
        self._next_number = self._dead_count = 0
        self._add(groups[rows], values)

    @override
    def results(self, groups: Int64Array) -> pa.Array:
        self._reserve(groups)
        return pa.array(self._count[groups])

    @property
    @override
    def state_type(self) -> pa.DataType:
        return pa.list_(self._key_types[1])

    @override
    def freeze(self, groups: Int64Array) -> FrozenStates:
        self._reserve(groups)
        numbers, number_bound = self._number[groups], self._next_number
        values = self._values.view()
        number_of_pair = self._number_of_pair[: len(values)]
        ready: list[tuple[Int64Array, Int64Array]] = []

        def states(rows: Int64Array) -> pa.Array:
            if not ready:
                rank_of = np.full(number_bound + 1, -1, np.int64)
                rank_of[numbers] = np.arange(len(numbers))
                rank_of[-1] = -1  # where groups without a number have left theirs
                rank = rank_of[number_of_pair]
                wanted = np.flatnonzero(rank >= 0)
                by_group = wanted[np.argsort(rank[wanted], kind="stable")]
                counts = np.bincount(rank[wanted], minlength=len(numbers))
                ready.append((by_group, bounds_of(counts.astype(np.int64))))
            by_group, bounds = ready[0]
            lengths = bounds[rows + 1] - bounds[rows]
            picked = values.take(by_group[ranges_of(bounds[rows], lengths)])
            offsets = pa.array(bounds_of(lengths), pa.int32())
            item = self.state_type.value_field.with_type(picked.type)
            return pa.ListArray.from_arrays(offsets, picked, type=pa.list_(item))

        return states

    @override
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        self.clear(groups)
        lengths = states.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        self._add(np.repeat(groups, lengths), states.flatten())

    @property
    @override
    def memory_bytes(self) -> int:
        arrays = self._count.nbytes + self._number.nbytes + self._number_of_pair.nbytes
        return self._pairs.memory_bytes() + self._values.memory_bytes + arrays
