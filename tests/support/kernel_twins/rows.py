"""The numpy twins of ``compiled_rows``: same results."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_groups import UInt16Array
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.accumulators import Values

_SAFE_SUM = 2.0**62


def put_words(slots: Int64Array, words: Int64Array, records: Int64Array, column: int) -> None:
    """See ``compiled_rows.put_words``."""
    records[slots, column : column + len(words)] = words.T


def count_rows(slots: Int64Array, valid: BoolArray, records: Int64Array, column: int) -> None:
    """See ``compiled_rows.count_rows``."""
    np.add.at(records[:, column], slots[valid] if len(valid) else slots, 1)


def add_integers(
    slots: Int64Array, values: Values, valid: BoolArray, records: Int64Array, column: int
) -> int:
    """See ``compiled_rows.add_integers``."""
    sums = records[:, column]
    rows = np.flatnonzero(valid) if len(valid) else np.arange(len(slots))
    if len(rows) == 0:
        return -1
    targets, added = slots[rows], values[rows]
    reach = np.abs(added.astype(np.float64)).sum() + np.abs(sums[targets].astype(np.float64)).max()
    if reach < _SAFE_SUM:
        np.add.at(sums, targets, added)
        return -1
    for row, slot, value in zip(rows.tolist(), targets.tolist(), added.tolist(), strict=True):
        total = int(sums[slot]) + value
        if not -(2**63) <= total < 2**63:
            return int(row)
        sums[slot] = total
    return -1


def add_floats(
    slots: Int64Array, values: Values, valid: BoolArray, records: Values, column: int
) -> None:
    """See ``compiled_rows.add_floats``."""
    targets, added = _valid_rows(slots, values, valid)
    with np.errstate(all="ignore"):
        np.add.at(records[:, column], targets, added)


def extreme_integers(
    slots: Int64Array,
    values: Values,
    valid: BoolArray,
    records: Values,
    column: int,
    largest: bool,
) -> None:
    """See ``compiled_rows.extreme_integers``."""
    targets, candidates = _valid_rows(slots, values, valid)
    extreme = np.maximum if largest else np.minimum
    extreme.at(records[:, column], targets, candidates)


def extreme_floats(
    slots: Int64Array,
    values: Values,
    valid: BoolArray,
    records: Values,
    column: int,
    largest: bool,
) -> None:
    """See ``compiled_rows.extreme_floats``."""
    targets, candidates = _valid_rows(slots, values, valid)
    extreme = np.fmax if largest else np.fmin
    with np.errstate(invalid="ignore"):
        extreme.at(records[:, column], targets, candidates)


def mark_seen(
    slots: Int64Array, valid: BoolArray, records: Int64Array, column: int, bit: int
) -> None:
    """See ``compiled_rows.mark_seen``."""
    targets = slots[valid] if len(valid) else slots
    mark = np.array(1 << bit, dtype=np.uint64).view(np.int64)
    np.bitwise_or.at(records[:, column], targets, mark)


def slice_starts(timestamps: Int64Array, size: int, offset: int, starts: Int64Array) -> None:
    """See ``compiled_rows.slice_starts``."""
    np.subtract(timestamps, np.mod(timestamps - offset, size), out=starts)


def value_bounds(values: Int64Array, bounds: Int64Array) -> None:
    """See ``compiled_rows.value_bounds``."""
    bounds[0] = values.min()
    bounds[1] = values.max()


def partition(channels: UInt16Array, order: Int64Array, bounds: Int64Array) -> int:
    """See ``compiled_rows.partition``."""
    count = len(bounds) - 1
    wrong = np.flatnonzero(channels >= count)
    if len(wrong):
        return int(wrong[0])
    order[:] = np.argsort(channels, kind="stable")
    bounds[0] = 0
    np.cumsum(np.bincount(channels, minlength=count), out=bounds[1:])
    return -1


def _valid_rows(slots: Int64Array, values: Values, valid: BoolArray) -> tuple[Int64Array, Values]:
    if len(valid) == 0:
        return slots, values
    return slots[valid], values[valid]
