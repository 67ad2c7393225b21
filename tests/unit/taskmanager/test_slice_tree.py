"""Aim: windows of many slices are made of few tables, which hold what their slices hold, in the order of their time.

Method: slices are lists of numbers; windows move over them while rows come to any slice that is still needed and
old slices go; what the parts of each window hold is compared with the slices themselves, and what it took is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from taskmanager.operators.slice_tree import SLICES_MIN, SliceTree
from tests.support.examples import examples

Table = list[int]


class Slices:
    """Slices of lists, their tree, and how many lists were put together."""

    def __init__(self, slice_ms: int = 1, limit: int = 1 << 40) -> None:
        self.tables: dict[int, Table] = {}
        self.made = 0
        self.tree: SliceTree[Table] = SliceTree(
            slice_ms, self.tables.__getitem__, self._together, len, limit
        )

    def _together(self, tables: Sequence[Table]) -> Table:
        self.made += len(tables) - 1
        return list(chain(*tables))

    def add(self, start: int, value: int) -> None:
        self.tables.setdefault(start, []).append(value)
        self.tree.changed(start)

    def drop(self, start: int) -> None:
        self.tree.changed(start)
        del self.tables[start]

    def window(self, first: int, stop: int) -> list[Table]:
        starts = sorted(start for start in self.tables if first <= start < stop)
        parts = self.tree.parts(starts) if starts else []
        assert list(chain(*parts)) == list(chain(*(self.tables[start] for start in starts)))
        return parts


@given(
    slice_ms=st.integers(1, 5),
    offset_ms=st.integers(-7, 7),
    count=st.integers(1, 40),
    steps=st.lists(st.tuples(st.integers(0, 45), st.booleans()), max_size=80),
    limit=st.sampled_from([3, 40, 1 << 40]),
)
@examples(200)
def test_parts_hold_what_the_slices_hold(
    slice_ms: int, offset_ms: int, count: int, steps: list[tuple[int, bool]], limit: int
) -> None:
    slices, first = Slices(slice_ms, limit), -20
    for value, (ahead, slides) in enumerate(steps):
        slices.add((first + ahead) * slice_ms + offset_ms, value)
        if slides:
            start = first * slice_ms + offset_ms
            slices.window(start, start + count * slice_ms)
            if start in slices.tables:
                slices.drop(start)
            first += 1


def test_a_slide_makes_about_one_node_and_a_window_few_parts() -> None:
    slices, count, slides = Slices(), 300, 3_000
    for start in range(count):
        slices.add(start, start)
    slices.window(0, count)
    made, parts = slices.made, 0
    for first in range(1, slides + 1):
        slices.add(first + count - 1, 0)
        slices.drop(first - 1)
        parts = max(parts, len(slices.window(first, first + count)))
    assert parts <= 2 * math.log2(count)
    assert slices.made - made <= 1.1 * slides


def test_a_late_row_makes_one_node_per_level_anew() -> None:
    slices, count = Slices(), 1_024
    for start in range(count):
        slices.add(start, start)
    slices.window(0, count)
    made = slices.made
    slices.add(517, -1)
    slices.window(0, count)
    assert slices.made - made == math.log2(count) - 1, "of half a window at most"


def test_windows_of_few_slices_are_made_of_these() -> None:
    slices = Slices()
    for start in range(SLICES_MIN - 1):
        slices.add(start, start)
    assert len(slices.window(0, SLICES_MIN)) == SLICES_MIN - 1
    assert slices.made == 0


def test_where_memory_is_short_the_lowest_levels_are_left_out() -> None:
    """Of 64 slices with the same ten keys each, the level of four of them has 160."""
    slices, count, slides = Slices(limit=400), 64, 200
    for start in range(count):
        slices.tables[start] = [7] * 10
    slices.tree = SliceTree(
        1, slices.tables.__getitem__, lambda tables: tables[0], len, slices.tree._limit_bytes
    )
    for first in range(slides):
        parts = slices.tree.parts(range(first, first + count))
        assert slices.tree.memory_bytes() <= 400
        assert len(parts) <= 2 * math.log2(count) + 2 * 4
        slices.tables[first + count] = [7] * 10
        slices.drop(first)


def test_nodes_that_are_too_large_are_given_up_for_a_while() -> None:
    slices = Slices(limit=40)
    for start in range(64):
        slices.add(start, start)
    slices.window(0, 64)
    assert slices.tree.memory_bytes() == 0
    for _ in range(64):
        assert len(slices.window(0, 64)) == 64
    assert slices.made == 62
