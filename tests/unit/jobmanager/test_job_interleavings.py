"""The machine of a job under random interleavings of random plans.

PENSTOCK_HISTORIES sets how many stories there are, in the place of the default.
"""

from __future__ import annotations

import os
from collections import Counter
from unittest import mock

from hypothesis import example, given
from hypothesis import strategies as st

from jobmanager.failover.restart_settings import NO_LIMIT
from jobmanager.graph.job_plan import JobPlan
from jobmanager.job import groups
from jobmanager.job.groups import GROUP_TRANSITIONS, GroupEvent, GroupPhase
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState, is_terminal
from tests.support.examples import examples
from tests.support.job_world import World
from tests.support.speculative_world import SpeculativeWorld

HISTORIES = int(os.environ.get("PENSTOCK_HISTORIES") or 250)


@examples(HISTORIES)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.02, 0.05, 0.1]),
    st.sampled_from([0, 2, NO_LIMIT]),
    st.booleans(),
)
def test_any_interleaving_ends_once_and_leaks_nothing(
    seed: int, mishaps: float, attempts: int, checkpoints: bool
) -> None:
    check_story(World(seed, mishaps, attempts, checkpoints=checkpoints), mishaps, attempts)


@examples(HISTORIES)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.02, 0.05, 0.1]),
    st.sampled_from([0, 2, NO_LIMIT]),
)
@example(
    1913, 0.0, 0
)  # slots for what comes next, while all that are free are on their way to rivals
def test_any_interleaving_with_rivals_ends_once_and_leaks_nothing(
    seed: int, mishaps: float, attempts: int
) -> None:
    world = SpeculativeWorld(seed, mishaps, attempts)
    check_story(world, mishaps, attempts)
    committed = Counter(key.subtask for key in world.commits)
    assert set(committed.values()) <= {1}, "of two attempts one is committed"
    assert not world.beaten & world.commits.keys()
    if mishaps == 0.0:
        assert not world.beaten & {key for _, key in world.partitions}, "what lost leaves nothing"


def test_drawn_stories_see_every_fate_of_rivals() -> None:
    fates: Counter[job_effects.RivalFate] = Counter()
    for seed in range(120):
        world = SpeculativeWorld(seed, 0.02, NO_LIMIT)
        check_story(world, 0.02, NO_LIMIT)
        fates.update(world.fates)
    assert set(fates) == set(job_effects.RivalFate)
    assert fates[job_effects.RivalFate.WON] > 20


CANCELLED_IN = [phase for phase in GroupPhase if phase is not GroupPhase.LOCATING]


def _cancel_in(world: World, phase: GroupPhase) -> None:
    """Goes on until a group is in a phase, and cancels the job then."""
    while world.turn():
        if world.master._parts.groups.in_phase(phase):
            world.deliver(job_events.CancelRequested())
            return


OF_RECOVERED_JOBS = (GroupPhase.LOCATING, GroupEvent.PINNED)


def test_drawn_stories_see_whatever_can_happen_to_a_group_in_every_phase() -> None:
    """But to groups of recovered jobs, whose stories are in test_partial_restarts."""
    met: set[tuple[GroupPhase, GroupEvent]] = set()
    wanted = {pair for pair in GROUP_TRANSITIONS if not set(pair) & set(OF_RECOVERED_JOBS)}
    follows = groups.next_phase

    def audited(group: groups.Group, event: GroupEvent) -> GroupPhase:
        met.add((group.phase, event))
        return follows(group, event)

    with mock.patch.object(groups, "next_phase", audited):
        for seed in range(400):
            world = World(seed, 0.1, NO_LIMIT, checkpoints=bool(seed % 2))
            if seed % 2 == 0:
                _cancel_in(world, CANCELLED_IN[seed // 2 % len(CANCELLED_IN)])
            check_story(world, 0.1, NO_LIMIT)
            if met >= wanted:
                break
    assert met == wanted


def check_story(world: World, mishaps: float, attempts: int) -> None:
    """Runs a job to its end, without mishaps from some time on."""
    for _ in range(400):
        if not world.turn():
            break
    world.mishaps = 0.0
    for _ in range(3_000):
        if not world.turn():
            break
    master = world.master
    assert master.ended, (master.state, master._phase, list(master.story)[-10:])
    world.drain()
    assert [is_terminal(state) for state in world.published].count(True) == 1
    end = world.published[-1]
    if mishaps == 0.0:
        assert world.published == [JobState.RUNNING, JobState.FINISHED]
    if end is JobState.FAILED and attempts == NO_LIMIT:
        assert master.failure is not None
        assert master.failure.error_class == "Unrecoverable", master.failure
    if attempts == 2:
        assert master.restarts <= 2
    assert set(world.commits.values()) <= {1}
    if end is JobState.FINISHED:
        check_splits(world, world.plan)
    assert not world.held, "slots are given back"
    for slot in world.granted:
        assert world.freed[slot] + (slot in world.lost) >= 1, slot
        assert world.freed[slot] <= 1, slot


def check_splits(world: World, plan: JobPlan) -> None:
    """Each split was read by one subtask."""
    for vertex in plan.vertices:
        if vertex.source_uids:
            owners = Counter(
                split
                for subtask, splits in world.finished_splits.items()
                if subtask.vertex == vertex.id
                for split in splits
            )
            assert owners == Counter({f"s{number}": 1 for number in range(5)}), owners
