"""Aim: when a checkpoint starts and whose turn it is.

Method: tables of (settings, what has happened, what is due), on the policy alone and, for the order of
requests, through the coordinator.
"""

from __future__ import annotations

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.failure_policy import pause_after_failures_ms
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.trigger_policy import (
    PERIODIC,
    REQUESTS_MAX,
    Request,
    TriggerPolicy,
)
from tests.support.checkpoints import AT_THE_END, ONE_TASK, SOURCE, Driver, of_type

ON_DEMAND = Request("a")
FINAL = Request("f", AT_THE_END)


@pytest.mark.parametrize(
    ("interval_ms", "min_pause_ms", "last_end", "under_way", "expected"),
    [
        (1_000, 0, None, 0, 1_000),
        (None, 0, None, 0, None),
        (1_000, 0, 700, 0, 1_000),
        (1_000, 500, 700, 0, 1_200),  # the pause is counted from the end of the last one
        (1_000, 500, 300, 0, 1_000),
        (1_000, 500, None, 0, 1_000),
        (1_000, 0, None, 1, 1_000),  # two at once
        (1_000, 1, None, 1, None),  # a pause after the end of one that has not ended
        (1_000, 0, None, 2, None),  # too many
    ],
)
def test_when_the_periodic_one_is_due(
    interval_ms: int | None,
    min_pause_ms: int,
    last_end: int | None,
    under_way: int,
    expected: int | None,
) -> None:
    settings = CheckpointSettings(interval_ms, min_pause_ms=min_pause_ms, max_concurrent=2)
    policy = TriggerPolicy(settings)
    policy.begin(0)
    if last_end is not None:
        policy.completed(last_end)
    assert policy.due_ms(0, under_way) == expected
    if expected is not None:
        assert policy.take(expected - 1, under_way) is None
        assert policy.take(expected, under_way) == PERIODIC


@pytest.mark.parametrize("request_", [ON_DEMAND, FINAL])
def test_requests_ignore_interval_and_pause_but_not_the_bound(request_: Request) -> None:
    policy = TriggerPolicy(CheckpointSettings(1_000, min_pause_ms=5_000, max_concurrent=1))
    policy.begin(0)
    policy.aborted(5, 10)
    assert policy.add(request_) is None
    assert policy.due_ms(11, 1) is None
    assert policy.take(11, 1) is None
    assert policy.due_ms(11, 0) == 11
    assert policy.take(11, 0) == request_
    assert policy.take(11, 0) is None


def test_order() -> None:
    policy = TriggerPolicy(CheckpointSettings(1_000))
    policy.begin(0)
    requests = [Request(name) for name in "abc"]
    for request in requests:
        policy.add(request)
    policy.add(FINAL)
    policy.add_again(Request("again"))
    taken = [policy.take(5_000, 0) for _ in range(6)]
    assert taken == [FINAL, Request("again"), *requests, PERIODIC]


def test_the_queue_is_bounded_but_a_final_one_is_never_refused() -> None:
    policy = TriggerPolicy(CheckpointSettings(1_000))
    for number in range(REQUESTS_MAX):
        assert policy.add(Request(str(number))) is None
    assert policy.add(ON_DEMAND) is c.RequestRefused.QUEUE_FULL
    assert policy.add(FINAL) is None


def test_a_checkpoint_of_any_kind_sets_the_interval_anew() -> None:
    policy = TriggerPolicy(CheckpointSettings(1_000))
    policy.begin(0)
    policy.started(900)
    assert policy.due_ms(900, 0) == 1_900


@pytest.mark.parametrize(
    ("failed_in_a_row", "first_pause_ms", "expected"),
    [
        *((0, 10, 0), (1, 10, 10), (2, 10, 20), (4, 10, 80), (99, 10, 80)),
        *((3, 10_000, 40_000), (99, 10_000, 60_000), (3, 90_000, 90_000)),
    ],
)
def test_pause_after_failures(failed_in_a_row: int, first_pause_ms: int, expected: int) -> None:
    assert pause_after_failures_ms(failed_in_a_row, first_pause_ms) == expected


def test_failures_back_off_until_one_completes() -> None:
    policy = TriggerPolicy(CheckpointSettings(1_000))
    policy.begin(0)
    policy.aborted(3, 100)
    assert policy.due_ms(100, 0) == 4_100
    policy.aborted(0, 200)  # a void one changes nothing
    assert policy.due_ms(200, 0) == 4_100
    policy.completed(300)
    assert policy.due_ms(300, 0) == 1_000


# ---------------------------------------------------------------- through the coordinator


def test_a_final_one_waits_for_what_can_complete_and_goes_ahead_of_all_else() -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    driver.request()
    effects = driver.request(is_final=True)
    assert not of_type(effects, c.ReportAborted)
    assert not of_type(effects, c.TriggerTasks)
    driver.ack(one)
    [trigger] = of_type(driver.stored(one), c.TriggerTasks)
    driver.ack(trigger.checkpoint_id)
    [answer] = of_type(driver.stored(trigger.checkpoint_id), c.AnswerRequest)
    assert answer.request_id == "r3"


def test_requests_beyond_the_bound_are_refused() -> None:
    driver = Driver(ONE_TASK)
    driver.trigger()
    for _ in range(REQUESTS_MAX):
        assert not of_type(driver.request(), c.AnswerRequest)
    [answer] = of_type(driver.request(), c.AnswerRequest)
    assert answer.refused is c.RequestRefused.QUEUE_FULL
    assert answer.detail


def test_the_same_request_again_is_answered_once() -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    assert not driver.step(c.CheckpointRequested("r1", driver.now_ms))
    driver.ack(one)
    assert len(of_type(driver.stored(one), c.AnswerRequest)) == 1


def test_an_interval_that_was_missed_starts_as_soon_as_there_is_room() -> None:
    driver = Driver(ONE_TASK)
    driver.at(1_000)
    assert not of_type(driver.at(5_000), c.TriggerTasks)
    driver.ack(1)
    assert [t.checkpoint_id for t in of_type(driver.stored(1), c.TriggerTasks)] == [2]


def test_periodic_ones_keep_going() -> None:
    driver = Driver(ONE_TASK, min_pause_ms=200)
    starts = []
    for now in range(0, 10_000, 100):
        for trigger in of_type(driver.at(now), c.TriggerTasks):
            starts.append(now)
            driver.now_ms += 50
            driver.step(
                c.AckReceived(
                    SOURCE, trigger.checkpoint_id, None, (), SnapshotSummary(), driver.now_ms
                )
            )
            driver.stored(trigger.checkpoint_id)
    assert starts == list(range(1_000, 10_000, 1_000))
