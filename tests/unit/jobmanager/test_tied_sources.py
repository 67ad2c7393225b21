"""Aim: sources that were read under another JobManager are read again whole, or not at all: nobody knows who has had
which of their splits.

Method: the machine of a job alone; a TaskManager is lost with what one of two adopted subtasks has written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint, RestoredSplit
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.slot import Slot
from jobmanager.messages import job_effects, job_events
from penstock.connectors.source import Split
from tests.support.drawn_plans import drawn
from tests.unit.jobmanager.test_partial_restarts import (
    LOST,
    Story,
    deployed,
    half_read,
    located,
    taken_over,
    with_source,
)

PLAN = with_source(drawn("a:2 b:2", "a>b hash blocking reproducible"), "a")
SPLITS = (Split("s0", size=9), Split("s1", size=9))


def given(story: Story) -> dict[str, list[str]]:
    """Attempt -> splits that it has been told of, where the source is discovered."""
    effects = story.do(job_events.SplitsReported(story.key("a0"), "src", SPLITS, True))
    return {
        str(command.key.subtask): [split.id for split in command.splits]
        for effect in effects
        if isinstance(effect, job_effects.SendCommands)
        for command in effect.commands
        if isinstance(command, job_effects.AddSplits)
    }


def adopted() -> RestoredCheckpoint:
    splits = tuple(RestoredSplit("a", "src", index, f"s{index}", 9, True) for index in range(2))
    return replace(half_read(3, 2), splits=splits)


@pytest.mark.parametrize("lost", ["h0", "h1"])
def test_a_stage_that_a_checkpoint_knows_as_done_is_read_again_whole(lost: str) -> None:
    story = taken_over(PLAN, adopted())
    assert deployed(story.do(located("h0:a0#3", "h1:a1#2"))) == "b0 b1"
    story.run("b0 b1")
    story.do(job_events.TaskManagerGone(lost, LOST))
    assert deployed(story.due()) == "a0 a1"
    story.run("a0 a1")
    assert given(story) == {"a/0": ["s0"], "a/1": ["s1"]}


@pytest.mark.parametrize("lost", ["h0", "h1"])
def test_a_stage_of_which_only_the_rows_are_left_is_read_again_whole(lost: str) -> None:
    story = Story(PLAN, first_attempt=7, goes_on=True)
    reads = frozenset(("a>b", AttemptKey("a", index, 3)) for index in range(2))
    found = tuple(
        job_events.FoundAttempt(
            AttemptKey("b", index, 3),
            Slot(str(index), f"t{index}", "first"),
            Endpoint(str(index)),
            1,
            AttemptState.RUNNING,
            reads=reads,
        )
        for index in range(2)
    )
    held = located("h0:a0#3", "h1:a1#3").located
    ended = frozenset([SubtaskId("a", 0), SubtaskId("a", 1)])
    story.do(job_events.AttemptsFound(7, found, located=held, ended=ended))
    assert story.master.restarts == 0
    assert story.attempts("a0 a1 b0 b1") == [3, 3, 3, 3]
    story.do(job_events.TaskManagerGone(lost, LOST))
    assert deployed(story.due()) == "a0 a1"
    story.run("a0 a1")
    assert given(story) == {"a/0": ["s0"], "a/1": ["s1"]}
