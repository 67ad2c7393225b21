"""When tumbling and sliding windows fire, and how long their slices live. Pure: no rows, no clock.

A window of ``size`` starts every ``slide`` at ``offset``; time is cut into slices of gcd(size, slide),
each of which lies in the same windows with all its rows. Windows are named by their end.

Invariants:
- windows fire in the order of their ends, each once by the progress of time (``fire_next``);
- a slice is live from its first row until the last window that contains it has fired and the
  allowed lateness is over; late rows never make a slice live;
- ``watermark_ms`` never goes back.

Source: Li et al., "No Pane, No Gain" (panes); Flink's WindowOperator for lateness and late firings.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

from common.elements import MIN_TIMESTAMP_MS
from penstock.pb import graph_pb2


class SliceTimeline:
    """The live slices of one operator and the progress of its time.

    Example: windows of 10 ms every 5 ms, whose rows lie in slices of 5 ms.
        >>> timeline = SliceTimeline(graph_pb2.WindowSpec(size_ms=10, slide_ms=5))
        >>> timeline.add(timeline.slice_of(7))
        >>> timeline.next_due(watermark_ms=9), timeline.slices_of(10)
        (10, [5])
        >>> timeline.fire_next(10)
        >>> timeline.next_due(watermark_ms=9), timeline.next_due(watermark_ms=14)
        (None, 15)
    """

    def __init__(self, window: graph_pb2.WindowSpec) -> None:
        self.size_ms: int = window.size_ms
        self.slide_ms: int = window.slide_ms
        self.slice_ms = math.gcd(self.size_ms, self.slide_ms)
        self.offset_ms = window.offset_ms % self.slice_ms
        self._window_offset_ms = window.offset_ms
        self._lateness_ms: int = window.allowed_lateness_ms
        self.watermark_ms = MIN_TIMESTAMP_MS
        self._live: list[int] = []

    def restore(self, watermark_ms: int, live: Iterable[int]) -> None:
        """Goes on from a snapshot: the watermark, and the starts of the slices that have rows."""
        self.watermark_ms = watermark_ms
        self._live = sorted(live)

    def is_live(self, start: int) -> bool:
        """True where the slice has rows."""
        index = bisect_left(self._live, start)
        return index < len(self._live) and self._live[index] == start

    def add(self, start: int) -> None:
        """The slice has got rows; it must not be late."""
        assert start >= self.first_in_time_slice(), "a late row must not make a slice live"
        if not self.is_live(start):
            insort(self._live, start)

    def slice_of(self, timestamp_ms: int) -> int:
        """Start of the slice that a time lies in."""
        return timestamp_ms - (timestamp_ms - self.offset_ms) % self.slice_ms

    def first_in_time_slice(self, watermark_ms: int | None = None) -> int:
        """The earliest slice whose rows are not late: all before it are.

        Args:
            watermark_ms: None = that of the operator.
        """
        # A window that still takes rows ends after watermark - lateness + 1; the earliest of them:
        time_ms = self.watermark_ms if watermark_ms is None else watermark_ms
        earliest_end = time_ms - self._lateness_ms + 2
        start = earliest_end - self.size_ms
        return start + (self._window_offset_ms - start) % self.slide_ms

    def next_due(self, watermark_ms: int) -> int | None:
        """End of the next window with rows that fires at the watermark, None = none does."""
        index = 0
        while index < len(self._live):
            end = self._first_end_after(max(self._live[index], self.watermark_ms + 1))
            first = bisect_left(self._live, end - self.size_ms)
            if first < len(self._live) and self._live[first] < end:
                return end if end - 1 <= watermark_ms else None
            index = first
        return None

    def fire_next(self, end: int) -> None:
        """The window that ends there has fired."""
        assert end - 1 > self.watermark_ms, "windows fire in the order of their ends"
        self.watermark_ms = end - 1

    def advance(self, watermark_ms: int) -> None:
        """Time has come so far; all due windows have fired."""
        self.watermark_ms = max(self.watermark_ms, watermark_ms)

    def slices_of(self, end: int) -> list[int]:
        """The live slices of the window that ends there."""
        return self._live[
            bisect_left(self._live, end - self.size_ms) : bisect_left(self._live, end)
        ]

    def fired_windows_of(self, start: int, watermark_ms: int | None = None) -> range:
        """Ends of the windows of a slice that have fired and still take rows.

        Args:
            watermark_ms: None = that of the operator.
        """
        time_ms = self.watermark_ms if watermark_ms is None else watermark_ms
        first = self._first_end_after(start)
        last = self._last_end(start)
        earliest = max(first, time_ms - self._lateness_ms + 2)
        earliest += (first - earliest) % self.slide_ms
        return range(earliest, min(last, time_ms + 1) + 1, self.slide_ms)

    def expire(self) -> list[int]:
        """Removes and returns the slices that nothing needs any more."""
        count = bisect_left(self._live, self.first_in_time_slice())
        expired = self._live[:count]
        del self._live[:count]
        return expired

    def _first_end_after(self, time: int) -> int:
        """End of the first window that ends after ``time``."""
        return time + 1 + (self._window_offset_ms + self.size_ms - time - 1) % self.slide_ms

    def _last_end(self, start: int) -> int:
        """End of the last window that contains the slice."""
        return start - (start - self._window_offset_ms) % self.slide_ms + self.size_ms
