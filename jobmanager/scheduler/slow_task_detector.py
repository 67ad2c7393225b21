"""Which subtasks take much longer than the others of their vertex.

When enough subtasks of a vertex have reached the end of their data, the baseline is a multiple of the median
of their execution times, and a lower bound at least. An attempt is slow when it has run for as long as that.
Times run from the deployment. The wall clock may jump: then an attempt is found slow that is not, or some
time too late, and nothing is wrong for that.

Source: Flink, ExecutionTimeBasedSlowTaskDetector; here times are not weighed by the size of the input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobmanager.graph.execution_attempt import ON_TASKMANAGER, AttemptState, ExecutionAttempt


@dataclass(frozen=True, slots=True)
class SlowTaskSettings:
    """When a subtask is slow.

    Attributes:
        check_interval_ms: from one look to the next.
        lower_bound_ms: of the baseline.
        ratio: part of a vertex' subtasks that must be done, 0 <= ratio < 1.
        multiplier: of the median, above 0.
    """

    check_interval_ms: int = 1_000
    lower_bound_ms: int = 60_000
    ratio: float = 0.75
    multiplier: float = 1.5


class SlowTaskDetector:
    """Compares the attempts of one vertex with each other.

    Example: three of four subtasks took 10 s; the last one is slow after 15.
        >>> from jobmanager.graph.execution_attempt import AttemptKey
        >>> attempts = [
        ...     ExecutionAttempt(
        ...         AttemptKey("v1", index, 0), AttemptState.FINISHED, deployed_at_ms=1, done_at_ms=10_001
        ...     )
        ...     for index in range(3)
        ... ]
        >>> last = ExecutionAttempt(AttemptKey("v1", 3, 0), AttemptState.RUNNING, deployed_at_ms=1)
        >>> detector = SlowTaskDetector(SlowTaskSettings(lower_bound_ms=1_000))
        >>> [len(detector.slow([*attempts, last], now_ms)) for now_ms in (15_000, 15_001)]
        [0, 1]
    """

    def __init__(self, settings: SlowTaskSettings) -> None:
        self._settings = settings

    def slow(self, attempts: Sequence[ExecutionAttempt], now_ms: int) -> list[ExecutionAttempt]:
        """The slow ones among the current attempts of a vertex."""
        baseline_ms = self._baseline_ms(attempts)
        if baseline_ms is None:
            return []
        return [
            attempt
            for attempt in attempts
            if is_at_work(attempt) and now_ms - attempt.deployed_at_ms >= baseline_ms
        ]

    def _baseline_ms(self, attempts: Sequence[ExecutionAttempt]) -> float | None:
        """None = too few are done."""
        needed = math.ceil(self._settings.ratio * len(attempts))
        times_ms = sorted(_times_ms(attempts))
        if len(times_ms) < needed:
            return None
        # Slow ones that are done by now do not raise it.
        median_ms = times_ms[needed // 2] if needed else 0
        return max(self._settings.lower_bound_ms, median_ms * self._settings.multiplier)


def _times_ms(attempts: Iterable[ExecutionAttempt]) -> list[int]:
    """Of those that are done; what was done under another JobManager took nobody knows how long."""
    return [
        attempt.done_at_ms - attempt.deployed_at_ms
        for attempt in attempts
        if attempt.done_or_waiting and attempt.deployed_at_ms
    ]


def is_at_work(attempt: ExecutionAttempt) -> bool:
    """Whether it has been deployed, is to go on, and is not done with its data."""
    is_on_its_way = attempt.state in ON_TASKMANAGER - {AttemptState.CANCELING}
    return is_on_its_way and not attempt.reached_end_of_data
