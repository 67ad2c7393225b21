"""A time that never runs backwards, made of a wall clock that may.

All deadlines of the coordinator are in steady time. When the wall clock jumps back, no time has passed;
when it jumps forward, that time has passed, since a pause of the whole machine looks the same.

Invariants: steady time never decreases; ``wall(steady(now)) == now``.
"""

from __future__ import annotations


class SteadyTime:
    """Turns wall-clock into steady milliseconds and back.

    Attributes:
        now_ms: the steady time that was told last; 0 = none was.
        wall_now_ms: the wall clock's then.
    """

    def __init__(self) -> None:
        self.now_ms = 0
        self.wall_now_ms = 0
        self._offset_ms = 0
        self._latest_ms: int | None = None

    def advance(self, wall_ms: int) -> int:
        """Takes the wall clock's time; returns the steady one."""
        if self._latest_ms is not None and wall_ms + self._offset_ms < self._latest_ms:
            self._offset_ms = self._latest_ms - wall_ms
        self.now_ms = self._latest_ms = wall_ms + self._offset_ms
        self.wall_now_ms = wall_ms
        return self._latest_ms

    def wall(self, steady_ms: int) -> int:
        """What the wall clock will say at a steady time, if it does not jump until then."""
        return steady_ms - self._offset_ms
