"""How many different values a group has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import Int64Array
from taskmanager.kernels.pair_set import PairSet
from taskmanager.state.group_column import GroupColumn, valid_rows
from taskmanager.state.slot_arrays import grown
from taskmanager.state.value_log import FrozenStates, ranges_of
from taskmanager.state.value_words import ValueWords

_COMPACT_ABOVE = 1 << 15


class DistinctCount(GroupColumn):
    """How many different values a group has: a set of pairs (group, value) and a count per group.

    In the set a group goes by a number of its own, which it gets anew after ``clear``, and a value by a word: what a
    cleared group leaves behind belongs to nobody, and is dropped when it is more than what is alive.
    Pairs are only ever added, so that freezing a group copies nothing.
    """

    def __init__(self, spec: GroupColumnSpec) -> None:
        super().__init__(spec)
        assert spec.input_type is not None
        self._type = spec.input_type
        self._words = ValueWords(spec.input_type)
        self._pairs = PairSet()
        self._count = np.zeros(64, np.int64)
        self._number = np.full(64, -1, np.int64)
        self._next_number = 0
        self._dead_count = 0

    @override
    def update(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        if values.null_count:
            rows = valid_rows(values)
            groups, values = groups[rows], values.take(pa.array(rows))
        self._add(groups, self._words.of(values))

    def _add(self, groups: Int64Array, words: Int64Array) -> None:
        if not len(groups):
            return
        self._reserve(groups)
        unnumbered = groups[self._number[groups] < 0]
        if len(unnumbered):
            unnumbered = np.unique(unnumbered)
            self._number[unnumbered] = np.arange(len(unnumbered)) + self._next_number
            self._next_number += len(unnumbered)
        is_new = self._pairs.add(self._number[groups], words)
        np.add.at(self._count, groups[is_new], 1)

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
        numbers, words = other._pairs.columns()
        moved = target_of[numbers]
        rows = np.flatnonzero(moved >= 0)
        self._add(moved[rows], self._words.of(other._words.values(words[rows])))

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
        numbers, words = self._pairs.columns()
        groups = group_of[numbers]
        rows = np.flatnonzero(groups >= 0)
        values = self._words.values(words[rows])
        self._pairs = PairSet()
        self._words = ValueWords(self._type)
        self._count[:] = 0
        self._number[:] = -1
        self._next_number = self._dead_count = 0
        self._add(groups[rows], self._words.of(values))

    @override
    def results(self, groups: Int64Array) -> pa.Array:
        self._reserve(groups)
        return pa.array(self._count[groups])

    @override
    def freeze(self, groups: Int64Array) -> FrozenStates:
        self._reserve(groups)
        numbers, number_bound = self._number[groups], self._next_number
        number_of_pair, word_of_pair = self._pairs.columns()
        words = self._words.view()
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
            picked = words.values(word_of_pair[by_group[ranges_of(bounds[rows], lengths)]])
            offsets = pa.array(bounds_of(lengths), pa.int32())
            item = self.state_type.value_field.with_type(picked.type)
            return pa.ListArray.from_arrays(offsets, picked, type=pa.list_(item))

        return states

    @override
    def restore(self, groups: Int64Array, states: pa.Array) -> None:
        self.clear(groups)
        lengths = states.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        self._add(np.repeat(groups, lengths), self._words.of(states.flatten()))

    @property
    @override
    def memory_bytes(self) -> int:
        arrays = self._count.nbytes + self._number.nbytes
        return self._pairs.memory_bytes + self._words.memory_bytes + arrays
