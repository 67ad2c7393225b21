"""Whether a failed job is restarted, and when.

Invariants: a cause that no restart can mend ends the job under every strategy; a failure that joins a
restart under way is not counted. The counter is not reset by success: ``fixed-delay`` allows so many
restarts in the life of a job.

What failed on the user's side fails again: where nobody asked for restarts (neither
``execution.checkpointing.interval`` nor ``restart-strategy.type`` is set) an exception of user code,
a bad record, and a file that an operator cannot read or write end the job at once, and only the
cluster's own failures restart it. There, a job that
has not got its slots in time when it was first started ends as well: it asks for more than there is, and
whoever waits for it would see nothing. Later the slots have been there, and may come back.

Source: Flink, RestartBackoffTimeStrategy and its default with checkpointing on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jobmanager.failover.failure_cause import FailureCause
from penstock.config import Configuration
from penstock.errors import JobRejected

NO_LIMIT = -1

_UNRECOVERABLE = frozenset(
    {
        "Unrecoverable",
        "JobRejected",
        "ConfigurationError",
        "ExpressionError",
        "ProtocolMismatch",
        "Unauthenticated",
    }
)


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """What a job was configured to.

    Attributes:
        attempts_max: restarts before the job fails; 0 = none, ``NO_LIMIT``.
        delay_ms: between the end of the failed attempts and the next ones.
        spares_user_failures: failures of user code and data, and a first start without enough slots,
            are restarted as well.
    """

    attempts_max: int = 0
    delay_ms: int = 0
    spares_user_failures: bool = True

    @property
    def restarts(self) -> bool:
        """True when some failure restarts the job."""
        return self.attempts_max != 0


def restart_settings(config: Configuration, takes_checkpoints: bool) -> RestartSettings:
    """The settings of a job.

    Args:
        config: of the job, the cluster's included.
        takes_checkpoints: whether it has something to restart from.

    Raises:
        JobRejected: a strategy that this version does not have.
    """
    delay_ms = config.restart_strategy_fixed_delay_delay_ms
    match config.restart_strategy_type:
        case None if takes_checkpoints:
            asked_for = config.execution_checkpointing_interval_ms is not None
            return RestartSettings(
                config.restart_strategy_fixed_delay_attempts, delay_ms, asked_for
            )
        case None | "none" | "off" | "disable":
            return RestartSettings()
        case "fixed-delay" | "fixeddelay":
            return RestartSettings(config.restart_strategy_fixed_delay_attempts, delay_ms)
        case other:
            raise JobRejected(
                f"restart-strategy.type {other!r} is not available in this version: use "
                "'fixed-delay' or 'none'"
            )


class RestartStrategy:
    """Decides failure by failure.

    Args:
        settings: of the job.
        is_recovered: an earlier JobManager has run the job.
    """

    def __init__(self, settings: RestartSettings, *, is_recovered: bool = False) -> None:
        self._settings = settings
        self._is_recovered = is_recovered
        self.restarts = 0

    def allows(self, cause: FailureCause) -> bool:
        """Whether a restart may mend this cause."""
        if not self._settings.restarts or cause.error_class in _UNRECOVERABLE:
            return False
        if self._settings.spares_user_failures:
            return True
        return not (_is_of_user(cause) or self._wants_too_much(cause))

    def _wants_too_much(self, cause: FailureCause) -> bool:
        is_first_start = self.restarts == 0 and not self._is_recovered
        return is_first_start and cause.error_class == "NoResourceAvailable"

    def restart_after_ms(self, cause: FailureCause) -> int | None:
        """The delay of the restart that begins with this failure; None = the job fails."""
        if not self.allows(cause) or self.exhausted:
            return None
        self.restarts += 1
        return self._settings.delay_ms

    @property
    def exhausted(self) -> bool:
        """True when all restarts have been used up."""
        return self._settings.attempts_max != NO_LIMIT and (
            self.restarts >= self._settings.attempts_max
        )

    def told(self, cause: FailureCause) -> FailureCause:
        """The cause as the job's end shows it: says so where restarts were used up."""
        if not self.allows(cause) or not self.exhausted:
            return cause
        return replace(
            cause,
            message=f"{cause.message} (restarted {self.restarts} times before, as "
            "restart-strategy.fixed-delay.attempts allows)",
        )


def _is_of_user(cause: FailureCause) -> bool:
    """Of code, data, or files: what an operator itself says that it cannot go on for."""
    said_by_operator = bool(cause.operator) and cause.error_class == "TaskFailure"
    return (
        said_by_operator or bool(cause.traceback or cause.row) or (cause.error_class == "BadRecord")
    )
