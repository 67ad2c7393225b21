"""Aim: each failure is restarted after the right delay, joins the restart under way, or ends the job.

Method: the worked examples of Flink's documentation to the millisecond; random failures against a model
that keeps every failure in a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_settings import (
    NO_LIMIT,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartSettings,
    Strategy,
)
from jobmanager.failover.restart_strategy import RestartDecision, RestartStrategy
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.results.results_store import ResultsOverflow
from jobmanager.rpc.graph_convert import cause_of_error

CAUSE = FailureCause("TaskFailure", "it broke")
MINUTE_MS = 60_000
ENDS = RestartDecision(None)


def made(
    strategy: Strategy,
    jitter: Callable[[], float] = lambda: 0.0,
    *,
    per_task: int = NO_LIMIT,
    total: int = NO_LIMIT,
) -> RestartStrategy:
    return RestartStrategy(RestartSettings(strategy, per_task, total), jitter=jitter)


def delays(strategy: RestartStrategy, count: int, run_ms: int = 1) -> list[int | None]:
    """The delays of failures that each come some time after the restart before."""
    found: list[int | None] = []
    now_ms = 0
    for _ in range(count):
        decision = strategy.failed(CAUSE, None, now_ms)
        assert not decision.joined
        found.append(decision.delay_ms)
        now_ms += (decision.delay_ms or 0) + run_ms
    return found


# ---------------------------------------------------------------- exponential delay

EXAMPLE = ExponentialDelay(1_000, 10_000, 2, 6 * MINUTE_MS, 0.1, 8)


def test_the_worked_example() -> None:
    strategy = made(EXAMPLE)
    assert delays(strategy, 9) == [1_000, 2_000, 4_000, 8_000, *[10_000] * 4, None]
    assert strategy.restarts == 8


def test_the_defaults() -> None:
    assert delays(made(ExponentialDelay()), 13) == [
        *(1_000, 1_500, 2_250, 3_375, 5_062, 7_594, 11_391, 17_086, 25_629, 38_443, 57_665),
        *(60_000, 60_000),
    ]


@pytest.mark.parametrize(("jitter", "third", "fourth"), [(-1.0, 3_600, 7_200), (1.0, 4_400, 8_800)])
def test_extreme_jitter(jitter: float, third: int, fourth: int) -> None:
    found = delays(made(EXAMPLE, lambda: jitter), 6)
    assert found[2:4] == [third, fourth]
    assert found[5] == (10_000 if jitter > 0 else 9_000), "no delay is longer than max-backoff"


def test_jitter_does_not_add_up() -> None:
    thrown = iter((1.0, -1.0, 0.0, 0.5))
    assert delays(made(EXAMPLE, lambda: next(thrown)), 4) == [1_100, 1_800, 4_000, 8_400]


def test_the_reset_counts_from_the_end_of_the_delay_and_resets_the_attempts() -> None:
    strategy = made(EXAMPLE)
    assert delays(strategy, 8)[-1] == 10_000
    last_failure_ms = sum((1_000, 2_000, 4_000, 8_000, *[10_000] * 3)) + 7
    end_ms = last_failure_ms + 10_000
    one_short = end_ms + EXAMPLE.reset_threshold_ms - 1
    spent = made(EXAMPLE)
    delays(spent, 8)
    assert spent.failed(CAUSE, None, one_short) == ENDS
    # The retry counter is 1 again, and seven more attempts follow.
    assert strategy.failed(CAUSE, None, one_short + 1) == RestartDecision(1_000)
    now_ms = one_short + 1 + 1_000
    for expected in (2_000, 4_000, 8_000, 10_000, 10_000, 10_000, 10_000, None):
        assert strategy.failed(CAUSE, None, now_ms).delay_ms == expected
        now_ms += expected or 0
    assert strategy.restarts == 16


def test_a_backoff_of_nothing_stays_nothing() -> None:
    assert delays(made(ExponentialDelay(0, 0), lambda: 1.0), 3) == [0, 0, 0]


# ---------------------------------------------------------------- the others


def test_fixed_delay() -> None:
    assert delays(made(FixedDelay()), 2) == [1_000, None]
    assert delays(made(FixedDelay(3, 10_000)), 4) == [10_000, 10_000, 10_000, None]
    assert delays(made(FixedDelay(NO_LIMIT, 0)), 50) == [0] * 50


def test_no_restart() -> None:
    strategy = made(NoRestart())
    assert strategy.failed(CAUSE, None, 0) == ENDS
    assert strategy.told(CAUSE) == CAUSE


def test_failure_rate_slides() -> None:
    strategy = made(FailureRate(3, 300_000, 10_000))
    for now_ms in (0, 100_000, 200_000):
        assert strategy.failed(CAUSE, None, now_ms) == RestartDecision(10_000)
    assert strategy.failed(CAUSE, None, 300_001) == RestartDecision(10_000)
    assert strategy.failed(CAUSE, None, 400_000) == ENDS, "100,000 is still in the interval"
    assert delays(made(FailureRate()), 2) == [1_000, None]


# ---------------------------------------------------------------- joining


def test_failures_during_a_backoff_join_it_and_count_once() -> None:
    strategy = made(FixedDelay(2, 1_000), total=2, per_task=2)
    task = SubtaskId("v0", 0)
    assert strategy.failed(CAUSE, task, 50) == RestartDecision(1_000)
    for now_ms in (50, 51, 1_049):
        joined = RestartDecision(1_050 - now_ms, joined=True)
        assert strategy.failed(CAUSE, task, now_ms) == joined
    assert strategy.restarts == 1
    assert strategy.failed(CAUSE, task, 1_050) == RestartDecision(1_000)
    assert strategy.failed(CAUSE, task, 2_050) == ENDS


def test_a_clock_that_jumps_back_neither_ends_a_backoff_nor_begins_one() -> None:
    strategy = made(FixedDelay(NO_LIMIT, 1_000))
    strategy.failed(CAUSE, None, 10_000_000)
    assert strategy.failed(CAUSE, None, 5_000) == RestartDecision(1_000, joined=True)
    assert strategy.failed(CAUSE, None, 5_400) == RestartDecision(600, joined=True)
    assert strategy.failed(CAUSE, None, 6_000) == RestartDecision(1_000)


# ---------------------------------------------------------------- causes

HOPELESS = FailureCause("Unrecoverable", "no")
WITHIN = FailureCause("TaskFailure", "no", cause_chain=("TaskFailure", "KeyError", "Unrecoverable"))


@pytest.mark.parametrize("cause", [HOPELESS, WITHIN, FailureCause("JobRejected", "no")])
@pytest.mark.parametrize(
    "kind", [NoRestart(), FixedDelay(NO_LIMIT), FailureRate(9), ExponentialDelay()]
)
def test_what_no_restart_mends_ends_the_job_at_any_time(
    kind: Strategy, cause: FailureCause
) -> None:
    assert made(kind).failed(cause, None, 0) == ENDS
    strategy = made(kind)
    strategy.failed(CAUSE, None, 0)
    assert strategy.failed(cause, None, 1) == ENDS
    assert strategy.told(cause) == cause


def test_an_error_of_the_jobmanager_goes_by_the_public_class_it_is_derived_from() -> None:
    cause = cause_of_error(ResultsOverflow("too many rows"), now_ms=7)
    assert (cause.error_class, cause.timestamp_ms) == ("Unrecoverable", 7)
    assert made(FixedDelay()).failed(cause, None, 7) == ENDS


def test_a_class_of_the_users_that_has_such_a_name_means_nothing() -> None:
    named = FailureCause("TaskFailure", "x", cause_chain=("TaskFailure", "jobs.Unrecoverable"))
    assert made(FixedDelay()).failed(named, None, 0) == RestartDecision(1_000)


OF_USER = FailureCause("TaskFailure", "division by zero", traceback="Traceback ...")
NO_SLOTS = FailureCause("NoResourceAvailable", "it needs 9 slots")


@pytest.mark.parametrize(
    "cause",
    [
        OF_USER,
        FailureCause("BadRecord", "x"),
        FailureCause("TaskFailure", "no such file", operator="read_csv"),
    ],
)
def test_failures_of_the_user_are_restarted_where_that_was_asked_for(cause: FailureCause) -> None:
    for spares in (False, True):
        settings = RestartSettings(ExponentialDelay(), spares_user_failures=spares)
        strategy = RestartStrategy(settings, jitter=lambda: 0.0)
        assert (strategy.failed(cause, None, 0).delay_ms is not None) is spares


@pytest.mark.parametrize("is_recovered", [False, True])
@pytest.mark.parametrize("spares", [False, True])
def test_a_first_start_without_enough_slots_ends_a_job_that_did_not_ask_for_restarts(
    is_recovered: bool, spares: bool
) -> None:
    settings = RestartSettings(FixedDelay(NO_LIMIT, 10), spares_user_failures=spares)
    strategy = RestartStrategy(settings, jitter=lambda: 0.0, is_recovered=is_recovered)
    assert strategy.allows(NO_SLOTS) == (is_recovered or spares)
    # Once it has run, the slots may come back.
    assert strategy.failed(CAUSE, None, 0).delay_ms == 10
    assert strategy.failed(NO_SLOTS, None, 10).delay_ms == 10


# ---------------------------------------------------------------- limits, and what is told of them


def test_the_limit_per_task() -> None:
    strategy = made(FixedDelay(NO_LIMIT, 10), per_task=2)
    first, second = SubtaskId("v0", 0), SubtaskId("v0", 1)
    for number, task in enumerate((first, second, None, first, None, second, None)):
        assert strategy.failed(CAUSE, task, 10 * number) == RestartDecision(10)
    assert strategy.failed(CAUSE, first, 70) == ENDS
    assert strategy.told(CAUSE).message == (
        "it broke (subtask v0/0 has failed 3 times, and restart-strategy.max-failures-per-task = 2 is "
        "used up)"
    )


def test_the_limit_of_the_job() -> None:
    strategy = made(ExponentialDelay(), total=1)
    assert strategy.failed(CAUSE, SubtaskId("v0", 0), 0) == RestartDecision(1_000)
    assert strategy.failed(CAUSE, SubtaskId("v0", 1), 999).joined
    assert strategy.failed(CAUSE, SubtaskId("v0", 1), 1_000) == ENDS
    assert "restart-strategy.max-failures-total = 1" in strategy.told(CAUSE).message


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (FixedDelay(2), "restarted 2 times before, as restart-strategy.fixed-delay.attempts"),
        (
            FailureRate(2),
            "restarted 2 times within 60 s, as restart-strategy.failure-rate.max-fail",
        ),
        (
            ExponentialDelay(attempts_max=2),
            (
                "restarted 2 times without running for 3600 s in between, as "
                "restart-strategy.exponential-delay.attempts-before-reset-backoff"
            ),
        ),
    ],
)
def test_the_end_names_the_key_to_change(kind: Strategy, words: str) -> None:
    strategy = made(kind)
    assert strategy.told(CAUSE) == CAUSE
    delays(strategy, 3)
    assert words in strategy.told(CAUSE).message
    assert strategy.told(HOPELESS) == HOPELESS


# ---------------------------------------------------------------- against a model


@dataclass
class Model:
    """Every counted failure in a list, and the rules of the strategies read off it."""

    kind: Strategy
    per_task: int
    total: int
    counted: list[tuple[int, int, SubtaskId | None]] = field(default_factory=list)
    """(when, until when its delay lasted, whose)."""

    def failed(self, task: SubtaskId | None, now_ms: int) -> RestartDecision:
        if self.counted and now_ms < self.counted[-1][1]:
            return RestartDecision(self.counted[-1][1] - now_ms, joined=True)
        same = sum(1 for _, _, other in self.counted if task is not None and other == task)
        if NO_LIMIT != self.total <= len(self.counted) or NO_LIMIT != self.per_task <= same:
            return ENDS
        delay_ms = self.delay_ms(now_ms)
        if delay_ms is not None:
            self.counted.append((now_ms, now_ms + delay_ms, task))
        return RestartDecision(delay_ms)

    def delay_ms(self, now_ms: int) -> int | None:
        match self.kind:
            case FixedDelay(attempts, delay_ms):
                return None if len(self.counted) == attempts else delay_ms
            case FailureRate(most, interval_ms, delay_ms):
                recent = [at for at, _, _ in self.counted if now_ms - at <= interval_ms]
                return None if len(recent) >= most else delay_ms
            case ExponentialDelay(initial, longest, multiplier, reset_ms, _, attempts):
                streak = 0
                following = now_ms
                for at, end, _ in reversed(self.counted):
                    if following - end >= reset_ms:
                        break
                    following, streak = at, streak + 1
                if streak == attempts:
                    return None
                return round(min(longest, initial * multiplier**streak))
            case NoRestart():
                return None


counts = st.one_of(st.just(NO_LIMIT), st.integers(1, 6))
kinds = st.one_of(
    st.builds(FixedDelay, counts, st.integers(0, 50)),
    st.builds(FailureRate, st.integers(1, 4), st.integers(1, 200), st.integers(0, 50)),
    st.builds(
        ExponentialDelay,
        st.integers(0, 40),
        st.integers(40, 200),
        st.sampled_from((1.0, 1.5, 2.0, 4.0)),
        st.integers(1, 300),
        st.just(0.0),
        counts,
    ),
)
tasks = st.one_of(st.none(), st.builds(SubtaskId, st.just("v"), st.integers(0, 2)))
failures = st.lists(st.tuples(st.integers(0, 150), tasks), max_size=40)


@given(kinds, failures, counts, counts)
def test_every_strategy_does_as_its_model(
    kind: Strategy, steps: list[tuple[int, SubtaskId | None]], per_task: int, total: int
) -> None:
    strategy, model = made(kind, per_task=per_task, total=total), Model(kind, per_task, total)
    now_ms = 1_000_000
    for later_ms, task in steps:
        now_ms += later_ms
        decision = strategy.failed(CAUSE, task, now_ms)
        assert decision == model.failed(task, now_ms)
        if decision.delay_ms is None:
            break
    assert strategy.restarts == len(model.counted)


@given(
    st.floats(-1, 1),
    st.floats(0, 1),
    st.lists(st.integers(-1_000, 1_000), min_size=1, max_size=20),
)
def test_delays_stay_within_their_bounds_whatever_the_clock_does(
    thrown: float, factor: float, jumps: list[int]
) -> None:
    kind = ExponentialDelay(100, 1_000, 2, 10_000, factor)
    strategy = made(kind, lambda: thrown)
    now_ms = 1_000_000
    for jump in jumps:
        now_ms += jump
        before = strategy.restarts
        decision = strategy.failed(CAUSE, None, now_ms)
        assert decision.delay_ms is not None
        assert 0 <= decision.delay_ms <= kind.max_backoff_ms
        assert strategy.restarts == before + (not decision.joined)
