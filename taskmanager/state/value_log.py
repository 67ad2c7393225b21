"""Arrow values that are appended a batch at a time and read by position, in any order.

``ValueLog`` keeps few chunks by merging small neighbours (each value is copied a logarithmic number of
times), so that reading by position stays a handful of Arrow calls. ``GroupedLog`` adds to every value
the group it belongs to and its place in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from penstock.aggregates.stored_fields import sequenced_lists
from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_types import Int64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.slot_arrays import grown
from taskmanager.state.wide_columns import OFFSET_BYTES_MAX, narrow_pieces, taken

FrozenStates = Callable[[Int64Array], pa.Array]
"""States of some groups as they were when they were frozen, readable on any thread: takes indices of
those groups, int64[n], and gives n states; of wider types where they are more than offsets reach."""

_CHUNK_ROWS_MAX = 1 << 20
_COMPACT_ABOVE = 1 << 15
_ENTRIES_MIN = 256


class ValueLog:
    """Values of one type, numbered from 0 in the order in which they were appended.

    Args:
        type_: of the values; more of them at once than its offsets reach have 64-bit ones.
        chunk_bytes_max: what one chunk may have.
    """

    def __init__(self, type_: pa.DataType, chunk_bytes_max: int = OFFSET_BYTES_MAX) -> None:
        self._type = type_
        self._chunk_bytes_max = chunk_bytes_max
        self._chunks: list[pa.Array] = []
        self._starts: list[int] = []
        self._length = 0
        self._is_fixed = pa.types.is_primitive(type_)

    def __len__(self) -> int:
        return self._length

    @property
    def memory_bytes(self) -> int:
        """Bytes of the values."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def view(self) -> ValueLog:
        """The values as they are now, whatever happens to this log; nothing is copied."""
        view = ValueLog(self._type, self._chunk_bytes_max)
        view._chunks, view._starts = list(self._chunks), list(self._starts)
        view._length = self._length
        return view

    def append(self, values: pa.Array) -> int:
        """Appends n values; returns the position of the first."""
        first = self._length
        if values.type == self._type:
            self._append(values)
            return first
        for piece in narrow_pieces(values, self._type, self._chunk_bytes_max):
            self._append(piece)
        return first

    def _append(self, values: pa.Array) -> None:
        if len(values):
            self._chunks.append(values)
            self._starts.append(self._length)
            self._length += len(values)
            self._merge_tail()

    def take(self, positions: Int64Array) -> pa.Array:
        """The values at the positions, which differ, or have together what offsets reach; a position of -1 gives null."""
        present = positions >= 0
        if present.all():
            return self._take(positions)
        values = self._take(positions[present])
        indices = pa.array(np.cumsum(present) - 1, pa.int64(), mask=~present)
        return values.take(indices)

    def keep(self, positions: Int64Array) -> None:
        """Drops everything else; the value at ``positions[i]`` gets position i."""
        values = self._take(positions)
        self._chunks, self._starts, self._length = [], [], 0
        self.append(values)

    def _take(self, positions: Int64Array) -> pa.Array:
        if not len(positions):
            return pa.nulls(0, self._type)
        is_narrow = self._is_fixed or self.memory_bytes <= self._chunk_bytes_max
        return taken(
            self._chunks, self._starts, positions, self._chunk_bytes_max, is_narrow=is_narrow
        )

    def _merge_tail(self) -> None:
        chunks = self._chunks
        while len(chunks) > 1:
            before, last = len(chunks[-2]), len(chunks[-1])
            if before > 2 * last or before + last > _CHUNK_ROWS_MAX:
                return
            if chunks[-2].nbytes + chunks[-1].nbytes > self._chunk_bytes_max:
                return
            chunks[-2:] = [pa.concat_arrays(chunks[-2:])]
            self._starts.pop()


