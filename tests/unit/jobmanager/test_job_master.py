"""The machine of a job: its story by hand, and its invariants under random interleavings.

The random test plays cluster: it answers effects with the events a cluster could send, in any order,
mixed with failures, losses, cancellations, duplicates and stale reports.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.failover.failure_cause import FailureCause, more_telling
from jobmanager.graph import execution_attempt
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, ExecutionAttempt
from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import TRANSITIONS as JOB_TRANSITIONS
from jobmanager.messages.job_state import JobState, is_terminal
from penstock.connectors.source import Split
from penstock.errors import InvariantViolation
from penstock.pb import client_pb2
from tests.support.examples import examples

PLAN = JobPlan(
    (VertexPlan("v0", 2, source_uids=("src",)), VertexPlan("v1", 2)),
    (EdgePlan("e0", "v0", "v1", Partitioning.HASH),),
)
SLOTS = (Slot("a-0", "a", "1"), Slot("b-0", "b", "1"))
KEYS = [AttemptKey(v, i, 0) for v in ("v0", "v1") for i in (0, 1)]
CAUSE = FailureCause("TaskFailure", "it broke")


def deployed() -> JobMaster:
    master = JobMaster(PLAN)
    assert master.step(job_events.JobStarted()) == [job_effects.RequestSlots(2)]
    assert master.step(job_events.SlotsGranted(SLOTS)) == [
        job_effects.AllocateSlots("a", ("a-0",), 1),
        job_effects.AllocateSlots("b", ("b-0",), 1),
    ]
    assert master.step(job_events.SlotsAllocated("a", (Endpoint("a-0"),), 1)) == []
    effects = master.step(job_events.SlotsAllocated("b", (Endpoint("b-0"),), 1))
    assert [type(e) for e in effects] == [job_effects.DeployTasks, job_effects.DeployTasks]
    return master


def running() -> JobMaster:
    master = deployed()
    effects: list[job_effects.JobEffect] = []
    for key in KEYS:
        assert master.state is JobState.CREATED
        effects = master.step(job_events.AttemptReported(key, AttemptState.RUNNING))
    assert effects == [job_effects.PublishState(JobState.RUNNING)]
    return master


def report_all(master: JobMaster, state: AttemptState) -> list[job_effects.JobEffect]:
    return [e for key in KEYS for e in master.step(job_events.AttemptReported(key, state))]


def test_states_have_the_numbers_of_the_protocol() -> None:
    assert {f"JOB_STATE_{s.name}": s.value for s in JobState} == dict(client_pb2.JobState.items())
    assert {f"ATTEMPT_STATE_{s.name}": s.value for s in AttemptState} == dict(
        client_pb2.AttemptState.items()
    )
    assert set(JOB_TRANSITIONS) == set(JobState)
    assert set(execution_attempt.TRANSITIONS) == set(AttemptState)


def test_commit_goes_out_once_when_the_last_has_reached_the_end() -> None:
    master = running()
    assert master.step(job_events.AttemptReported(KEYS[0], AttemptState.FINISHED)) == []
    assert master.step(job_events.EndOfDataReported(KEYS[2])) == []
    assert master.step(job_events.EndOfDataReported(KEYS[3])) == []
    assert master.step(job_events.EndOfDataReported(KEYS[3])) == []
    assert master.step(job_events.AttemptReported(KEYS[1], AttemptState.FINISHED)) == [
        job_effects.SendCommands("a", (job_effects.CommitOutput(KEYS[2]),)),
        job_effects.SendCommands("b", (job_effects.CommitOutput(KEYS[3]),)),
    ]
    assert master.step(job_events.AttemptReported(KEYS[2], AttemptState.FINISHED)) == []
    assert master.step(job_events.AttemptReported(KEYS[3], AttemptState.FINISHED)) == [
        job_effects.PublishState(JobState.FINISHED),
        job_effects.FreeSlots(SLOTS[:1]),
        job_effects.FreeSlots(SLOTS[1:]),
    ]
    assert master.dropped_events == 1


def test_an_early_end_of_data_waits_until_everything_runs() -> None:
    master = deployed()
    for key in KEYS:
        assert master.step(job_events.EndOfDataReported(key)) == []
    effects = report_all(master, AttemptState.RUNNING)
    assert effects[0] == job_effects.PublishState(JobState.RUNNING)
    assert sum(len(e.commands) for e in effects[1:] if isinstance(e, job_effects.SendCommands)) == 4


def test_splits_go_to_the_subtasks_that_read_them() -> None:
    master = running()
    found = (Split("x", size=2), Split("y", size=1))
    assert master.step(job_events.SplitsReported(KEYS[0], "src", found, True)) == [
        job_effects.SendCommands("a", (job_effects.AddSplits(KEYS[0], "src", found[:1], True),)),
        job_effects.SendCommands("b", (job_effects.AddSplits(KEYS[1], "src", found[1:], True),)),
    ]
    assert master.step(job_events.SplitsReported(KEYS[0], "src", found, True)) == []
    assert master.dropped_events == 1


def test_splits_of_what_is_no_source_fail_the_job() -> None:
    master = running()
    master.step(job_events.SplitsReported(KEYS[2], "src", (), True))
    assert master.state is JobState.FAILING
    assert master.failure is not None
    assert "is no source" in master.failure.message


def test_a_failure_cancels_the_others_and_an_original_cause_replaces_a_consequence() -> None:
    master = running()
    lost = FailureCause("PartitionUnavailable", "connection reset")
    effects = master.step(job_events.AttemptReported(KEYS[2], AttemptState.FAILED, lost))
    assert effects == [
        job_effects.PublishState(JobState.FAILING),
        job_effects.CancelTasks("a", (KEYS[0],)),
        job_effects.CancelTasks("b", (KEYS[1], KEYS[3])),
        job_effects.AwaitCancellation(1),
    ]
    master.step(job_events.AttemptReported(KEYS[1], AttemptState.FAILED, CAUSE))
    assert master.failure == CAUSE
    master.step(job_events.AttemptReported(KEYS[0], AttemptState.CANCELED))
    effects = master.step(job_events.TaskManagerGone("b", FailureCause("TaskManagerLost", "gone")))
    assert effects == [
        job_effects.PublishState(JobState.FAILED),
        job_effects.FreeSlots(SLOTS[:1]),
        job_effects.SweepOutput(),  # it takes no checkpoints: nobody commits what was prepared
    ]
    assert master.failure == CAUSE


@pytest.mark.parametrize("error_class", ["TaskFailure", "Unrecoverable"])
def test_a_failing_job_that_is_cancelled_is_canceled(error_class: str) -> None:
    """Whatever it was failing of, and whatever else fails until it has ended."""
    master = running()
    cause = FailureCause(error_class, "it broke")
    master.step(job_events.AttemptReported(KEYS[2], AttemptState.FAILED, cause))
    assert master.state is JobState.FAILING
    effects = master.step(job_events.CancelRequested(is_noted=True))
    assert effects == [
        job_effects.PublishState(JobState.CANCELLING),
        job_effects.CancelTasks("a", (KEYS[0],), is_final=True),
        job_effects.CancelTasks("b", (KEYS[1], KEYS[3]), is_final=True),
        job_effects.AwaitCancellation(2),
    ]
    assert master.step(job_events.CancelRequested(is_noted=True)) == []
    master.step(job_events.AttemptReported(KEYS[1], AttemptState.FAILED, cause))
    for key in (KEYS[0], KEYS[3]):
        master.step(job_events.AttemptReported(key, AttemptState.CANCELED))
    master.check()
    assert master.state is JobState.CANCELED
    assert master.failure == cause


def test_which_cause_is_shown() -> None:
    consequence = FailureCause("PartitionUnavailable", "p")
    lost = FailureCause("TaskManagerLost", "l")
    assert more_telling(None, consequence) is consequence
    assert more_telling(consequence, lost) is lost
    assert more_telling(lost, CAUSE) is CAUSE
    assert more_telling(CAUSE, lost) is CAUSE
    assert more_telling(CAUSE, FailureCause("BadRecord", "later")) is CAUSE


@pytest.mark.parametrize("when", ["before", "waiting", "allocating", "deployed", "running"])
def test_cancel_in_every_state(when: str) -> None:
    master = JobMaster(PLAN) if when in ("before", "waiting", "allocating") else deployed()
    if when in ("waiting", "allocating"):
        master.step(job_events.JobStarted())
    if when == "allocating":
        master.step(job_events.SlotsGranted(SLOTS))
    if when == "running":
        report_all(master, AttemptState.RUNNING)
    effects = master.step(job_events.CancelRequested())
    assert effects[0] == job_effects.PublishState(JobState.CANCELLING)
    if when == "waiting":
        assert job_effects.WithdrawRequest() in effects
        # The grant was on its way already.
        assert master.step(job_events.SlotsGranted(SLOTS)) == [
            job_effects.FreeSlots(SLOTS[:1]),
            job_effects.FreeSlots(SLOTS[1:]),
        ]
    if when in ("deployed", "running"):
        assert report_all(master, AttemptState.RUNNING) == []
        effects = report_all(master, AttemptState.CANCELED)
    assert job_effects.PublishState(JobState.CANCELED) in effects
    assert master.step(job_events.JobStarted()) == []
    assert master.step(job_events.CancelRequested()) == []
    master.check()


def test_a_cancellation_that_comes_after_everything_has_finished_changes_nothing() -> None:
    master = running()
    master.step(job_events.CancelRequested())
    effects = report_all(master, AttemptState.FINISHED)
    assert job_effects.PublishState(JobState.FINISHED) in effects


@pytest.mark.parametrize(
    ("event", "is_final"),
    [
        (job_events.CancelRequested(), True),
        (job_events.CancelRequested(is_noted=False), False),
        (job_events.SuspendRequested(), False),
        (job_events.FailureRequested(FailureCause("TaskFailure", "down")), False),
    ],
)
def test_only_a_noted_cancellation_is_final(event: job_events.JobEvent, is_final: bool) -> None:
    """What tasks have prepared is removed only where nobody ever goes on with the job."""
    effects = running().step(event)
    cancelled = [effect for effect in effects if isinstance(effect, job_effects.CancelTasks)]
    assert cancelled
    assert {effect.is_final for effect in cancelled} == {is_final}


def test_attempts_that_do_not_end_in_time_are_given_up() -> None:
    master = running()
    assert master.step(job_events.CancellationOverdue()) == []
    [*_, awaited] = master.step(job_events.CancelRequested())
    assert isinstance(awaited, job_effects.AwaitCancellation)
    effects = master.step(job_events.CancellationOverdue(awaited.group))
    assert effects == [
        job_effects.FreeSlots(SLOTS[:1]),
        job_effects.FreeSlots(SLOTS[1:]),
        job_effects.PublishState(JobState.CANCELED),
    ]


def test_a_lost_taskmanager_does_not_matter_to_a_job_that_has_nothing_there() -> None:
    master = JobMaster(PLAN)
    master.step(job_events.JobStarted())
    lost = job_events.TaskManagerGone("a", FailureCause("TaskManagerLost", "gone"))
    assert master.step(lost) == []
    # It comes back, and its new slots are freed in the end.
    master.step(job_events.SlotsGranted(SLOTS))
    effects = master.step(job_events.CancelRequested())
    assert [e for e in effects if isinstance(e, job_effects.FreeSlots)] == [
        job_effects.FreeSlots(SLOTS[:1]),
        job_effects.FreeSlots(SLOTS[1:]),
    ]


def test_slots_without_an_address_fail_the_job() -> None:
    master = JobMaster(PLAN)
    master.step(job_events.JobStarted())
    master.step(job_events.SlotsGranted(SLOTS))
    master.step(job_events.SlotsAllocated("a", (), 1))
    master.step(job_events.SlotsAllocated("b", (Endpoint("b-0"),), 1))
    assert master.state is JobState.FAILED
    assert master.failure is not None
    assert "a-0" in master.failure.message


def test_an_illegal_transition_tells_the_story() -> None:
    with pytest.raises(InvariantViolation, match="FINISHED cannot become RUNNING"):
        ExecutionAttempt(KEYS[0], AttemptState.FINISHED).become(AttemptState.RUNNING)
    master = JobMaster(PLAN, JobOptions(coordinator=_no_coordinator))
    master.step(job_events.JobStarted())
    with pytest.raises(InvariantViolation, match=r"before the job was prepared.*JobStarted"):
        master.step(c.TimeReached(0))


def _no_coordinator(*_: object) -> CheckpointCoordinator:
    raise AssertionError("there is none before the start is prepared")


def test_slots_that_nobody_waits_for_are_given_back_at_once() -> None:
    master = deployed()
    stray = (Slot("a-1", "a", "1"),)
    assert master.step(job_events.SlotsGranted(stray)) == [job_effects.FreeSlots(stray)]
    assert master.step(job_events.SlotsRefused(2, 1, 1, 1, 100)) == []
    assert master.dropped_events == 1


class _World:
    """A cluster that may do anything a real one could, in any order."""

    def __init__(self, seed: int, mishaps: float) -> None:
        self.random = random.Random(seed)
        self.mishaps = mishaps
        self.master = JobMaster(PLAN)
        self.pending: list[job_events.JobEvent] = [job_events.JobStarted()]
        self.alive: dict[AttemptKey, AttemptState] = {}
        self.published: list[JobState] = []
        self.stopping = 0
        self.granted: tuple[Slot, ...] = ()
        self.freed: Counter[Slot] = Counter()
        self.lost: set[str] = set()
        self.commits = 0

    def deliver(self, event: job_events.JobEvent) -> None:
        for effect in self.master.step(event):
            self.perform(effect)
        self.master.check()

    def perform(self, effect: job_effects.JobEffect) -> None:
        match effect:
            case job_effects.RequestSlots(_, group):
                if self.mishap():
                    self.pending.append(job_events.SlotsRefused(2, 1, 1, 1, 100, group))
                else:
                    self.granted = SLOTS
                    self.pending.append(job_events.SlotsGranted(SLOTS, group))
            case job_effects.AllocateSlots(taskmanager_id, slot_ids, call):
                ok = job_events.SlotsAllocated(taskmanager_id, tuple(map(Endpoint, slot_ids)), call)
                self.pending.append(self.or_failure(taskmanager_id, ok))
            case job_effects.DeployTasks(taskmanager_id, tasks):
                assert {t.slot_id for t in tasks} <= {s.slot_id for s in self.granted}
                assert self.granted
                for task in tasks:
                    assert task.attempt not in self.alive, "deployed once"
                    self.alive[task.attempt] = AttemptState.DEPLOYING
                if self.mishap():
                    self.pending.append(job_events.CallFailed(taskmanager_id, CAUSE))
            case job_effects.SendCommands(_, commands):
                for command in commands:
                    if isinstance(command, job_effects.CommitOutput):
                        self.commits += 1
                        attempts = list(self.master.graph.current())
                        assert all(a.done_or_waiting for a in attempts)
                        self.pending.append(
                            job_events.AttemptReported(command.key, AttemptState.FINISHED)
                        )
            case job_effects.CancelTasks(taskmanager_id, keys):
                if self.mishap():
                    self.pending.append(job_events.CallFailed(taskmanager_id, CAUSE))
                else:
                    self.pending += [
                        job_events.AttemptReported(k, AttemptState.CANCELED) for k in keys
                    ]
            case job_effects.AwaitCancellation(group):
                self.stopping = group
                if self.mishap():
                    self.pending.append(job_events.CancellationOverdue(group))
            case job_effects.FreeSlots(slots):
                self.freed.update(slots)
            case job_effects.PublishState(state):
                self.published.append(state)
            case job_effects.WithdrawRequest():
                pass  # too late: the grant is on its way

    def or_failure(self, taskmanager_id: str, event: job_events.JobEvent) -> job_events.JobEvent:
        return job_events.CallFailed(taskmanager_id, CAUSE) if self.mishap() else event

    def mishap(self) -> bool:
        return self.random.random() < self.mishaps

    def progress(self) -> list[job_events.JobEvent]:
        """What each living attempt does next."""
        events: list[job_events.JobEvent] = []
        for key, state in self.alive.items():
            if state is AttemptState.DEPLOYING:
                events.append(job_events.AttemptReported(key, AttemptState.INITIALIZING))
            elif state is AttemptState.INITIALIZING:
                events.append(job_events.AttemptReported(key, AttemptState.RUNNING))
            elif state is AttemptState.RUNNING and key.vertex == "v1":
                events.append(job_events.EndOfDataReported(key))
            elif state is AttemptState.RUNNING:
                events.append(job_events.AttemptReported(key, AttemptState.FINISHED))
        return events

    def next_event(self) -> job_events.JobEvent | None:
        choices = [*self.pending, *self.progress()]
        if not choices:
            return None
        if self.mishap():
            return self.disturbance()
        event = self.random.choice(choices)
        if event in self.pending:
            self.pending.remove(event)
        elif isinstance(event, job_events.AttemptReported):
            self.alive[event.key] = event.state
        elif isinstance(event, job_events.EndOfDataReported):
            self.alive[event.key] = AttemptState.FINISHED  # it says nothing more by itself
        return event

    def disturbance(self) -> job_events.JobEvent:
        key = self.random.choice([*KEYS, AttemptKey("v0", 0, 7), AttemptKey("v9", 0, 0)])
        taskmanager_id = self.random.choice("ab")
        disturbances: list[job_events.JobEvent] = [
            job_events.CancelRequested(),
            job_events.FailureRequested(CAUSE),
            job_events.TaskManagerGone(taskmanager_id, CAUSE),
            job_events.AttemptReported(key, AttemptState.FAILED, CAUSE),
            job_events.AttemptReported(key, AttemptState.RUNNING),
            job_events.AttemptReported(key, AttemptState.CREATED),
            job_events.SplitsReported(KEYS[0], "src", (Split("s"),), True),
            job_events.CancellationOverdue(self.stopping),
        ]
        event = self.random.choice(disturbances)
        granted = self.granted and not any(
            isinstance(e, job_events.SlotsGranted) for e in self.pending
        )
        gone = isinstance(event, job_events.TaskManagerGone) and not any(
            slot.taskmanager_id == event.taskmanager_id for slot in self.freed
        )
        if (
            isinstance(event, job_events.TaskManagerGone)
            and gone
            and granted
            and not self.master.ended
        ):
            self.lost.add(event.taskmanager_id)
        return event


@examples(300)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3]))
def test_any_interleaving_ends_in_exactly_one_terminal_state(seed: int, mishaps: float) -> None:
    world = _World(seed, mishaps)
    for _ in range(300):
        event = world.next_event()
        if event is None:
            break
        world.deliver(event)
    # Whatever did not come by itself comes from the deadline.
    if not world.master.ended:
        world.deliver(job_events.CancelRequested())
        world.deliver(job_events.CancellationOverdue(world.stopping))
    world.mishaps = 0.0
    while world.pending:
        world.deliver(world.pending.pop(0))
    assert world.master.ended
    assert [is_terminal(state) for state in world.published].count(True) == 1
    assert is_terminal(world.published[-1])
    if mishaps == 0.0:
        assert world.published == [JobState.RUNNING, JobState.FINISHED]
        assert world.commits == 2
    assert world.commits <= 2
    for slot in world.granted:
        assert world.freed[slot] == (0 if slot.taskmanager_id in world.lost else 1), slot
