"""How much may be written to the disk under the spill directory (pure).

Two limits: below ``taskmanager.spill.min-free`` slots write nothing more to it, so that who has no
memory left waits; below ``taskmanager.spill.hard-min-free`` the TaskManager ends, which gives the
space back that it took. Writing goes on somewhat above the first limit only, so that the two do not
alternate with every file that is removed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_MARGIN_DIVISOR = 8


class DiskState(enum.Enum):
    """What the free space allows."""

    ROOM = "room"
    NEARLY_FULL = "nearly full"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Free bytes below which something is done; 0 = nothing is.

    Attributes:
        min_free_bytes: slots stop writing.
        hard_min_free_bytes: the TaskManager ends.
    """

    min_free_bytes: int
    hard_min_free_bytes: int


class DiskGuard:
    """Follows the free space.

    Args:
        limits: what is compared with it.
    """

    def __init__(self, limits: DiskLimits) -> None:
        self._limits = limits
        self.state = DiskState.ROOM

    def observe(self, free_bytes: int) -> bool:
        """Takes in the free space; True when the state is another one now. FULL is for good."""
        before = self.state
        if before is not DiskState.FULL:
            self.state = self._state_at(free_bytes)
        return self.state is not before

    def _state_at(self, free_bytes: int) -> DiskState:
        limits = self._limits
        if free_bytes < limits.hard_min_free_bytes:
            return DiskState.FULL
        enough_bytes = limits.min_free_bytes
        if self.state is DiskState.NEARLY_FULL:
            enough_bytes += limits.min_free_bytes // _MARGIN_DIVISOR
        return DiskState.ROOM if free_bytes >= enough_bytes else DiskState.NEARLY_FULL
