"""Restarts of a part of a job: stories by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint, SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.restored_checkpoint import (
    RestoredCheckpoint,
    RestoredRead,
    RestoredSplit,
)
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_counts import KeptFailures
from jobmanager.failover.restart_settings import NO_LIMIT, FixedDelay, RestartSettings
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.job_plan import JobPlan, VertexPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.groups import GroupPhase
from jobmanager.job.job_history import JobHistory
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.rpc.graph_convert import event_of
from penstock.connectors.source import Split
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties
from tests.support.drawn_plans import drawn, in_words, subtask, subtasks
from tests.support.job_story import JobStory

CAUSE = FailureCause("TaskFailure", "it broke")
LOST = FailureCause("TaskManagerLost", "it is gone")
RUNNING, FINISHED = AttemptState.RUNNING, AttemptState.FINISHED


def with_source(plan: JobPlan, vertex: str) -> JobPlan:
    """The plan with a source in a vertex."""
    vertices = tuple(
        replace(v, source_uids=("src",)) if v.id == vertex else v for v in plan.vertices
    )
    return JobPlan(vertices, plan.edges)


class Story(JobStory):
    """A job that may restart, and may take checkpoints."""

    def __init__(
        self,
        plan: JobPlan,
        *,
        attempts: int = NO_LIMIT,
        checkpoints: bool = False,
        strategy: FailoverStrategyName = FailoverStrategyName.REGION,
        slots_per_taskmanager: int = 1,
        first_attempt: int = 0,
        restored: RestoredCheckpoint | None = None,
        shares_spill: bool = False,
        goes_on: bool = False,
        failures: KeptFailures | None = None,
        retained_max: int = 1,
        retained: tuple[CompletedCheckpoint, ...] = (),
    ) -> None:
        settings = CheckpointSettings(interval_ms=1_000, retained_max=retained_max)
        make = partial(_coordinator, settings) if checkpoints else None
        restart = RestartSettings(FixedDelay(attempts, 500))
        options = JobOptions(
            restart,
            strategy,
            make,
            first_attempt=first_attempt,
            is_recovered=first_attempt > 0,
            shares_spill=shares_spill,
            goes_on=goes_on,
            taskmanagers={"h0": ""} if first_attempt else {},
            history=JobHistory(failures or KeptFailures()),
        )
        super().__init__(plan, options, slots_per_taskmanager)
        self.restored = restored
        self.retained = retained
        self.processes: dict[str, str] = {}
        self.answers_calls = True
        self.prepares = True
        self.do(job_events.JobStarted())

    def answers(self, effect: job_effects.JobEffect) -> list[job_events.JobEvent]:
        match effect:
            case job_effects.PrepareStart(attempt):
                next_id = 1 + max((one.checkpoint_id for one in self.retained), default=0)
                prepared = job_events.StartPrepared(attempt, self.restored, self.retained, next_id)
                return [prepared] if self.prepares else []
            case job_effects.RequestSlots() | job_effects.CancelTasks() if not self.answers_calls:
                return []
            case job_effects.AllocateSlots(name, slot_ids, call):
                found = tuple(Endpoint(id, self.processes.get(id, "p0")) for id in slot_ids)
                answer = job_events.SlotsAllocated(name, found, call, Endpoint("", name))
                return [answer] if self.answers_calls else []
        return super().answers(effect)

    # ------------------------------------------------------------ what happens

    def fail(
        self, text: str, missing: job_events.MissingPartition | None = None
    ) -> list[job_effects.JobEffect]:
        event = job_events.AttemptReported(self.key(text), AttemptState.FAILED, CAUSE, missing)
        return self.do(event)

    def lose(self, text: str) -> list[job_effects.JobEffect]:
        """The TaskManager of a subtask is lost."""
        name = self.master.graph.current_of(subtask(text)).taskmanager_id
        return self.do(job_events.TaskManagerGone(name, LOST))

    def run(self, text: str) -> None:
        self.report(text, RUNNING)

    # ------------------------------------------------------------ what can be seen

    def state(self, text: str) -> AttemptState:
        return self.master.graph.current_of(subtask(text)).state


def _coordinator(
    wanted: CheckpointSettings, retained: tuple[CompletedCheckpoint, ...], next_id: int
) -> CheckpointCoordinator:
    return CheckpointCoordinator(wanted, retained=retained, next_checkpoint_id=next_id)


def cancelled(effects: list[job_effects.JobEffect]) -> str:
    return in_words(
        k.subtask for e in effects if isinstance(e, job_effects.CancelTasks) for k in e.keys
    )


def deployed(effects: list[job_effects.JobEffect]) -> str:
    return in_words(
        t.attempt.subtask
        for e in effects
        if isinstance(e, job_effects.DeployTasks)
        for t in e.tasks
    )


CommandT = TypeVar("CommandT", bound="job_effects.Command | c.CheckpointCommand")


def commands(effects: list[job_effects.JobEffect], kind: type[CommandT]) -> list[CommandT]:
    sent = (e.commands for e in effects if isinstance(e, job_effects.SendCommands))
    return [command for own in sent for command in own if isinstance(command, kind)]


def told(
    effects: list[job_effects.JobEffect], kind: type[job_effects.Command | c.CheckpointCommand]
) -> str:
    return in_words(
        key.subtask for command in commands(effects, kind) for key in job_effects.receivers(command)
    )


def dues(effects: list[job_effects.JobEffect]) -> list[job_effects.PostLater]:
    return [e for e in effects if isinstance(e, job_effects.PostLater)]


# ---------------------------------------------------------------- who restarts


def test_of_eight_pipelines_one_fails_and_the_others_hear_nothing() -> None:
    story = Story(drawn("a:8 b:8", "a>b forward pipelined"))
    everyone = " ".join(f"{v}{i}" for v in "ab" for i in range(8))
    story.run(everyone)
    effects = [*story.fail("b3"), *story.due()]
    assert cancelled(effects) == "a3"
    assert deployed(effects) == "a3 b3"
    assert not [
        e for e in effects if isinstance(e, job_effects.PublishState | job_effects.SendCommands)
    ]
    assert len([e for e in effects if isinstance(e, job_effects.AllocateSlots)]) == 1
    assert not [e for e in effects if isinstance(e, job_effects.RequestSlots)]
    assert story.attempts("a3 b3 a2 b2 a4 b4") == [1, 1, 0, 0, 0, 0]
    assert story.master.state is JobState.RUNNING


CACHING = drawn("a:2 b:2", "a>b hash caching reproducible")


def test_behind_a_caching_shuffle_only_what_ran_on_a_lost_taskmanager_restarts() -> None:
    story = Story(with_source(CACHING, "a"))
    story.run("a0 a1 b0 b1")
    found = tuple(Split(f"s{n}", size=1) for n in range(4))
    story.do(job_events.SplitsReported(story.key("a0"), "src", found, True))
    effects = story.lose("a1")
    assert cancelled(effects) == ""
    assert dues(effects) == [job_effects.PostLater(500, job_events.RestartDue(1))]
    effects = story.due()
    assert deployed(effects) == "a1 b1"
    assert story.attempts("a0 a1 b0 b1") == [0, 1, 0, 1]
    [replaced] = commands(effects, job_effects.ReplaceProducer)
    assert isinstance(replaced, job_effects.ReplaceProducer)
    assert (replaced.key, replaced.edge_id) == (story.key("b0"), "a>b")
    assert replaced.channel.producer_attempt == story.key("a1")
    assert replaced.channel.producer.slot_id == "t2-2"
    # Told again in the same order; nobody else gets them.
    [splits] = commands(effects, job_effects.AddSplits)
    assert splits == job_effects.AddSplits(story.key("a1"), "src", (found[1], found[3]), True)
    assert story.master.state is JobState.RUNNING
    assert not [e for e in story.effects if e == job_effects.PublishState(JobState.RESTARTING)]


def test_splits_that_the_checkpoint_names_are_not_told_again() -> None:
    story = Story(with_source(CACHING, "a"), checkpoints=True)
    story.run("a0 a1 b0 b1")
    found = tuple(Split(f"s{n}", size=1) for n in range(4))
    story.do(job_events.SplitsReported(story.key("a0"), "src", found, False))
    story.restored = RestoredCheckpoint(
        1, splits=(RestoredSplit("a", "src", 1, "s1", 1, done=False),)
    )
    story.fail("a1")
    [splits] = commands(story.due(), job_effects.AddSplits)
    assert splits == job_effects.AddSplits(story.key("a1"), "src", (found[3],), False)


def test_behind_a_second_shuffle_what_is_not_reproducible_restarts_as_well() -> None:
    plan = drawn("a:2 b:2 c:2", "a>b hash caching reproducible", "b>c hash caching")
    story = Story(plan)
    story.run("a0 a1 b0 b1 c0 c1")
    assert cancelled(story.fail("b1")) == "c0 c1"
    effects = story.due()
    assert deployed(effects) == "b1 c0 c1"
    assert told(effects, job_effects.ReplaceProducer) == ""
    story.run("b1 c0 c1")
    assert cancelled(story.fail("a0")) == ""
    assert told(story.due(), job_effects.ReplaceProducer) == "b0 b1"


def test_a_blamed_partition_restarts_its_producer_and_a_stale_blame_does_not() -> None:
    story = Story(CACHING)
    story.run("a0 a1 b0 b1")
    first = story.key("a1")
    effects = story.fail("b0", job_events.MissingPartition("a>b", first))
    assert cancelled(effects) == "a1"
    effects = story.due()
    assert deployed(effects) == "a1 b0"
    assert told(effects, job_effects.ReplaceProducer) == "b1"
    story.run("a1 b0")
    effects = story.fail("b1", job_events.MissingPartition("a>b", first))
    assert cancelled(effects) == ""
    assert deployed(story.due()) == "b1"


def apart(plan: JobPlan) -> JobPlan:
    """The plan with each vertex in slots of its own."""
    vertices = tuple(VertexPlan(v.id, v.parallelism, v.id) for v in plan.vertices)
    return JobPlan(vertices, plan.edges)


def test_a_producer_whose_process_ended_after_it_had_finished_runs_again_for_who_still_reads() -> (
    None
):
    """Nothing that runs has failed, and its TaskManager lives."""
    story = Story(apart(CACHING))
    story.run("a0 a1 b0 b1")
    story.report("a0 a1", FINISHED)
    story.do(job_events.EndOfDataReported(story.key("b0")))
    report = internal_pb2.TaskEvent(
        attempt=internal_pb2.AttemptId(job_id="j", vertex="a", subtask_index=1, attempt=0),
        kept_rows_lost=internal_pb2.KeptRowsLost(reason="it was killed"),
    )
    lost = event_of(report, 5)
    assert isinstance(lost, job_events.KeptRowsLost)
    effects = [*story.do(lost), *story.due()]
    assert (cancelled(effects), deployed(effects)) == ("", "a1")
    assert told(effects, job_effects.ReplaceProducer) == "b0 b1"
    assert story.state("a0") is FINISHED
    [shown] = story.master.exceptions.entries
    assert "it was killed" in shown.cause.message


def released(effects: list[job_effects.JobEffect]) -> list[tuple[str, AttemptKey]]:
    return [
        p for e in effects if isinstance(e, job_effects.ReleasePartitions) for p in e.partitions
    ]


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("why", ["missed", "all"])
def test_what_a_finished_attempt_has_left_in_its_process_goes_when_it_begins_again(
    why: str, checkpoints: bool
) -> None:
    """The process stays, and would keep one more copy of the rows for each restart."""
    story = Story(apart(CACHING), checkpoints=checkpoints)
    story.run("a0 a1 b0 b1")
    story.report("a0 a1", FINISHED)
    left = [("a>b", story.key("a0")), ("a>b", story.key("a1"))]
    if why == "missed":
        story.fail("b0", job_events.MissingPartition("a>b", story.key("a0")))
        left = left[:1]
    else:
        story.do(job_events.FailureRequested(CAUSE))
    effects = story.due()
    assert released(effects) == left
    names = [type(effect) for effect in effects]
    assert names.index(job_effects.ReleasePartitions) < names.index(job_effects.DeployTasks)
    story.run("a0 a1 b0 b1")
    assert released(story.report("a0", FINISHED)) == []


def test_rows_that_everybody_has_read_are_made_again_when_they_are_needed_again() -> None:
    story = Story(apart(drawn("a:2 b:2 x:1", "a>b hash caching reproducible")))
    story.run("a0 a1 b0 b1 x0")
    story.report("a0 a1", FINISHED)
    for reader in ("b0", "b1"):
        story.do(job_events.EndOfDataReported(story.key(reader)))
    story.do(job_events.KeptRowsLost(story.key("a1"), LOST))
    assert story.master.restarts == 0
    assert deployed([*story.fail("b0"), *story.due()]) == "a1 b0"


def test_files_outlive_the_process_that_wrote_them() -> None:
    story = Story(apart(CHAIN))
    finished_stage(story, "a0 a1")
    story.run("b0 b1")
    story.do(job_events.KeptRowsLost(story.key("a0"), LOST))
    assert story.master.restarts == 0
    assert deployed([*story.fail("b1"), *story.due()]) == "b1"


def test_a_blame_of_what_is_not_kept_is_no_loss() -> None:
    story = Story(drawn("a:1 b:1 c:1", "a>b forward pipelined", "b>c hash caching"))
    story.run("a0 b0 c0")
    story.answers_calls = False
    story.fail("b0", job_events.MissingPartition("a>b", story.key("a0")))
    story.lose("c0")
    assert story.master.restarts == 1


@pytest.mark.parametrize(
    ("strategy", "again"), [("full", "a0 b0 a1 b1"), ("region", "a1 b1"), ("individual", "a1")]
)
def test_how_much_restarts_is_a_matter_of_the_strategy(strategy: str, again: str) -> None:
    plan = drawn("a:2 b:2", "a>b forward pipelined")
    if strategy == "individual":
        plan = drawn("a:2 b:2", "a>b forward caching reproducible")
    story = Story(plan, strategy=FailoverStrategyName(strategy))
    story.run("a0 a1 b0 b1")
    effects = [*story.fail("a1"), *story.due()]
    assert deployed(effects) == in_words(subtasks(again))


# ---------------------------------------------------------------- stages


CHAIN = drawn("a:2 b:2 c:1", "a>b hash blocking", "b>c hash blocking deterministic")


def finished_stage(story: Story, text: str) -> None:
    story.run(text)
    story.report(text, FINISHED)


def test_what_was_read_is_made_again_for_those_that_begin_again() -> None:
    """What a finished subtask has read is lost after the failure that restarts it."""
    story = Story(drawn("a:2 b:1 c:1", "a>b hash blocking", "b>c forward pipelined"))
    finished_stage(story, "a0 a1")
    story.run("b0 c0")
    story.report("b0", FINISHED)
    story.fail("c0")
    story.lose("a1")
    assert deployed(story.due()) == "a1"
    assert story.attempts("a0 a1 b0 c0") == [0, 1, 1, 1]
    finished_stage(story, "a1")
    assert story.state("b0") is AttemptState.DEPLOYING


def test_a_chain_of_blocking_edges_begins_stage_by_stage() -> None:
    story = Story(CHAIN)
    assert deployed(story.effects) == "a0 a1"
    story.run("a0 a1")
    assert deployed(story.report("a0", FINISHED)) == ""
    effects = story.report("a1", FINISHED)
    assert deployed(effects) == "b0 b1"
    [task, _] = [t for e in effects if isinstance(e, job_effects.DeployTasks) for t in e.tasks]
    assert [channel.producer.host_id for channel in task.inputs[0].channels] == ["t0", "t1"]
    finished_stage(story, "b0 b1")
    # What a failure of the last stage might need again stays to the end.
    story.report("c0")
    assert not [e for e in story.effects if isinstance(e, job_effects.ReleasePartitions)]
    effects = story.report("c0", FINISHED)
    released = [
        p for e in effects if isinstance(e, job_effects.ReleasePartitions) for p in e.partitions
    ]
    assert in_words(key.subtask for _, key in released) == "a0 a1 b0 b1"
    assert story.master.state is JobState.FINISHED


def test_a_stage_that_fails_reads_again_what_is_there() -> None:
    story = Story(CHAIN)
    finished_stage(story, "a0 a1")
    story.run("b0 b1")
    effects = [*story.fail("b1"), *story.due()]
    assert (cancelled(effects), deployed(effects)) == ("", "b1")
    # Of what is lost with its TaskManager, the producers run again, and their readers.
    story.run("b1")
    effects = [*story.lose("a1"), *story.due()]
    assert deployed(effects) == "a1"
    assert story.state("b0") is AttemptState.CREATED
    story.run("a1")
    assert story.master.state is JobState.RUNNING
    assert deployed(story.report("a1", FINISHED)) == "b0 b1"


def test_finished_readers_of_a_deterministic_edge_are_left_alone() -> None:
    plan = drawn(
        "a:1 b:1 c:1 d:1",
        "a>b hash blocking deterministic",
        "a>c hash blocking deterministic",
        "c>d hash blocking",
    )
    story = Story(plan, slots_per_taskmanager=1)
    finished_stage(story, "a0")
    story.run("b0 c0")
    story.report("b0", FINISHED)
    effects = [*story.fail("c0", job_events.MissingPartition("a>c", story.key("a0"))), *story.due()]
    assert deployed(effects) == "a0"
    assert story.state("b0") is FINISHED


def test_a_lost_partition_that_all_have_read_restarts_nobody() -> None:
    """The reader waits for the commit: only if it fails itself is its input needed again."""
    plan = JobPlan(
        (VertexPlan("a", 1, "one"), VertexPlan("b", 1, "two")),
        drawn("a:1 b:1", "a>b hash blocking").edges,
    )
    story = Story(plan)
    finished_stage(story, "a0")
    story.run("b0")
    story.do(job_events.EndOfDataReported(story.key("b0")))
    story.lose("a0")
    assert story.master.restarts == 0
    story.report("b0", FINISHED)
    assert story.master.state is JobState.FINISHED


def test_a_reader_that_begins_again_keeps_what_it_reads_from_being_released() -> None:
    plan = drawn("a:1 b:1 c:1", "a>b hash blocking", "b>c hash pipelined")
    story = Story(plan)
    finished_stage(story, "a0")
    story.run("b0 c0")
    story.report("c0", FINISHED)
    story.answers_calls = False
    story.do(job_events.FailureRequested(CAUSE))
    # It finishes while it is cancelled.
    effects = story.report("b0", FINISHED)
    assert not [e for e in effects if isinstance(e, job_effects.ReleasePartitions) and e.partitions]


def test_what_was_released_is_made_again_where_it_is_needed_again() -> None:
    plan = drawn("a:1 x:1 c:1 d:1", "a>c hash blocking", "x>c hash blocking", "x>d hash blocking")
    story = Story(plan)
    finished_stage(story, "a0 x0")
    story.run("c0 d0")
    effects = story.report("c0", FINISHED)
    released = [
        p for e in effects if isinstance(e, job_effects.ReleasePartitions) for p in e.partitions
    ]
    assert released == [("a>c", story.key("a0")), ("x>c", story.key("x0"))]
    blame = job_events.MissingPartition("x>d", story.key("x0"))
    assert deployed([*story.fail("d0", blame), *story.due()]) == "a0 x0"


def test_a_later_stage_gets_the_number_of_the_attempts_it_begins_with() -> None:
    """Rows of a collect sink with an older number would be taken for those of a dead attempt."""
    story = Story(CHAIN)
    story.run("a0 a1")
    story.fail("a0")
    effects = story.due()
    prepared = [e for e in story.effects if isinstance(e, job_effects.PrepareStart)][-1]
    assert prepared.subtasks is not None
    assert deployed(effects) == "a0"
    story.run("a0")
    story.do(job_events.FailureRequested(CAUSE))
    story.due()
    prepared = [e for e in story.effects if isinstance(e, job_effects.PrepareStart)][-1]
    assert prepared == job_effects.PrepareStart(2)
    assert set(story.attempts("a0 a1 b0 b1 c0")) == {2}


# ---------------------------------------------------------------- failures while a restart is under way


@pytest.mark.parametrize("when", ["stopping", "waiting"])
def test_a_failure_joins_the_restart_whose_delay_runs(when: str) -> None:
    story = Story(drawn("a:3 b:3", "a>b forward pipelined"))
    story.run("a0 a1 a2 b0 b1 b2")
    story.answers_calls = when != "stopping"
    story.fail("a0")
    before = len(story.effects)
    story.fail("a1")
    assert dues(story.effects[before:]) == []
    assert story.master.restarts == 1
    story.answers_calls = True
    if when == "stopping":
        story.report("b0 b1", AttemptState.CANCELED)
    assert deployed(story.due()) == "a0 a1 b0 b1"
    assert story.attempts("a0 b0 a1 b1 a2 b2") == [1] * 4 + [0, 0]


def test_slots_that_are_lost_while_others_are_awaited_are_asked_for_as_well() -> None:
    story = Story(drawn("a:2 b:2", "a>b hash pipelined"))
    story.run("a0 a1 b0 b1")
    story.lose("a1")
    story.answers_calls = False
    assert story.due()[-1] == job_effects.RequestSlots(1, 1)
    assert story.do(job_events.TaskManagerGone("t0", LOST)) == []
    effects = story.do(job_events.SlotsGranted((Slot("t2-0", "t2", "1"),), 1))
    assert effects == [job_effects.RequestSlots(1, 1)]
    story.answers_calls = True
    assert (
        deployed(story.do(job_events.SlotsGranted((Slot("t3-0", "t3", "1"),), 1))) == "a0 a1 b0 b1"
    )
    assert story.master.restarts == 1


def test_an_answer_of_an_earlier_call_does_not_stand_for_slots_that_are_awaited() -> None:
    story = Story(drawn("a:2 b:2", "a>b hash pipelined"))
    story.run("a0 a1 b0 b1")
    story.fail("a0")
    story.answers_calls = False
    [_, first, second] = story.due()
    assert isinstance(first, job_effects.AllocateSlots)
    assert isinstance(second, job_effects.AllocateSlots)
    story.do(job_events.CallFailed("t1", CAUSE, 1))
    assert story.due()[-1] == job_effects.RequestSlots(1, 2)
    late = job_events.SlotsAllocated("t0", (Endpoint("t0-0", "p0"),), first.call)
    assert story.do(late) == []
    story.answers_calls = True
    effects = story.do(job_events.SlotsGranted((Slot("t2-2", "t2", "1"),), 2))
    assert deployed(effects) == "a0 a1 b0 b1"


def test_an_overdue_cancellation_takes_the_slot_and_all_in_it() -> None:
    plan = drawn("a:1 b:1 c:1 d:1", "b>c forward caching reproducible", "a>d forward pipelined")
    story = Story(plan)
    story.run("a0 b0 c0 d0")
    story.report("b0", FINISHED)
    story.answers_calls = False
    effects = story.fail("a0")
    assert cancelled(effects) == "d0"
    # All share a slot: c0, which ran, ends as well, and b0 has kept its rows there.
    effects = story.do(job_events.CancellationOverdue(1))
    assert [e for e in effects if isinstance(e, job_effects.FreeSlots)] == [
        job_effects.FreeSlots((Slot("t0-0", "t0", "1"),))
    ]
    story.answers_calls = True
    assert deployed(story.due()) == "a0 b0 c0 d0"
    assert story.master.restarts == 1


def test_a_slot_process_that_was_replaced_has_lost_what_finished_producers_kept_in_it() -> None:
    plan = JobPlan(
        (VertexPlan("a", 1), VertexPlan("b", 1), VertexPlan("c", 1, "other")),
        drawn("a:1 b:1 c:1", "a>c forward caching reproducible").edges,
    )
    story = Story(plan)
    story.run("a0 b0 c0")
    story.report("a0", FINISHED)
    story.processes["t0-0"] = "p1"
    story.fail("b0")
    assert deployed(story.due()) == "b0"
    effects = story.due()
    assert deployed(effects) == "a0"
    assert told(effects, job_effects.ReplaceProducer) == "c0"


# ---------------------------------------------------------------- checkpoints


def trigger(story: Story) -> list[job_effects.JobEffect]:
    return story.do(c.CheckpointRequested("r", 0))


def ack(story: Story, text: str, checkpoint_id: int) -> list[job_effects.JobEffect]:
    return [
        effect
        for name in text.split()
        for effect in story.do(
            c.AckReceived(story.key(name), checkpoint_id, object(), (), SnapshotSummary(), 0)
        )
    ]


def test_survivors_hear_that_a_checkpoint_is_void_and_none_is_taken_until_all_run() -> None:
    story = Story(CACHING, checkpoints=True)
    story.run("a0 a1 b0 b1")
    assert told(trigger(story), c.TriggerTasks) == "a0 a1"
    assert told(story.fail("a1"), c.NotifyAborted) == "a0 b0 b1"
    [answer] = [e for e in trigger(story) if isinstance(e, c.AnswerRequest)]
    assert answer.refused is c.RequestRefused.STARTING
    story.due()
    assert told(trigger(story), c.TriggerTasks) == ""
    story.run("a1")
    assert told(trigger(story), c.TriggerTasks) == "a0 a1"


def test_survivors_hear_of_a_checkpoint_that_was_being_stored_before_producers_are_replaced() -> (
    None
):
    story = Story(CACHING, checkpoints=True)
    story.run("a0 a1 b0 b1")
    trigger(story)
    effects = ack(story, "a0 a1 b0 b1", 1)
    assert [e for e in effects if isinstance(e, job_effects.WriteManifest)]
    assert told(story.fail("a1"), c.NotifyAborted) == ""
    effects = story.do(c.CheckpointStored(1, "chk-1/manifest", 0))
    assert told(effects, c.NotifyCompleted) == "a0 b0 b1"
    story.restored = RestoredCheckpoint(1)
    assert told(story.due(), job_effects.ReplaceProducer) == "b0 b1"


@pytest.mark.parametrize("stored", ["as it fails", "when all run again"])
def test_what_a_checkpoint_covers_is_committed_when_all_have_said_so_or_begun_from_it(
    stored: str,
) -> None:
    """Its storage says late that it has it: one task has finished meanwhile, one has begun again."""
    story = Story(CACHING, checkpoints=True)
    story.run("a0 a1 b0 b1")
    trigger(story)
    ack(story, "a0 a1 b0 b1", 1)
    story.fail("b1")
    story.report("a0", FINISHED)
    story.restored = RestoredCheckpoint(1)
    if stored == "as it fails":
        told_of = told(story.do(c.CheckpointStored(1, "chk-1/manifest", 0)), c.NotifyCompleted)
    story.due()
    story.run("b1")
    if stored != "as it fails":
        told_of = told(story.do(c.CheckpointStored(1, "chk-1/manifest", 0)), c.NotifyCompleted)
    assert told_of == "a1 b0"
    for name in ("b0", "a1"):
        assert job_effects.ReportCommitted(1) not in story.effects
        story.do(job_events.OutputCommitted(story.key(name), 1))
    assert job_effects.ReportCommitted(1) in story.effects


@pytest.mark.parametrize("is_stored", [False, True])
def test_what_fails_while_event_time_has_been_ended_takes_everything_back(is_stored: bool) -> None:
    """A stop with --drain told all sources that time is over: those that go on would never take rows in time again."""
    story = Story(CACHING, checkpoints=True)
    story.run("a0 a1 b0 b1")
    wanted = CheckpointProperties(target="/kept/savepoint", behind=BehindBarrier.DRAIN)
    assert told(story.do(c.CheckpointRequested("stop", 0, wanted)), c.TriggerTasks) == "a0 a1"
    if is_stored:
        ack(story, "a0 a1 b0 b1", 1)
        assert cancelled(story.fail("b1")) == ""
        assert cancelled(story.do(c.CheckpointNotStored(1, "the store is full", 0))) == "a0 a1 b0"
    else:
        assert cancelled(story.fail("b1")) == "a0 a1 b0"
    assert deployed(story.due()) == "a0 a1 b0 b1"
    story.run("a0 a1 b0 b1")
    assert story.master.state is JobState.RUNNING


def test_a_job_that_ends_for_another_reason_does_not_begin_again_for_its_event_time() -> None:
    story = Story(CACHING, checkpoints=True, attempts=0)
    story.run("a0 a1 b0 b1")
    wanted = CheckpointProperties(target="/kept/savepoint", behind=BehindBarrier.DRAIN)
    story.do(c.CheckpointRequested("stop", 0, wanted))
    story.fail("b1")
    assert story.master.failure is not None
    assert story.master.failure.message == CAUSE.message
    assert story.master.state is JobState.FAILED


def test_a_leader_that_hands_over_ends_no_task_for_its_event_time() -> None:
    """The next one finds out that it has been ended, and has all begin again."""
    story = Story(CACHING, checkpoints=True, goes_on=True)
    story.run("a0 a1 b0 b1")
    wanted = CheckpointProperties(target="/kept/savepoint", behind=BehindBarrier.DRAIN)
    story.do(c.CheckpointRequested("stop", 0, wanted))
    effects = story.do(job_events.SuspendRequested())
    assert cancelled(effects) == ""
    assert story.master.state is JobState.SUSPENDED


def test_a_newest_checkpoint_that_cannot_be_read_any_more_takes_everything_back() -> None:
    """Aim: what goes on holds what follows the newest one; of splits that were read until then nobody keeps names."""
    story = Story(drawn("a:2 b:2", "a>b forward pipelined"), checkpoints=True)
    story.run("a0 a1 b0 b1")
    for checkpoint_id in (1, 2):
        trigger(story)
        ack(story, "a0 a1 b0 b1", checkpoint_id)
        story.do(c.CheckpointStored(checkpoint_id, f"chk-{checkpoint_id}/manifest", 0))
    story.restored = RestoredCheckpoint(1)
    story.fail("a1")
    effects = story.due()
    assert cancelled(effects) == "a0 b0"
    assert deployed(effects) == ""
    assert deployed(story.due()) == "a0 a1 b0 b1"


def test_what_a_stage_has_left_is_not_replaced_by_what_its_former_attempt_had() -> None:
    """The checkpoint is older than the attempt whose rows are read now."""
    story = Story(drawn("a:1 b:1", "a>b hash blocking reproducible"), checkpoints=True)

    def finish(text: str, left: str) -> None:
        story.run(text)
        last = c.LastState(left)
        story.do(job_events.AttemptReported(story.key(text), FINISHED, last=last))

    finish("a0", "of the first")
    story.run("b0")
    first = (subtask("a0"), c.LastState("of the first"))
    begun = subtasks("a0 b0")
    story.restored = RestoredCheckpoint(1, subtasks("a0"), subtasks=begun, left=(first,))
    story.fail("b0", job_events.MissingPartition("a>b", story.key("a0")))
    assert deployed(story.due()) == "a0"
    finish("a0", "of the second")
    story.run("b0")
    story.fail("b0")
    assert deployed(story.due()) == "b0"
    story.run("b0")
    trigger(story)
    [store] = [e for e in ack(story, "b0", 1) if isinstance(e, job_effects.WriteManifest)]
    assert store.stored.last == ((story.key("a0"), "of the second"),)


def test_a_checkpoint_waits_for_what_has_begun_before_and_waits_for_its_input() -> None:
    plan = drawn("a:1 b:1 c:1", "a>b hash blocking reproducible", "b>c hash caching reproducible")
    story = Story(plan, checkpoints=True)
    finished_stage(story, "a0")
    story.run("b0 c0")
    blame = job_events.MissingPartition("a>b", story.key("a0"))
    story.fail("b0", blame)
    assert deployed(story.due()) == "a0"
    story.run("a0")
    assert story.state("c0") is RUNNING
    assert told(trigger(story), c.TriggerTasks) == ""
    story.report("a0", FINISHED)
    story.run("b0")
    assert told(trigger(story), c.TriggerTasks) == "b0"


def test_a_checkpoint_waits_for_what_the_restored_one_holds() -> None:
    plan = drawn("a:1 b:1 c:1", "a>b hash blocking reproducible")
    story = Story(plan, checkpoints=True)
    story.prepares = False
    story.do(job_events.FailureRequested(CAUSE))
    story.due()
    held = subtasks("b0 c0")
    story.do(job_events.StartPrepared(1, RestoredCheckpoint(7, subtasks=held), (), 8))
    story.run("a0 c0")
    assert told(trigger(story), c.TriggerTasks) == ""
    story.report("a0", FINISHED)
    story.run("b0")
    assert told(trigger(story), c.TriggerTasks) == "b0 c0"


def test_a_damaged_checkpoint_restarts_everything() -> None:
    story = Story(CACHING, checkpoints=True)
    story.run("a0 a1 b0 b1")
    story.restored = RestoredCheckpoint(3)
    story.fail("a1")
    story.due()
    damaged = FailureCause("StoreCorrupt", "chk-3/x was altered", vertex="a")
    effects = story.do(job_events.AttemptReported(story.key("a1"), AttemptState.FAILED, damaged))
    assert cancelled(effects) == "a0 b0 b1"
    story.restored = RestoredCheckpoint(2)
    effects = story.due()
    assert effects[0] == job_effects.PrepareStart(2, (3,))
    assert deployed(effects) == "a0 a1 b0 b1"


@pytest.mark.parametrize("strategy", ["region", "full"])
def test_a_failure_of_the_whole_job_leaves_alone_what_is_kept_of_stages_that_are_done(
    strategy: str,
) -> None:
    """Aim: a reader that has read a part of it goes on; rows that were made again need not be the same ones."""
    story = Story(
        drawn("a:2 b:1 c:1 d:1", "a>b hash blocking", "c>d hash caching"),
        checkpoints=True,
        strategy=FailoverStrategyName(strategy),
    )
    finished_stage(story, "a0 a1")
    story.run("b0 c0 d0")
    story.report("c0", FINISHED)
    read = RestoredRead(subtask("b0"), "a>b", 0, story.key("a0").attempt, rows=10)
    begun = subtasks("a0 a1 b0 c0 d0")
    story.restored = RestoredCheckpoint(1, subtasks("a0 a1 c0"), reads=(read,), subtasks=begun)
    story.do(job_events.FailureRequested(CAUSE))
    effects = story.due()
    if strategy == "full":
        assert story.master.state is JobState.FAILED
    else:
        assert deployed(effects) == "b0 c0 d0"


def test_a_stage_that_is_lost_begins_again_with_the_whole_job() -> None:
    """What the lost stage had read was released when it was done, and is made again as well."""
    story = Story(drawn("a:1 b:1 c:1", "a>b hash blocking", "b>c hash blocking"))
    finished_stage(story, "a0")
    finished_stage(story, "b0")
    story.run("c0")
    story.lose("b0")
    assert deployed([*story.do(job_events.FailureRequested(CAUSE)), *story.due()]) == "a0"


def test_an_older_checkpoint_that_is_damaged_leaves_the_newest_alone() -> None:
    """a0 goes on from checkpoint 3, a1 from checkpoint 5."""
    story = Story(drawn("a:2 b:2", "a>b forward pipelined"), checkpoints=True)
    story.restored = RestoredCheckpoint(3)
    story.do(job_events.FailureRequested(CAUSE))
    story.due()
    story.run("a0 a1 b0 b1")
    story.restored = RestoredCheckpoint(5)
    story.fail("a1")
    story.due()
    story.run("a1 b1")
    damaged = FailureCause("StoreNotFound", "chk-3/x is not there", vertex="a")
    effects = story.do(job_events.AttemptReported(story.key("a0"), AttemptState.FAILED, damaged))
    assert cancelled(effects) == "b0"
    assert story.due()[0] == job_effects.PrepareStart(3, (3,), subtasks("a0 b0"))


# ---------------------------------------------------------------- after another JobManager


BUILT = drawn("a:2 b:2", "a>b hash blocking")


def half_read(*attempts: int) -> RestoredCheckpoint:
    """Both of b had begun to read these attempts of a0 and a1."""
    reads = tuple(
        RestoredRead(SubtaskId("b", reader), "a>b", producer, attempt, rows=5)
        for reader in range(2)
        for producer, attempt in enumerate(attempts)
    )
    return RestoredCheckpoint(4, subtasks("a0 a1"), (), reads, subtasks("a0 a1 b0 b1"))


def located(*held: str) -> job_events.AttemptsFound:
    """Nothing runs any more; of ``h0:a1#3``, TaskManager h0 has what attempt 3 of a1 has sent to b."""
    found = []
    for text in held:
        holder, _, rest = text.partition(":")
        name, _, attempt = rest.partition("#")
        key = AttemptKey(name[0], int(name[1:]), int(attempt))
        found.append(
            job_events.LocatedPartition(holder, Endpoint("", f"server {holder}"), "a>b", key)
        )
    return job_events.AttemptsFound(7, (), located=tuple(found))


