"""How long each restart is delayed, and when the restarts of a strategy are used up.

A backoff is told of counted failures only: who joins a restart under way does not get here. Time is steady
(``SteadyTime``), in milliseconds.

Source: Flink, FixedDelay-, FailureRate- and ExponentialDelayRestartBackoffTimeStrategy. There a first
delay with jitter is never shorter than the initial backoff; here jitter works in both directions.

Example: delays double up to a limit.
    >>> strategy = ExponentialDelay(initial_backoff_ms=100, max_backoff_ms=300, multiplier=2)
    >>> backoff = backoff_of(strategy, jitter=lambda: 0.0)
    >>> [backoff.failed(now_ms) for now_ms in (0, 1_000, 2_000)]
    [100, 200, 300]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from jobmanager.failover.restart_counts import BackoffCounts
from jobmanager.failover.restart_settings import (
    NO_LIMIT,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    Strategy,
)


class Backoff(Protocol):
    """The delays of one strategy."""

    def failed(self, now_ms: int) -> int | None:
        """Counts a failure; the delay of its restart, None = there are no more."""

    def used_up(self) -> str:
        """What was used up when ``failed`` last returned None, in words; "" = nothing ever was there."""

    def counts(self) -> BackoffCounts:
        """What has been used."""


def backoff_of(
    strategy: Strategy,
    jitter: Callable[[], float],
    counts: BackoffCounts = BackoffCounts(),  # noqa: B008 - it is frozen
) -> Backoff:
    """A backoff.

    Args:
        strategy: kind and numbers.
        jitter: uniform in -1..1.
        counts: what has been used of it.
    """
    match strategy:
        case NoRestart():
            return NoBackoff()
        case FixedDelay():
            return FixedBackoff(strategy, counts)
        case FailureRate():
            return RateBackoff(strategy, counts)
        case ExponentialDelay():
            return ExponentialBackoff(strategy, jitter, counts)


class NoBackoff:
    """There are no restarts."""

    def failed(self, now_ms: int) -> int | None:
        """None."""

    def used_up(self) -> str:
        """Nothing that could be."""
        return ""

    def counts(self) -> BackoffCounts:
        """Nothing."""
        return BackoffCounts()


class FixedBackoff:
    """The same delay, so many times."""

    def __init__(self, settings: FixedDelay, counts: BackoffCounts) -> None:
        self._settings = settings
        self._attempts = counts.attempts

    def failed(self, now_ms: int) -> int | None:
        """Counts a failure; the delay of its restart, None = there are no more."""
        attempts_max = self._settings.attempts_max
        if attempts_max != NO_LIMIT and self._attempts >= attempts_max:
            return None
        self._attempts += 1
        return self._settings.delay_ms

    def used_up(self) -> str:
        """The restarts."""
        return f"restarted {times(self._attempts)} before, as restart-strategy.fixed-delay.attempts allows"

    def counts(self) -> BackoffCounts:
        """The restarts."""
        return BackoffCounts(self._attempts)


class RateBackoff:
    """The same delay, so many times within any interval."""

    def __init__(self, settings: FailureRate, counts: BackoffCounts) -> None:
        self._settings = settings
        self._restarted_at_ms = deque(counts.restarted_at_ms)

    def failed(self, now_ms: int) -> int | None:
        """Counts a failure; the delay of its restart, None = there are too many."""
        restarted = self._restarted_at_ms
        while restarted and now_ms - restarted[0] > self._settings.interval_ms:
            restarted.popleft()
        if len(restarted) >= self._settings.restarts_max:
            return None
        restarted.append(now_ms)
        return self._settings.delay_ms

    def used_up(self) -> str:
        """The restarts of an interval."""
        return (
            f"restarted {times(len(self._restarted_at_ms))} within {self._settings.interval_ms / 1000:g} s, "
            "as restart-strategy.failure-rate.max-failures-per-interval and .failure-rate-interval allow"
        )

    def counts(self) -> BackoffCounts:
        """When it was restarted."""
        return BackoffCounts(restarted_at_ms=tuple(self._restarted_at_ms))


class ExponentialBackoff:
    """Delays that grow with each failure until the job has run well for a while."""

    def __init__(
        self, settings: ExponentialDelay, jitter: Callable[[], float], counts: BackoffCounts
    ) -> None:
        self._settings = settings
        self._jitter = jitter
        self._attempts = counts.attempts
        self._backoff_ms = counts.backoff_ms
        self._delay_ends_at_ms = counts.delay_ends_at_ms

    def failed(self, now_ms: int) -> int | None:
        """Counts a failure; the delay of its restart, None = there are no more."""
        settings = self._settings
        ends_at_ms = self._delay_ends_at_ms
        if ends_at_ms is None or now_ms - ends_at_ms >= settings.reset_threshold_ms:
            self._attempts = 0
        if settings.attempts_max != NO_LIMIT and self._attempts >= settings.attempts_max:
            return None
        grown = (
            self._backoff_ms * settings.multiplier
            if self._attempts
            else settings.initial_backoff_ms
        )
        self._backoff_ms = min(grown, settings.max_backoff_ms)
        self._attempts += 1
        jitter_ms = self._backoff_ms * settings.jitter_factor * self._jitter()
        delay_ms = min(round(self._backoff_ms + jitter_ms), settings.max_backoff_ms)
        self._delay_ends_at_ms = now_ms + delay_ms
        return delay_ms

    def used_up(self) -> str:
        """The restarts since the last reset."""
        return (
            f"restarted {times(self._attempts)} without running for "
            f"{self._settings.reset_threshold_ms / 1000:g} s in between, as "
            "restart-strategy.exponential-delay.attempts-before-reset-backoff allows"
        )

    def counts(self) -> BackoffCounts:
        """The restarts since the last reset, and the last delay."""
        return BackoffCounts(self._attempts, self._backoff_ms, self._delay_ends_at_ms)


def times(count: int) -> str:
    """A number of restarts or failures in words."""
    return "once" if count == 1 else f"{count} times"
