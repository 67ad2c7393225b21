"""Aim: runs are searched and merged as sorted lists are. Method: the compiled loops against their twins and Python's sort."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_twins.implementations import load

HASHES = st.one_of(st.integers(0, 6), st.integers(2**64 - 3, 2**64 - 1))
TIMES = st.integers(-4, 4)
ROWS = st.lists(st.tuples(HASHES, TIMES), max_size=40).map(sorted)
PROBES = st.lists(st.tuples(HASHES, TIMES, st.integers(-1, 5)), max_size=20).map(sorted)


@given(rows=ROWS, probes=PROBES)
def test_ranges_are_those_of_both_implementations(
    rows: list[tuple[int, int]], probes: list[tuple[int, int, int]]
) -> None:
    hashes = np.array([row[0] for row in rows], np.uint64)
    times = np.array([row[1] for row in rows], np.int64)
    wanted = np.array([probe[0] for probe in probes], np.uint64)
    first = np.array([probe[1] for probe in probes], np.int64)
    last = first + np.array([probe[2] for probe in probes], np.int64)
    found = []
    for compiled in (True, False):
        starts, counts = np.full((2, len(probes)), -1, np.int64)
        load(compiled=compiled).find_ranges(hashes, times, wanted, first, last, starts, counts)
        found.append(
            [
                rows[start : start + count]
                for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
            ]
        )
    expected = [
        [row for row in rows if row[0] == probe[0] and probe[1] <= row[1] <= probe[1] + probe[2]]
        for probe in probes
    ]
    assert found == [expected, expected]


@given(rows=ROWS, later=ROWS)
def test_merged_runs_are_sorted_and_keep_the_order_of_equal_rows(
    rows: list[tuple[int, int]], later: list[tuple[int, int]]
) -> None:
    numbered = [(*row, place) for place, row in enumerate([*rows, *later])]
    for compiled in (True, False):
        columns = [
            (
                np.array([row[0] for row in part], np.uint64),
                np.array([row[1] for row in part], np.int64),
                np.array([row[2] for row in part], np.int64),
            )
            for part in (numbered[: len(rows)], numbered[len(rows) :])
        ]
        count = len(numbered)
        merged = np.empty(count, np.uint64), np.empty(count, np.int64), np.empty(count, np.int64)
        load(compiled=compiled).merge_runs(*columns[0], *columns[1], *merged)
        assert list(zip(*(column.tolist() for column in merged), strict=True)) == sorted(numbered)
