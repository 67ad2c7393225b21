"""When failed checkpoints fail the job, and how long to wait after one.

A failed or late checkpoint does no harm to a job that runs: by default any number of them is tolerated.
What counts is said by ``AbortReason.counts``: checkpoints that were void for a reason of the job's own
life (stopped tasks, a task that finished, a later checkpoint that was faster, rows that were still being
compared after a restart) say nothing about the health of checkpoints. A completed checkpoint sets the count back.

After each further failure the next periodic checkpoint waits twice as long, up to some intervals, so that a store or a
job in trouble is not loaded further, and the first one that can be taken again is not long in coming.

Source: Flink, CheckpointFailureManager; the growing pause is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jobmanager.checkpoint.messages import AbortReason
from jobmanager.checkpoint.settings import UNLIMITED

LONGEST_PAUSE_MS: Final = 60_000
_LONGEST_PAUSE_TIMES: Final = 8
"""The same, in first pauses."""


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """What follows from an aborted checkpoint.

    Attributes:
        failed_in_a_row: failures since the last completed one, this one included if it counts.
        fails_job: they are more than are tolerated.
    """

    failed_in_a_row: int
    fails_job: bool


class FailurePolicy:
    """Counts failures in a row.

    Args:
        tolerable_failed: how many are accepted; -1 = any number.
        failed_total: how many there were before.
    """

    def __init__(self, tolerable_failed: int, failed_total: int = 0) -> None:
        self._tolerable = tolerable_failed
        self.failed_in_a_row = 0
        self.failed_total = failed_total

    def aborted(self, reason: AbortReason) -> FailureVerdict:
        """A checkpoint was aborted.

        The count starts anew where the job is to fail: the job starts anew, too.
        """
        if not reason.counts:
            return FailureVerdict(self.failed_in_a_row, fails_job=False)
        self.failed_total += 1
        self.failed_in_a_row += 1
        failed = self.failed_in_a_row
        if self._tolerable == UNLIMITED or failed <= self._tolerable:
            return FailureVerdict(failed, fails_job=False)
        self.failed_in_a_row = 0
        return FailureVerdict(failed, fails_job=True)

    def completed(self) -> None:
        """A checkpoint is complete."""
        self.failed_in_a_row = 0


def pause_after_failures_ms(failed_in_a_row: int, first_pause_ms: int) -> int:
    """How long to wait after the last of some failures in a row.

    Args:
        failed_in_a_row: how many; 0 = no wait.
        first_pause_ms: after the first of them; doubled for each further one up to eight times as long, or up to
            a minute, or itself where that is longer.
    """
    if failed_in_a_row == 0:
        return 0
    longest = max(first_pause_ms, min(_LONGEST_PAUSE_TIMES * first_pause_ms, LONGEST_PAUSE_MS))
    return min(first_pause_ms << min(failed_in_a_row - 1, 32), longest)