def taken_over(plan: JobPlan = BUILT, restored: RestoredCheckpoint | None = None) -> Story:
    restored = restored or half_read(3, 2)
    return Story(plan, checkpoints=True, first_attempt=7, restored=restored, goes_on=True)


def phases(story: Story) -> list[GroupPhase]:
    return [group.phase for group in story.master._parts.groups]


def test_what_an_earlier_jobmanager_had_done_and_is_held_is_read_on() -> None:
    story = taken_over()
    wanted = (("a>b", AttemptKey("a", 0, 3)), ("a>b", AttemptKey("a", 1, 2)))
    assert job_effects.FindAttempts(7, wanted) in story.effects
    assert deployed(story.effects) == ""
    effects = story.do(located("h0:a0#3", "h1:a1#2"))
    assert deployed(effects) == "b0 b1"
    assert story.attempts("a0 a1 b0 b1") == [3, 2, 7, 7]
    channels = {
        (channel.producer.host_id, channel.producer_attempt)
        for e in effects
        if isinstance(e, job_effects.DeployTasks)
        for task in e.tasks
        for edge in task.inputs
        for channel in edge.channels
    }
    assert channels == {
        ("server h0", AttemptKey("a", 0, 3)),
        ("server h1", AttemptKey("a", 1, 2)),
    }
    story.run("b0 b1")
    assert story.master.state is JobState.RUNNING
    story.report("b0 b1", FINISHED)
    assert story.master.state is JobState.FINISHED
    released = [e for e in story.effects if isinstance(e, job_effects.ReleasePartitions)]
    assert released == [job_effects.ReleasePartitions("h0"), job_effects.ReleasePartitions("h1")]


