"""Aim: a savepoint is taken beside a job's checkpoints and is none of them.

Method: the coordinator, driven event by event; and its savepoints in between drawn requests, acks, stores and stops, where
every request is answered once and what is registered, kept and counted is that of the checkpoints alone.
"""

from __future__ import annotations

import random

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.trigger_policy import Request, TriggerPolicy
from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from jobmanager.job.checkpoint_wiring import CheckpointWiring
from jobmanager.job.source_splits import SourceSplits
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
)
from penstock.storage.manifest import StoredRange
from tests.support.checkpoints import (
    CHAIN,
    MIDDLE,
    SOURCE,
    Driver,
    deletions,
    of_type,
    private,
    shared,
)

SAVEPOINT = CheckpointProperties(CheckpointKind.SAVEPOINT, "/kept/savepoint-1")


SAVED = CheckpointProperties(target="/kept/savepoint-1")
"""As it is where the store makes it of a checkpoint of the job."""


def ask(driver: Driver, name: str = "s") -> list[c.CoordinatorEffect]:
    return driver.step(c.CheckpointRequested(name, driver.now_ms, SAVEPOINT))


def triggered(effects: list[c.CoordinatorEffect]) -> c.TriggerTasks:
    [trigger] = of_type(effects, c.TriggerTasks)
    return trigger


def test_it_is_not_kept_counted_or_built_upon() -> None:
    driver = Driver(max_concurrent=3)
    driver.complete(shared("a", "shared/1"))
    trigger = triggered(ask(driver))
    assert trigger.properties == SAVEPOINT
    effects = driver.ack_all(trigger.checkpoint_id, shared("a", "shared/1"), private("state/2"))
    [store] = of_type(effects, c.StoreCheckpoint)
    assert (store.retained, store.next_checkpoint_id) == ((), 0)
    effects = driver.stored(trigger.checkpoint_id)
    assert of_type(effects, c.AnswerRequest) == [c.AnswerRequest("s", trigger.checkpoint_id)]
    [saved] = of_type(effects, c.NotifySaved)
    assert set(saved.keys) == {task.key for task in CHAIN}
    assert not of_type(effects, c.NotifyCompleted)
    assert not of_type(effects, c.ReportCompleted)
    machine = driver.machine
    assert [kept.checkpoint_id for kept in machine.retained] == [1]
    assert machine._files.registry.count(shared("a", "").identity or StoredRange("", 0, 0, 0)) == 1
    assert machine.completed_total == 1
    assert [record.checkpoint_id for record in machine.history] == [1]
    # The next checkpoint has an id behind it, and releases the first one's file.
    effects = driver.complete(shared("b", "shared/3"))
    assert [kept.checkpoint_id for kept in machine.retained] == [trigger.checkpoint_id + 1]
    assert "shared/1" in deletions(effects)
    assert not any(path.startswith("state/") for path in deletions(effects))


def test_it_waits_for_what_is_under_way_and_holds_back_what_comes_next() -> None:
    driver = Driver(max_concurrent=3, interval_ms=1_000)
    first = driver.trigger()
    assert not of_type(ask(driver), c.TriggerTasks)
    assert not of_type(driver.request(), c.TriggerTasks)
    assert not of_type(driver.at(5_000), c.TriggerTasks)  # the interval's checkpoint waits as well
    driver.ack_all(first)
    savepoint = triggered(driver.stored(first))
    assert savepoint.properties.is_savepoint
    assert not of_type(driver.at(6_000), c.TriggerTasks)
    driver.ack_all(savepoint.checkpoint_id)
    assert not triggered(driver.stored(savepoint.checkpoint_id)).properties.is_savepoint


def test_the_interval_goes_on_as_if_there_had_been_none() -> None:
    driver = Driver(interval_ms=1_000)
    driver.at(900)
    savepoint = triggered(ask(driver)).checkpoint_id
    driver.at(950)
    driver.ack_all(savepoint)
    driver.stored(savepoint)
    assert not of_type(driver.at(999), c.TriggerTasks)
    assert of_type(driver.at(1_000), c.TriggerTasks)


