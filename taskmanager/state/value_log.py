"""Arrow values that are appended a batch at a time and read by position, in any order.

``ValueLog`` keeps few chunks by merging small neighbours (each value is copied a logarithmic number of
times), so that reading by position stays a handful of Arrow calls. ``GroupedLog`` adds to every value
the group it belongs to and its place in the order of arrival.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]

_CHUNK_ROWS_MAX = 1 << 20
_COMPACT_ABOVE = 1 << 15


class ValueLog:
    """Values of one type, numbered from 0 in the order in which they were appended."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._chunks: list[pa.Array] = []
        self._starts: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def memory_bytes(self) -> int:
        """Bytes of the values."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def append(self, values: pa.Array) -> int:
        """Appends n values; returns the position of the first."""
        first = self._length
        if len(values):
            self._chunks.append(values)
            self._starts.append(first)
            self._length += len(values)
            self._merge_tail()
        return first

    def take(self, positions: Int64Array) -> pa.Array:
        """The values at the positions; a position of -1 gives null."""
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
            return pa.array([], self._type)
        if len(self._chunks) == 1:
            return self._chunks[0].take(pa.array(positions))
        chunk_of = np.searchsorted(self._starts, positions, side="right") - 1
        first = int(chunk_of[0])
        if (chunk_of == first).all():
            return self._chunks[first].take(pa.array(positions - self._starts[first]))
        order = np.argsort(chunk_of, kind="stable")
        sorted_positions, sorted_chunks = positions[order], chunk_of[order]
        cuts = np.flatnonzero(np.diff(sorted_chunks, prepend=-1)).tolist()
        pieces = []
        for start, stop in zip(cuts, [*cuts[1:], len(order)], strict=True):
            chunk = int(sorted_chunks[start])
            local = sorted_positions[start:stop] - self._starts[chunk]
            pieces.append(self._chunks[chunk].take(pa.array(local)))
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(inverse))

    def _merge_tail(self) -> None:
        chunks = self._chunks
        while len(chunks) > 1:
            before, last = len(chunks[-2]), len(chunks[-1])
            if before > 2 * last or before + last > _CHUNK_ROWS_MAX:
                return
            chunks[-2:] = [pa.concat_arrays(chunks[-2:])]
            self._starts.pop()


class GroupedLog:
    """Values that each belong to a group; read group by group in order of arrival."""

    def __init__(self, type_: pa.DataType) -> None:
        self._values = ValueLog(type_)
        self._group_of = np.empty(1024, np.int64)
        self._sequence_of = np.empty(1024, np.int64)
        self._dead_count = 0

    def __len__(self) -> int:
        return len(self._values) - self._dead_count

    def memory_bytes(self) -> int:
        """Bytes of the values and of what belongs to them."""
        return self._values.memory_bytes + self._group_of.nbytes + self._sequence_of.nbytes

    def append(self, groups: Int64Array, sequence: Int64Array, values: pa.Array) -> None:
        """Appends n values.

        Args:
            groups: int64[n], the group of each.
            sequence: int64[n], its place in the order of arrival.
            values: n values.
        """
        start = self._values.append(values)
        stop = start + len(values)
        if stop > len(self._group_of):
            self._group_of = _grown(self._group_of, stop)
            self._sequence_of = _grown(self._sequence_of, stop)
        self._group_of[start:stop] = groups
        self._sequence_of[start:stop] = sequence

    def gather(self, groups: Int64Array) -> tuple[Int64Array, Int64Array, pa.Array]:
        """The values of the groups.

        Args:
            groups: int64[g], different groups.

        Returns:
            How many values each group has, int64[g]; the sequence numbers and the values of the first
            group, of the second and so on, each in order of arrival.
        """
        positions, rank = self._positions(groups)
        sequence = self._sequence_of[positions]
        order = np.lexsort((sequence, rank))
        counts = np.bincount(rank, minlength=len(groups)).astype(np.int64)
        return counts, sequence[order], self._values.take(positions[order])

    def clear(self, groups: Int64Array) -> None:
        """Drops the values of the groups."""
        positions, _ = self._positions(groups)
        self._group_of[positions] = -1
        self._dead_count += len(positions)
        length = len(self._values)
        if self._dead_count > max(length // 2, _COMPACT_ABOVE):
            live = np.flatnonzero(self._group_of[:length] >= 0)
            self._values.keep(live)
            self._group_of = self._group_of[live]
            self._sequence_of = self._sequence_of[live]
            self._dead_count = 0

    def merge(self, other: GroupedLog, source: Int64Array, target: Int64Array) -> None:
        """Appends the values of other's group ``source[i]`` to group ``target[i]``."""
        positions, rank = other._positions(source)
        if len(positions):
            values = other._values.take(positions)
            self.append(target[rank], other._sequence_of[positions], values)

    def _positions(self, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Positions of the groups' values, and the index in ``groups`` of the group of each."""
        group_of = self._group_of[: len(self._values)]
        size = int(max(group_of.max(initial=-1), groups.max(initial=-1))) + 1
        rank_of = np.full(size + 1, -1, np.int64)  # the last entry is for rows without a group
        rank_of[groups] = np.arange(len(groups))
        rank = rank_of[group_of]
        positions = np.flatnonzero(rank >= 0)
        return positions, rank[positions]


def _grown(array: Int64Array, length: int) -> Int64Array:
    grown = np.empty(max(2 * len(array), length), array.dtype)
    grown[: len(array)] = array
    return grown
