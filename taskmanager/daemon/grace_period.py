"""How long what a lost JobManager has left behind is kept (pure)."""

from __future__ import annotations


class GracePeriod:
    """Measures the absence of a JobManager.

    Args:
        length_ms: how long it may be away.
    """

    def __init__(self, length_ms: int) -> None:
        self._length_ms = length_ms
        self._absent_since_ms: int | None = None
        self._is_over = False

    def observe(self, now_ms: int, *, is_present: bool) -> bool:
        """Takes in whether it is there now; True once per absence, when that has lasted too long."""
        if is_present:
            self._absent_since_ms = None
            self._is_over = False
            return False
        if self._absent_since_ms is None:
            self._absent_since_ms = now_ms
        is_over = now_ms - self._absent_since_ms >= self._length_ms
        has_ended = is_over and not self._is_over
        self._is_over = is_over
        return has_ended
