"""Which tables, each of many slices, a window is made of (pure: what a table is, its caller knows).

A window of n slices that fires with each of them would take n tables together each time. So pairs of neighbouring
slices are taken together once, pairs of pairs, and so on: the *nodes* of a binary tree over the numbers of the
slices. A window is then at most 2 log2(n) nodes, in the order of their time, and each slide makes about one node. Nothing is ever
subtracted, so that numbers with fractions do not drift. Nodes are no state: they are made again from the slices.

Where memory is short the lowest levels are left out: each has half as many nodes as the one below it, and a window
gets a few slices more.

Invariant: a node holds what its slices hold; one of whose slices has changed, or is gone, is no more.

Source: Tangwongsan et al., "General Incremental Sliding-Window Aggregation" (FlatFAT), here over whole tables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")

SLICES_MIN: Final = 8
"""Windows of fewer slices are made of these: nodes would cost as much."""


class SliceTree(Generic[T]):
    """The nodes over the slices of one operator.

    Args:
        slice_ms: length of a slice.
        table_of: the table of a slice, by its start.
        together: a new table with what is in several, in the order of their time; these stay as they are.
        size_bytes: what a table takes.
        limit_bytes: of all nodes; where those of no level can be kept, windows are made of slices for a while.

    Example: windows of eight slices; the second one takes up again what the first was made of.
        >>> made = []
        >>> def together(tables):
        ...     made.append("".join(tables))
        ...     return made[-1]
        >>> tree = SliceTree(10, lambda start: chr(97 + start // 10), together, len, 1_000)
        >>> tree.parts(range(0, 80, 10)), tree.parts(range(10, 90, 10))
        (['abcd', 'efgh'], ['b', 'cd', 'efgh', 'i'])
        >>> made
        ['ab', 'cd', 'abcd', 'ef', 'gh', 'efgh']
        >>> tree.changed(20)
        >>> tree.parts(range(10, 90, 10)), made[6:]
        (['b', 'cd', 'efgh', 'i'], ['cd'])
    """

    def __init__(
        self,
        slice_ms: int,
        table_of: Callable[[int], T],
        together: Callable[[Sequence[T]], T],
        size_bytes: Callable[[T], int],
        limit_bytes: int,
    ) -> None:
        self._slice_ms = slice_ms
        self._table_of = table_of
        self._together = together
        self._size_bytes = size_bytes
        self._limit_bytes = limit_bytes
        self._nodes: dict[tuple[int, int], T] = {}
        """By level (2 ** level slices) and number at that level."""
        self._lowest_level = 1
        """Of the nodes that are kept."""
        self._top_level = 0
        self._covered = 0
        """Number of the slice behind the last one that a node covers."""
        self._rests = 0
        """Windows that are yet to be made of slices."""

    def memory_bytes(self) -> int:
        """What the nodes take."""
        return sum(self._size_bytes(node) for node in self._nodes.values())

    def parts(self, slices: Sequence[int]) -> list[T]:
        """Tables that together hold what these slices hold, in the order of their time.

        Args:
            slices: starts of all slices of a window that have rows, ascending.
        """
        if self._rests:
            self._rests -= 1
        elif len(slices) >= SLICES_MIN:
            return self._parts(slices)
        return [self._table_of(start) for start in slices]

    def changed(self, start: int) -> None:
        """Rows came to a slice, or it is gone: nodes over it hold something else now."""
        number = self._number(start)
        if not self._nodes or number >= self._covered:
            return
        for level in range(1, self._top_level + 1):
            self._nodes.pop((level, number >> level), None)

    def clear(self) -> None:
        """Forgets all nodes."""
        self._nodes.clear()
        self._lowest_level = 1
        self._top_level = self._covered = 0

    def _number(self, start: int) -> int:
        return start // self._slice_ms

    def _parts(self, slices: Sequence[int]) -> list[T]:
        parts = []
        first, stop = self._number(slices[0]), self._number(slices[-1]) + 1
        # A node is part of as many windows as it is shorter than one; the longest would be made for few.
        level_max = ((stop - first) * 3 // 4).bit_length() - 1
        for level, number in _cover(first, stop, level_max):
            own = self._within(slices, number << level, (number + 1) << level)
            if own:
                parts += self._tables(level, number, own)
        if not self._keeps_within_limit():
            self.clear()
            self._rests = len(slices)
        return parts

    def _keeps_within_limit(self) -> bool:
        """Leaves out as many levels as memory is short of; False = no level can be kept."""
        size_bytes = self.memory_bytes()
        if size_bytes * 4 < self._limit_bytes and self._lowest_level > 1:
            self._lowest_level -= 1
        while size_bytes > self._limit_bytes:
            self._lowest_level += 1
            for place in [place for place in self._nodes if place[0] < self._lowest_level]:
                size_bytes -= self._size_bytes(self._nodes.pop(place))
            if not self._nodes:
                return False
        return True

    def _within(self, slices: Sequence[int], first: int, stop: int) -> Sequence[int]:
        """Those of the slices that have these numbers."""
        begin = bisect_left(slices, first * self._slice_ms)
        return slices[begin : bisect_left(slices, stop * self._slice_ms, begin)]

    def _tables(self, level: int, number: int, slices: Sequence[int]) -> list[T]:
        """The tables of those slices of a node that have rows, at least one: the node itself where it is kept."""
        if len(slices) == 1 or level < self._lowest_level:
            return [self._table_of(start) for start in slices]
        known = self._nodes.get((level, number))
        if known is not None:
            return [known]
        child_level = level - 1
        tables = []
        for child in (2 * number, 2 * number + 1):
            own = self._within(slices, child << child_level, (child + 1) << child_level)
            if own:
                tables += self._tables(child_level, child, own)
        if len(tables) > 1:
            tables = [self._together(tables)]
            self._nodes[level, number] = tables[0]
            self._top_level = max(self._top_level, level)
            self._covered = max(self._covered, (number + 1) << level)
        return tables


def _cover(first: int, stop: int, level_max: int) -> Iterator[tuple[int, int]]:
    """The fewest nodes, as level and number, that cover ``first .. stop - 1`` and nothing else, ascending."""
    behind: list[tuple[int, int]] = []
    level = 0
    while first < stop and level < level_max:
        if first & 1:
            yield level, first
            first += 1
        if stop & 1:
            stop -= 1
            behind.append((level, stop))
        first, stop, level = first >> 1, stop >> 1, level + 1
    yield from ((level, number) for number in range(first, stop))
    yield from reversed(behind)