def test_rows_that_are_gone_cannot_be_read_on() -> None:
    story = taken_over()
    story.do(located("h0:a0#3"))
    assert story.master.state is JobState.FAILED
    assert story.master.failure is not None
    assert "cannot go on from checkpoint 4" in story.master.failure.message


def test_who_had_read_all_before_the_checkpoint_needs_no_rows() -> None:
    """Its snapshot says where it stood, at the end, when it was still closing; it passes nothing on but its end."""
    plan = drawn("a:1 b:1 c:1", "a>b forward blocking", "b>c forward pipelined")
    reads = (RestoredRead(SubtaskId("b", 0), "a>b", 0, 3, rows=5),)
    restored = RestoredCheckpoint(4, subtasks("a0 b0"), (), reads, subtasks("a0 b0 c0"))
    story = taken_over(plan, restored)
    story.do(located())
    assert story.master.failure is None
    begun = deployed(story.effects).split()
    for name in begun:
        story.run(name)
        story.report(name, FINISHED)
    assert story.master.failure is None
    assert story.master.state is not JobState.FAILED


def test_rows_that_come_again_are_made_again_where_they_are_gone() -> None:
    story = taken_over(drawn("a:2 b:2", "a>b hash blocking reproducible"))
    assert deployed(story.do(located("h1:a1#2"))) == "a0"
    story.run("a0")
    assert deployed(story.report("a0", FINISHED)) == "b0 b1"
    assert story.attempts("a0 a1") == [7, 2]


