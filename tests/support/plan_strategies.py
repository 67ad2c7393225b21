"""Random jobs for property tests, small enough to try every set of their regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

from hypothesis import strategies as st

from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from tests.support.failover_model import Regions

SUBTASKS_MAX = 8

Item = TypeVar("Item")
Draw = Callable[[st.SearchStrategy[Any]], Any]


BITS = st.integers(0, 2**64 - 1)


def some_of(draw: Draw, items: Sequence[Item]) -> frozenset[Item]:
    """Any subset, in one draw."""
    assert len(items) <= 64
    bits = draw(BITS)
    return frozenset(item for place, item in enumerate(items) if bits >> place & 1)


def few_of(draw: Draw, items: Sequence[Item]) -> frozenset[Item]:
    """About a quarter of them."""
    return some_of(draw, items) & some_of(draw, items)


SHAPES = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["", "", "", "x", "y"])), min_size=1, max_size=5
)
CLAIMS = st.sampled_from([(False, False), (True, False), (True, True)])
EDGES = st.lists(
    st.tuples(
        st.sampled_from(list(Partitioning)),
        st.sampled_from([*Exchange, Exchange.BLOCKING, Exchange.CACHING]),
        CLAIMS,
    ),
    max_size=2,
)


@st.composite
def plans(draw: st.DrawFn) -> JobPlan:
    vertices: list[VertexPlan] = []
    left = SUBTASKS_MAX
    for parallelism, group in draw(SHAPES):
        if parallelism <= left:
            left -= parallelism
            name = "abcde"[len(vertices)]
            vertices.append(VertexPlan(name, parallelism, colocation_group=group))
    edges: list[EdgePlan] = []
    for source, target in combinations(vertices, 2):
        for partitioning, exchange, (is_deterministic, is_reproducible) in draw(EDGES):
            if partitioning is Partitioning.FORWARD and source.parallelism != target.parallelism:
                continue
            edges.append(
                EdgePlan(
                    f"e{len(edges)}",
                    source.id,
                    target.id,
                    partitioning,
                    exchange,
                    is_deterministic,
                    is_reproducible,
                )
            )
    return JobPlan(tuple(vertices), tuple(edges))


def subsets(those: Iterable[frozenset[SubtaskId]]) -> Iterator[Regions]:
    """All sets of regions, the smallest first."""
    listed = list(those)
    for size in range(len(listed) + 1):
        yield from map(frozenset, combinations(listed, size))
