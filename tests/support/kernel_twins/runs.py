"""The numpy twins of ``compiled_runs``: whole ranges at a time."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_types import Int64Array, UInt64Array


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
    """See ``compiled_runs.find_ranges``."""
    low = np.searchsorted(hashes, wanted, side="left")
    assert (directory[wanted >> np.uint64(65 - len(directory).bit_length())] <= low).all()
    high = np.searchsorted(hashes, wanted, side="right")
    starts[:] = _bisect(low, high, first, times, after=False)
    counts[:] = np.maximum(_bisect(low, high, last, times, after=True) - starts, 0)


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
    """See ``compiled_runs.spread_ranges``."""
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if not first_row <= row < first_row + len(places):
            continue
        place = int(places[row - first_row])
        some = slice(start, start + count)
        times[place : place + count] = run_times[some]
        positions[place : place + count] = run_positions[some]
        buckets[place : place + count] = bucket
        places[row - first_row] += count


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
    """See ``compiled_runs.merge_runs``."""
    all_hashes[:] = np.append(hashes, later_hashes)
    all_times[:] = np.append(times, later_times)
    all_positions[:] = np.append(positions, later_positions)
    order = np.lexsort((np.arange(len(all_hashes)), all_times, all_hashes))
    for column in (all_hashes, all_times, all_positions):
        column[:] = column[order]


def _bisect(
    low: Int64Array, high: Int64Array, wanted: Int64Array, times: Int64Array, *, after: bool
) -> Int64Array:
    """In each range low .. high - 1 the first row with a time >= ``wanted``, or > if ``after``."""
    side = "right" if after else "left"
    ranges = zip(low.tolist(), high.tolist(), wanted.tolist(), strict=True)
    return np.array(
        [
            start + np.searchsorted(times[start:stop], time, side=side)
            for start, stop, time in ranges
        ],
        np.int64,
    )
