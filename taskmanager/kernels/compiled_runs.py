"""Compiled loops over runs: rows by hash, and by time where hashes are equal."""

from __future__ import annotations

from typing import Any

import numpy as np

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


@kernel(VOID(UINT64S_IN, INT64S_IN, UINT64S_IN, INT64S_IN, INT64S_IN, INT64S, INT64S))
def find_ranges(
    hashes: UInt64Array,
    times: Int64Array,
    wanted: UInt64Array,
    first: Int64Array,
    last: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
) -> None:
    """See ``interface.Kernels.find_ranges``."""
    begin = np.int64(0)
    for row in range(len(wanted)):
        if row == 0 or wanted[row] != wanted[row - 1]:
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
    """See ``interface.Kernels.spread_ranges``."""
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
    """See ``interface.Kernels.merge_runs``."""
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
