"""Watermarks per origin, merged into one (pure).

Each origin's watermark is its largest event time - out-of-orderness - 1. The generator's is the
minimum over the origins that are open and not idle, never past ``Origins.hold_back_ms``, never
backwards. An origin is idle when it brought no row for ``idle_timeout_ms``, however the wall clock is set meanwhile, and none is waiting. When all are, none holds
another back, and the watermark is the largest of theirs.

Where rows come in any order, as in batch mode, they say nothing: the watermark is just before what
``Origins.proven_ms`` knows of the rows to come, and no origin is idle. So no row is late.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.clock import SteadyMs
from common.elements import MIN_TIMESTAMP_MS
from taskmanager.alignment.origins import Origins


@dataclass(slots=True)
class _Progress:
    max_event_time_ms: int
    last_row_at_ms: SteadyMs


class WatermarkGenerator:
    """Follows the event times of a subtask's origins.

    Example: the slower of two origins says what time it is, until it falls silent.
        >>> origins = Origins(open={"a", "b"}, all_known=True)
        >>> generator = WatermarkGenerator(origins, out_of_orderness_ms=0, idle_timeout_ms=50)
        >>> for origins.current, largest_ms in [("a", 901), ("b", 101)]:
        ...     generator.rows_seen(largest_ms, now_ms=0)
        >>> generator.advance(now_ms=0), generator.watermark_ms
        (True, 100)
        >>> origins.current = "a"
        >>> generator.rows_seen(1_001, now_ms=60)
        >>> generator.advance(now_ms=60), generator.watermark_ms
        (True, 1000)
    """

    def __init__(
        self,
        origins: Origins,
        out_of_orderness_ms: int,
        idle_timeout_ms: int,
        *,
        in_any_order: bool = False,
    ) -> None:
        self._origins = origins
        self._in_any_order = in_any_order
        self._out_of_orderness_ms = out_of_orderness_ms
        self._idle_timeout_ms = idle_timeout_ms
        self._progress: dict[str, _Progress] = {}
        self._largest_ms = MIN_TIMESTAMP_MS
        """Of all rows."""
        self.watermark_ms = MIN_TIMESTAMP_MS
        self.is_idle = False

    def rows_seen(self, max_event_time_ms: int, now_ms: SteadyMs) -> None:
        """A batch of the current origin with this largest event time."""
        self._largest_ms = max(self._largest_ms, max_event_time_ms)
        if self._in_any_order:
            return
        progress = self._progress.get(self._origins.current)
        if progress is None:
            self._progress[self._origins.current] = _Progress(max_event_time_ms, now_ms)
            return
        progress.last_row_at_ms = now_ms
        progress.max_event_time_ms = max(progress.max_event_time_ms, max_event_time_ms)

    def origin_ended(self, origin: str, now_ms: SteadyMs) -> None:
        """What the origin has said still counts; from now on it holds nothing back."""
        if origin in self._progress:
            self._raise_to(min(map(self._said_by, [*self._active(now_ms), origin])))
            del self._progress[origin]

    def all_ended(self) -> None:
        """All rows have come, whatever was known of them before: the watermark is that of the largest of them."""
        reached_ms = self._largest_ms - self._slack_ms
        if self._largest_ms > MIN_TIMESTAMP_MS and reached_ms > self.watermark_ms:
            self.watermark_ms = reached_ms

    def advance(self, now_ms: SteadyMs) -> bool:
        """Recomputes watermark and idleness; True when the watermark has advanced."""
        if self._in_any_order:
            return self._raise_to(self._origins.proven_ms())
        active = self._active(now_ms)
        self.is_idle = not active and self._has_no_rows_to_wait_for()
        if active:
            return self._raise_to(min(map(self._said_by, active)))
        return self._raise_to(max(map(self._said_by, self._origins.open), default=MIN_TIMESTAMP_MS))

    def _said_by(self, origin: str) -> int:
        """The origin's own watermark."""
        progress = self._progress.get(origin)
        if progress is None:
            return MIN_TIMESTAMP_MS
        return progress.max_event_time_ms - self._out_of_orderness_ms - 1

    def _raise_to(self, watermark_ms: int) -> bool:
        watermark_ms = min(watermark_ms, self._origins.hold_back_ms())
        if watermark_ms <= self.watermark_ms:
            return False
        self.watermark_ms = watermark_ms
        return True

    def next_idle_at_ms(self) -> int | None:
        """When the next origin becomes idle if nothing arrives; None where that does not matter."""
        if not self._idle_timeout_ms:
            return None
        times = [
            progress.last_row_at_ms + self._idle_timeout_ms for progress in self._progress.values()
        ]
        return min(times, default=None)

    def watch_from(self, origin: str, now_ms: SteadyMs) -> None:
        """Starts the idle clock of an origin that has brought no row yet."""
        if origin not in self._progress:
            self._progress[origin] = _Progress(MIN_TIMESTAMP_MS + self._slack_ms, now_ms)

    @property
    def _slack_ms(self) -> int:
        return self._out_of_orderness_ms + 1

    def _active(self, now_ms: SteadyMs) -> list[str]:
        if not self._idle_timeout_ms:
            return list(self._origins.open)
        return [
            origin
            for origin in self._origins.open
            if origin not in self._progress
            or now_ms - self._progress[origin].last_row_at_ms < self._idle_timeout_ms
            or self._origins.has_waiting(origin)
        ]

    def _has_no_rows_to_wait_for(self) -> bool:
        if self._origins.unread:
            return False
        if self._origins.open:
            return True  # all of them silent for longer than the idle timeout
        return not self._origins.bounded
