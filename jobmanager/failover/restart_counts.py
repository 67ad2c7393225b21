"""What a restart strategy has counted, and the delay that runs, as one JobManager leaves them to the next.

Times are those of the wall clock, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jobmanager.failover.exceptions_history import ExceptionEntry
from jobmanager.graph.execution_attempt import SubtaskId


@dataclass(frozen=True, slots=True)
class BackoffCounts:
    """What a backoff has used of its restarts; each kind has a part of this.

    Attributes:
        attempts: since the start, or since the last reset.
        backoff_ms: the last one, without its jitter.
        delay_ends_at_ms: of the last delay; None = there was none.
        restarted_at_ms: within the last interval, the oldest first.
    """

    attempts: int = 0
    backoff_ms: float = 0.0
    delay_ends_at_ms: int | None = None
    restarted_at_ms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartCounts:
    """What a strategy and the limits of a job have counted.

    Attributes:
        restarts: counted so far.
        delay_ms: the whole of the last delay.
        delay_ends_at_ms: None = there was none.
        failures: counted against the limits.
        failures_of_task: the same by subtask, where there is a limit for each.
    """

    restarts: int = 0
    delay_ms: int = 0
    delay_ends_at_ms: int | None = None
    backoff: BackoffCounts = field(default_factory=BackoffCounts)
    failures: int = 0
    failures_of_task: Mapping[SubtaskId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeptFailures:
    """What has failed in a job so far, and what came of it.

    Attributes:
        restarts_uncounted: those that the strategy was not asked for.
        restarts_by_region: named after the first subtask of each.
        entries: of the exceptions history, the newest first.
        restarting: subtasks whose restart is counted, and that do not run again yet.
    """

    counts: RestartCounts = field(default_factory=RestartCounts)
    restarts_uncounted: int = 0
    restarts_by_region: Mapping[str, int] = field(default_factory=dict)
    entries: tuple[ExceptionEntry, ...] = ()
    restarting: frozenset[SubtaskId] = frozenset()