def test_a_holder_that_is_lost_before_its_rows_are_read_ends_the_job() -> None:
    """With the cause, and not before the job has tried: what is behind may still have been reproducible."""
    story = taken_over(restored=half_read(3, 2))
    story.answers_calls = False
    story.do(located("h0:a0#3", "h1:a1#2"))
    story.do(job_events.TaskManagerGone("h1", LOST))
    story.answers_calls = True
    story.due()
    assert story.master.state is JobState.FAILED
    assert story.master.failure is not None
    assert "what a/1 had written" in story.master.failure.message


def test_nobody_is_asked_twice_what_was_done() -> None:
    """Everything begins again after a damaged checkpoint, as in any job."""
    story = taken_over(drawn("a:2 b:2", "a>b hash blocking reproducible"))
    story.do(located("h0:a0#3", "h1:a1#2"))
    story.run("b0 b1")
    before = len(story.effects)
    damaged = FailureCause("StoreCorrupt", "chk-7/x was altered", vertex="b")
    story.restored = None
    story.do(job_events.AttemptReported(story.key("b0"), AttemptState.FAILED, damaged))
    story.due()
    assert deployed(story.effects[before:]) == "a0 a1"
    assert not [e for e in story.effects[before:] if isinstance(e, job_effects.FindAttempts)]


