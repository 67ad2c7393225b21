"""How a job is to be restarted, read from its configuration and its cluster's.

Rules: a job that names its own strategy takes all keys of it from itself, so that it does not get half of
another's numbers; one that names none, or ``fallback``, takes the cluster's. Where the cluster names none
either, a job with checkpoints has ``exponential-delay``, and one without has ``none``. The limits on
failures hold under every strategy, the job's over the cluster's.

Where nobody asked for restarts (neither ``execution.checkpointing.interval`` nor a strategy is set),
failures of user code and data are not restarted: they would come again.

Source: Flink, RestartBackoffTimeStrategyFactoryLoader and RestartStrategyOptions. Flink has neither the
limits nor the exception for failures of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config import Configuration, is_of_restart_strategy

NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class NoRestart:
    """The first failure ends the job."""


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """So many restarts in the life of the job, each after the same time.

    Attributes:
        attempts_max: restarts, ``NO_LIMIT``.
        delay_ms: from the failure to the restart.
    """

    attempts_max: int = 1
    delay_ms: int = 1_000


@dataclass(frozen=True, slots=True)
class FailureRate:
    """So many restarts within any interval.

    Attributes:
        restarts_max: within ``interval_ms``, at least 1.
        delay_ms: from the failure to the restart.
    """

    restarts_max: int = 1
    interval_ms: int = 60_000
    delay_ms: int = 1_000


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """Longer and longer delays, until the job has run well for a while.

    Attributes:
        initial_backoff_ms: the first delay.
        max_backoff_ms: the longest one, jitter included.
        multiplier: growth from one delay to the next, at least 1.
        reset_threshold_ms: without a failure since the end of the last delay.
        jitter_factor: part of a delay that is added or subtracted at most, 0 to 1.
        attempts_max: restarts between two resets, ``NO_LIMIT``.
    """

    initial_backoff_ms: int = 1_000
    max_backoff_ms: int = 60_000
    multiplier: float = 1.5
    reset_threshold_ms: int = 3_600_000
    jitter_factor: float = 0.1
    attempts_max: int = NO_LIMIT


Strategy = NoRestart | FixedDelay | FailureRate | ExponentialDelay


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """What a job was configured to.

    Attributes:
        strategy: whether and when it is restarted.
        failures_per_task_max: failures of one subtask that are restarted, ``NO_LIMIT``.
        failures_total_max: failures that are restarted, ``NO_LIMIT``.
        spares_user_failures: failures of user code and data, and a first start without enough slots,
            are restarted as well.
    """

    strategy: Strategy = field(default_factory=NoRestart)
    failures_per_task_max: int = NO_LIMIT
    failures_total_max: int = NO_LIMIT
    spares_user_failures: bool = True

    @property
    def restarts(self) -> bool:
        """True when some failure restarts the job."""
        if 0 in (self.failures_per_task_max, self.failures_total_max):
            return False
        match self.strategy:
            case NoRestart():
                return False
            case FixedDelay() | ExponentialDelay():
                return self.strategy.attempts_max != 0
            case FailureRate():
                return True


def over_cluster(cluster: Configuration, job: Mapping[str, object]) -> Configuration:
    """The configuration in force for a job.

    Args:
        job: the keys that the job sets.

    Raises:
        ConfigurationError: a key or value of the job is wrong.
    """
    own = Configuration.from_mapping(job)
    if own.restart_strategy_type is None:
        return cluster.merged(job)
    if own.restart_strategy_type == "fallback":
        return cluster.merged({key: job[key] for key in job if not is_of_restart_strategy(key)})
    return cluster.with_restart_strategy({}).merged(job)


def restart_settings(config: Configuration, takes_checkpoints: bool) -> RestartSettings:
    """The settings of a job.

    Args:
        config: in force for the job, see ``over_cluster``.
        takes_checkpoints: whether it has something to restart from.

    Raises:
        ConfigurationError: the numbers of its strategy contradict each other.

    Example: a job with checkpoints is restarted unless somebody says otherwise.
        >>> restart_settings(Configuration(), takes_checkpoints=True).restarts
        True
        >>> restart_settings(Configuration(), takes_checkpoints=False).restarts
        False
    """
    is_default = config.restart_strategy_type in (None, "fallback")
    return RestartSettings(
        strategy=_strategy(config, takes_checkpoints),
        failures_per_task_max=config.restart_strategy_max_failures_per_task,
        failures_total_max=config.restart_strategy_max_failures_total,
        spares_user_failures=not is_default
        or config.execution_checkpointing_interval_ms is not None,
    )


def _strategy(config: Configuration, takes_checkpoints: bool) -> Strategy:
    match config.restart_strategy_type:
        case None | "fallback":
            return _exponential_delay(config) if takes_checkpoints else NoRestart()
        case "none" | "off" | "disable":
            return NoRestart()
        case "fixed-delay" | "fixeddelay":
            return FixedDelay(
                config.restart_strategy_fixed_delay_attempts,
                config.restart_strategy_fixed_delay_delay_ms,
            )
        case "failure-rate" | "failurerate":
            return FailureRate(
                config.restart_strategy_failure_rate_max_failures,
                config.restart_strategy_failure_rate_interval_ms,
                config.restart_strategy_failure_rate_delay_ms,
            )
        case "exponential-delay" | "exponentialdelay":
            return _exponential_delay(config)


def _exponential_delay(config: Configuration) -> ExponentialDelay:
    config.check_exponential_delay()
    return ExponentialDelay(
        initial_backoff_ms=config.restart_strategy_exponential_delay_initial_backoff_ms,
        max_backoff_ms=config.restart_strategy_exponential_delay_max_backoff_ms,
        multiplier=config.restart_strategy_exponential_delay_backoff_multiplier,
        reset_threshold_ms=config.restart_strategy_exponential_delay_reset_backoff_threshold_ms,
        jitter_factor=config.restart_strategy_exponential_delay_jitter_factor,
        attempts_max=config.restart_strategy_exponential_delay_attempts,
    )
