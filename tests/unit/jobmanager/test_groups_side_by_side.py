"""Aim: failures in different regions recover at the same time, and none waits for, or takes from, another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.graph.slot import Slot
from jobmanager.job.groups import (
    GROUP_TRANSITIONS,
    Group,
    GroupEvent,
    GroupPhase,
    Groups,
    next_phase,
)
from jobmanager.job.job_phases import JOB_TRANSITIONS, JobPhase, JobTurn
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from penstock.errors import InvariantViolation
from tests.support.drawn_plans import drawn, in_words, subtask
from tests.unit.jobmanager.test_partial_restarts import (
    Story,
    cancelled,
    deployed,
    dues,
    told,
    trigger,
)

CHAINS = drawn("a:3 b:3", "a>b forward pipelined")
RUNNING, CANCELED = AttemptState.RUNNING, AttemptState.CANCELED
DAMAGED = FailureCause("StoreCorrupt", "chk-7/x was altered", vertex="a")


class Held(Story):
    """A story in which answers of some kinds wait until they are let go."""

    def __init__(self, **options: bool) -> None:
        self.held: tuple[type[job_effects.JobEffect], ...] = ()
        self.waiting: list[job_effects.JobEffect] = []
        super().__init__(CHAINS, **options)
        self.run("a0 a1 a2 b0 b1 b2")

    def answers(self, effect: job_effects.JobEffect) -> list[job_events.JobEvent]:
        if isinstance(effect, self.held):
            self.waiting.append(effect)
            return []
        return super().answers(effect)

    def let_go(self) -> list[job_effects.JobEffect]:
        """Answers what waits."""
        self.held, waiting, self.waiting = (), self.waiting, []
        return [
            effect
            for asked in waiting
            for event in self.answers(asked)
            for effect in self.do(event)
        ]

    def phases(self) -> dict[str, str]:
        """Subtasks of ``a`` -> the phase of their group."""
        return {
            str(one): group.phase.name
            for group in self.master._parts.groups
            for one in sorted(group.subtasks)
            if one.vertex == "a"
        }


WAYS: list[tuple[str, tuple[type[job_effects.JobEffect], ...]]] = [
    ("PREPARING", (job_effects.PrepareStart,)),
    ("SLOTS", (job_effects.RequestSlots,)),
    ("PROCESSES", (job_effects.AllocateSlots,)),
    ("LATE", (job_effects.CancelTasks,)),
]


@pytest.mark.parametrize(("phase", "held"), WAYS)
def test_a_failure_elsewhere_withdraws_nothing_and_goes_its_own_way(
    phase: str, held: tuple[type[job_effects.JobEffect], ...]
) -> None:
    story = Held()
    story.held = held
    if phase == "SLOTS":
        story.lose("a0")
    else:
        story.fail("a0")
    story.due()
    story.now_ms = 1_000
    assert story.phases()["a/0"] == phase
    story.held = ()
    effects = story.fail("a1")
    assert dues(effects) == [job_effects.PostLater(500, job_events.RestartDue(2))], (
        "its delay is its own"
    )
    assert story.master.restarts == 2
    assert cancelled(effects) == "b1"
    assert not [e for e in story.effects if isinstance(e, job_effects.WithdrawRequest)]
    assert deployed(story.due()) == "a1 b1"
    story.run("a1 b1")
    assert story.phases() == {"a/0": phase, "a/1": "RUNNING", "a/2": "RUNNING"}
    assert story.master.state is JobState.RUNNING
    assert deployed(story.let_go()) == "a0 b0"
    story.run("a0 b0")
    assert set(story.phases().values()) == {"RUNNING"}
    assert story.attempts("a0 b0 a2 b2") in ([1, 1, 0, 0], [2, 2, 0, 0])


def test_a_region_that_has_its_slot_does_not_wait_for_another_s_whatever_has_failed_with_it() -> (
    None
):
    """Two TaskManagers are lost in one delay, and one slot comes."""
    story = Held()
    story.held = (job_effects.RequestSlots,)
    story.lose("a0")
    assert dues(story.lose("a1")) == []
    assert story.master.restarts == 1
    story.due()
    second, first = story.waiting
    assert isinstance(first, job_effects.RequestSlots)
    assert isinstance(second, job_effects.RequestSlots)
    assert (first.count, second.count) == (1, 1)
    effects = story.do(job_events.SlotsGranted((Slot("t9-0", "t9", "1"),), second.group))
    assert deployed(effects) == "a1 b1"
    story.run("a1 b1")
    assert story.master.state is JobState.RUNNING
    # What is refused fails by itself, and counts.
    story.now_ms = 1_000
    effects = story.do(job_events.SlotsRefused(1, 3, 0, 3, 100, first.group))
    assert cancelled(effects) == ""
    assert story.master.restarts == 2
    story.held = ()
    assert deployed(story.due()) == "a0 b0"


def test_what_joins_a_delay_prolongs_nothing_and_waits_for_nobody_s_attempts() -> None:
    story = Held()
    story.held = (job_effects.CancelTasks,)
    story.fail("a0")
    story.held = ()
    story.now_ms = 400
    assert dues(story.fail("a1")) == []
    assert deployed(story.due()) == "a1 b1", "b0 still ends"
    assert story.phases() == {"a/0": "LATE", "a/1": "RESTORE", "a/2": "RUNNING"}
    assert deployed(story.let_go()) == "a0 b0"
    assert story.master.restarts == 1


def test_all_that_runs_no_more_is_restarting_until_some_of_it_runs_again() -> None:
    story = Held()
    story.held = (job_effects.RequestSlots,)
    for name in ("a0", "a1", "a2"):
        story.lose(name)
    assert story.master.state is JobState.RESTARTING
    story.due()
    assert len(story.waiting) == 3
    story.waiting = story.waiting[2:]
    story.run(deployed(story.let_go()))
    assert story.master.state is JobState.RUNNING


def test_attempts_that_do_not_end_are_given_up_group_by_group() -> None:
    story = Held()
    story.held = (job_effects.CancelTasks,)
    story.fail("a0")
    story.due()
    [first] = [e for e in story.effects if isinstance(e, job_effects.AwaitCancellation)]
    story.now_ms = 1_000
    story.fail("a1")
    effects = story.do(job_events.CancellationOverdue(first.group))
    assert deployed(effects) == "a0 b0"
    assert story.state("b1") is AttemptState.CANCELING


# ---------------------------------------------------------------- checkpoints


def restored(story: Story, checkpoint_id: int) -> None:
    everything = frozenset(map(subtask, ["a0", "a1", "a2", "b0", "b1", "b2"]))
    story.restored = RestoredCheckpoint(checkpoint_id, subtasks=everything)


def test_no_checkpoint_is_taken_until_all_run() -> None:
    story = Held(checkpoints=True)
    story.held = (job_effects.RequestSlots,)
    story.lose("a0")
    story.due()
    story.fail("a1")
    story.due()
    story.run("a1 b1")
    assert told(trigger(story), c.TriggerTasks) == ""
    story.let_go()
    story.run("a0 b0")
    assert told(trigger(story), c.TriggerTasks) == "a0 a1 a2"


def begun(effects: Iterable[job_effects.JobEffect]) -> list[job_effects.PrepareStart]:
    return [effect for effect in effects if isinstance(effect, job_effects.PrepareStart)]


def test_what_is_about_to_be_deployed_keeps_what_it_was_prepared_for() -> None:
    story = Held(checkpoints=True)
    story.held = (job_effects.RequestSlots,)
    story.lose("a0")
    story.due()
    story.fail("a1")
    [prepared] = begun(story.due())
    assert in_words(prepared.subtasks or ()) == "a1 b1"
    assert in_words(prepared.kept) == "a0 b0"


@pytest.mark.parametrize("runs", [True, False])
def test_a_damaged_checkpoint_takes_all_back_that_hold_it(runs: bool) -> None:
    story = Held(checkpoints=True)
    restored(story, 7)
    story.held = (job_effects.RequestSlots,)
    story.lose("a0")
    story.due()
    story.fail("a1")
    story.due()
    if runs:
        story.run("b1")
        story.fail("a2")
        story.due()
    broken = job_events.AttemptReported(story.key("a1"), AttemptState.FAILED, DAMAGED)
    effects = story.do(broken)
    [due] = dues(effects)
    assert due.delay_ms == 0, "another checkpoint is tried at once"
    assert [e for e in effects if isinstance(e, job_effects.WithdrawRequest)] == [
        job_effects.WithdrawRequest(1)
    ]
    assert set(story.phases().values()) == {"DELAY"}
    restored(story, 6)
    story.held = ()
    effects = story.due()
    [prepared] = begun(effects)
    assert (prepared.unusable, prepared.subtasks) == ((7,), None)
    assert deployed(effects) == "a0 a1 a2 b0 b1 b2"


def test_where_a_later_group_finds_an_older_checkpoint_all_go_on_from_that() -> None:
    story = Held(checkpoints=True)
    restored(story, 7)
    story.held = (job_effects.RequestSlots,)
    story.lose("a0")
    story.due()
    restored(story, 6)
    story.held = ()
    story.fail("a1")
    effects = story.due()
    assert deployed(effects) == ""
    assert job_effects.WithdrawRequest(1) in effects
    effects = story.due()
    assert deployed(effects) == "a0 a1 a2 b0 b1 b2"
    assert {story.master.graph.current_of(s).restored_from for s in story.restored.subtasks} == {6}  # type: ignore[union-attr]


# ---------------------------------------------------------------- what reads each other


def test_what_reads_a_producer_that_waits_for_its_slot_waits_for_it() -> None:
    story = Story(
        replace(
            drawn("a:1 b:1", "a>b forward caching reproducible"),
            vertices=tuple(
                replace(v, slot_group=v.id)
                for v in drawn("a:1 b:1", "a>b forward caching").vertices
            ),
        )
    )
    story.run("a0 b0")
    story.answers_calls = False
    story.lose("a0")
    story.due()
    request = story.effects[-1]
    assert isinstance(request, job_effects.RequestSlots)
    story.answers_calls = True
    story.fail("b0")
    assert deployed(story.due()) == ""
    slot = Slot("t9-0", "t9", "1")
    effects = story.do(job_events.SlotsGranted((slot,), request.group))
    assert deployed(effects) == "a0 b0"
    assert not [e for e in effects if isinstance(e, job_effects.SendCommands)]


def test_who_waits_for_slots_and_reads_a_producer_that_fails_meanwhile_is_deployed_behind_it() -> (
    None
):
    vertices = tuple(replace(v, slot_group=v.id) for v in drawn("a:1 b:1").vertices)
    story = Story(replace(drawn("a:1 b:1", "a>b forward caching reproducible"), vertices=vertices))
    story.run("a0 b0")
    story.answers_calls = False
    story.lose("b0")
    story.due()
    request = story.effects[-1]
    assert isinstance(request, job_effects.RequestSlots)
    story.answers_calls = True
    story.fail("a0")
    slot = Slot("t9-0", "t9", "1")
    assert deployed(story.do(job_events.SlotsGranted((slot,), request.group))) == ""
    assert deployed(story.due()) == "a0 b0"


# ---------------------------------------------------------------- the tables


def test_what_the_tables_do_not_name_is_our_bug() -> None:
    everything = [subtask("a0")]
    for phase in GroupPhase:
        for event in GroupEvent:
            group = Group(1, frozenset(everything), phase)
            if (phase, event) in GROUP_TRANSITIONS:
                assert next_phase(group, event) is GROUP_TRANSITIONS[phase, event]
            else:
                with pytest.raises(InvariantViolation, match=f"{event.name} in {phase.name}"):
                    next_phase(group, event)
    assert {phase for phase, _ in GROUP_TRANSITIONS} == set(GroupPhase)
    assert set(GROUP_TRANSITIONS.values()) == set(GroupPhase)


def test_every_phase_of_a_job_is_reached_and_only_its_end_is_not_left() -> None:
    assert set(JOB_TRANSITIONS.values()) == set(JobPhase) - {JobPhase.NEW}
    assert {phase for phase, _ in JOB_TRANSITIONS} == set(JobPhase) - {JobPhase.ENDED}
    assert {turn for _, turn in JOB_TRANSITIONS} == set(JobTurn)


def test_numbers_of_groups_that_have_failed_are_new() -> None:
    groups = Groups([subtask("a0"), subtask("b0")])
    numbers = {0}
    for _ in range(3):
        [group] = groups
        for event in (GroupEvent.STARTED, GroupEvent.PREPARED, GroupEvent.BEGUN):
            groups.move(group, event)
        assert group.id in numbers
        taken = groups.take(group.subtasks, GroupEvent.FAILED)
        assert taken.id not in numbers
        numbers.add(taken.id)
        groups.move(taken, GroupEvent.ATTEMPTS_OVER)
        groups.move(taken, GroupEvent.DUE)
        groups.move(taken, GroupEvent.PREPARED)
    groups.check()
