"""Which slices of event time have ended, by watermarks or by the rows themselves (pure).

A slice has ended at a watermark that is not below the last time in it. Where rows are out of order by
at most a bound, the watermark behind a row is at most the largest event time so far - bound - 1: that is what the
rows say (``taskmanager.alignment.watermark_generator``).
"""

from __future__ import annotations

import numpy as np

from common.elements import MIN_TIMESTAMP_MS, TIME_LIMIT_MS
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import slice_start, slice_starts


class EndedSlices:
    """The progress of event time in slices.

    Args:
        size_ms: of a slice.
        offset_ms: where slices start, relative to the epoch.
        out_of_orderness_ms: the bound, None = there is none, so that only watermarks count.

    Attributes:
        open_from: slices that start before have ended, the others have not.
        largest_ms: largest event time so far.

    Example: slices of 10 ms, rows at most 5 ms out of order.
        >>> slices = EndedSlices(size_ms=10, offset_ms=0, out_of_orderness_ms=5)
        >>> slices.row_came(24)
        >>> slices.open_from, slices.after_row(25)
        (10, 20)
        >>> slices.watermark_came(39)
        >>> slices.open_from
        40
    """

    def __init__(self, size_ms: int, offset_ms: int, out_of_orderness_ms: int | None) -> None:
        self._size_ms = size_ms
        self._offset_ms = offset_ms
        self.follows_rows = out_of_orderness_ms is not None
        self._bound_ms = min(out_of_orderness_ms or 0, TIME_LIMIT_MS)
        self.open_from = MIN_TIMESTAMP_MS
        self.largest_ms = -TIME_LIMIT_MS

    def after_row(self, time_ms: int) -> int:
        """``open_from`` behind a row of this time."""
        if not self.follows_rows:
            return self.open_from
        ended_ms = max(self.largest_ms, time_ms) - self._bound_ms
        return max(self.open_from, self._start_of(max(ended_ms, -TIME_LIMIT_MS)))

    def after_rows(self, times: Int64Array) -> Int64Array:
        """``open_from`` behind each of some rows: int64[n].

        Args:
            times: int64[n], of at least one row.
        """
        if not self.follows_rows:
            return np.full(len(times), self.open_from)
        ended = np.maximum(np.maximum.accumulate(times), self.largest_ms) - self._bound_ms
        starts = slice_starts(np.maximum(ended, -TIME_LIMIT_MS), self._size_ms, self._offset_ms)
        return np.maximum(starts, self.open_from)

    def row_came(self, time_ms: int) -> None:
        """A row of this time is the largest of those that came."""
        self.open_from = self.after_row(time_ms)
        self.largest_ms = max(self.largest_ms, time_ms)

    def watermark_came(self, watermark_ms: int) -> None:
        """Time has come so far."""
        ended_ms = min(max(watermark_ms + 1, -TIME_LIMIT_MS), TIME_LIMIT_MS + self._size_ms)
        self.open_from = max(self.open_from, self._start_of(ended_ms))

    def _start_of(self, time_ms: int) -> int:
        return slice_start(time_ms, self._size_ms, self._offset_ms)
