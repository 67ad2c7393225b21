"""Compiled loops over runs: rows by hash, and by time where hashes are equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.loops.prefetch import prefetch
from penstock.storage.key_types import Int64Array, UInt64Array
from taskmanager.kernels.jit import (
    INT64,
    INT64S,
    INT64S_IN,
    UINT64S,
    UINT64S_IN,
    VOID,
    inlined,
    kernel,
)

_FIRST_TIME = np.int64(-(2**63))
_FEW = np.int64(16)
"""So many rows of a hash are looked at one by one, without a branch that depends on their times."""
_AHEAD = 16
"""So many rows before it is its turn the memory is asked for where the partners of a row are."""


@inlined
def _lower_bound(begin: Any, wanted: Any, time: Any, hashes: Any, times: Any) -> Any:
    """The first place from ``begin`` on that is not before a hash and time: in steps that double, then halve."""
    low, high, step = begin, begin, np.int64(1)
    while high < len(hashes) and (
        hashes[high] < wanted or (hashes[high] == wanted and times[high] < time)
    ):
        low = high + 1
        high += step
        step *= 2
    high = min(high, len(hashes))
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] < wanted or (hashes[middle] == wanted and times[middle] < time):
            low = middle + 1
        else:
            high = middle
    return low


@kernel(
    VOID(
        *(UINT64S_IN, INT64S_IN, INT64S_IN),
        *(UINT64S_IN, INT64S_IN, INT64S_IN),
        *(INT64S, INT64S),
    )
)
def find_ranges(
    hashes: UInt64Array,
    times: Int64Array,
    directory: Int64Array,
    wanted: UInt64Array,
    first: Int64Array,
    last: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
) -> None:
    """Where the rows of a run with one hash and a time from one to another are.

    Args:
        hashes: uint64[m] ascending.
        times: int64[m] ascending where hashes are equal.
        directory: int64[2**bits], bits > 0: for each value of a hash's highest bits a place that is not behind the
            first row of such a hash, nor of a higher one.
        wanted: uint64[n] ascending.
        first: int64[n] earliest times.
        last: int64[n] latest times, below 2**63 - 1.
        starts: int64[n], filled with the first of these rows.
        counts: int64[n], filled with how many there are.
    """
    shift = np.uint64(64)
    while np.int64(1) << np.int64(np.uint64(64) - shift) < len(directory):
        shift -= np.uint64(1)
    begin = np.int64(0)
    for row in range(len(wanted)):
        if row + _AHEAD < len(wanted):
            ahead = directory[wanted[row + _AHEAD] >> shift]
            prefetch(hashes, ahead)
            prefetch(times, ahead)
        if row == 0 or wanted[row] != wanted[row - 1]:
            begin = max(begin, directory[wanted[row] >> shift])
            begin = _lower_bound(begin, wanted[row], _FIRST_TIME, hashes, times)
        start: Any = begin
        stop: Any = begin
        place = begin
        end: Any = min(begin + _FEW, len(hashes))
        while place < end and hashes[place] == wanted[row]:
            start += times[place] < first[row]
            stop += times[place] <= last[row]
            place += 1
        if place < len(hashes) and place == end and hashes[place] == wanted[row]:
            start = _lower_bound(begin, wanted[row], first[row], hashes, times)
            stop = _lower_bound(start, wanted[row], last[row] + 1, hashes, times)
        starts[row], counts[row] = start, max(stop - start, 0)


@kernel(
    VOID(
        *(INT64S_IN, INT64S_IN, INT64S_IN, INT64, INT64S),
        *(INT64S_IN, INT64S_IN, INT64),
        *(INT64S, INT64S, INT64S),
    )
)
def spread_ranges(
    rows: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    first_row: int,
    places: Int64Array,
    run_times: Int64Array,
    run_positions: Int64Array,
    bucket: int,
    times: Int64Array,
    positions: Int64Array,
    buckets: Int64Array,
) -> None:
    """Copies what ranges of a run (``starts``, ``counts``: int64[k]) hold to where the rows have theirs that they were found for.

    Args:
        rows: int64[k] these rows; ``first_row`` is the first and ``first_row + n - 1`` the last of which anything is copied.
        places: int64[n] where each of them has what comes next in the last three; moved on.
    """
    for each in range(len(rows)):
        row = rows[each] - first_row
        if row < 0 or row >= len(places):
            continue
        place = places[row]
        for source in range(starts[each], starts[each] + counts[each]):
            times[place] = run_times[source]
            positions[place] = run_positions[source]
            buckets[place] = bucket
            place += 1
        places[row] = place


@kernel(
    VOID(
        *(UINT64S_IN, INT64S_IN, INT64S_IN),
        *(UINT64S_IN, INT64S_IN, INT64S_IN),
        *(UINT64S, INT64S, INT64S),
    )
)
def merge_runs(
    hashes: UInt64Array,
    times: Int64Array,
    positions: Int64Array,
    later_hashes: UInt64Array,
    later_times: Int64Array,
    later_positions: Int64Array,
    all_hashes: UInt64Array,
    all_times: Int64Array,
    all_positions: Int64Array,
) -> None:
    """Fills the last three with two runs in their order; of equal rows those of the first come first."""
    one, other = np.int64(0), np.int64(0)
    for place in range(len(all_hashes)):
        is_later = one == len(hashes) or (
            other < len(later_hashes)
            and (
                later_hashes[other] < hashes[one]
                or (later_hashes[other] == hashes[one] and later_times[other] < times[one])
            )
        )
        if is_later:
            all_hashes[place] = later_hashes[other]
            all_times[place] = later_times[other]
            all_positions[place] = later_positions[other]
            other += 1
        else:
            all_hashes[place] = hashes[one]
            all_times[place] = times[one]
            all_positions[place] = positions[one]
            one += 1