def test_a_failure_before_anybody_has_said_what_was_done_has_all_be_asked_again() -> None:
    """Nothing has begun under this JobManager: what was done before may still be adopted, by the new numbers."""
    story = taken_over()
    assert phases(story) == [GroupPhase.LOCATING]
    assert [type(e) for e in story.do(job_events.FailureRequested(CAUSE))] == [
        job_effects.PostLater
    ]
    assert phases(story) == [GroupPhase.DELAY]
    asked = [e for e in story.due() if isinstance(e, job_effects.FindAttempts)]
    assert [e.attempt for e in asked] == [8]
    assert story.do(located("h0:a0#3", "h1:a1#2")) == []
    assert story.master.dropped_events == 1, "the answer to the first question is stale"
    answer = replace(located("h0:a0#3", "h1:a1#2"), attempt=8)
    assert deployed(story.do(answer)) == "b0 b1"
    assert story.attempts("a0 a1 b0 b1") == [3, 2, 8, 8]


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    story = taken_over()
    assert phases(story) == [GroupPhase.LOCATING]
    story.do(job_events.CancelRequested())
    assert phases(story) == [GroupPhase.LATE]
    assert story.master.state is JobState.CANCELED
    assert story.do(located("h0:a0#3", "h1:a1#2")) == []
    assert story.master.dropped_events == 1


