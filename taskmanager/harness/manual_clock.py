"""A clock for tests, which stands still until it is moved."""

from __future__ import annotations


class ManualClock:
    """Time that is set; wall clock and monotonic time are the same unless the one is set back or forward.

    Attributes:
        time_ms: now, in milliseconds since the epoch.
        wall_ahead_ms: how far the wall clock was set forward.
    """

    def __init__(self, now_ms: int = 0) -> None:
        self.time_ms = now_ms
        self.wall_ahead_ms = 0

    def now_ms(self) -> int:
        """The time that was set, as the wall clock says it."""
        return self.time_ms + self.wall_ahead_ms

    def monotonic_ns(self) -> int:
        """The time that was set, in nanoseconds."""
        return self.time_ms * 1_000_000
