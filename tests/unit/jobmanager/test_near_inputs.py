"""Aim: what alone reads complete partitions asks for a slot where most of their bytes lie; all else may go anywhere.

Method: stories of jobs by hand, in which the producers tell what they have written.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.pb import internal_pb2
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.restart_settings import FixedDelay, RestartSettings
from jobmanager.graph.job_plan import JobPlan, VertexPlan
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.rpc.graph_convert import event_of
from penstock.pb import client_pb2
from tests.support.drawn_plans import drawn
from tests.support.job_story import JobStory

_ENDS = {
    "end": lambda written: {"end_of_data": internal_pb2.EndOfDataReached(written=written)},
    "finish": lambda written: {
        "state_changed": internal_pb2.AttemptStateChanged(
            state=client_pb2.ATTEMPT_STATE_FINISHED, written=written
        )
    },
}


def story_of(vertices: str, *edges: str, **options: Any) -> JobStory:
    """A job that runs on a TaskManager for each slot: each vertex has slots of its own."""
    plan = drawn(vertices, *edges)
    apart = tuple(VertexPlan(v.id, v.parallelism, v.id) for v in plan.vertices)
    story = JobStory(JobPlan(apart, plan.edges), JobOptions(**options))
    story.do(job_events.JobStarted())
    return story


def ends(
    story: JobStory, name: str, *written: tuple[str, int], how: str = "finish"
) -> list[job_effects.RequestSlots]:
    """A subtask has done its work, as its TaskManager tells it; returns what is asked for then."""
    story.report(name)
    key = story.key(name)
    attempt = internal_pb2.AttemptId(
        job_id="j", vertex=key.vertex, subtask_index=key.subtask_index, attempt=key.attempt
    )
    sizes = [internal_pb2.WrittenPartition(edge_id=id, size_bytes=size) for id, size in written]
    event = event_of(internal_pb2.TaskEvent(attempt=attempt, **_ENDS[how](sizes)), 0)
    assert event is not None
    return [e for e in story.do(event) if isinstance(e, job_effects.RequestSlots)]


@pytest.mark.parametrize("how", _ENDS)
@pytest.mark.parametrize(("sizes", "near"), [((5, 9), "t1"), ((9, 5), "t0"), ((0, 0), "t0")])
def test_one_reader_of_all_goes_where_most_lies(
    sizes: tuple[int, int], near: str, how: str
) -> None:
    story = story_of("a:2 b:1", "a>b rebalance blocking")
    assert ends(story, "a0", ("a>b", sizes[0]), how=how) == []
    [asked] = ends(story, "a1", ("a>b", sizes[1]), ("elsewhere", 1_000), how=how)
    assert (asked.count, asked.near) == (1, (near,))


def test_who_reads_one_partition_each_goes_there_and_several_readers_of_the_same_anywhere() -> None:
    story = story_of("a:2 b:2", "a>b forward blocking")
    assert [asked.near for asked in ends(story, "a1", ("a>b", 1))] == [("t1",)]
    assert [asked.near for asked in ends(story, "a0", ("a>b", 1))] == [("t0",)]
    story = story_of("a:1 b:2", "a>b hash blocking")
    assert [(asked.count, asked.near) for asked in ends(story, "a0", ("a>b", 9))] == [(2, ())]


def test_all_inputs_count_together_and_only_those_that_are_complete() -> None:
    story = story_of(
        "a:1 b:1 c:1 d:1", "a>d hash blocking", "b>d broadcast blocking", "c>d hash caching"
    )
    ends(story, "a0", ("a>d", 9))
    ends(story, "c0")
    assert [asked.near for asked in ends(story, "b0", ("b>d", 10))] == [("t1",)]


def test_what_lies_on_shared_storage_is_near_to_all() -> None:
    story = story_of("a:1 b:1", "a>b hash blocking", shares_spill=True)
    assert [asked.near for asked in ends(story, "a0", ("a>b", 9))] == [()]


def test_who_begins_again_asks_once_more_for_where_its_input_lies() -> None:
    story = story_of("a:1 b:1", "a>b hash blocking", restart=RestartSettings(FixedDelay(9, 500)))
    assert [asked.near for asked in ends(story, "a0", ("a>b", 9))] == [("t0",)]
    story.report("b0")
    story.do(job_events.TaskManagerGone("t1", FailureCause("TaskManagerLost", "it is gone")))
    [again] = [e for e in story.due() if isinstance(e, job_effects.RequestSlots)]
    assert (again.count, again.near) == (1, ("t0",))
