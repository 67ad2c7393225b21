"""Placement, channels and splits against drawings made by hand, and by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobmanager.graph.deployment import (
    DeploymentPlanner,
    Endpoint,
    producers_of,
    subpartition_count,
)
from jobmanager.graph.execution_attempt import AttemptState, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan, plan_problem
from jobmanager.scheduler.placement import Seat, seat_of
from jobmanager.scheduler.split_assigner import Assignment, SplitAssigner
from penstock.connectors.source import PART_OF, Split
from tests.support.drawn_plans import drawn

ALL_TO_ALL = (Partitioning.HASH, Partitioning.REBALANCE, Partitioning.BROADCAST)

# Partitioning, producers, consumers -> per consumer: (producer, subpartition) pairs; per producer:
# how many subpartitions.
DRAWINGS = [
    *[(p, 2, 3, [[(0, i), (1, i)] for i in range(3)], [3, 3]) for p in ALL_TO_ALL],
    (Partitioning.FORWARD, 2, 2, [[(0, 0)], [(1, 0)]], [1, 1]),
    (Partitioning.RESCALE, 2, 4, [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]], [2, 2]),
    (Partitioning.RESCALE, 4, 2, [[(0, 0), (1, 0)], [(2, 0), (3, 0)]], [1, 1, 1, 1]),
    (Partitioning.RESCALE, 2, 3, [[(0, 0)], [(0, 1)], [(1, 0)]], [2, 1]),
    (Partitioning.RESCALE, 3, 2, [[(0, 0), (1, 0)], [(2, 0)]], [1, 1, 1]),
    (Partitioning.RESCALE, 2, 2, [[(0, 0)], [(1, 0)]], [1, 1]),
]


@pytest.mark.parametrize(("partitioning", "producers", "consumers", "reads", "counts"), DRAWINGS)
def test_channels_are_as_drawn(
    partitioning: Partitioning,
    producers: int,
    consumers: int,
    reads: list[list[tuple[int, int]]],
    counts: list[int],
) -> None:
    got = [producers_of(partitioning, producers, consumers, i) for i in range(consumers)]
    assert got == reads
    assert counts == [
        subpartition_count(partitioning, producers, consumers, i) for i in range(producers)
    ]


@given(st.sampled_from(list(Partitioning)), st.integers(1, 20), st.integers(1, 20))
def test_each_subpartition_is_read_once(
    partitioning: Partitioning, producers: int, consumers: int
) -> None:
    if partitioning is Partitioning.FORWARD:
        consumers = producers
    written = {
        (producer, subpartition)
        for producer in range(producers)
        for subpartition in range(subpartition_count(partitioning, producers, consumers, producer))
    }
    read = [
        pair
        for i in range(consumers)
        for pair in producers_of(partitioning, producers, consumers, i)
    ]
    assert sorted(read) == sorted(written)
    assert all(producers_of(partitioning, producers, consumers, i) for i in range(consumers))


def test_slot_sharing_puts_subtask_i_of_each_vertex_into_slot_i() -> None:
    plan = JobPlan(
        (
            VertexPlan("v0", 2, "g"),
            VertexPlan("v1", 3, "g"),
            VertexPlan("v2", 1, "own"),
        )
    )
    seats = {
        SubtaskId("v0", 0): Seat("g", 0),
        SubtaskId("v0", 1): Seat("g", 1),
        SubtaskId("v1", 0): Seat("g", 0),
        SubtaskId("v1", 1): Seat("g", 1),
        SubtaskId("v1", 2): Seat("g", 2),
        SubtaskId("v2", 0): Seat("own", 0),
    }
    assert {subtask: seat_of(plan, subtask) for subtask in ExecutionGraph(plan).subtasks()} == seats


class _Endpoints:
    """Slot s0 listens on host h0, and TaskManager t0 serves partitions on host p0."""

    def endpoint_of(self, slot_id: str) -> Endpoint | None:
        return Endpoint(slot_id, slot_id.replace("s", "h"))

    def partition_endpoint_of(self, taskmanager_id: str) -> Endpoint | None:
        return Endpoint("", taskmanager_id.replace("t", "p"))


def test_a_deployment_names_producers_where_they_listen() -> None:
    plan = JobPlan(
        (VertexPlan("v0", 2), VertexPlan("v1", 1)),
        (EdgePlan("e0", "v0", "v1", Partitioning.HASH),),
    )
    graph = ExecutionGraph(plan)
    for attempt in graph.current():
        index = attempt.key.subtask_index
        attempt.slot_id, attempt.taskmanager_id = f"s{index}", f"t{index}"
    planner = DeploymentPlanner(graph, _Endpoints())
    producer, _, consumer = map(planner.task, graph.current())
    assert (producer.inputs, producer.outputs[0].subpartition_count) == ((), 1)
    (edge,) = consumer.inputs
    assert [c.producer.host_id for c in edge.channels] == ["h0", "h1"]
    assert [c.producer_attempt.subtask_index for c in edge.channels] == [0, 1]
    assert consumer.outputs == ()
    graph.check()


def test_complete_partitions_are_read_from_the_taskmanager() -> None:
    plan = drawn("a:2 b:1 c:1", "a>b hash blocking", "a>c hash caching")
    graph = ExecutionGraph(plan)
    for attempt in graph.current():
        index = attempt.key.subtask_index
        attempt.slot_id, attempt.taskmanager_id = f"s{index}", f"t{index}"
    graph.current_of(SubtaskId("c", 0)).state = AttemptState.FINISHED
    planner = DeploymentPlanner(graph, _Endpoints())
    producer, _, blocking, caching = map(planner.task, graph.current())
    assert [c.producer.host_id for c in blocking.inputs[0].channels] == ["p0", "p1"]
    assert [c.producer.host_id for c in caching.inputs[0].channels] == ["h0", "h1"]
    # Nobody reads what is for a consumer that has finished.
    assert [o.finished_subpartitions for o in producer.outputs] == [(), (0,)]
    replaced = list(planner.replaced_producers(frozenset({SubtaskId("a", 1)})))
    assert [(key.vertex, edge, c.producer_attempt.subtask_index) for key, edge, c in replaced] == [
        ("c", "a>c", 1)
    ]


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (JobPlan(()), "no operators"),
        (JobPlan((VertexPlan("v0", 1), VertexPlan("v0", 1))), "not unique"),
        (JobPlan((VertexPlan("v0", 0),)), "at least 1"),
        (
            JobPlan((VertexPlan("v0", 1),), (EdgePlan("e0", "v0", "v9", Partitioning.HASH),)),
            "unknown vertex 'v9'",
        ),
        (
            JobPlan(
                (VertexPlan("v0", 1), VertexPlan("v1", 1)),
                (EdgePlan("e0", "v1", "v0", Partitioning.HASH),),
            ),
            "back to v0",
        ),
        (
            JobPlan(
                (VertexPlan("v0", 1), VertexPlan("v1", 2)),
                (EdgePlan("e0", "v0", "v1", Partitioning.FORWARD),),
            ),
            "is forward",
        ),
        (
            JobPlan(
                (VertexPlan("v0", 1), VertexPlan("v1", 1)),
                (EdgePlan("e0", "v0", "v1", Partitioning.HASH),) * 2,
            ),
            "edge ids",
        ),
    ],
)
def test_impossible_plans_are_named(plan: JobPlan, problem: str) -> None:
    assert problem in (plan_problem(plan) or "")


def splits(**sizes: int) -> list[Split]:
    return [Split(id, size=size) for id, size in sizes.items()]


def test_splits_are_balanced_by_size_and_stay_where_they_are() -> None:
    assigner = SplitAssigner(2)
    found = splits(a=1, b=10, c=6, d=5)
    first, second = assigner.assign(found, final=False)
    assert [s.id for s in first.splits] == ["a", "b"]
    assert [s.id for s in second.splits] == ["c", "d"]
    # Discovered again, with one more: only the new one goes out.
    (more,) = assigner.assign([*found, Split("e", size=3)], final=False)
    assert more == Assignment(0, (Split("e", size=3),), False)
    assert assigner.assign([], final=True) == [Assignment(0, (), True), Assignment(1, (), True)]
    assert assigner.assign(splits(f=1), final=True) == []
    assert assigner.owner("c") == 1
    assert assigner.owner("f") is None


def test_everyone_hears_of_an_empty_first_discovery() -> None:
    assert SplitAssigner(2).assign([], final=False) == [
        Assignment(0, (), False),
        Assignment(1, (), False),
    ]


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_every_split_is_assigned_once_and_the_load_is_balanced(
    sizes: list[int], parallelism: int
) -> None:
    found = [Split(str(i), size=size) for i, size in enumerate(sizes)]
    got = SplitAssigner(parallelism).assign(found, final=True)
    assert sorted(s.id for a in got for s in a.splits) == sorted(s.id for s in found)
    assert got == SplitAssigner(parallelism).assign(found, final=True)
    if all(sizes):
        loads = [sum(s.size for s in a.splits) for a in got]
        assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_whole_that_was_cut_is_never_cut_in_another_way() -> None:
    # A file that was replaced meanwhile has other row groups, or pieces, or is small enough to be read whole.
    assigner = SplitAssigner(2)
    assigner.seed(f"f{PART_OF}old{PART_OF}0", 0, 0)
    assigner.seed("g", 1, 0)
    splits = [
        Split(f"f{PART_OF}old{PART_OF}1"),
        Split(f"f{PART_OF}new{PART_OF}0"),
        Split("f"),
        Split(f"g{PART_OF}new{PART_OF}0"),
        Split(f"h{PART_OF}new{PART_OF}0"),
        Split(f"h{PART_OF}new{PART_OF}1"),
    ]
    given = {s.id for assignment in assigner.assign(splits, True) for s in assignment.splits}
    assert given == {splits[0].id, splits[4].id, splits[5].id}
