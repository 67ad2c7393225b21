"""Time as an interface, so that the whole cluster can run on simulated time."""

from __future__ import annotations

import time
from typing import NewType, Protocol

SteadyMs = NewType("SteadyMs", int)
"""Milliseconds of a clock that only runs forward, for pauses and silences; no time of the day."""


class Clock(Protocol):
    """Where runners read the time; cores get it as ``now_ms`` in their events."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Time that never jumps, in nanoseconds."""


def steady_ms(clock: Clock) -> SteadyMs:
    """Monotonic time in milliseconds."""
    return SteadyMs(clock.monotonic_ns() // 1_000_000)


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        """Time that never jumps, in nanoseconds."""
        return time.monotonic_ns()
