"""What windows must come to, row by row in plain Python: the twin that tests compare operators with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

MIN_TIME = -(2**63)
MAX_TIME = 2**63 - 1


def key_of(row: Row, keys: Iterable[str]) -> tuple[Any, ...]:
    """A row's key with NaN and -0.0 in their one form."""
    return tuple(_canonical(row[name]) for name in keys)


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def aggregate(function: str, column: str | None, rows: list[Row]) -> Any:
    """One built-in aggregate of rows in order of arrival."""
    if column is None:
        return len(rows)
    values = [row[column] for row in rows if row[column] is not None]
    if function == "count":
        return len(values)
    if function == "count_distinct":
        return len({_canonical(value) for value in values})
    if function == "collect_list":
        return values
    if not values:
        return None
    numbers = [v for v in values if not (isinstance(v, float) and math.isnan(v))]
    match function:
        case "sum":
            return sum(values)
        case "mean":
            return sum(values) / len(values)
        case "min":
            return min(numbers) if numbers else math.nan
        case "max":
            return max(numbers) if numbers else math.nan
        case "first":
            return values[0]
        case _:
            return values[-1]


@dataclass
class _Window:
    start: int
    end: int
    key: tuple[Any, ...]
    rows: list[Row] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    fired: bool = False

    def sorted_rows(self) -> list[Row]:
        order = sorted(range(len(self.rows)), key=lambda i: self.arrivals[i])
        return [self.rows[i] for i in order]


@dataclass
class WindowOracle:
    """Event-time windows of any kind.

    ``push`` and ``watermark`` return the windows that fire, as (key, start, end, rows).
    """

    keys: tuple[str, ...]
    lateness_ms: int = 0
    size_ms: int = 0
    slide_ms: int = 0
    offset_ms: int = 0
    gap_ms: int = 0
    now: int = MIN_TIME
    late: list[Row] = field(default_factory=list)
    _windows: list[_Window] = field(default_factory=list)
    _arrived: int = 0

    def push(self, rows: list[Row], time: Callable[[Row], int]) -> list[tuple[Any, ...]]:
        """One batch of rows."""
        touched: list[_Window] = []
        for row in rows:
            self._arrived += 1
            for window in self._assign(row, time(row)):
                window.rows.append(row)
                window.arrivals.append(self._arrived)
                if self.gap_ms:
                    window.fired = False
                if window not in touched:
                    touched.append(window)
        due = [w for w in touched if w in self._windows and w.end - 1 <= self.now]
        return self._fire(due)

    def watermark(self, time: int) -> list[tuple[Any, ...]]:
        """Progress of time."""
        due = [w for w in self._windows if not w.fired and w.end - 1 <= time]
        self.now = max(self.now, time)
        fired = self._fire(due)
        self._windows = [w for w in self._windows if not self._is_over(w.end)]
        return fired

    def _fire(self, due: list[_Window]) -> list[tuple[Any, ...]]:
        for window in due:
            window.fired = True
        due = sorted(due, key=lambda w: w.end)
        return [(w.key, w.start, w.end, w.sorted_rows()) for w in due]

    def _is_over(self, end: int) -> bool:
        return end + self.lateness_ms - 1 <= self.now

    def _assign(self, row: Row, time: int) -> list[_Window]:
        key = key_of(row, self.keys)
        found = self._sessions(key, time) if self.gap_ms else self._sliding(key, time)
        if not found:
            self.late.append(row)
        return found

    def _sliding(self, key: tuple[Any, ...], time: int) -> list[_Window]:
        found = []
        start = time - (time - self.offset_ms) % self.slide_ms
        while start + self.size_ms > time:
            end = start + self.size_ms
            if not self._is_over(end):
                window = next((w for w in self._windows if (w.key, w.end) == (key, end)), None)
                if window is None:
                    window = _Window(start, end, key, fired=end - 1 <= self.now)
                    self._windows.append(window)
                found.append(window)
            start -= self.slide_ms
        return found

    def _sessions(self, key: tuple[Any, ...], time: int) -> list[_Window]:
        merged = _Window(time, time + self.gap_ms, key)
        met = [
            w
            for w in self._windows
            if w.key == key and w.start <= merged.end and merged.start <= w.end
        ]
        for window in met:
            merged.start = min(merged.start, window.start)
            merged.end = max(merged.end, window.end)
            merged.rows += window.rows
            merged.arrivals += window.arrivals
        if self._is_over(merged.end):
            return []
        self._windows = [w for w in self._windows if w not in met]
        self._windows.append(merged)
        return [merged]
