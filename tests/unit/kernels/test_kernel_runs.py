"""Aim: runs are searched and merged as sorted lists are. Method: the compiled loops against their twins and Python's sort."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from taskmanager.operators.join_index import ANYWHERE, directory_of
from tests.support.kernel_twins.implementations import load

HASHES = st.one_of(
    st.integers(0, 6),
    st.integers(0, 31).map(lambda top: top << 59),
    st.integers(2**64 - 3, 2**64 - 1),
)
TIMES = st.integers(-4, 4)
FEW_ROWS = st.lists(st.tuples(HASHES, TIMES), max_size=40)
MANY_OF_ONE = st.lists(st.tuples(st.just(3), TIMES), min_size=14, max_size=40)
ROWS = st.one_of(FEW_ROWS, st.tuples(FEW_ROWS, MANY_OF_ONE).map(lambda two: two[0] + two[1])).map(
    sorted
)
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
    for compiled, directory in itertools.product(
        (True, False), (ANYWHERE, directory_of(hashes, 5))
    ):
        starts, counts = np.full((2, len(probes)), -1, np.int64)
        load(compiled=compiled).find_ranges(
            hashes, times, directory, wanted, first, last, starts, counts
        )
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
    assert found == [expected] * 4


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


@given(counts=st.lists(st.integers(0, 3), max_size=12), first_row=st.integers(0, 4))
def test_what_ranges_hold_goes_to_the_rows_that_they_were_found_for(
    counts: list[int], first_row: int
) -> None:
    rows = np.arange(len(counts))[::-1].copy()  # in another order than that of the rows
    starts = 2 * rows
    run_times = np.arange(2 * len(counts) + 3) * 10
    asked = counts[first_row:]
    ends = np.cumsum([0, *asked])
    for compiled in (True, False):
        places = ends[:-1].copy()
        times, positions, buckets = np.full((3, int(ends[-1])), -1, np.int64)
        load(compiled=compiled).spread_ranges(
            rows, starts, np.array(counts[::-1], np.int64), first_row, places,
            run_times, -run_times, 7, times, positions, buckets,
        )  # fmt: skip
        expected = [
            (2 * (first_row + row) + place) * 10
            for row, n in enumerate(asked)
            for place in range(n)
        ]
        assert times.tolist() == expected
        assert positions.tolist() == [-time for time in expected]
        assert buckets.tolist() == [7] * len(expected)
        assert places.tolist() == ends[1:].tolist()