def test_a_jobmanager_that_stops_leaves_to_its_successor_what_is_held() -> None:
    story = Story(BUILT, checkpoints=True)
    story.run("a0 a1")
    story.report("a0 a1", FINISHED)
    effects = story.do(job_events.SuspendRequested())
    assert story.master.state is JobState.SUSPENDED
    assert not [e for e in effects if isinstance(e, job_effects.ReleasePartitions)]


def test_splits_wait_for_readers_that_begin_later() -> None:
    """Subtask 1 of the source is in a region that waits for the input of another stage."""
    plan = with_source(drawn("a:2 s:2 b:2", "a>b forward blocking", "s>b forward pipelined"), "s")
    story = Story(plan)
    story.run("a0 a1")
    assert deployed(story.report("a0", FINISHED)) == "b0 s0"
    story.run("s0 b0")
    found = (Split("x", size=2), Split("y", size=1))
    assert (
        told(
            story.do(job_events.SplitsReported(story.key("s0"), "src", found, True)),
            job_effects.AddSplits,
        )
        == "s0"
    )
    [late] = commands(story.report("a1", FINISHED), job_effects.AddSplits)
    assert late == job_effects.AddSplits(story.key("s1"), "src", (found[1],), True)


def test_who_discovers_splits_does_not_wait_for_those_who_read_them() -> None:
    """b0 goes with a0 and reads what a1 writes, who can write nothing before a0 has found splits."""
    story = Story(with_source(drawn("a:4@x b:2@x", "a>b rescale blocking"), "a"))
    story.run("a0 a1 a2 a3 b0 b1")
    found = (Split("x", size=2), Split("y", size=1))
    told_of = told(
        story.do(job_events.SplitsReported(story.key("a0"), "src", found, True)),
        job_effects.AddSplits,
    )
    assert told_of == "a0 a1 a2 a3"


