"""Which share of its time the writing of a snapshot may hold the interpreter lock.

Python objects are encoded one by one under the interpreter lock, which the operator's thread needs too.
The writing begins with a small share and gets more as its checkpoint gets older: a checkpoint of many
changed objects takes longer than the interval then, but it ends.
"""

from __future__ import annotations

from typing import Final

FIRST_SHARE: Final = 0.2
FULL_SHARE_AFTER_SECONDS: Final = 20.0


def work_share(age_seconds: float) -> float:
    """Share of the time that the writing may work, 0 < share <= 1."""
    age = min(max(age_seconds, 0.0), FULL_SHARE_AFTER_SECONDS)
    return FIRST_SHARE + (1.0 - FIRST_SHARE) * age / FULL_SHARE_AFTER_SECONDS


def pause_seconds(worked_seconds: float, age_seconds: float) -> float:
    """How long to pause after some work, so that the share is kept."""
    share = work_share(age_seconds)
    return max(worked_seconds, 0.0) * (1.0 - share) / share
