"""Aim: what stages have written is read on by the next JobManager, whatever of the job still runs.

Method: the machine of a job, and the rule that says what is done, alone.
"""

from __future__ import annotations

from dataclasses import replace

from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint, RestoredRead
from jobmanager.failover.regions import RegionGraph
from jobmanager.failover.restart_counts import KeptFailures, RestartCounts
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.slot import Slot
from jobmanager.job.found_stages import known_stages
from jobmanager.messages import job_effects, job_events
from tests.support.drawn_plans import drawn, subtask, subtasks
from tests.unit.jobmanager.test_partial_restarts import (
    BUILT,
    CAUSE,
    Story,
    deployed,
    half_read,
    located,
    taken_over,
)


def test_what_is_done_is_no_part_of_what_is_said_to_begin_again() -> None:
    story = taken_over()
    story.do(located("h0:a0#3", "h1:a1#2"))
    [entry] = story.master.exceptions.entries
    assert entry.restarted == subtasks("b0 b1")
    assert story.master.restarts == 1


def test_behind_the_rest_of_a_restarts_delay_it_is_asked_what_is_left() -> None:
    """TaskManagers may go, and come, while it runs."""
    everything = subtasks("a0 a1 b0 b1")
    counted = RestartCounts(restarts=1, delay_ms=500, delay_ends_at_ms=300)
    story = Story(
        BUILT,
        checkpoints=True,
        first_attempt=7,
        restored=half_read(3, 2),
        goes_on=True,
        failures=KeptFailures(counted, restarting=everything),
    )
    assert story.do(located("h0:a0#3")) == [
        job_effects.PostLater(300, job_events.RestartDue(1)),
    ]
    story.now_ms = 300
    [asked] = [e for e in story.due() if isinstance(e, job_effects.FindAttempts)]
    answer = replace(located("h0:a0#3", "h1:a1#2"), attempt=asked.attempt)
    assert deployed(story.do(answer)) == "b0 b1"
    assert story.attempts("a0 a1") == [3, 2]
    assert story.master.restarts == 1, "which the JobManager before had counted"


def test_what_was_found_for_an_earlier_question_is_asked_for_again() -> None:
    """The job fails while it is looked for what is left, and the answer comes before it begins again."""
    story = taken_over()
    story.do(job_events.FailureRequested(CAUSE))
    story.do(located("h0:a0#3", "h1:a1#2"))
    [asked] = [e for e in story.due() if isinstance(e, job_effects.FindAttempts)]
    answer = replace(located("h0:a0#3", "h1:a1#2"), attempt=asked.attempt)
    assert deployed(story.do(answer)) == "b0 b1"


def test_rows_that_nobody_has_begun_to_read_are_known_by_their_region() -> None:
    """One of two readers waits for a slot, and the processes of the stage before have ended."""
    regions = RegionGraph(drawn("s:2 p:2 a:2", "s>p hash pipelined", "p>a forward blocking"))
    restored = RestoredCheckpoint(
        4,
        subtasks("s0 s1 p0 p1"),
        (),
        (RestoredRead(subtask("a0"), "p>a", 0, 3, rows=5),),
        subtasks("s0 s1 p0 p1 a0"),
    )
    runs = job_events.FoundAttempt(
        AttemptKey("a", 0, 3), Slot("s", "t", "1"), Endpoint("s"), 1, AttemptState.RUNNING
    )

    def done(*numbers: int) -> dict[str, int]:
        kept = [
            job_events.LocatedPartition("t", Endpoint(""), "p>a", AttemptKey("p", index, number))
            for index, number in enumerate(numbers)
        ]
        stages = known_stages(regions, {subtask("a0"): runs}, restored, kept)
        return {str(one): stage.attempt for one, stage in stages.items()}

    assert done(3, 3) == {"s/0": 0, "s/1": 0, "p/0": 3, "p/1": 3}
    assert done(3, 4) == {"s/0": 0, "s/1": 0, "p/0": 3}, "another version of p/1"