def test_one_that_is_made_of_a_checkpoint_is_the_newest_of_them() -> None:
    driver = Driver(max_concurrent=3, interval_ms=1_000)
    first = driver.trigger()
    asked = c.CheckpointRequested("s", driver.now_ms, SAVED)
    assert not of_type(driver.step(asked), c.TriggerTasks)  # it waits, as any savepoint does
    driver.ack_all(first, shared("a", "shared/1"))
    driver.at(700)
    trigger = triggered(driver.stored(first))
    assert trigger.properties == SAVED
    assert not of_type(driver.request(), c.TriggerTasks)
    [store] = of_type(
        driver.ack_all(trigger.checkpoint_id, shared("b", "shared/2")), c.StoreCheckpoint
    )
    assert store.retained == (trigger.checkpoint_id,)
    effects = driver.stored(trigger.checkpoint_id)
    assert of_type(effects, c.NotifyCompleted)
    assert not of_type(effects, c.NotifySaved)
    assert of_type(effects, c.AnswerRequest) == [c.AnswerRequest("s", trigger.checkpoint_id)]
    assert "shared/1" in deletions(effects)
    assert [kept.checkpoint_id for kept in driver.machine.retained] == [trigger.checkpoint_id]
    waited = triggered(effects).checkpoint_id  # what was asked for meanwhile
    driver.ack_all(waited)
    driver.stored(waited)
    assert not of_type(driver.at(1_600), c.TriggerTasks)
    assert of_type(driver.at(1_700), c.TriggerTasks)


@pytest.mark.parametrize("cause", ["declined", "store", "stopped"])
def test_one_that_fails_puts_no_checkpoint_off(cause: str) -> None:
    driver = Driver(interval_ms=1_000, tolerable_failed=0)
    driver.complete(shared("a", "shared/1"))
    driver.at(900)
    asked = driver.step(c.CheckpointRequested("s", driver.now_ms, SAVED))
    saved = triggered(asked).checkpoint_id
    if cause == "declined":
        effects = driver.step(c.DeclineReceived(MIDDLE, saved, "no room", driver.now_ms))
    elif cause == "stopped":
        effects = driver.stop()
        assert not of_type(effects, c.FailJob)
        return
    else:
        driver.ack_all(saved, shared("b", "shared/2"))
        effects = driver.not_stored(saved)
    [answer] = of_type(effects, c.AnswerRequest)
    assert (answer.request_id, answer.refused) == ("s", c.RequestRefused.ABORTED)
    assert of_type(effects, c.DiscardSavepoint) == [c.DiscardSavepoint(saved, SAVED.target)]
    assert not of_type(effects, c.FailJob)
    assert driver.machine.failed_total == 0
    assert "shared/1" not in deletions(effects)
    assert of_type(driver.at(1_000), c.TriggerTasks)


def test_it_waits_and_is_taken_within_the_timeout_together() -> None:
    driver = Driver(interval_ms=None, timeout_ms=1_000)
    first = driver.trigger()
    driver.at(500)
    ask(driver)
    driver.at(900)
    driver.ack_all(first)
    savepoint = triggered(driver.stored(first)).checkpoint_id
    assert not of_type(driver.at(1_499), c.AnswerRequest)
    effects = driver.at(1_500)
    [answer] = of_type(effects, c.AnswerRequest)
    assert answer.refused is c.RequestRefused.ABORTED
    assert of_type(effects, c.DiscardSavepoint) == [c.DiscardSavepoint(savepoint, SAVEPOINT.target)]


def test_one_that_has_waited_too_long_is_forgotten() -> None:
    policy = TriggerPolicy(CheckpointSettings(1_000, max_concurrent=2))
    early, late = Request("s", SAVEPOINT, 500), Request("t", SAVEPOINT, 600)
    policy.add(late)
    policy.add(early)
    assert policy.due_ms(0, under_way=1) is None
    assert policy.expires_ms() == 500
    assert policy.expired(499) == ()
    assert policy.expired(500) == (early,)
    assert policy.queued == (late,)
    assert policy.due_ms(510, under_way=0) == 510


@pytest.mark.parametrize("cause", ["declined", "expired", "store", "stopped"])
def test_one_that_fails_harms_nothing(cause: str) -> None:
    driver = Driver(interval_ms=None, tolerable_failed=0)
    driver.complete(shared("a", "shared/1"))
    savepoint = triggered(ask(driver)).checkpoint_id
    if cause == "declined":
        effects = driver.step(c.DeclineReceived(MIDDLE, savepoint, "no room", driver.now_ms))
    elif cause == "expired":
        effects = driver.at(60_000)
    elif cause == "stopped":
        effects = driver.stop()
    else:
        driver.ack_all(savepoint)
        effects = driver.not_stored(savepoint)
    [answer] = of_type(effects, c.AnswerRequest)
    assert (answer.request_id, answer.refused) == ("s", c.RequestRefused.ABORTED)
    assert of_type(effects, c.NotifyAborted)
    assert of_type(effects, c.DiscardSavepoint)
    assert not of_type(effects, c.FailJob)
    assert not of_type(effects, c.ReportAborted)
    assert driver.machine.failed_total == 0
    assert not deletions(effects)


