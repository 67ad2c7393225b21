"""A clock for tests, which stands still until it is moved."""

from __future__ import annotations


class ManualClock:
    """Time that is set; wall clock and monotonic time are the same.

    Attributes:
        time_ms: now, in milliseconds since the epoch.
    """

    def __init__(self, now_ms: int = 0) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        """The time that was set."""
        return self.time_ms

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""
        return self.time_ms * 1_000_000
