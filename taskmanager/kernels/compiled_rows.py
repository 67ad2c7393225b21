"""Compiled loops over the rows of a batch: accumulators, slices of time, partitioning."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_groups import UInt16Array
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.accumulators import Values
from taskmanager.kernels.jit import (
    BOOL,
    BOOLS_IN,
    FLOAT64_RECORDS,
    FLOAT64S_IN,
    INT64,
    INT64S,
    INT64S_IN,
    RECORDS,
    RECORDS_IN,
    UINT16S_IN,
    UINT64_RECORDS,
    UINT64S_IN,
    VOID,
    kernel,
)


@kernel(VOID(INT64S_IN, RECORDS_IN, RECORDS, INT64))
def put_words(slots: Int64Array, words: Int64Array, records: Int64Array, column: int) -> None:
    """Sets columns from ``column`` on of the records of n rows to ``words``: int64[columns, n]."""
    for row in range(len(slots)):
        slot = np.uint64(slots[row])
        for place in range(words.shape[0]):
            records[slot, column + place] = words[place, row]


@kernel(VOID(INT64S_IN, BOOLS_IN, RECORDS, INT64))
def count_rows(slots: Int64Array, valid: BoolArray, records: Int64Array, column: int) -> None:
    """Adds 1 to the column of the record of each valid row."""
    if len(valid) == 0:
        for row in range(len(slots)):
            records[np.uint64(slots[row]), column] += 1
    else:
        for row in range(len(slots)):
            records[np.uint64(slots[row]), column] += np.int64(valid[row])


@kernel(INT64(INT64S_IN, INT64S_IN, BOOLS_IN, RECORDS, INT64))
def add_integers(
    slots: Int64Array, values: Values, valid: BoolArray, records: Int64Array, column: int
) -> int:
    """Adds int64 values; the row at which a sum overflowed (nothing added there), or -1."""
    has_invalid = len(valid) > 0
    for row in range(len(slots)):
        if has_invalid and not valid[row]:
            continue
        slot = np.uint64(slots[row])
        before = records[slot, column]
        value = values[row]
        after = before + value
        if ((before ^ after) & (value ^ after)) < 0:
            return row
        records[slot, column] = after
    return -1


@kernel(VOID(INT64S_IN, FLOAT64S_IN, BOOLS_IN, FLOAT64_RECORDS, INT64))
def add_floats(
    slots: Int64Array, values: Values, valid: BoolArray, records: Values, column: int
) -> None:
    """Adds float64 values; ``records`` is the table seen as float64."""
    has_invalid = len(valid) > 0
    for row in range(len(slots)):
        if has_invalid and not valid[row]:
            continue
        records[np.uint64(slots[row]), column] += values[row]


@kernel(
    [
        VOID(INT64S_IN, INT64S_IN, BOOLS_IN, RECORDS, INT64, BOOL),
        VOID(INT64S_IN, UINT64S_IN, BOOLS_IN, UINT64_RECORDS, INT64, BOOL),
    ]
)
def extreme_integers(
    slots: Int64Array,
    values: Values,
    valid: BoolArray,
    records: Values,
    column: int,
    largest: bool,
) -> None:
    """Keeps the largest or smallest of int64 or uint64 values; ``records`` is seen as these."""
    has_invalid = len(valid) > 0
    for row in range(len(slots)):
        if has_invalid and not valid[row]:
            continue
        slot = np.uint64(slots[row])
        before = records[slot, column]
        value = values[row]
        records[slot, column] = max(before, value) if largest else min(before, value)


@kernel(VOID(INT64S_IN, FLOAT64S_IN, BOOLS_IN, FLOAT64_RECORDS, INT64, BOOL))
def extreme_floats(
    slots: Int64Array,
    values: Values,
    valid: BoolArray,
    records: Values,
    column: int,
    largest: bool,
) -> None:
    """Keeps the largest or smallest of float64 values, NaN only where there is nothing else."""
    has_invalid = len(valid) > 0
    for row in range(len(slots)):
        if has_invalid and not valid[row]:
            continue
        slot = np.uint64(slots[row])
        before = records[slot, column]
        value = values[row]
        beats = value > before if largest else value < before
        if beats or np.isnan(before):
            records[slot, column] = value


@kernel(VOID(INT64S_IN, BOOLS_IN, RECORDS, INT64, INT64))
def mark_seen(
    slots: Int64Array, valid: BoolArray, records: Int64Array, column: int, bit: int
) -> None:
    """Sets a bit in the column of the record of each valid row."""
    mark = np.int64(1) << bit
    has_invalid = len(valid) > 0
    for row in range(len(slots)):
        if has_invalid and not valid[row]:
            continue
        records[np.uint64(slots[row]), column] |= mark


@kernel(VOID(INT64S_IN, INT64, INT64, INT64S))
def slice_starts(timestamps: Int64Array, size: int, offset: int, starts: Int64Array) -> None:
    """Fills ``starts`` with the start of each timestamp's slice."""
    if len(timestamps) == 0:
        return
    start = timestamps[0] - (timestamps[0] - offset) % size
    for row in range(len(timestamps)):
        timestamp = timestamps[row]
        if timestamp < start or timestamp - start >= size:  # rows mostly share their slice
            start = timestamp - (timestamp - offset) % size
        starts[row] = start


@kernel(VOID(INT64S_IN, INT64S))
def value_bounds(values: Int64Array, bounds: Int64Array) -> None:
    """Fills ``bounds`` (int64[2]) with the minimum and maximum of at least one value."""
    smallest = values[0]
    largest = values[0]
    for row in range(len(values)):
        smallest = min(smallest, values[row])
        largest = max(largest, values[row])
    bounds[0] = smallest
    bounds[1] = largest


@kernel(INT64(UINT16S_IN, INT64S, INT64S))
def partition(channels: UInt16Array, order: Int64Array, bounds: Int64Array) -> int:
    """Stable order of rows by channel, and the channels' bounds; a bad row's index, or -1."""
    count = len(bounds) - 1
    bounds[:] = 0
    for row in range(len(channels)):
        channel = np.int64(channels[row])
        if channel >= count:
            return row
        bounds[channel + 1] += 1
    for position in range(count):
        bounds[position + 1] += bounds[position]
    for row in range(len(channels)):
        channel = np.int64(channels[row])
        order[bounds[channel]] = row
        bounds[channel] += 1
    for position in range(count, 0, -1):  # each start has become the next one
        bounds[position] = bounds[position - 1]
    bounds[0] = 0
    return -1
