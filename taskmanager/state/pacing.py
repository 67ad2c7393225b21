"""Which share of a core the writing of a snapshot may have beside a thread that processes rows.

What is written for a snapshot takes the core, the caches and the interpreter lock that the operators want. It
begins with a small share, so that they hardly notice, and gets more as its checkpoint gets older: one of much state
takes longer, but it ends, and not much later than the next one is due.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

FIRST_SHARE: Final = 0.1
FREE_SECONDS: Final = 0.02
"""Of work for which no pause is made: what is small is written at once."""
SPAN_SECONDS_MIN: Final = 1.0
SPAN_SECONDS_MAX: Final = 10.0
IDLE_SHARE: Final = 0.1
"""Who wants less of a core than this is not disturbed."""
OTHERS_SHARE_MIN: Final = 0.1
"""Whoever gets less than this is waited for as if it got so much."""


class SnapshotTimes:
    """When snapshots were taken, and from that after how long the next one is written as fast as it can be: the larger
    of the latest two gaps, within bounds, since one that was asked for may follow another at once.

    Args:
        opened_at_ms: wall-clock time from which on there may have been any.

    >>> times = SnapshotTimes(0)
    >>> [times.next_span_seconds(now_ms) for now_ms in (5_000, 5_060, 5_100, 3_600_000)]
    [5.0, 5.0, 1.0, 10.0]
    >>> times.cut_short()
    >>> times.next_span_seconds(3_610_000)
    5.0
    """

    def __init__(self, opened_at_ms: int) -> None:
        self._latest_ms = deque((opened_at_ms,), 3)
        self._span_seconds_max = SPAN_SECONDS_MAX

    def cut_short(self) -> None:
        """One was given up while it was being written, for it took too long maybe: later ones have half of the time."""
        self._span_seconds_max /= 2

    def next_span_seconds(self, now_ms: int) -> float:
        """One is taken now."""
        self._latest_ms.append(now_ms)
        gap_ms = max(later - earlier for earlier, later in pairwise(self._latest_ms))
        return min(max(gap_ms / 1000, SPAN_SECONDS_MIN), self._span_seconds_max)


def work_share(age_seconds: float, span_seconds: float = SPAN_SECONDS_MAX) -> float:
    """Share of the time that the writing may work, 0 < share <= 1.

    Args:
        age_seconds: since the snapshot was frozen.
        span_seconds: when it is written as fast as it can be.

    >>> [round(work_share(age, 10.0), 2) for age in (0, 2, 5, 8, 10)]
    [0.1, 0.11, 0.21, 0.56, 1.0]
    """
    age = min(max(age_seconds, 0.0), span_seconds)
    return FIRST_SHARE + (1.0 - FIRST_SHARE) * (age / span_seconds) ** 3


def pause_seconds(
    worked_seconds: float,
    wanted_share: float,
    others_share: float,
    age_seconds: float,
    span_seconds: float = SPAN_SECONDS_MAX,
) -> float:
    """How long to pause after some work, so that the share is kept of what the process gets.

    Args:
        wanted_share: of a core, for which the thread that processes rows has run or waited meanwhile.
        others_share: of a core, which the other threads of the process have had: on a crowded machine it is little, and
            the writing gets a share of that.

    >>> def pause(*shares: float, age: float = 0.0) -> float:
    ...     return round(pause_seconds(0.01, *shares, age), 3)
    >>> pause(1.0, 1.0), pause(1.0, 0.5), pause(0.02, 0.02), pause(1.0, 1.0, age=30.0)
    (0.09, 0.18, 0.0, 0.0)
    """
    if wanted_share < IDLE_SHARE:
        return 0.0
    share = work_share(age_seconds, span_seconds)
    crowding = min(max(others_share, OTHERS_SHARE_MIN), 1.0)
    return max(worked_seconds, 0.0) * (1.0 - share) / share / crowding
