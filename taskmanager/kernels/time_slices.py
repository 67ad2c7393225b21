"""Slices of event time: the non-overlapping intervals that windows are made of.

A slice of ``size`` ms starts at ``offset + k * size`` for an integer k; a timestamp belongs to the
slice with ``start <= timestamp < start + size``, also before 1970 (floor, not truncation).
Timestamps, sizes and offsets stay within +-2**62 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.storage.key_types import Int64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.partitioning import partition_order

_COUNTED_SLICES_MAX = 1 << 15


@dataclass(frozen=True, slots=True)
class SliceSplit:
    """The rows of a batch by slice.

    Attributes:
        order: int64[n], row numbers, slice after slice, in each in the order of the batch; None
            where the batch lies in one slice, so that nothing needs to be taken apart.
        starts: int64[k], starts of the slices that have rows, ascending.
        bounds: int64[k + 1]: slice j has rows ``order[bounds[j]:bounds[j + 1]]``.
    """

    order: Int64Array | None
    starts: Int64Array
    bounds: Int64Array


def slice_start(timestamp_ms: int, size_ms: int, offset_ms: int = 0) -> int:
    """Start of the slice that one timestamp belongs to."""
    return timestamp_ms - (timestamp_ms - offset_ms) % size_ms


def slice_starts(timestamps: Int64Array, size_ms: int, offset_ms: int = 0) -> Int64Array:
    """Starts of the slices that timestamps belong to: int64[n].

    Args:
        timestamps: int64[n] ms since the epoch.
        size_ms: length of a slice, positive.
        offset_ms: where slices start, relative to the epoch.
    """
    _check_size(size_ms)
    starts = np.empty(len(timestamps), dtype=np.int64)
    values = np.require(timestamps, dtype=np.int64, requirements=["C", "A"])
    process_kernels().slice_starts(values, size_ms, offset_ms, starts)
    return starts


def time_bounds(timestamps: Int64Array) -> tuple[int, int]:
    """Smallest and largest of at least one timestamp."""
    if len(timestamps) == 0:
        raise ValueError("no timestamps, so no bounds")
    bounds = np.empty(2, dtype=np.int64)
    values = np.require(timestamps, dtype=np.int64, requirements=["C", "A"])
    process_kernels().value_bounds(values, bounds)
    return int(bounds[0]), int(bounds[1])


def slice_span(timestamps: Int64Array, size_ms: int, offset_ms: int = 0) -> tuple[int, int]:
    """Starts of the first and the last slice that at least one timestamp belongs to."""
    _check_size(size_ms)
    smallest, largest = time_bounds(timestamps)
    return slice_start(smallest, size_ms, offset_ms), slice_start(largest, size_ms, offset_ms)


def split_by_slice(timestamps: Int64Array, size_ms: int, offset_ms: int = 0) -> SliceSplit:
    """Takes a batch of at least one row apart by slice.

    Args:
        timestamps: int64[n] ms since the epoch.
        size_ms: length of a slice, positive.
        offset_ms: where slices start, relative to the epoch.
    """
    first, last = slice_span(timestamps, size_ms, offset_ms)
    rows = len(timestamps)
    if first == last:
        return SliceSplit(
            None, np.array([first], dtype=np.int64), np.array([0, rows], dtype=np.int64)
        )
    starts = slice_starts(timestamps, size_ms, offset_ms)
    slices = (last - first) // size_ms + 1
    if slices <= _COUNTED_SLICES_MAX:
        ordinals = ((starts - first) // size_ms).astype(np.uint16)
        order, bounds = partition_order(ordinals, slices)
        present = np.flatnonzero(np.diff(bounds))
        return SliceSplit(order, first + present * size_ms, np.append(bounds[present], rows))
    order = np.argsort(starts, kind="stable")
    values, positions = np.unique(starts[order], return_index=True)
    return SliceSplit(order, values, np.append(positions, rows))


def _check_size(size_ms: int) -> None:
    if size_ms <= 0:
        raise ValueError(f"a slice of {size_ms} ms: the size must be positive")
