"""Regions of hand-drawn graphs: what is joined, in which order regions stand, and which can be started.

Each drawing is followed by its regions in order, written by hand. Sizes are tested by counting, and by CPU
time where the promise is one.
"""

from __future__ import annotations

import time

import pytest

from jobmanager.failover.channel_groups import channel_groups
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from tests.support.drawn_plans import drawn, in_words, partition, partitions, subtask, subtasks


def words(graph: RegionGraph) -> list[str]:
    return [in_words(region.subtasks) for region in graph.regions]


DRAWINGS = {
    "independent pipelines": (
        drawn("a:3 b:3", "a>b forward pipelined"),
        ["a0 b0", "a1 b1", "a2 b2"],
    ),
    "all-to-all": (drawn("a:2 b:3", "a>b hash pipelined"), ["a0 a1 b0 b1 b2"]),
    "broadcast": (drawn("a:1 b:2", "a>b broadcast pipelined"), ["a0 b0 b1"]),
    "rescale up stays pointwise": (
        drawn("a:2 b:4", "a>b rescale pipelined"),
        ["a0 b0 b1", "a1 b2 b3"],
    ),
    "rescale down stays pointwise": (
        drawn("a:4 b:2", "a>b rescale pipelined"),
        ["a0 a1 b0", "a2 a3 b1"],
    ),
    "no edges at all": (drawn("a:2"), ["a0", "a1"]),
    "blocking shuffle between pipelines": (
        drawn(
            "a:2 b:2 c:2 d:2",
            "a>b forward pipelined",
            "b>c hash blocking",
            "c>d forward pipelined",
        ),
        ["a0 b0", "a1 b1", "c0 d0", "c1 d1"],
    ),
    "chain of blocking regions": (
        drawn("a:1 b:1 c:1 d:1", "a>b hash blocking", "b>c hash blocking", "c>d hash blocking"),
        ["a0", "b0", "c0", "d0"],
    ),
    "caching separates as blocking does": (
        drawn("a:2 b:2 c:2", "a>b hash caching", "b>c hash caching-memory"),
        ["a0", "a1", "b0", "b1", "c0", "c1"],
    ),
    "join of a pipelined and a blocking input": (
        drawn("a:2 b:2 j:2", "a>j forward pipelined", "b>j hash blocking"),
        ["b0", "b1", "a0 j0", "a1 j1"],
    ),
    "pipelined join of two sources": (
        drawn("a:2 b:2 j:2", "a>j forward pipelined", "b>j forward pipelined"),
        ["a0 b0 j0", "a1 b1 j1"],
    ),
    "diamond, one way pipelined all through": (
        # b reads a blocking partition, and yet is in the region that writes it: c joins them.
        drawn("a:1 b:1 c:1", "a>b hash blocking", "a>c forward pipelined", "b>c forward pipelined"),
        ["a0 b0 c0"],
    ),
    "diamond, both ways end blocking": (
        drawn(
            "a:1 b:1 c:1 d:1",
            "a>b forward pipelined",
            "a>c forward pipelined",
            "b>d hash blocking",
            "c>d hash blocking",
        ),
        ["a0 b0 c0", "d0"],
    ),
    "cycle over blocking edges merges": (
        # {a b} sends to c, and {c d} to b.
        drawn(
            "a:1@x c:1 d:1 b:1@x", "a>c hash blocking", "c>d forward pipelined", "d>b hash blocking"
        ),
        ["a0 b0 c0 d0"],
    ),
    "cycle between pipelines over a shuffle merges": (
        # Pointwise, a0 and b0 would be a region: but b0 needs a1 and b1 needs a0.
        drawn("a:2@x b:2@x", "a>b hash caching"),
        ["a0 a1 b0 b1"],
    ),
    "no cycle where the shuffle goes on to others": (
        drawn("a:2@x b:2@x c:2", "a>b forward caching", "b>c hash caching"),
        ["a0 b0", "a1 b1", "c0", "c1"],
    ),
    "colocation joins equal indices": (
        drawn("a:2@x b:3@x c:2", "a>c forward caching", "b>c hash blocking"),
        ["a0 b0", "a1 b1", "b2", "c0", "c1"],
    ),
    "vertices that stand apart from their edges": (
        drawn("a:2 x:1 b:2 y:1", "a>b forward blocking", "x>y forward blocking"),
        ["a0", "a1", "x0", "b0", "b1", "y0"],
    ),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_regions_are_as_drawn(name: str) -> None:
    plan, expected = DRAWINGS[name]
    graph = RegionGraph(plan)
    assert words(graph) == expected
    assert words(RegionGraph(plan)) == words(graph)
    assert [region.index for region in graph.regions] == list(range(len(expected)))
    for region in graph.regions:
        assert all(graph.region_of(member) is region for member in region.subtasks)
        for read in graph.consumed_by(region):
            assert graph.region_of(read.producer).index < region.index


def test_partitions_between_regions() -> None:
    graph = RegionGraph(
        drawn(
            "a:2 b:2 c:1", "a>b hash blocking", "b>c hash caching deterministic", "a>c hash caching"
        )
    )
    a0, b1 = graph.region_of(subtask("a0")), graph.region_of(subtask("b1"))
    c0 = graph.region_of(subtask("c0"))
    assert graph.consumed_by(a0) == ()
    assert set(graph.produced_by(a0)) == partitions("a>b/0 a>c/0")
    assert set(graph.consumed_by(b1)) == partitions("a>b/0 a>b/1")
    assert set(graph.consumed_by(c0)) == partitions("b>c/0 b>c/1 a>c/0 a>c/1")
    assert graph.produced_by(c0) == ()
    assert graph.consumers_of(partition("a>b/1")) == (subtask("b0"), subtask("b1"))
    assert graph.consumers_of(partition("a>c/1")) == (subtask("c0"),)
    assert graph.exchange_of("b>c").is_deterministic
    with pytest.raises(KeyError):
        graph.consumers_of(partition("a>z/0"))


def test_pointwise_partitions_have_their_own_consumers() -> None:
    graph = RegionGraph(drawn("a:2 b:4 c:2", "a>b rescale blocking", "b>c rescale blocking"))
    assert graph.consumers_of(partition("a>b/1")) == (subtask("b2"), subtask("b3"))
    assert set(graph.consumed_by(graph.region_of(subtask("c1")))) == partitions("b>c/2 b>c/3")


def test_kept_partitions_within_a_region_are_its_own_affair() -> None:
    graph = RegionGraph(
        drawn("a:1 b:1 c:1", "a>b hash blocking", "a>c forward pipelined", "b>c forward pipelined")
    )
    (region,) = graph.regions
    assert graph.consumed_by(region) == ()
    assert set(graph.produced_by(region)) == partitions("a>b/0")
    assert graph.startable(set(), lambda _: False) == [region]


STARTS = [
    # Started, complete -> startable regions.
    ("", "", ["a0", "a1", "x0 y0"]),
    ("a0 a1 x0 y0", "", []),
    ("a0 a1 x0 y0", "a>b/0", []),
    ("a0 a1 x0 y0", "a>b/0 a>b/1", ["b0", "b1", "c0"]),
    ("a0 a1", "a>b/0 a>b/1", ["x0 y0", "b0", "b1", "c0"]),
    ("a0 a1 x0 y0 b0", "a>b/0 a>b/1", ["b1", "c0"]),
    ("a0 a1 x0 y0 b0 b1", "a>b/0 a>b/1", ["c0"]),
    ("a0 a1 x0 y0 b0 b1 c0", "a>b/0 a>b/1", []),
]


@pytest.mark.parametrize(("started", "complete", "expected"), STARTS)
def test_regions_start_when_their_inputs_can_be_read(
    started: str, complete: str, expected: list[str]
) -> None:
    """Blocking a>b is waited for; over caching b>c the consumer starts with its producers."""
    graph = RegionGraph(
        drawn(
            "a:2 x:1 y:1 b:2 c:1",
            "a>b hash blocking",
            "b>c hash caching",
            "x>y forward pipelined",
            "y>c hash caching-memory",
        )
    )
    readable = partitions(complete)
    got = graph.startable(subtasks(started), lambda part: part in readable)
    assert sorted(in_words(region.subtasks) for region in got) == sorted(expected)
    assert [region.index for region in got] == sorted(region.index for region in got)


def test_what_a_region_sends_to_itself_does_not_hold_it_back() -> None:
    """m0 and b0 are one region, to which m1 sends as well."""
    mixed = RegionGraph(drawn("a:1 m:2@x b:1@x", "a>b hash blocking", "m>b hash blocking"))
    assert sorted(words(mixed)) == ["a0", "b0 m0", "m1"]
    started = subtasks("a0 m1")
    complete = partitions("a>b/0 m>b/1")
    assert [
        in_words(region.subtasks)
        for region in mixed.startable(started, lambda part: part in complete)
    ] == ["b0 m0"]
    assert mixed.startable(started, lambda part: part == partition("a>b/0")) == []


def shuffles(parallelism: int, exchange: Exchange) -> JobPlan:
    return JobPlan(
        tuple(VertexPlan(name, parallelism) for name in "abcd"),
        tuple(
            EdgePlan(f"{source}>{target}", source, target, Partitioning.HASH, exchange)
            for source, target in ("ab", "bc", "cd")
        ),
    )


def made_in_s(plan: JobPlan) -> float:
    """CPU seconds in which the regions are found, at best."""
    taken = []
    for _ in range(5):
        before = time.process_time()
        RegionGraph(plan)
        taken.append(time.process_time() - before)
    return min(taken)


@pytest.mark.parametrize("exchange", list(Exchange))
def test_size_is_that_of_the_subtasks_not_of_the_channels(exchange: Exchange) -> None:
    """500 x 500 x 3 channels: groups name each subtask once per edge, and nothing is asked twice."""
    plan = shuffles(500, exchange)
    graph = RegionGraph(plan)
    # Four times the subtasks have sixteen times the channels.
    assert made_in_s(plan) < 10 * made_in_s(shuffles(125, exchange))
    assert len(graph.regions) == (1 if exchange is Exchange.PIPELINED else 2000)
    named = sum(len(group.producers) + len(group.consumers) for group in channel_groups(plan))
    assert named == 3 * 1000

    asked = []
    started = {member for region in graph.regions[:500] for member in region.subtasks}
    startable = graph.startable(started, lambda part: bool(asked.append(part)) or True)
    match exchange:
        case Exchange.PIPELINED:
            assert startable == []
        case Exchange.BLOCKING:
            assert len(startable) == 1500
            assert len(asked) == 1500
        case _:
            assert len(startable) == 1500
            assert asked == []


def test_depth_is_no_limit() -> None:
    """A chain of 1000 regions; closed to a cycle by a colocation of its ends, it is one."""
    count = 1000
    edges = tuple(
        EdgePlan(f"e{i}", f"v{i}", f"v{i + 1}", Partitioning.FORWARD, Exchange.BLOCKING)
        for i in range(count - 1)
    )
    chain = JobPlan(tuple(VertexPlan(f"v{i}", 1) for i in range(count)), edges)
    assert [region.subtasks for region in RegionGraph(chain).regions] == [
        {SubtaskId(f"v{i}", 0)} for i in range(count)
    ]
    ends = {0, count - 1}
    closed = JobPlan(
        tuple(VertexPlan(f"v{i}", 1, colocation_group="x" * (i in ends)) for i in range(count)),
        edges,
    )
    (region,) = RegionGraph(closed).regions
    assert len(region.subtasks) == count