def test_what_comes_too_late_for_one_is_removed_and_nothing_else() -> None:
    driver = Driver(interval_ms=None)
    savepoint = triggered(ask(driver)).checkpoint_id
    driver.ack(savepoint, SOURCE, private("state/early"))
    driver.step(c.DeclineReceived(MIDDLE, savepoint, "no room", driver.now_ms))
    effects = driver.ack(savepoint, MIDDLE, private("state/late"), private("shared/late"))
    assert of_type(effects, c.DiscardSavepoint) == [
        c.DiscardSavepoint(savepoint, SAVEPOINT.target, files=("state/late",))
    ]
    assert deletions(effects) == {"shared/late"}
    again = driver.ack(savepoint, SOURCE, private("state/early"))  # it was there to be removed
    assert not of_type(again, c.DiscardSavepoint)


def test_a_report_that_is_repeated_takes_nothing_from_one_that_is_complete() -> None:
    driver = Driver(interval_ms=None)
    savepoint = triggered(ask(driver)).checkpoint_id
    driver.ack_all(savepoint, private("state/a"))
    driver.stored(savepoint)
    assert not of_type(driver.ack(savepoint, MIDDLE, private("state/a")), c.DiscardSavepoint)


def test_a_task_that_had_not_heard_of_the_newest_checkpoint_is_asked_again() -> None:
    driver = Driver(interval_ms=None)
    driver.complete(shared("a", "shared/1"))
    driver.complete(shared("b", "shared/2"))
    savepoint = triggered(ask(driver)).checkpoint_id
    effects = driver.ack(savepoint, SOURCE, shared("a", "shared/1"))
    again = triggered(effects)
    assert again.checkpoint_id == savepoint + 1
    assert again.properties == SAVEPOINT
    assert not of_type(effects, c.AnswerRequest)
    assert not of_type(effects, c.DiscardSavepoint)


def test_one_that_is_being_written_when_time_is_up_is_waited_for() -> None:
    driver = Driver(interval_ms=None, timeout_ms=1_000)
    savepoint = triggered(ask(driver)).checkpoint_id
    driver.ack_all(savepoint)
    effects = driver.at(1_000)
    assert of_type(effects, c.SettleCheckpoint)
    assert not of_type(effects, c.AnswerRequest)
    effects = driver.stored(savepoint)
    assert of_type(effects, c.AnswerRequest) == [c.AnswerRequest("s", savepoint)]


@pytest.mark.parametrize("seed", range(30))
def test_among_drawn_events(seed: int) -> None:
    """Each request is answered once, and checkpoints alone are kept."""
    drawn = random.Random(seed)
    driver = Driver(max_concurrent=2, interval_ms=700, timeout_ms=3_000)
    answers: dict[str, int] = {}
    asked: dict[str, bool] = {}
    savepoints: set[int] = set()
    storing: list[int] = []

    def take(effects: list[c.CoordinatorEffect]) -> None:
        for answer in of_type(effects, c.AnswerRequest):
            answers[answer.request_id] = answers.get(answer.request_id, 0) + 1
        for trigger in of_type(effects, c.TriggerTasks):
            if trigger.properties.is_savepoint:
                savepoints.add(trigger.checkpoint_id)
        storing.extend(store.checkpoint_id for store in of_type(effects, c.StoreCheckpoint))

    for index in range(300):
        match drawn.randrange(8):
            case 0:
                asked[f"s{index}"] = True
                take(ask(driver, f"s{index}"))
            case 1:
                asked[f"c{index}"] = False
                take(driver.step(c.CheckpointRequested(f"c{index}", driver.now_ms)))
            case 2 | 3 | 4:
                pending = driver.machine.pending
                if pending:
                    one = drawn.choice(pending).checkpoint_id
                    for task in CHAIN:
                        take(driver.ack(one, task.key, private(f"state/{one}")))
            case 5:
                if storing:
                    one = storing.pop(0)
                    take(driver.stored(one) if drawn.random() < 0.8 else driver.not_stored(one))
            case 6:
                take(driver.at(driver.now_ms - 100_000 + drawn.randrange(900)))
            case _:
                if drawn.random() < 0.1:
                    take(driver.stop())
                    take(driver.restart())
        assert not savepoints & {kept.checkpoint_id for kept in driver.machine.retained}
        assert not savepoints & {record.checkpoint_id for record in driver.machine.history}
    while storing:
        take(driver.stored(storing.pop(0)))
    take(driver.stop())
    assert savepoints
    assert {name: answers.get(name) for name in asked} == dict.fromkeys(asked, 1)


STOP = CheckpointProperties(target="/kept/savepoint-2", behind=BehindBarrier.HOLD)
DRAIN = CheckpointProperties(target="/kept/savepoint-2", behind=BehindBarrier.DRAIN)


def stop(driver: Driver, properties: CheckpointProperties = STOP) -> list[c.CoordinatorEffect]:
    return driver.step(c.CheckpointRequested("stop", driver.now_ms, properties))


