"""Aim: a job is restarted as its configuration says, by every key, alias, default and notation.

Method: configurations in, settings out; a job's keys over a cluster's.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

import penstock as ps
from jobmanager.failover.restart_settings import (
    NO_LIMIT,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartSettings,
    Strategy,
    over_cluster,
    restart_settings,
)
from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobRejected

FIXED, RATE, EXPONENTIAL = (
    f"restart-strategy.{kind}." for kind in ("fixed-delay", "failure-rate", "exponential-delay")
)
TYPE = "restart-strategy.type"


def settings(
    job: dict[str, object], cluster: dict[str, object] | None = None, *, checkpoints: bool = True
) -> RestartSettings:
    in_force = over_cluster(Configuration.from_mapping(cluster or {}), job)
    return restart_settings(in_force, takes_checkpoints=checkpoints)


def strategy(job: dict[str, object], cluster: dict[str, object] | None = None) -> Strategy:
    return settings(job, cluster).strategy


# ---------------------------------------------------------------- kinds and defaults


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("none", "off", "disable", False, "OFF"), NoRestart()),
        (("fixed-delay", "fixeddelay", "Fixed-Delay"), FixedDelay(1, 1_000)),
        (("failure-rate", "failurerate"), FailureRate(1, 60_000, 1_000)),
        (
            ("exponential-delay", "exponentialdelay"),
            ExponentialDelay(1_000, 60_000, 1.5, 3_600_000, 0.1, NO_LIMIT),
        ),
    ],
)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_every_alias_has_the_defaults_of_its_kind(
    names: tuple[object, ...], expected: Strategy, checkpoints: bool
) -> None:
    for name in names:
        assert settings({TYPE: name}, checkpoints=checkpoints) == RestartSettings(expected)


def test_without_a_type_checkpoints_decide() -> None:
    assert settings({}) == RestartSettings(ExponentialDelay(), spares_user_failures=False)
    assert not settings({}, checkpoints=False).restarts
    # Whoever asks for checkpoints asks for restarts of every failure.
    assert settings({"execution.checkpointing.interval": "1s"}).spares_user_failures
    # Numbers of the strategy that there is by default are heeded.
    assert strategy({f"{EXPONENTIAL}initial-backoff": "2s"}) == ExponentialDelay(2_000)


def test_every_number_can_be_set() -> None:
    assert strategy({TYPE: "fixed-delay", f"{FIXED}attempts": "3", f"{FIXED}delay": "10 s"}) == (
        FixedDelay(3, 10_000)
    )
    rate = {
        TYPE: "failure-rate",
        f"{RATE}max-failures-per-interval": "3",
        f"{RATE}failure-rate-interval": "5 min",
        f"{RATE}delay": "10 s",
    }
    assert strategy(rate) == FailureRate(3, 300_000, 10_000)
    exponential = {
        TYPE: "exponential-delay",
        f"{EXPONENTIAL}initial-backoff": "10 s",
        f"{EXPONENTIAL}max-backoff": "2 min",
        f"{EXPONENTIAL}backoff-multiplier": "1.4",
        f"{EXPONENTIAL}reset-backoff-threshold": "10 min",
        f"{EXPONENTIAL}jitter-factor": "0.1",
        f"{EXPONENTIAL}attempts-before-reset-backoff": "10",
    }
    assert strategy(exponential) == ExponentialDelay(10_000, 120_000, 1.4, 600_000, 0.1, 10)
    limits = {
        "restart-strategy.max-failures-per-task": 4,
        "restart-strategy.max-failures-total": "7",
    }
    limited = settings(limits)
    assert (limited.failures_per_task_max, limited.failures_total_max) == (4, 7)


@pytest.mark.parametrize("notation", ["10 s", "10s", "10000 ms", 10_000, timedelta(seconds=10)])
def test_durations_in_every_notation(notation: object) -> None:
    assert strategy({TYPE: "fixed-delay", f"{FIXED}delay": notation}) == FixedDelay(1, 10_000)
    assert strategy({TYPE: "failure-rate", f"{RATE}failure-rate-interval": "1 min"}) == (
        FailureRate(1, 60_000)
    )


@pytest.mark.parametrize("endless", ["infinite", "unlimited"])
def test_counts_without_a_limit(endless: object) -> None:
    assert strategy({TYPE: "fixed-delay", f"{FIXED}attempts": endless}) == FixedDelay(NO_LIMIT)
    limited = settings({"restart-strategy.max-failures-total": endless})
    assert limited.failures_total_max == limited.failures_per_task_max == NO_LIMIT
    # As it travels with the job.
    set_there = Configuration.from_mapping({f"{FIXED}attempts": endless}).to_mapping()
    assert strategy({TYPE: "fixed-delay", **set_there}) == FixedDelay(NO_LIMIT)


def test_settings_that_allow_no_restart_say_so() -> None:
    for mapping in (
        {TYPE: "fixed-delay", f"{FIXED}attempts": 0},
        {TYPE: "exponential-delay", f"{EXPONENTIAL}attempts-before-reset-backoff": 0},
        {TYPE: "failure-rate", "restart-strategy.max-failures-total": 0},
        {TYPE: "failure-rate", "restart-strategy.max-failures-per-task": 0},
    ):
        assert not settings(mapping).restarts
    for kind in ("fixed-delay", "failure-rate", "exponential-delay"):
        assert settings({TYPE: kind}).restarts


# ---------------------------------------------------------------- what is refused


def test_who_wants_no_limit_is_told_its_name() -> None:
    with pytest.raises(ConfigurationError, match="at least 0, or `infinite` for no limit"):
        ps.RestartStrategies.fixed_delay(attempts=-1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TYPE, "sometimes"),
        (f"{FIXED}attempts", -1),
        (f"{FIXED}attempts", "-1"),
        (f"{FIXED}attempts", True),
        (f"{FIXED}delay", True),
        (f"{RATE}max-failures-per-interval", True),
        (f"{FIXED}delay", "-1s"),
        (f"{FIXED}delay", "soon"),
        (f"{RATE}max-failures-per-interval", 0),
        (f"{RATE}failure-rate-interval", 0),
        (f"{EXPONENTIAL}initial-backoff", -1),
        (f"{EXPONENTIAL}backoff-multiplier", 0.99),
        (f"{EXPONENTIAL}backoff-multiplier", "nan"),
        (f"{EXPONENTIAL}backoff-multiplier", "inf"),
        (f"{EXPONENTIAL}jitter-factor", 1.01),
        (f"{EXPONENTIAL}jitter-factor", -0.01),
        (f"{EXPONENTIAL}reset-backoff-threshold", 0),
        (f"{EXPONENTIAL}jitter-factor", True),
        (f"{EXPONENTIAL}attempts-before-reset-backoff", -1),
        ("restart-strategy.max-failures-total", -1),
        ("restart-strategy.max-failures-total", False),
        ("restart-strategy.max-failures-per-task", "many"),
        ("execution.checkpointing.tolerable-failed-checkpoints", -1),
    ],
)
def test_values_that_make_no_sense_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=key.replace(".", r"\.")):
        settings({key: value})


def test_the_longest_delay_is_no_shorter_than_the_first() -> None:
    wrong = {TYPE: "exponential-delay", f"{EXPONENTIAL}max-backoff": "999 ms"}
    too_short = r"max-backoff \(999 ms\) is shorter than .* \(1000 ms\)"
    with pytest.raises(ConfigurationError, match=too_short):
        settings(wrong)
    with pytest.raises(ConfigurationError, match=too_short):
        ps.RestartStrategies.exponential_delay(max_backoff="999 ms")
    assert strategy({**wrong, TYPE: "fixed-delay"}) == FixedDelay()
    equal = {TYPE: "exponential-delay", f"{EXPONENTIAL}max-backoff": "1 s"}
    assert strategy(equal) == ExponentialDelay(1_000, 1_000)


# ---------------------------------------------------------------- the job over the cluster

CLUSTER = {
    TYPE: "fixed-delay",
    f"{FIXED}attempts": 100,
    f"{FIXED}delay": "7s",
    f"{EXPONENTIAL}max-backoff": "500ms",
    "restart-strategy.max-failures-total": 9,
    "execution.checkpointing.interval": "5s",
}


def test_a_job_without_a_strategy_has_the_clusters() -> None:
    assert settings({}, CLUSTER) == RestartSettings(FixedDelay(100, 7_000), failures_total_max=9)
    # Single numbers of it can be the job's.
    assert strategy({f"{FIXED}attempts": 1}, CLUSTER) == FixedDelay(1, 7_000)


def test_a_job_with_a_strategy_takes_all_its_numbers_from_itself() -> None:
    assert strategy({TYPE: "exponential-delay"}, CLUSTER) == ExponentialDelay()
    assert strategy({TYPE: "fixed-delay"}, CLUSTER) == FixedDelay(1, 1_000)
    assert not settings({TYPE: "none"}, CLUSTER).restarts
    # What is no part of a strategy stays the cluster's.
    in_force = over_cluster(Configuration.from_mapping(CLUSTER), {TYPE: "fixed-delay"})
    assert in_force.execution_checkpointing_interval_ms == 5_000
    assert restart_settings(in_force, True).failures_total_max == 9


def test_limits_are_the_jobs_over_the_clusters() -> None:
    endless = {"restart-strategy.max-failures-total": "infinite"}
    assert settings(endless, CLUSTER).failures_total_max == NO_LIMIT
    assert settings({TYPE: "fallback", **endless}, CLUSTER).failures_total_max == NO_LIMIT


def test_fallback_is_the_clusters_strategy_or_the_default() -> None:
    job = {TYPE: "fallback", f"{FIXED}attempts": 2}
    assert strategy(job, CLUSTER) == FixedDelay(100, 7_000)
    for cluster in ({}, {TYPE: "fallback"}):
        assert settings(job, cluster) == RestartSettings(
            ExponentialDelay(), spares_user_failures=False
        )
        assert not settings(job, cluster, checkpoints=False).restarts


# ---------------------------------------------------------------- from Python


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ps.RestartStrategies.none(), NoRestart()),
        (ps.RestartStrategies.fallback(), FixedDelay(100, 7_000)),
        (ps.RestartStrategies.fixed_delay(), FixedDelay()),
        (ps.RestartStrategies.fixed_delay(3, timedelta(seconds=10)), FixedDelay(3, 10_000)),
        (ps.RestartStrategies.fixed_delay("infinite"), FixedDelay(NO_LIMIT)),
        (ps.RestartStrategies.failure_rate(), FailureRate()),
        (ps.RestartStrategies.failure_rate(3, "5 min", "10 s"), FailureRate(3, 300_000, 10_000)),
        (ps.RestartStrategies.exponential_delay(), ExponentialDelay()),
        (
            ps.RestartStrategies.exponential_delay(
                initial_backoff=1,
                max_backoff="1s",
                backoff_multiplier=1.1,
                reset_backoff_threshold=timedelta(seconds=2),
                jitter_factor=0.2,
                attempts_before_reset_backoff=8,
            ),
            ExponentialDelay(1, 1_000, 1.1, 2_000, 0.2, 8),
        ),
    ],
)
def test_strategies_are_chosen_in_python(
    choice: ps.restart_strategies.RestartStrategyChoice, expected: Strategy
) -> None:
    env = ps.Environment("h:1", config={TYPE: "fixed-delay", f"{FIXED}attempts": 77})
    env.set_restart_strategy(choice)
    assert strategy(dict(env.config.to_mapping()), CLUSTER) == expected


def test_a_strategy_that_is_none_is_refused() -> None:
    env = ps.Environment("h:1", config={"restart-strategy.max-failures-total": 3})
    with pytest.raises(JobRejected, match="RestartStrategies"):
        env.set_restart_strategy("fixed-delay")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="jitter-factor"):
        ps.RestartStrategies.exponential_delay(jitter_factor=2)
    env.set_restart_strategy(ps.RestartStrategies.none())
    assert env.config.restart_strategy_max_failures_total == 3
