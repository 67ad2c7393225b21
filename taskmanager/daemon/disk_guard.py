"""How much may be written to the disk under the spill directory (pure).

Two limits: below ``taskmanager.spill.min-free`` slots write nothing more to it, so that who has no
memory left waits; below ``taskmanager.spill.hard-min-free`` the TaskManager ends, which gives the
space back that it took. Who has waited in vain for ``taskmanager.spill.wait-timeout`` is told so.
Writing goes on somewhat above the first limit only, so that the two do not alternate with every file
that is removed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_MARGIN_DIVISOR = 8


class DiskState(enum.Enum):
    """What the free space allows."""

    ROOM = "room"
    NEARLY_FULL = "nearly full"
    TOO_LONG = "nearly full for too long"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Free bytes below which something is done; 0 = nothing is.

    Attributes:
        min_free_bytes: slots stop writing.
        hard_min_free_bytes: the TaskManager ends.
        wait_timeout_ms: so long slots wait for space.
    """

    min_free_bytes: int
    hard_min_free_bytes: int
    wait_timeout_ms: int


class DiskGuard:
    """Follows the free space.

    Args:
        limits: what is compared with it.
    """

    def __init__(self, limits: DiskLimits) -> None:
        self._limits = limits
        self.state = DiskState.ROOM
        self._nearly_full_since_ms = 0

    def observe(self, free_bytes: int, now_ms: int) -> bool:
        """Takes in the free space at a (monotonic) time; True when the state is another one now.

        FULL is for good.
        """
        before = self.state
        if before is not DiskState.FULL:
            self.state = self._state_at(free_bytes, now_ms)
        return self.state is not before

    def _state_at(self, free_bytes: int, now_ms: int) -> DiskState:
        limits = self._limits
        if free_bytes < limits.hard_min_free_bytes:
            return DiskState.FULL
        enough_bytes = limits.min_free_bytes
        if self.state is not DiskState.ROOM:
            enough_bytes += limits.min_free_bytes // _MARGIN_DIVISOR
        if free_bytes >= enough_bytes:
            return DiskState.ROOM
        if self.state is DiskState.ROOM:
            self._nearly_full_since_ms = now_ms
            return DiskState.NEARLY_FULL
        is_over = now_ms - self._nearly_full_since_ms >= limits.wait_timeout_ms
        return DiskState.TOO_LONG if is_over else DiskState.NEARLY_FULL
