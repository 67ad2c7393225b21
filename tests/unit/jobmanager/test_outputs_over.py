"""Aim: what a blocking exchange keeps goes once no checkpoint that can be restored has anybody read or make it again, and
neither a failure nor a lost TaskManager brings it back.

Method: stories of the job's machine with a history that is read before live rows, as those of partial restarts; drawn
ones, in a world that keeps two checkpoints, of which the newer one may be damaged, and that knows who would read what.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.regions import KeptOutput
from jobmanager.failover.restart_settings import NO_LIMIT
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.job_plan import JobPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.kept_partitions_runner import KeptPartitionsRunner
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.partitions.partition_tracker import SHARED_STORAGE
from penstock.partition_id import PartitionId
from tests.support.drawn_plans import drawn, subtask, subtasks
from tests.support.examples import examples
from tests.support.job_world import Task, World
from tests.unit.jobmanager.test_job_interleavings import check_story
from tests.unit.jobmanager.test_partial_restarts import (
    Story,
    ack,
    deployed,
    finished_stage,
    trigger,
    with_source,
)

FINISHED = AttemptState.FINISHED
# s has made the history, h reads it and passes it on to l, which reads live rows of v behind it.
EDGES = ("s>h hash blocking", "h>l hash pipelined", "v>l hash pipelined")
HISTORY = drawn("s:2 h:2 v:2 l:2", *EDGES)
OVER = frozenset(KeptOutput("s>h", subtask(name)) for name in ("s0", "s1"))


def outputs(effects: list[job_effects.JobEffect]) -> frozenset[KeptOutput]:
    """What TaskManagers are to drop whatever attempts have made it."""
    found = [e.partitions for e in effects if isinstance(e, job_effects.ReleaseOutputs)]
    return frozenset().union(*found)


def stored(story: Story, checkpoint_id: int, text: str) -> list[job_effects.JobEffect]:
    """A checkpoint of those that run is completed."""
    trigger(story)
    ack(story, text, checkpoint_id)
    return story.do(c.CheckpointStored(checkpoint_id, f"chk-{checkpoint_id}/manifest", 0))


def begun(**options: Any) -> Story:
    """The history is complete, and is read; checkpoint 1 is of that time."""
    story = Story(HISTORY, checkpoints=True, **options)
    finished_stage(story, "s0 s1")
    story.run("h0 h1 v0 v1 l0 l1")
    assert not outputs(stored(story, 1, "h0 h1 v0 v1 l0 l1"))
    return story


def gone_on(story: Story, checkpoint_id: int) -> None:
    """A subtask fails, and what begins again goes on from a checkpoint behind the history."""
    story.restored = RestoredCheckpoint(
        checkpoint_id, subtasks("s0 s1 h0 h1"), subtasks=subtasks("s0 s1 h0 h1 v0 v1 l0 l1")
    )
    story.fail("l0")
    assert deployed(story.due()) == "h0 h1 l0 l1 v0 v1", "the history is not made again"
    story.run("v0 v1 l0 l1")
    story.report("h0 h1", FINISHED)


def test_it_goes_once_a_checkpoint_has_all_who_read_it_as_finished() -> None:
    story = begun()
    story.report("h0", FINISHED)
    assert not outputs(stored(story, 2, "h1 v0 v1 l0 l1"))
    story.report("h1", FINISHED)
    assert not outputs(story.effects)
    assert outputs(stored(story, 3, "v0 v1 l0 l1")) == OVER
    gone_on(story, 3)
    assert outputs(stored(story, 4, "v0 v1 l0 l1")) == OVER, "a TaskManager may not have heard"
    assert story.master.state is JobState.RUNNING


def test_one_of_an_older_checkpoint_that_is_kept_stays() -> None:
    story = begun(retained_max=2)
    story.report("h0 h1", FINISHED)
    assert not outputs(stored(story, 2, "v0 v1 l0 l1")), "if 2 is damaged, 1 has it read"
    assert outputs(stored(story, 3, "v0 v1 l0 l1")) == OVER


def test_what_is_lost_behind_that_is_missed_by_nobody() -> None:
    story = begun()
    story.report("h0 h1", FINISHED)
    stored(story, 2, "v0 v1 l0 l1")
    story.restored = RestoredCheckpoint(
        2, subtasks("s0 s1 h0 h1"), subtasks=subtasks("s0 s1 h0 h1 v0 v1 l0 l1")
    )
    effects = [*story.lose("s0"), *story.due()]
    assert "s" not in deployed(effects), "it need not run elsewhere"


def test_who_misses_it_all_the_same_gets_it_made_again() -> None:
    """As a slot of an earlier version does, which reads what it has taken once more."""
    story = begun()
    story.report("h0 h1", FINISHED)
    stored(story, 2, "v0 v1 l0 l1")
    story.restored = RestoredCheckpoint(
        2, subtasks("s0 s1 h0 h1"), subtasks=subtasks("s0 s1 h0 h1 v0 v1 l0 l1")
    )
    story.fail("l0")
    story.due()
    missing = job_events.MissingPartition("s>h", story.key("s1"))
    assert "s1" in deployed([*story.fail("h0", missing), *story.due()])


def test_what_lies_on_shared_storage_goes_once() -> None:
    story = begun(shares_spill=True)
    story.report("h0 h1", FINISHED)
    released = [
        [
            e
            for e in stored(story, id, "v0 v1 l0 l1")
            if isinstance(e, job_effects.ReleasePartitions)
        ]
        for id in (2, 3)
    ]
    made = (("s>h", AttemptKey("s", 0, 0)), ("s>h", AttemptKey("s", 1, 0)))
    assert released == [[job_effects.ReleasePartitions(SHARED_STORAGE, made)], []]


@pytest.mark.parametrize("finished", ["s0 s1 h0 h1", "s0 s1 h0"])
def test_the_next_jobmanager_knows_it_from_the_checkpoint(finished: str) -> None:
    known = subtasks(finished)
    story = Story(
        HISTORY,
        checkpoints=True,
        first_attempt=16,
        goes_on=True,
        restored=RestoredCheckpoint(5, known, subtasks=subtasks("s0 s1 h0 h1 v0 v1 l0 l1")),
        retained=(CompletedCheckpoint(5, 0, 0, 0, "chk-5/manifest", (), finished=known),),
    )
    runs = [name for name in ("h1", "v0", "v1", "l0", "l1") if subtask(name) not in known]
    found = tuple(
        job_events.FoundAttempt(
            AttemptKey(name[0], int(name[1]), 0),
            Slot(f"s{name[1]}", "tm", "i"),
            Endpoint(f"s{name[1]}"),
            1,
            AttemptState.RUNNING,
            reads=frozenset(
                (f"{producer}>l", AttemptKey(producer, index, 0))
                for producer in "hv"
                for index in range(2)
                if name[0] == "l"
            ),
        )
        for name in runs
    )
    effects = story.do(job_events.AttemptsFound(16, found, is_anyone_missing=False))
    assert outputs(effects) == (OVER if len(known) == 4 else frozenset())


def test_what_taskmanagers_say_they_hold_of_it_goes_whatever_attempt_has_made_it() -> None:
    held = {
        PartitionId("s>h", "s", 0, 3): "tm-1",
        PartitionId("s>h", "s", 1, 4): "tm-2",
        PartitionId("s>x", "s", 0, 3): "tm-1",
    }
    cluster = cast(
        "Any", type("Cluster", (), {"partitions": type("P", (), {"of_job": lambda *_: held})()})
    )
    kept = KeptPartitionsRunner("job", HISTORY, cluster, None)
    assert kept.lying(OVER) == (
        job_effects.ReleasePartitions("tm-1", (("s>h", AttemptKey("s", 0, 3)),)),
        job_effects.ReleasePartitions("tm-2", (("s>h", AttemptKey("s", 1, 4)),)),
    )
    assert kept.lying([]) == ()


# ---------------------------------------------------------------- drawn stories


class HistoryWorld(World):
    """A job with a history, whose live rows come for some checkpoints longer."""

    @override
    def _drawn_plan(self) -> JobPlan:
        self.live_until = self.random.randint(2, 9)
        claims = self.random.choice(("", " deterministic", " reproducible"))
        between = self.random.choice(("pipelined", "pipelined", "caching"))
        edges = [f"s>h hash blocking{claims}", f"h>l forward {between}{claims}", *EDGES[2:]]
        if self.random.random() < 0.3:
            edges[0] = f"s>t hash blocking{claims}"
            edges.insert(1, f"t>h forward blocking{claims}")
            return with_source(with_source(drawn("s:2 t:2 h:2 v:1 l:2", *edges), "s"), "v")
        return with_source(with_source(drawn("s:2 h:2 v:1 l:2", *edges), "s"), "v")

    @override
    def _has_read_all(self, task: Task) -> bool:
        if task.key.vertex == "v" and len(self.frozen) < self.live_until:
            return False
        return super()._has_read_all(task)


@examples(120)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.02, 0.05, 0.1]))
def test_whatever_fails_nobody_misses_what_has_gone(seed: int, mishaps: float) -> None:
    check_story(HistoryWorld(seed, mishaps, NO_LIMIT, checkpoints=True), mishaps, NO_LIMIT)


def test_drawn_stories_release_it_and_go_back_behind_damaged_checkpoints() -> None:
    released = damaged = both = 0
    for seed in range(24):
        world = HistoryWorld(seed, 0.1, NO_LIMIT, checkpoints=True)
        check_story(world, 0.1, NO_LIMIT)
        released += bool(world.released_early)
        damaged += bool(world.damaged)
        both += bool(world.damaged and world.released_early)
    assert min(released, damaged, both) > 0, (released, damaged, both)
