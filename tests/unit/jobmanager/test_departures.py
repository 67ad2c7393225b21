"""Aim: a job leaves a TaskManager that is drained with a checkpoint behind which it holds: who leaves hears nothing of
it before it has ended, who stays goes on, and nothing counts as a failure.

Method: stories by hand in the machine of a job of two chains that need nothing of each other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties
from tests.unit.jobmanager.test_job_restarts import CAUSE, options

PLAN = JobPlan(
    (VertexPlan("v0", 2, source_uids=("src",)), VertexPlan("v1", 2)),
    (EdgePlan("e0", "v0", "v1", Partitioning.FORWARD),),
)
MOVE = CheckpointProperties(behind=BehindBarrier.MOVE)
A, B, C = (Slot(f"{name}-0", name, "0") for name in "abc")
CHAINS = [[AttemptKey("v0", i, 0), AttemptKey("v1", i, 0)] for i in (0, 1)]


def begun(master: JobMaster, effects: list[job_effects.JobEffect]) -> list[job_effects.JobEffect]:
    """Answers until something is deployed, and has it run; returns all that was wanted on the way."""
    wanted, waiting = list(effects), list(effects)
    while waiting:
        effect, more = waiting.pop(0), list[job_effects.JobEffect]()
        match effect:
            case job_effects.RequestSlots(count, group):
                slots = (A, B) if count == 2 else (C,)
                more = master.step(job_events.SlotsGranted(slots, group))
            case job_effects.AllocateSlots(id, slot_ids, call):
                ends = tuple(map(Endpoint, slot_ids))
                more = master.step(job_events.SlotsAllocated(id, ends, call))
            case job_effects.DeployTasks(_, tasks):
                for task in tasks:
                    running = job_events.AttemptReported(task.attempt, AttemptState.RUNNING)
                    more += master.step(running)
        wanted, waiting = wanted + more, waiting + more
    return wanted


@pytest.fixture
def master() -> JobMaster:
    """A job that runs, chain 0 on one TaskManager, chain 1 on another."""
    master = JobMaster(PLAN, options(checkpoints=True))
    master.step(job_events.JobStarted())
    begun(master, master.step(job_events.StartPrepared(0, None, (), 1)))
    assert master.state is JobState.RUNNING
    assert master.graph.current_of(SubtaskId("v0", 0)).taskmanager_id == "a"
    return master


def moved(master: JobMaster, *asked: str) -> list[job_effects.JobEffect]:
    """A checkpoint behind which all hold is asked for, taken and stored, others behind it; returns what follows."""
    effects = master.step(c.CheckpointRequested("leave", 10, MOVE))
    [triggered] = [
        command
        for effect in effects
        if isinstance(effect, job_effects.SendCommands) and effect.taskmanager_id == "a"
        for command in effect.commands
    ]
    assert isinstance(triggered, c.TriggerTasks)
    assert triggered.properties.is_move
    for request in asked:
        master.step(c.CheckpointRequested(request, 15, CheckpointProperties()))
    for key in (*CHAINS[0], *CHAINS[1]):
        effects = master.step(c.AckReceived(key, 1, object(), (), SnapshotSummary(), 20))
    assert any(isinstance(effect, job_effects.WriteManifest) for effect in effects)
    return master.step(c.CheckpointStored(1, "chk-1/manifest", 30), 30)


def told(effects: list[job_effects.JobEffect]) -> dict[str, set[AttemptKey]]:
    """TaskManager -> who hears there that the checkpoint is complete."""
    return {
        effect.taskmanager_id: set(command.keys)
        for effect in effects
        if isinstance(effect, job_effects.SendCommands)
        for command in effect.commands
        if isinstance(command, c.NotifyCompleted)
    }


def test_who_leaves_begins_elsewhere_and_who_stays_goes_on(master: JobMaster) -> None:
    assert master.step(job_events.TaskManagerDrained("a")) == []
    effects = moved(master)
    assert told(effects) == {"b": set(CHAINS[1])}
    assert job_effects.CancelTasks("a", tuple(CHAINS[0])) in effects
    assert c.AnswerRequest("leave", 1) in effects
    [due] = [e.event for e in effects if isinstance(e, job_effects.PostLater)]
    assert isinstance(due, job_events.RestartDue)
    master.step(due, 30)
    for key in CHAINS[0]:
        effects = master.step(job_events.AttemptReported(key, AttemptState.CANCELED))
    [prepare] = [e for e in effects if isinstance(e, job_effects.PrepareStart)]
    assert job_effects.FreeSlots((A,)) in effects, "nothing is done there any more"
    leaving = {key.subtask for key in CHAINS[0]}
    assert master.kept_failures().restarting == leaving, "under another JobManager it is no failure"
    restored = RestoredCheckpoint(1, subtasks=frozenset(key.subtask for key in CHAINS[0]))
    wanted = begun(master, master.step(job_events.StartPrepared(prepare.attempt, restored, (), 2)))
    [request] = [e for e in wanted if isinstance(e, job_effects.RequestSlots)]
    assert request.count == 1
    current = {attempt.key.subtask: attempt for attempt in master.graph.current()}
    assert [current[key.subtask].taskmanager_id for key in CHAINS[0]] == ["c", "c"]
    assert [current[key.subtask].restored_from for key in CHAINS[0]] == [1, 1]
    assert [current[key.subtask].key for key in CHAINS[1]] == CHAINS[1]
    assert (master.state, master.restarts, master.failure) == (JobState.RUNNING, 0, None)
    assert not master.kept_failures().restarting
    master.check()


def test_what_comes_of_another_that_has_left_first_is_no_failure(master: JobMaster) -> None:
    master.step(job_events.TaskManagerDrained("a"))
    moved(master)
    first, second = CHAINS[0]
    master.step(job_events.AttemptReported(first, AttemptState.CANCELED))
    lost = replace(CAUSE, error_class="PartitionUnavailable")
    master.step(job_events.AttemptReported(second, AttemptState.FAILED, lost), 40)
    assert not master.exceptions.entries
    assert (master.restarts, master.failure) == (0, None)
    master.check()


def test_what_fails_when_it_has_begun_elsewhere_is_told(master: JobMaster) -> None:
    master.step(job_events.TaskManagerDrained("a"))
    effects = moved(master)
    [due] = [e.event for e in effects if isinstance(e, job_effects.PostLater)]
    master.step(due, 30)
    for key in CHAINS[0]:
        effects = master.step(job_events.AttemptReported(key, AttemptState.CANCELED))
    [prepare] = [e for e in effects if isinstance(e, job_effects.PrepareStart)]
    restored = RestoredCheckpoint(1, subtasks=frozenset(key.subtask for key in CHAINS[0]))
    begun(master, master.step(job_events.StartPrepared(prepare.attempt, restored, (), 2)))
    current = [master.graph.current_of(key.subtask).key for key in CHAINS[0]]
    master.step(job_events.AttemptReported(current[0], AttemptState.FAILED, CAUSE), 40)
    master.step(job_events.AttemptReported(current[1], AttemptState.FAILED, CAUSE), 41)
    [entry] = master.exceptions.entries
    assert entry.concurrent_count == 1, (
        "what fails while it is ended by a failure is told beside it"
    )


def test_who_has_nothing_to_leave_goes_on(master: JobMaster) -> None:
    master.step(job_events.TaskManagerDrained("c"))
    assert told(moved(master)) == {"a": set(CHAINS[0]), "b": set(CHAINS[1])}
    # So it does where the TaskManager was taken in use again meanwhile.
    master.check()


def test_where_it_is_taken_in_use_again_before_that_all_go_on(master: JobMaster) -> None:
    master.step(job_events.TaskManagerDrained("a"))
    master.step(job_events.TaskManagerInUse("a"))
    assert told(moved(master)) == {"a": set(CHAINS[0]), "b": set(CHAINS[1])}


def test_a_checkpoint_that_fails_lets_all_go_on_and_discards_no_savepoint(
    master: JobMaster,
) -> None:
    master.step(job_events.TaskManagerDrained("a"))
    master.step(c.CheckpointRequested("leave", 10, MOVE))
    effects = master.step(c.DeclineReceived(CHAINS[0][0], 1, "no disk", 20))
    aborted = {
        key
        for effect in effects
        if isinstance(effect, job_effects.SendCommands)
        for command in effect.commands
        if isinstance(command, c.NotifyAborted)
        for key in command.keys
    }
    assert aborted == {*CHAINS[0], *CHAINS[1]}
    assert not any(isinstance(effect, c.DiscardSavepoint | c.FailJob) for effect in effects)
    [answer] = [effect for effect in effects if isinstance(effect, c.AnswerRequest)]
    assert (answer.refused, master.state) == (c.RequestRefused.ABORTED, JobState.RUNNING)


def test_what_fails_meanwhile_leaves_as_well(master: JobMaster) -> None:
    """Its slot is given back as soon as nothing is done in it, whatever has ended that."""
    master.step(job_events.TaskManagerDrained("a"))
    for key in CHAINS[0]:
        effects = master.step(
            job_events.AttemptReported(key, AttemptState.FAILED, replace(CAUSE, message="x"))
        )
    assert job_effects.FreeSlots((A,)) in effects


@pytest.mark.parametrize("drained", ["a", "ab"])
def test_who_asks_for_a_checkpoint_meanwhile_is_told_to_ask_again(
    master: JobMaster, drained: str
) -> None:
    for taskmanager_id in drained:
        master.step(job_events.TaskManagerDrained(taskmanager_id))
    effects = moved(master, "queued")
    effects += master.step(c.CheckpointRequested("later", 35, CheckpointProperties()))
    assert (master.state is JobState.RESTARTING) == (drained == "ab")
    assert refusals(effects) == {
        "queued": c.RequestRefused.LEAVING,
        "later": c.RequestRefused.LEAVING,
    }


@pytest.mark.parametrize("end", [job_events.CancelRequested(), job_events.SuspendRequested()])
def test_who_asks_when_the_job_ends_meanwhile_is_told_so(
    master: JobMaster, end: job_events.JobEvent
) -> None:
    master.step(job_events.TaskManagerDrained("a"))
    moved(master)
    master.step(end)
    effects = master.step(c.CheckpointRequested("asked", 35, CheckpointProperties()))
    assert refusals(effects) == {"asked": c.RequestRefused.NOT_RUNNING}


def test_who_asks_when_something_has_failed_meanwhile_is_told_so(master: JobMaster) -> None:
    master.step(job_events.TaskManagerDrained("a"))
    moved(master)
    failed = AttemptState.FAILED
    for key in CHAINS[1]:
        master.step(job_events.AttemptReported(key, failed, CAUSE))
    effects = master.step(c.CheckpointRequested("asked", 35, CheckpointProperties()))
    assert refusals(effects) == {"asked": c.RequestRefused.NOT_RUNNING}


def refusals(effects: list[job_effects.JobEffect]) -> dict[str, c.RequestRefused | None]:
    answers = [effect for effect in effects if isinstance(effect, c.AnswerRequest)]
    return {answer.request_id: answer.refused for answer in answers if answer.refused}