# ---------------------------------------------------------------- the end


def test_after_the_commit_has_begun_a_failure_ends_the_job() -> None:
    story = Story(drawn("a:2"))
    story.run("a0 a1")
    story.do(job_events.EndOfDataReported(story.key("a0")))
    effects = story.do(job_events.EndOfDataReported(story.key("a1")))
    assert effects[0] == job_effects.NoteCommit()
    assert told(effects, job_effects.CommitOutput) == "a0 a1"
    story.report("a0", FINISHED)
    story.fail("a1")
    assert story.master.state is JobState.FAILED
    assert story.master.failure is not None
    assert "output had begun to be committed" in story.master.failure.message


def test_all_partitions_are_released_at_the_end() -> None:
    story = Story(CHAIN, checkpoints=False)
    finished_stage(story, "a0 a1")
    effects = story.do(job_events.CancelRequested())
    assert [e for e in effects if isinstance(e, job_effects.ReleasePartitions)] == [
        job_effects.ReleasePartitions("t0"),
        job_effects.ReleasePartitions("t1"),
    ]


def test_a_checkpoint_waits_for_who_will_read_a_caching_edge_from_the_start() -> None:
    """Without it the producer would drop rows, and after a restart never write them again."""
    plan = drawn("a:1 b:1 c:1", "a>c hash blocking", "b>c hash caching reproducible")
    story = Story(plan, checkpoints=True)
    story.run("a0 b0")
    assert told(trigger(story), c.TriggerTasks) == ""
    story.report("a0", FINISHED)
    assert told(trigger(story), c.TriggerTasks) == ""
    story.run("c0")
    assert told(trigger(story), c.TriggerTasks) == "b0"
