"""Aim: a subtask is slow from the millisecond on that the settings say, and never before enough are done.

Method: attempts by hand; random ones against the rule, spelled out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, ExecutionAttempt
from jobmanager.scheduler.slow_task_detector import SlowTaskDetector, SlowTaskSettings

DEPLOYED_AT_MS = 5_000


def attempts_of(*done_after_ms: int | None) -> list[ExecutionAttempt]:
    """Attempts that were done so long after their deployment; None = they run."""
    attempts = []
    for index, duration_ms in enumerate(done_after_ms):
        attempt = ExecutionAttempt(AttemptKey("v", index, 0), AttemptState.RUNNING)
        attempt.deployed_at_ms = DEPLOYED_AT_MS
        if duration_ms is not None:
            attempt.state = AttemptState.FINISHED
            attempt.done_at_ms = DEPLOYED_AT_MS + duration_ms
        attempts.append(attempt)
    return attempts


def slow_after(
    duration_ms: int, attempts: Sequence[ExecutionAttempt], settings: SlowTaskSettings
) -> list[int]:
    """Indices of those that are slow so long after the deployment."""
    found = SlowTaskDetector(settings).slow(attempts, DEPLOYED_AT_MS + duration_ms)
    return [attempt.key.subtask_index for attempt in found]


def test_slow_is_who_has_run_for_a_multiple_of_the_median() -> None:
    settings = SlowTaskSettings(lower_bound_ms=0, ratio=0.75, multiplier=1.5)
    attempts = attempts_of(100, 1_000, None, 200)
    assert slow_after(299, attempts, settings) == []
    assert slow_after(300, attempts, settings) == [2], "1.5 times 200"


def test_nobody_is_slow_below_the_lower_bound() -> None:
    attempts = attempts_of(100, 100, 100, None)
    settings = SlowTaskSettings(lower_bound_ms=10_000)
    assert slow_after(9_999, attempts, settings) == []
    assert slow_after(10_000, attempts, settings) == [3]
    assert slow_after(60_000, attempts, SlowTaskSettings()) == [3], "the defaults"
    assert slow_after(59_999, attempts, SlowTaskSettings()) == []


@pytest.mark.parametrize(("done", "are_enough"), [(2, False), (3, True)])
def test_nobody_is_slow_before_enough_are_done(done: int, are_enough: bool) -> None:
    attempts = attempts_of(*[10] * done, *[None] * (4 - done))
    slow = slow_after(10**9, attempts, SlowTaskSettings(ratio=0.75))
    assert slow == (list(range(done, 4)) if are_enough else [])


def test_what_was_done_under_another_jobmanager_says_nothing_of_times() -> None:
    attempts = attempts_of(100, 100, 100, None)
    for adopted in attempts[:2]:
        adopted.deployed_at_ms = adopted.done_at_ms = 0
    settings = SlowTaskSettings(lower_bound_ms=0, ratio=0.25, multiplier=2.0)
    assert slow_after(199, attempts, settings) == []
    assert slow_after(200, attempts, settings) == [3]


def test_the_only_subtask_of_a_vertex_is_never_slow() -> None:
    assert slow_after(10**9, attempts_of(None), SlowTaskSettings(ratio=0.01)) == []


def test_a_ratio_of_nothing_leaves_the_lower_bound() -> None:
    settings = SlowTaskSettings(lower_bound_ms=70, ratio=0.0)
    assert slow_after(69, attempts_of(None, None), settings) == []
    assert slow_after(70, attempts_of(None, None), settings) == [0, 1]


def test_slow_ones_that_are_done_do_not_raise_the_baseline() -> None:
    """The median is that of the fastest, as many as the ratio asks for."""
    settings = SlowTaskSettings(lower_bound_ms=0, ratio=0.5, multiplier=1.0)
    attempts = attempts_of(100, 100, 100, 9_000, 9_000, None)
    assert slow_after(99, attempts, settings) == []
    assert slow_after(100, attempts, settings) == [5]


@pytest.mark.parametrize(
    ("state", "is_slow"),
    [
        (AttemptState.CREATED, False),
        (AttemptState.SCHEDULED, False),
        (AttemptState.DEPLOYING, True),
        (AttemptState.INITIALIZING, True),
        (AttemptState.CANCELING, False),
        (AttemptState.FAILED, False),
    ],
)
def test_only_who_is_to_go_on_is_slow(state: AttemptState, is_slow: bool) -> None:
    attempts = attempts_of(1, 1, 1, None)
    attempts[3].state = state
    assert slow_after(10**9, attempts, SlowTaskSettings()) == ([3] if is_slow else [])


def test_who_waits_for_the_commit_is_done() -> None:
    attempts = attempts_of(1, 1, None, None)
    for index, duration_ms in ((2, 4_000), (3, None)):
        if duration_ms is not None:
            attempts[index].reached_end_of_data = True
            attempts[index].done_at_ms = DEPLOYED_AT_MS + duration_ms
    settings = SlowTaskSettings(lower_bound_ms=0, ratio=0.75, multiplier=2.0)
    assert slow_after(2, attempts, settings) == [3]


@given(
    st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=12),
    st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9]),
    st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    st.integers(0, 60),
    st.integers(0, 150),
)
def test_the_rule(
    durations_ms: list[int | None],
    ratio: float,
    multiplier: float,
    lower_bound_ms: int,
    now_ms: int,
) -> None:
    done_ms = sorted(duration for duration in durations_ms if duration is not None)
    running = [index for index, duration in enumerate(durations_ms) if duration is None]
    needed = min(n for n in range(len(durations_ms) + 1) if n / len(durations_ms) >= ratio - 1e-9)
    expected = []
    if len(done_ms) >= needed:
        median_ms = statistics.median_high(done_ms[:needed])
        if now_ms >= lower_bound_ms and now_ms >= median_ms * multiplier:
            expected = running
    settings = SlowTaskSettings(1, lower_bound_ms, ratio, multiplier)
    assert slow_after(now_ms, attempts_of(*durations_ms), settings) == expected
