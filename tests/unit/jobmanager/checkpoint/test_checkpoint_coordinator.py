"""Aim: the life of a checkpoint: trigger, acks, store, completion, and every way to end otherwise.

Method: source -> middle -> sink with one subtask each, or small graphs of their own; event by event.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.statistics import CheckpointStatus
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.errors import ConfigurationError, InvariantViolation
from tests.support.checkpoints import (
    CHAIN,
    MIDDLE,
    ONE_TASK,
    SINK,
    SOURCE,
    Driver,
    deletions,
    of_type,
    private,
)


def reasons(effects: list[c.CoordinatorEffect]) -> list[tuple[int, c.AbortReason]]:
    return [(e.checkpoint_id, e.reason) for e in of_type(effects, c.ReportAborted)]


# ---------------------------------------------------------------- the good case


def test_completes_once_with_all_acks() -> None:
    driver = Driver(next_checkpoint_id=7)
    assert driver.at(999) == [c.CallAt(101_000)]
    effects = driver.at(1_000)
    assert of_type(effects, c.TriggerTasks) == [c.TriggerTasks(7, 101_000, (SOURCE,))]
    assert not of_type(driver.ack(7, SINK, state_bytes=5), c.StoreCheckpoint)
    assert not of_type(driver.ack(7, SOURCE, state_bytes=6), c.StoreCheckpoint)
    [view] = driver.machine.pending
    assert (view.checkpoint_id, view.acked, view.total) == (7, 2, 3)
    [store] = of_type(driver.ack(7, MIDDLE), c.StoreCheckpoint)
    assert store.snapshots == ((SOURCE, "source@7"), (MIDDLE, "middle@7"), (SINK, "sink@7"))
    assert (store.finished, store.retained, store.next_checkpoint_id) == ((), (7,), 24)
    assert store.state_bytes == 11
    assert driver.machine.latest_completed is None
    assert driver.machine._under_way.storing == 7
    driver.now_ms += 30
    effects = driver.stored(7)
    assert of_type(effects, c.NotifyCompleted) == [c.NotifyCompleted(7, (SOURCE, MIDDLE, SINK))]
    [report] = of_type(effects, c.ReportCompleted)
    assert (report.checkpoint.manifest_path, report.duration_ms) == ("chk-7/manifest", 30)
    assert driver.machine.latest_completed == report.checkpoint
    assert driver.machine._under_way.storing is None
    assert not of_type(driver.stored(7), c.ReportCompleted)


@pytest.mark.parametrize(
    ("key", "checkpoint_id"),
    [
        (SOURCE, 1),  # a second time
        (AttemptKey("middle", 0, 1), 1),  # another attempt
        (AttemptKey("other", 0, 0), 1),
        (MIDDLE, 99),
        (MIDDLE, 0),
    ],
)
def test_strays_are_dropped_counted_and_their_files_deleted(
    key: AttemptKey, checkpoint_id: int
) -> None:
    driver = Driver()
    driver.trigger()
    driver.ack(1, SOURCE, private("chk-1/mine"))
    effects = driver.ack(checkpoint_id, key, private("chk-1/stray"), private("chk-1/mine"))
    assert deletions(effects) == {"chk-1/stray"}
    assert driver.machine.dropped_events == 1
    assert driver.machine.pending[0].acked == 1
    driver.deleted()
    # The same again: its file is on its way out already.
    again = driver.ack(checkpoint_id, key, private("chk-1/stray"))
    assert deletions(again) == set()


def test_a_retransmitted_ack_of_a_completed_checkpoint_deletes_nothing() -> None:
    driver = Driver(ONE_TASK)
    driver.complete(private("chk-1/p"))
    assert deletions(driver.ack(1, SOURCE, private("chk-1/p"))) == set()


def test_stores_one_at_a_time_in_the_order_of_completion() -> None:
    driver = Driver(ONE_TASK, max_concurrent=3, retained_max=2)
    one, two, three = (driver.trigger() for _ in range(3))
    assert of_type(driver.ack(one), c.StoreCheckpoint)
    assert not of_type(driver.ack(three), c.StoreCheckpoint)
    assert not of_type(driver.ack(two), c.StoreCheckpoint)
    [store] = of_type(driver.stored(one), c.StoreCheckpoint)
    assert (store.checkpoint_id, store.retained) == (three, (one, three))
    effects = driver.stored(three)
    assert reasons(effects) == [(two, c.AbortReason.SUBSUMED)]
    assert [kept.checkpoint_id for kept in driver.machine.retained] == [one, three]


def test_the_next_one_waiting_is_stored_where_one_could_not_be() -> None:
    driver = Driver(ONE_TASK, max_concurrent=2)
    one, two = driver.trigger(), driver.trigger()
    driver.ack(two)
    driver.ack(one)
    effects = driver.not_stored(two)
    assert [store.checkpoint_id for store in of_type(effects, c.StoreCheckpoint)] == [one]
    effects = driver.stored(one)
    assert driver.machine.latest_completed is not None
    assert driver.machine.latest_completed.checkpoint_id == one


@pytest.mark.parametrize("too_large", [False, True])
def test_not_stored_aborts_and_deletes_uploads(too_large: bool) -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    driver.ack(one, SOURCE, private("chk-1/p"))
    effects = driver.not_stored(one, too_large=too_large, left=("chk-1/manifest-1",))
    reason = c.AbortReason.TOO_LARGE if too_large else c.AbortReason.STORE_FAILED
    assert reasons(effects) == [(one, reason)]
    assert deletions(effects) == {"chk-1/p", "chk-1/manifest-1"}
    [answer] = of_type(effects, c.AnswerRequest)
    assert (answer.refused, answer.detail) == (c.RequestRefused.ABORTED, "disk full")
    assert driver.machine.latest_completed is None


# ---------------------------------------------------------------- aborts


def test_expires_and_names_who_is_missing() -> None:
    driver = Driver(timeout_ms=500)
    effects = driver.at(1_000)
    assert of_type(effects, c.CallAt) == [c.CallAt(101_500)]
    driver.ack(1, SOURCE)
    effects = driver.at(1_500)
    [report] = of_type(effects, c.ReportAborted)
    assert report.reason is c.AbortReason.EXPIRED
    assert "2 of 3 tasks" in report.detail
    assert str(MIDDLE) in report.detail
    assert str(SOURCE) not in report.detail
    assert (report.failed_in_a_row, report.at_risk_ms) == (1, 1_500)


def test_does_not_expire_while_it_is_stored() -> None:
    driver = Driver(ONE_TASK, timeout_ms=500)
    driver.at(1_000)
    driver.ack(1)
    assert not of_type(driver.at(9_000), c.ReportAborted)
    assert of_type(driver.stored(1), c.ReportCompleted)


def test_declines_that_come_too_late_are_dropped() -> None:
    driver = Driver()
    one = driver.trigger()
    driver.ack(one, SOURCE)
    for key, checkpoint_id in ((SOURCE, one), (MIDDLE, 5), (AttemptKey("x", 0, 0), one)):
        effects = driver.step(c.DeclineReceived(key, checkpoint_id, "late", driver.now_ms))
        assert not of_type(effects, c.ReportAborted)
    assert driver.machine.dropped_events == 3


def test_too_many_failures_fail_the_job_and_a_success_sets_them_back() -> None:
    driver = Driver(ONE_TASK, tolerable_failed=1)

    def fail() -> list[c.CoordinatorEffect]:
        decline = c.DeclineReceived(SOURCE, driver.trigger(), "disk full", driver.now_ms)
        return driver.step(decline)

    assert not of_type(fail(), c.FailJob)
    driver.complete()
    assert not of_type(fail(), c.FailJob)
    effects = fail()
    [failure] = of_type(effects, c.FailJob)
    assert "2 checkpoints in a row" in failure.message
    assert "tolerable-failed-checkpoints" in failure.message
    assert "disk full" in failure.message
    assert not of_type(fail(), c.FailJob)
    assert driver.machine.failed_total == 4


def test_rows_that_are_being_compared_are_no_failure() -> None:
    driver = Driver(ONE_TASK, tolerable_failed=0)
    for _ in range(3):
        checkpoint_id = driver.trigger()
        decline = c.DeclineReceived(
            SOURCE, checkpoint_id, "they come again", driver.now_ms, is_comparing=True
        )
        effects = driver.step(decline)
        [report] = of_type(effects, c.ReportAborted)
        assert (report.reason, report.failed_in_a_row) == (c.AbortReason.COMPARING, 0)
        assert "they come again" in report.detail
        assert not of_type(effects, c.FailJob)
    driver.complete()
    assert driver.machine.failed_total == 0


def test_failures_are_tolerated_without_limit_by_default() -> None:
    driver = Driver(ONE_TASK)
    for number in range(1, 30):
        decline = c.DeclineReceived(SOURCE, driver.trigger(), "no", driver.now_ms)
        effects = driver.step(decline)
        assert of_type(effects, c.ReportAborted)[0].failed_in_a_row == number
        assert not of_type(effects, c.FailJob)


# ---------------------------------------------------------------- tasks that finish or stop


def test_triggers_go_where_all_producers_have_finished() -> None:
    left, right = AttemptKey("source", 0, 0), AttemptKey("source", 1, 0)
    join, sink = AttemptKey("join", 0, 0), AttemptKey("sink", 0, 0)
    tasks = (
        c.TaskView(left, ()),
        c.TaskView(right, ()),
        c.TaskView(join, (left, right)),
        c.TaskView(sink, (join,)),
    )
    driver = Driver(tasks)
    driver.finish(left)
    [trigger] = of_type(driver.request(), c.TriggerTasks)
    assert trigger.keys == (right,)
    [again] = of_type(driver.finish(right), c.TriggerTasks)
    assert again.keys == (join,)
    driver.ack(again.checkpoint_id, join)
    [store] = of_type(driver.ack(again.checkpoint_id, sink), c.StoreCheckpoint)
    assert store.finished == (left, right)
    assert [key for key, _ in store.snapshots] == [join, sink]
    effects = driver.stored(again.checkpoint_id)
    assert of_type(effects, c.NotifyCompleted)[0].keys == (join, sink)


def test_who_was_fed_last_by_a_task_that_had_no_barrier_to_send_is_triggered() -> None:
    left, right, joined = (AttemptKey(vertex, 0, 0) for vertex in ("left", "right", "joined"))
    tasks = (c.TaskView(left, ()), c.TaskView(right, ()), c.TaskView(joined, (left, right)))
    driver = Driver(tasks)
    checkpoint_id = driver.trigger()
    driver.ack(checkpoint_id, left)
    driver.ack(checkpoint_id, right)
    assert not of_type(driver.finish(left), c.TriggerTasks)
    [trigger] = of_type(driver.finish(right), c.TriggerTasks)
    assert (trigger.checkpoint_id, trigger.keys) == (checkpoint_id, (joined,))
    assert of_type(driver.ack(checkpoint_id, joined), c.StoreCheckpoint)


def test_a_task_restored_as_finished_takes_no_part() -> None:
    driver = Driver((c.TaskView(SOURCE, (), finished=True), *CHAIN[1:]))
    [trigger] = of_type(driver.request(), c.TriggerTasks)
    assert trigger.keys == (MIDDLE,)


def test_finishing_between_trigger_and_ack_takes_it_again_at_once() -> None:
    driver = Driver()
    one = driver.trigger()
    driver.ack(one, MIDDLE, private("chk-1/m"))
    effects = driver.finish(SOURCE)
    assert reasons(effects) == [(one, c.AbortReason.TASK_FINISHED)]
    assert of_type(effects, c.ReportAborted)[0].failed_in_a_row == 0
    assert of_type(effects, c.NotifyAborted) == [c.NotifyAborted(one, (MIDDLE, SINK))]
    assert deletions(effects) == {"chk-1/m"}
    assert not of_type(effects, c.AnswerRequest)
    [trigger] = of_type(effects, c.TriggerTasks)
    assert (trigger.checkpoint_id, trigger.keys) == (one + 1, (MIDDLE,))
    driver.ack(one + 1, MIDDLE)
    driver.ack(one + 1, SINK)
    [answer] = of_type(driver.stored(one + 1), c.AnswerRequest)
    assert (answer.request_id, answer.checkpoint_id, answer.refused) == ("r1", one + 1, None)


def test_a_periodic_one_is_taken_again_without_waiting_for_interval_and_pause() -> None:
    driver = Driver(min_pause_ms=5_000)
    driver.at(1_000)
    effects = driver.finish(SOURCE)
    assert [t.checkpoint_id for t in of_type(effects, c.TriggerTasks)] == [2]
    driver.ack(2, MIDDLE)
    driver.ack(2, SINK)
    effects = driver.stored(2)
    assert not of_type(effects, c.TriggerTasks)
    assert of_type(effects, c.CallAt) == [c.CallAt(driver.now_ms + 5_000)]


def test_finishing_after_the_ack_changes_nothing() -> None:
    driver = Driver()
    one = driver.trigger()
    driver.ack(one, SOURCE)
    assert not of_type(driver.finish(SOURCE), c.ReportAborted)
    driver.ack(one, MIDDLE)
    [store] = of_type(driver.ack(one, SINK), c.StoreCheckpoint)
    assert store.finished == ()
    assert of_type(driver.stored(one), c.NotifyCompleted)[0].keys == (MIDDLE, SINK)


def test_one_trigger_per_step_where_several_are_to_be_taken_again() -> None:
    driver = Driver(max_concurrent=3)
    for _ in range(3):
        driver.trigger()
    effects = driver.finish(SOURCE)
    assert len(of_type(effects, c.ReportAborted)) == 3
    assert of_type(effects, c.CallAt)[-1].at_ms == driver.now_ms
    later = [*driver.at(0), *driver.at(0), *driver.at(0)]
    assert [t.checkpoint_id for t in of_type([*effects, *later], c.TriggerTasks)] == [4, 5, 6]


def test_requests_are_refused_once_all_tasks_have_finished() -> None:
    driver = Driver(ONE_TASK)
    driver.trigger()
    effects = driver.finish(SOURCE)
    [answer] = of_type(effects, c.AnswerRequest)
    assert answer.refused is c.RequestRefused.ENDING
    assert "finished" in answer.detail
    assert not of_type(effects, c.TriggerTasks)
    assert not of_type(driver.at(60_000), c.CallAt)


def test_stopping_aborts_and_answers_everything() -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    driver.request()
    driver.request(is_final=True)
    effects = driver.stop()
    assert reasons(effects) == [(one, c.AbortReason.TASKS_STOPPED)]
    # Some may go on while others stop.
    assert of_type(effects, c.NotifyAborted) == [c.NotifyAborted(one, (SOURCE,))]
    answers = {a.request_id: a.refused for a in of_type(effects, c.AnswerRequest)}
    assert answers == {
        "r1": c.RequestRefused.ABORTED,
        "r2": c.RequestRefused.NOT_RUNNING,
        "r3": c.RequestRefused.NOT_RUNNING,
    }
    assert not driver.machine.is_active
    assert not of_type(driver.at(50_000), c.TriggerTasks)
    [answer] = of_type(driver.request(), c.AnswerRequest)
    assert answer.refused is c.RequestRefused.NOT_RUNNING


@pytest.mark.parametrize("restarted", [False, True])
def test_a_checkpoint_that_is_stored_after_the_stop_counts(restarted: bool) -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    driver.ack(one, SOURCE, private("chk-1/p"))
    assert not of_type(driver.stop(), c.ReportAborted)
    assert driver.machine._under_way.storing == one
    if restarted:
        driver.restart((c.TaskView(AttemptKey("source", 0, 1), ()),))
    effects = driver.stored(one)
    assert driver.machine.latest_completed is not None
    assert of_type(effects, c.AnswerRequest)[0].checkpoint_id == one
    told = [] if restarted else [c.NotifyCompleted(one, (SOURCE,), is_awaited=True)]
    assert of_type(effects, c.NotifyCompleted) == told
    assert deletions(effects) == set()


def test_after_a_restart_acks_of_old_attempts_are_strays() -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    driver.stop()
    new = AttemptKey("source", 0, 1)
    driver.restart((c.TaskView(new, ()),))
    assert deletions(driver.ack(one, SOURCE, private("chk-1/p"))) == {"chk-1/p"}
    two = driver.trigger()
    driver.ack(two, SOURCE)
    assert driver.machine.pending[0].acked == 0
    assert of_type(driver.ack(two, new), c.StoreCheckpoint)


def test_starting_again_without_a_stop_voids_what_is_pending() -> None:
    driver = Driver(ONE_TASK)
    one = driver.trigger()
    assert reasons(driver.restart()) == [(one, c.AbortReason.TASKS_STOPPED)]


# ---------------------------------------------------------------- deletions


def test_one_deletion_at_a_time_and_what_is_left_is_tried_again_later() -> None:
    driver = Driver(ONE_TASK, interval_ms=None)
    assert deletions(driver.ack(9, SOURCE, private("a"))) == {"a"}
    assert deletions(driver.ack(9, SOURCE, private("b"))) == set()
    effects = driver.deleted("a")
    assert deletions(effects) == {"b"}
    effects = driver.deleted()
    assert of_type(effects, c.CallAt) == [c.CallAt(101_000)]
    assert deletions(driver.at(999)) == set()
    assert deletions(driver.at(1_000)) == {"a"}
    assert of_type(driver.deleted("a"), c.CallAt) == [c.CallAt(103_000)]
    # Meanwhile checkpoints go on.
    assert of_type(driver.complete(), c.ReportCompleted)
    assert deletions(driver.at(3_000)) == {"a"}
    driver.deleted()
    assert driver.machine._files.deletions.paths() == ()


# ---------------------------------------------------------------- clocks, views, errors


def test_a_clock_that_jumps_back_delays_nothing() -> None:
    driver = Driver(ONE_TASK, timeout_ms=5_000)
    driver.at(500)
    effects = driver.at(-50_000)
    assert of_type(effects, c.CallAt) == [c.CallAt(50_500)]
    assert of_type(driver.at(-49_500), c.TriggerTasks)
    driver.at(-90_000)
    driver.ack(1)
    [report] = of_type(driver.stored(1), c.ReportCompleted)
    assert report.duration_ms == 0


def test_a_clock_that_jumps_forward_triggers_once() -> None:
    driver = Driver(ONE_TASK, timeout_ms=5_000)
    effects = driver.at(3_600_000)
    assert len(of_type(effects, c.TriggerTasks)) == 1
    driver.ack(1)
    effects = driver.stored(1)
    assert not of_type(effects, c.TriggerTasks)
    assert of_type(effects, c.CallAt) == [c.CallAt(driver.now_ms + 1_000)]


def test_history_tells_how_checkpoints_went() -> None:
    driver = Driver(ONE_TASK)
    driver.complete()
    driver.step(c.DeclineReceived(SOURCE, driver.trigger(), "no memory", driver.now_ms))
    driver.complete()
    driver.trigger()
    records = driver.machine.history
    assert [(r.checkpoint_id, r.status, r.retained) for r in records] == [
        (4, CheckpointStatus.PENDING, False),
        (3, CheckpointStatus.COMPLETED, True),
        (2, CheckpointStatus.FAILED, False),
        (1, CheckpointStatus.COMPLETED, False),
    ]
    assert "no memory" in records[2].failure
    assert (records[1].acknowledged, records[1].total) == (1, 1)
    assert driver.machine.completed_total == 2


def test_only_retained_max_of_those_found_survive_the_next_completion() -> None:
    first = Driver(ONE_TASK, retained_max=3)
    for number in range(3):
        first.complete(private(f"p{number}"))
    driver = Driver(ONE_TASK, retained=first.machine.retained, next_checkpoint_id=9)
    assert len(driver.machine.history) == 3
    assert {"p0", "p1", "p2"} < deletions(driver.complete(private("p9")))


def test_wrong_numbers_are_refused() -> None:
    for wrong in (
        {"interval_ms": 0},
        {"timeout_ms": 0},
        {"min_pause_ms": -1},
        {"max_concurrent": 0},
        {"tolerable_failed": -2},
        {"retained_max": 0},
    ):
        with pytest.raises(ConfigurationError, match="must be at least"):
            CheckpointSettings(**{"interval_ms": None, **wrong})  # type: ignore[arg-type]
    found = Driver(ONE_TASK)
    found.complete()
    with pytest.raises(InvariantViolation, match="next id"):
        CheckpointCoordinator(
            CheckpointSettings(None), retained=found.machine.retained, next_checkpoint_id=1
        )


def test_unknown_producers_are_our_bug_and_tell_the_story() -> None:
    driver = Driver(start=False)
    with pytest.raises(InvariantViolation, match="story: TasksStarted"):
        driver.restart((c.TaskView(SINK, (MIDDLE,)),))


# ---------------------------------------------------------------- tasks that load a side first


def loading(driver: Driver) -> list[c.CoordinatorEffect]:
    tasks = tuple(replace(task, is_loading=task.key != SOURCE) for task in CHAIN)
    return driver.step(c.TasksStarted(tasks, driver.now_ms))


def test_none_begins_while_a_task_is_loading_and_who_asks_hears_why() -> None:
    driver = Driver()
    loading(driver)
    driver.now_ms += 10_000
    assert not of_type(driver.at(10_000), c.TriggerTasks)
    [answer] = of_type(driver.step(c.CheckpointRequested("mine", driver.now_ms)), c.AnswerRequest)
    assert (answer.request_id, answer.refused) == ("mine", c.RequestRefused.LOADING)
    assert "load_first" in answer.detail
    assert str(MIDDLE) in answer.detail
    assert not of_type(driver.step(c.TaskLoaded(MIDDLE, driver.now_ms)), c.TriggerTasks)
    effects = driver.step(c.TaskLoaded(SINK, driver.now_ms))
    assert [trigger.keys for trigger in of_type(effects, c.TriggerTasks)] == [(SOURCE,)]
    assert driver.machine.failed_total == 0


def test_one_that_finishes_loads_no_more() -> None:
    driver = Driver()
    loading(driver)
    driver.now_ms += 10_000
    driver.step(c.TaskFinished(SINK, driver.now_ms))
    effects = driver.step(c.TaskLoaded(MIDDLE, driver.now_ms))
    assert of_type(effects, c.TriggerTasks)


# ---------------------------------------------------------------- what finished tasks leave


def test_what_a_finished_task_holds_is_in_every_later_checkpoint() -> None:
    driver = Driver(retained_max=1)
    last = c.LastState("left by source", (private("shared/left"),))
    driver.step(c.TaskFinished(SOURCE, driver.now_ms, last))
    for _ in range(3):
        checkpoint_id = driver.trigger()
        driver.ack(checkpoint_id, MIDDLE)
        [store] = of_type(driver.ack(checkpoint_id, SINK), c.StoreCheckpoint)
        assert store.last == ((SOURCE, "left by source"),)
        effects = driver.stored(checkpoint_id)
        assert "shared/left" not in deletions(effects)
        [completed] = of_type(effects, c.ReportCompleted)
        assert "shared/left" in {r.location.path for r in completed.checkpoint.references}
    again = c.TasksStarted(CHAIN, driver.now_ms)
    driver.step(again)
    checkpoint_id = driver.trigger()
    for key in (SOURCE, MIDDLE, SINK):
        driver.ack(checkpoint_id, key)
    gone = deletions(driver.stored(checkpoint_id)) | deletions(driver.deleted())
    assert "shared/left" in gone
