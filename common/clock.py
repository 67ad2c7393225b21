"""Time as an interface, so that the whole cluster can run on simulated time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where runners read the time; cores get it as ``now_ms`` in their events."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Time that never jumps, in nanoseconds."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        """Time that never jumps, in nanoseconds."""
        return time.monotonic_ns()
