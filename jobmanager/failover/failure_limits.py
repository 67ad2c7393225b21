"""How many failures of a job, and of each of its subtasks, are restarted at most under every strategy.

Counted failures only: who joins a restart under way is not one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from jobmanager.failover.backoff import times
from jobmanager.failover.restart_settings import NO_LIMIT, RestartSettings
from jobmanager.graph.execution_attempt import SubtaskId


class FailureLimits:
    """Counts failures against the limits of a job.

    Args:
        total: counted before.
        of_task: the same by subtask.

    Example: one subtask may fail once, the job as often as it likes.
        >>> limits = FailureLimits(RestartSettings(failures_per_task_max=1))
        >>> [bool(limits.failed(SubtaskId("v1", index))) for index in (0, 1, 0)]
        [False, False, True]
    """

    def __init__(
        self,
        settings: RestartSettings,
        total: int = 0,
        of_task: Mapping[SubtaskId, int] = MappingProxyType({}),
    ) -> None:
        self._per_task_max = settings.failures_per_task_max
        self._total_max = settings.failures_total_max
        self.total = total
        self.of_task: Counter[SubtaskId] = Counter(of_task)

    def failed(self, subtask: SubtaskId | None) -> str:
        """Counts a failure; the limit that it exceeds in words, "" = none.

        Args:
            subtask: whose failure it is; None = of no subtask.
        """
        self.total += 1
        if NO_LIMIT != self._total_max < self.total:
            return (
                f"the job has failed {times(self.total)}, and restart-strategy.max-failures-total = "
                f"{self._total_max} is used up"
            )
        if subtask is None or self._per_task_max == NO_LIMIT:
            return ""
        self.of_task[subtask] += 1
        if self.of_task[subtask] > self._per_task_max:
            return (
                f"subtask {subtask} has failed {times(self.of_task[subtask])}, and "
                f"restart-strategy.max-failures-per-task = {self._per_task_max} is used up"
            )
        return ""