class GroupedLog:
    """Values that each belong to a group; read group by group in order of arrival.

    The state of a group is the list of its values in order of arrival, each with its place in it. Where the values
    of a group are is kept in blocks that double in size: reading some groups looks at no others, and reads few
    places of memory. Blocks are only added to, so that freezing groups copies nothing of them.
    """

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._kernels = process_kernels()
        self._values = ValueLog(type_)
        self._entries = np.empty((_ENTRIES_MIN, 2), np.int64)
        self._used = np.zeros(1, np.int64)
        # By group.
        self._end = np.zeros(64, np.int64)
        self._count = np.zeros(64, np.int64)
        self._dead_count = 0

    def __len__(self) -> int:
        return len(self._values) - self._dead_count

    @property
    def state_type(self) -> pa.DataType:
        """Type of the state of a group."""
        return sequenced_lists(self._type)

    def state_fields(self) -> list[pa.Field]:
        """The one column of the states."""
        return [pa.field("values", self.state_type)]

    def freeze(self, groups: Int64Array) -> list[FrozenStates]:
        """The states of (different) groups, in one column; copies where their values are, but no values."""
        end, bounds = self._places(groups)
        entries = self._entries
        values = self._values.view()
        kind = self.state_type
        ready: list[tuple[Int64Array, Int64Array]] = []

        def states(rows: Int64Array) -> pa.Array:
            if not ready:
                ready.append(_by_arrival(*self._read(end, bounds, entries), bounds))
            by_group, sequence_by_group = ready[0]
            lengths = bounds[rows + 1] - bounds[rows]
            picked = ranges_of(bounds[rows], lengths)
            taken = values.take(by_group[picked])
            of_item = kind.value_type
            items = pa.StructArray.from_arrays(
                [pa.array(sequence_by_group[picked]), taken],
                fields=[of_item.field(0), of_item.field(1).with_type(taken.type)],
            )
            item = kind.value_field.with_type(items.type)
            offsets = pa.array(bounds_of(lengths), pa.int32())
            return pa.ListArray.from_arrays(offsets, items, type=pa.list_(item))

        return [states]

    def restore(self, groups: Int64Array, states: list[pa.Array]) -> None:
        """Sets the states of (different) groups.

        Args:
            groups: int64[n].
            states: one column of n states.
        """
        self.clear(groups)
        (column,) = states
        items = column.flatten()
        lengths = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        self.append(
            np.repeat(groups, lengths), items.field("sequence").to_numpy(), items.field("value")
        )

    def memory_bytes(self) -> int:
        """Bytes of the values and of what belongs to them."""
        by_group = self._end.nbytes + self._count.nbytes
        return self._values.memory_bytes + self._entries.nbytes + by_group

    def append(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        """Appends n values.

        Args:
            groups: int64[n], the group of each.
            sequence: int64[n], its place in the order of arrival.
            values: n values.
        """
        self._extend(groups, sequence, self._values.append(values))

    def gather(self, groups: Int64Array) -> tuple[Int64Array, Int64Array, pa.Array]:
        """The values of the groups.

        Args:
            groups: int64[g], different groups.

        Returns:
            How many values each group has, int64[g]; the sequence numbers and the values of the first
            group, of the second and so on, each in order of arrival.
        """
        positions, sequence, bounds = self._contents(groups)
        positions, sequence = _by_arrival(positions, sequence, bounds)
        return np.diff(bounds), sequence, self._values.take(positions)

    def clear(self, groups: Int64Array) -> None:
        """Drops the values of the groups."""
        self._reserve(groups)
        self._dead_count += int(self._count[groups].sum())
        self._count[groups] = 0
        if self._dead_count > max(len(self._values) // 2, _COMPACT_ABOVE):
            self._compact()

    def merge(self, other: GroupedLog, source: Int64Array, target: Int64Array) -> None:
        """Appends the values of other's group ``source[i]`` to group ``target[i]``."""
        positions, sequence, bounds = other._contents(source)
        if len(positions):
            values = other._values.take(positions)
            self.append(np.repeat(target, np.diff(bounds)), sequence, values)

    def _compact(self) -> None:
        """Keeps nothing of groups that have been cleared."""
        live = np.flatnonzero(self._count)
        positions, sequence, bounds = self._contents(live)
        self._values.keep(positions)
        self._entries = np.empty((_ENTRIES_MIN, 2), np.int64)
        self._used[0] = self._dead_count = 0
        self._count[:] = 0
        self._extend(np.repeat(live, np.diff(bounds)), sequence, 0)

    def _extend(self, groups: Int64Array, sequence: Int64Array, first: int) -> None:
        """Adds the values at the positions from ``first`` on to the chains of their groups."""
        self._reserve(groups)
        groups, sequence = np.ascontiguousarray(groups), np.ascontiguousarray(sequence)
        row = 0
        while True:
            row = self._kernels.extend_chains(
                groups, sequence, row, first, self._end, self._count, self._entries, self._used
            )
            if row == len(groups):
                return
            block = int(self._count[groups[row]]) + 2
            longer = np.empty((2 * len(self._entries) + block, 2), np.int64)
            longer[: self._used[0]] = self._entries[: self._used[0]]
            self._entries = longer

    def _reserve(self, groups: Int64Array) -> None:
        bound = int(groups.max(initial=-1)) + 1
        self._end = grown(self._end, bound)
        self._count = grown(self._count, bound)

    def _places(self, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where the chains of the groups end, and int64[g + 1] where their values begin among all of them."""
        self._reserve(groups)
        return self._end[groups], bounds_of(self._count[groups])

    def _contents(self, groups: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Positions and sequence numbers of the groups' values, group by group, and where each group's begin."""
        end, bounds = self._places(groups)
        return *self._read(end, bounds, self._entries), bounds

    def _read(
        self, end: Int64Array, bounds: Int64Array, entries: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        positions = np.empty(bounds[-1], np.int64)
        sequence = np.empty(bounds[-1], np.int64)
        self._kernels.read_chains(end, bounds, entries, positions, sequence)
        return positions, sequence


def _by_arrival(
    positions: Int64Array, sequence: Int64Array, bounds: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """The positions of each group, and their sequence numbers, in order of these."""
    falls = sequence[1:] < sequence[:-1]
    inner = bounds[(bounds > 0) & (bounds < len(sequence))]
    falls[inner - 1] = False
    if not falls.any():
        return positions, sequence
    rank = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    order = np.lexsort((sequence, rank))
    return positions[order], sequence[order]


def ranges_of(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The numbers ``starts[i] .. starts[i] + lengths[i] - 1`` for all i, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
