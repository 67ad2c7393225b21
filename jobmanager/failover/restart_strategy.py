"""Whether a failed job is restarted, and when.

Invariants: a cause that no restart can mend, wherever in its chain of causes it is named, ends the job under
every strategy; a failure that comes while a backoff runs joins its restart and is not counted; what a
failure costs (backoff, limits) does not depend on how long the restart itself took. A wall clock that
jumps back ends no backoff and begins none: no time has passed then.

Where nobody asked for restarts, an exception of user code, a bad record, and a file that an operator
cannot read or write end the job at once, and only the cluster's own failures restart it. There, a job
that has not got its slots in time when it was first started ends as well: it asks for more than there
is, and whoever waits for it would see nothing. Later the slots have been there, and may come back.

Source: Flink, RestartBackoffTimeStrategy and ExecutionFailureHandler; the limits and the exception for
failures of the user are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jobmanager.checkpoint.steady_time import SteadyTime
from jobmanager.failover.backoff import backoff_of
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.failure_limits import FailureLimits
from jobmanager.failover.restart_counts import RestartCounts
from jobmanager.failover.restart_settings import RestartSettings
from jobmanager.graph.execution_attempt import SubtaskId

_NOT_RESTARTABLE = frozenset(
    {
        "Unrecoverable",
        "JobRejected",
        "ConfigurationError",
        "ExpressionError",
        "ProtocolMismatch",
        "Unauthenticated",
        "InvariantViolation",
    }
)


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """What follows from a failure.

    Attributes:
        delay_ms: from now to the restart; None = the job fails.
        joined: it belongs to the restart whose backoff runs.
    """

    delay_ms: int | None
    joined: bool = False


class RestartStrategy:
    """Decides failure by failure.

    Args:
        jitter: uniform in -1..1.
        is_recovered: an earlier JobManager has run the job.
        counts: what it had counted.

    Example: a failure that comes while the delay of another one runs joins its restart.
        >>> from jobmanager.failover.restart_settings import FixedDelay
        >>> settings = RestartSettings(FixedDelay(attempts_max=1, delay_ms=100))
        >>> strategy = RestartStrategy(settings, jitter=lambda: 0.0)
        >>> lost = FailureCause("TaskManagerLost", "no heartbeat")
        >>> for now_ms in (0, 60, 200):
        ...     print(strategy.failed(lost, None, now_ms))
        RestartDecision(delay_ms=100, joined=False)
        RestartDecision(delay_ms=40, joined=True)
        RestartDecision(delay_ms=None, joined=False)
    """

    def __init__(
        self,
        settings: RestartSettings,
        *,
        jitter: Callable[[], float],
        is_recovered: bool = False,
        counts: RestartCounts = RestartCounts(),  # noqa: B008 - it is frozen
    ) -> None:
        self._settings = settings
        self.has_started = is_recovered
        """The job has had its slots once, so there were as many."""
        self._backoff = backoff_of(settings.strategy, jitter, counts.backoff)
        self._limits = FailureLimits(settings, counts.failures, counts.failures_of_task)
        self._time = SteadyTime()
        self._delay_ms = counts.delay_ms
        self._delay_ends_at_ms = counts.delay_ends_at_ms
        self._used_up = ""
        self.restarts = counts.restarts
        """Counted so far; a failure that joined a restart is none of its own."""

    def failed(
        self, cause: FailureCause, subtask: SubtaskId | None, now_ms: int
    ) -> RestartDecision:
        """Decides on a failure.

        Args:
            subtask: that failed; None = the failure belongs to none.
            now_ms: the wall clock.
        """
        now_ms = self._time.advance(now_ms)
        if not self.allows(cause):
            return RestartDecision(None)
        if rest_ms := self._rest_ms(now_ms):
            return RestartDecision(rest_ms, joined=True)
        self._used_up = self._limits.failed(subtask)
        if self._used_up:
            return RestartDecision(None)
        delay_ms = self._backoff.failed(now_ms)
        if delay_ms is None:
            self._used_up = self._backoff.used_up()
            return RestartDecision(None)
        self.restarts += 1
        self._delay_ms, self._delay_ends_at_ms = delay_ms, now_ms + delay_ms
        return RestartDecision(delay_ms)

    def rest_ms(self, now_ms: int) -> int:
        """What is left of the delay that runs; 0 = none does.

        Args:
            now_ms: the wall clock.
        """
        return self._rest_ms(self._time.advance(now_ms))

    def _rest_ms(self, now_ms: int) -> int:
        # The clock of the JobManager that began it may have been ahead of this one's.
        rest_ms = 0 if self._delay_ends_at_ms is None else self._delay_ends_at_ms - now_ms
        return max(0, min(rest_ms, self._delay_ms))

    def counts(self) -> RestartCounts:
        """What was counted so far, for the next JobManager."""
        wall, backoff = self._time.wall, self._backoff.counts()
        ends_at_ms = backoff.delay_ends_at_ms
        return RestartCounts(
            self.restarts,
            self._delay_ms,
            None if self._delay_ends_at_ms is None else wall(self._delay_ends_at_ms),
            replace(
                backoff,
                delay_ends_at_ms=None if ends_at_ms is None else wall(ends_at_ms),
                restarted_at_ms=tuple(map(wall, backoff.restarted_at_ms)),
            ),
            self._limits.total,
            dict(self._limits.of_task),
        )

    def allows(self, cause: FailureCause) -> bool:
        """Whether failures of this cause are restarted, as long as there are restarts left."""
        return self._settings.restarts and self.may_mend(cause)

    def may_mend(self, cause: FailureCause) -> bool:
        """Whether a restart may mend this cause, if there is one."""
        if not _NOT_RESTARTABLE.isdisjoint((cause.error_class, *cause.cause_chain)):
            return False
        if self._settings.spares_user_failures:
            return True
        return not (cause.is_of_user or self._wants_too_much(cause))

    def _wants_too_much(self, cause: FailureCause) -> bool:
        is_first_start = self.restarts == 0 and not self.has_started
        # The pool's own refusal. A TaskManager's is of a slot that it has not given up yet: it will.
        is_of_pool = cause.error_class == "NoResourceAvailable" and not cause.taskmanager_id
        return is_first_start and is_of_pool

    def told(self, cause: FailureCause) -> FailureCause:
        """The cause as the job's end shows it: says which limit was used up, and the key of it."""
        if not self._used_up or not self.allows(cause):
            return cause
        return replace(cause, message=f"{cause.message} ({self._used_up})")
