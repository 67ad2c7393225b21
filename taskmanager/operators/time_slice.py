"""When a long-running function must let the slot's other mail through."""

from __future__ import annotations

from collections.abc import Callable

SLICE_NS = 20_000_000
"""How long a function may run before the slot looks at its other mail."""

_LOOK_EVERY_NS = 1_000_000
_STRIDE_MAX = 256


class TimeSlice:
    """Looks at the clock often enough for slow functions and rarely for fast ones.

    Attributes:
        stride: how many rows to process until ``is_over`` is asked again.
    """

    __slots__ = ("_deadline", "_last_look", "_now_ns", "stride")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self.stride = 1
        self.begin()

    def begin(self) -> None:
        """A new slice begins."""
        self._last_look = self._now_ns()
        self._deadline = self._last_look + SLICE_NS

    def is_over(self) -> bool:
        """True when it is time to pause; adapts the stride to the time it took."""
        now = self._now_ns()
        elapsed, self._last_look = now - self._last_look, now
        if elapsed > 2 * _LOOK_EVERY_NS:
            self.stride = max(1, self.stride // 2)
        elif elapsed < _LOOK_EVERY_NS and self.stride < _STRIDE_MAX:
            self.stride *= 2
        return now >= self._deadline