def test_a_stop_is_the_last_checkpoint_of_its_job() -> None:
    driver = Driver(max_concurrent=2, interval_ms=1_000)
    first = driver.trigger()
    assert not of_type(stop(driver), c.TriggerTasks)  # it waits, as a savepoint does
    driver.ack_all(first)
    trigger = triggered(driver.stored(first))
    assert trigger.properties == STOP
    [store] = of_type(driver.ack_all(trigger.checkpoint_id), c.StoreCheckpoint)
    assert store.retained == (trigger.checkpoint_id,)
    effects = driver.stored(trigger.checkpoint_id)
    assert of_type(effects, c.NotifyCompleted)
    assert of_type(effects, c.AnswerRequest) == [c.AnswerRequest("stop", trigger.checkpoint_id)]
    assert [kept.is_stop for kept in driver.machine.retained] == [True]
    assert not of_type(driver.at(60_000), c.TriggerTasks)
    [answer] = of_type(driver.request(), c.AnswerRequest)
    assert "stopped" in answer.detail
    # Whoever takes the job over takes none either.
    successor = Driver(
        retained=driver.machine.retained, next_checkpoint_id=driver.machine.next_checkpoint_id
    )
    assert not of_type(successor.at(60_000), c.TriggerTasks)


@pytest.mark.parametrize("restored_id", [0, 1, 2, None])
def test_a_job_that_goes_back_behind_its_stop_takes_checkpoints_again(
    restored_id: int | None,
) -> None:
    """What it was stopped with is damaged. Its end needs one: nothing of a bounded job's output was committed without."""
    driver = Driver(retained_max=2)
    driver.complete()
    trigger = triggered(stop(driver))
    driver.ack_all(trigger.checkpoint_id)
    driver.stored(trigger.checkpoint_id)
    driver.stop()
    driver.step(c.TasksStarted(driver.tasks, driver.now_ms, restored_id=restored_id))
    goes_back = restored_id in (0, 1)
    assert bool(of_type(driver.request(), c.TriggerTasks)) == goes_back


@pytest.mark.parametrize("properties", [STOP, DRAIN])
@pytest.mark.parametrize("cause", ["declined", "expired", "store", "stopped"])
def test_a_stop_that_fails_lets_the_job_go_on(cause: str, properties: CheckpointProperties) -> None:
    driver = Driver(interval_ms=None, tolerable_failed=0)
    trigger = triggered(stop(driver, properties))
    if cause == "declined":
        declined = c.DeclineReceived(MIDDLE, trigger.checkpoint_id, "no room", driver.now_ms)
        effects = driver.step(declined)
    elif cause == "expired":
        effects = driver.at(60_000)
    elif cause == "stopped":
        effects = driver.stop()
    else:
        driver.ack_all(trigger.checkpoint_id)
        effects = driver.not_stored(trigger.checkpoint_id)
    [answer] = of_type(effects, c.AnswerRequest)
    assert (answer.request_id, answer.refused) == ("stop", c.RequestRefused.ABORTED)
    assert of_type(effects, c.NotifyAborted)
    [discard] = of_type(effects, c.DiscardSavepoint)
    assert discard.is_complete  # its manifest may have been written
    failed = of_type(effects, c.FailJob)
    # Event time has been ended: nothing but a restart of all tasks takes that back, and it is not held against the job.
    assert [one.is_free for one in failed] == [True] * (properties is DRAIN)
    if cause != "stopped":
        assert of_type(driver.request(), c.TriggerTasks)


@pytest.mark.parametrize("properties", [SAVEPOINT, STOP])
def test_a_job_in_the_middle_of_a_blocking_exchange_refuses(
    properties: CheckpointProperties,
) -> None:
    plan = JobPlan(
        (VertexPlan("v0", 1), VertexPlan("v1", 2)),
        (EdgePlan("e0", "v0", "v1", Partitioning.HASH, Exchange.BLOCKING),),
    )
    graph = ExecutionGraph(plan)
    wiring = CheckpointWiring(
        lambda _kept, _next_id: CheckpointCoordinator.__new__(CheckpointCoordinator), graph
    )
    wanted = c.CheckpointRequested("s", 0, properties)
    [answer] = wiring.take(wanted, SourceSplits(plan))
    assert isinstance(answer, c.AnswerRequest)
    assert answer.refused is c.RequestRefused.BLOCKING_EXCHANGE
    assert "e0 (v0 -> v1)" in answer.detail
    for subtask in graph.subtasks():
        attempt = graph.current_of(subtask)
        for state in (
            AttemptState.SCHEDULED,
            AttemptState.DEPLOYING,
            AttemptState.INITIALIZING,
            AttemptState.RUNNING,
            AttemptState.FINISHED,
        ):
            attempt.become(state)
    [answer] = wiring.take(wanted, SourceSplits(plan))
    assert isinstance(answer, c.AnswerRequest)
    assert answer.refused is c.RequestRefused.NOT_RUNNING
