"""Whether kept partitions may be written to disk (pure)."""

from __future__ import annotations

import enum


class Spilling(enum.Enum):
    """What the space on the disk allows."""

    ALLOWED = "allowed"
    STOPPED = "stopped"
    """It is nearly full; who cannot do without it waits."""
    GIVEN_UP = "given up"
    """It has been nearly full for too long; who cannot do without it fails."""
