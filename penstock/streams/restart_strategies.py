"""Restart strategies as values: ``env.set_restart_strategy(ps.RestartStrategies.fixed_delay(3, "10s"))``.

Each is nothing but configuration keys (``restart-strategy.*``), with the defaults of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from penstock.config import Configuration

_Duration = str | int | timedelta
_Count = int | str


@dataclass(frozen=True, slots=True)
class RestartStrategyChoice:
    """A strategy that was chosen.

    Attributes:
        config: the keys that choose it.
    """

    config: Mapping[str, str]


class RestartStrategies:
    """The strategies there are. Durations are ``"10s"``, ``timedelta(...)`` or milliseconds."""

    @staticmethod
    def none() -> RestartStrategyChoice:
        """The first failure ends the job."""
        return _choice("none")

    @staticmethod
    def fallback() -> RestartStrategyChoice:
        """As the cluster is configured; where it is not, by ``exponential_delay`` if checkpoints are taken."""
        return _choice("fallback")

    @staticmethod
    def fixed_delay(attempts: _Count = 1, delay: _Duration = "1s") -> RestartStrategyChoice:
        """So many restarts in the life of the job.

        Args:
            attempts: restarts before the job fails; ``"infinite"`` = no limit.
            delay: from a failure to its restart.

        Raises:
            ConfigurationError: a value is wrong.
        """
        return _choice("fixed-delay", attempts=attempts, delay=delay)

    @staticmethod
    def failure_rate(
        max_failures_per_interval: int = 1,
        failure_rate_interval: _Duration = "1min",
        delay: _Duration = "1s",
    ) -> RestartStrategyChoice:
        """So many restarts within any interval.

        Args:
            max_failures_per_interval: restarts within the interval before the job fails.
            failure_rate_interval: how long the interval is.
            delay: from a failure to its restart.

        Raises:
            ConfigurationError: a value is wrong.
        """
        return _choice(
            "failure-rate",
            max_failures_per_interval=max_failures_per_interval,
            failure_rate_interval=failure_rate_interval,
            delay=delay,
        )

    @staticmethod
    def exponential_delay(
        initial_backoff: _Duration = "1s",
        max_backoff: _Duration = "1min",
        backoff_multiplier: float = 1.5,
        reset_backoff_threshold: _Duration = "1h",
        jitter_factor: float = 0.1,
        attempts_before_reset_backoff: _Count = "infinite",
    ) -> RestartStrategyChoice:
        """Longer and longer delays, until the job has run well for a while.

        Args:
            initial_backoff: the first delay.
            max_backoff: the longest one.
            backoff_multiplier: growth from one delay to the next, at least 1.
            reset_backoff_threshold: after so long without a failure the next delay is the first again.
            jitter_factor: part of a delay that is added or subtracted at random at most, 0 to 1.
            attempts_before_reset_backoff: restarts before the job fails, counted since the last reset;
                ``"infinite"`` = no limit.

        Raises:
            ConfigurationError: a value is wrong.
        """
        return _choice(
            "exponential-delay",
            initial_backoff=initial_backoff,
            max_backoff=max_backoff,
            backoff_multiplier=backoff_multiplier,
            reset_backoff_threshold=reset_backoff_threshold,
            jitter_factor=jitter_factor,
            attempts_before_reset_backoff=attempts_before_reset_backoff,
        )


def _choice(kind: str, **values: object) -> RestartStrategyChoice:
    keys: dict[str, object] = {"restart-strategy.type": kind}
    for name, value in values.items():
        keys[f"restart-strategy.{kind}.{name.replace('_', '-')}"] = value
    config = Configuration.from_mapping(keys)
    config.check_exponential_delay()
    return RestartStrategyChoice(config.to_mapping())
