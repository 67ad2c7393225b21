"""Why TaskManagers are lost: what metrics and logs call it."""

from __future__ import annotations

import enum


class LossReason(enum.Enum):
    """How the JobManager came to know; the value is the label in metrics."""

    CONNECTION_REFUSED = "connection-refused"
    """Nobody listens at its address any more: its process has ended."""
    HEARTBEAT_TIMEOUT = "heartbeat-timeout"
    """It was silent for ``heartbeat.timeout``."""
    UNREACHABLE = "unreachable"
    """It was silent for less, and could not be reached either."""
    GOODBYE = "goodbye"
    """It was told to end, and said so."""
    GAVE_UP = "gave-up"
    """It could not go on, and said so."""
    RESTARTED = "restarted"
    """It has come back as another incarnation."""

    @property
    def advice(self) -> str:
        """What somebody can do about it, "" = nothing is wrong."""
        return _ADVICE.get(self, "")


_SILENT = (
    "its machine is down, overloaded or cut off; see its log, and start it again if it has ended"
)
_ADVICE = {
    LossReason.CONNECTION_REFUSED: "its process has ended; see the end of its log, and start it again",
    LossReason.HEARTBEAT_TIMEOUT: _SILENT,
    LossReason.UNREACHABLE: _SILENT,
}
