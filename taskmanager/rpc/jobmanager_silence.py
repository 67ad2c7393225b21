"""How long a JobManager that does not answer is waited for (pure).

Three stretches follow its last answer: for ``timeout_s`` it is present, for ``grace_s`` more it is away
and everything is kept for it, then it is given up. Invariant: it is given up only by a call that has
just failed, never by the clock alone, since the TaskManager itself may have been paused.
"""

from __future__ import annotations

import enum

_PATIENCE_MIN_S = 0.01


class Presence(enum.Enum):
    """What an unanswered call says about the JobManager."""

    PRESENT = "present"
    AWAY = "away"
    GIVEN_UP = "given up"


class JobManagerSilence:
    """The silence of one JobManager, since a registration was made with it.

    Args:
        timeout_s: silence after which it is away.
        grace_s: further silence after which it is given up.
        now_s: of the registration, on the monotonic clock.

    Example: present for 10 s, away for another 60, then given up.
        >>> silence = JobManagerSilence(timeout_s=10, grace_s=60, now_s=0)
        >>> [silence.unanswered(now_s).value for now_s in (9, 10, 70)]
        ['present', 'away', 'given up']
    """

    def __init__(self, timeout_s: float, grace_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._heard_s = now_s
        self.is_away = False

    def silent_s(self, now_s: float) -> float:
        """Time since its last answer."""
        return now_s - self._heard_s

    def answered(self, now_s: float) -> None:
        """It has answered."""
        self._heard_s = now_s
        self.is_away = False

    def unanswered(self, now_s: float) -> Presence:
        """A call has failed because nobody answered."""
        silent_s = self.silent_s(now_s)
        self.is_away = silent_s >= self._timeout_s
        if silent_s >= self._timeout_s + self._grace_s:
            return Presence.GIVEN_UP
        return Presence.AWAY if self.is_away else Presence.PRESENT

    def patience_s(self, now_s: float) -> float:
        """Deadline of the next call: half the timeout, but no later than the next stretch begins."""
        silent_s = self.silent_s(now_s)
        ends_s = (self._timeout_s, self._timeout_s + self._grace_s)
        left_s = min((end - silent_s for end in ends_s if end > silent_s), default=self._timeout_s)
        return max(min(left_s, self._timeout_s / 2), _PATIENCE_MIN_S)
