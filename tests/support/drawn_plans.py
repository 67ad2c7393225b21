"""Job plans drawn in words, for tests that decide on graphs.

``drawn("a:2 b:2@g", "a>b hash caching reproducible")`` is a plan of vertices with their parallelism (and
colocation group) and of edges. An edge is called after its ends, a second one between the same ends ``a>b.2``.
Subtasks are written ``a0``.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import (
    EdgePlan,
    Exchange,
    JobPlan,
    Partitioning,
    VertexPlan,
    plan_problem,
)


def drawn(vertices: str, *edges: str) -> JobPlan:
    """The plan of a drawing."""
    plan = JobPlan(tuple(map(_vertex, vertices.split())), tuple(_edges(edges)))
    assert plan_problem(plan) is None, plan_problem(plan)
    return plan


def _vertex(text: str) -> VertexPlan:
    text, _, group = text.partition("@")
    vertex_id, parallelism = text.split(":")
    return VertexPlan(vertex_id, int(parallelism), colocation_group=group)


def _edges(drawings: Iterable[str]) -> Iterable[EdgePlan]:
    for drawing in drawings:
        name, partitioning, exchange, *claims = drawing.split()
        assert set(claims) <= {"deterministic", "reproducible"}, drawing
        source, target = name.partition(".")[0].split(">")
        yield EdgePlan(
            name,
            source,
            target,
            Partitioning(partitioning),
            Exchange(exchange),
            is_deterministic=bool(claims),
            is_reproducible="reproducible" in claims,
        )


def subtask(text: str) -> SubtaskId:
    """The subtask of ``a0``."""
    return SubtaskId(text[0], int(text[1:]))


def subtasks(text: str) -> frozenset[SubtaskId]:
    """The subtasks of ``a0 a1 b0``."""
    return frozenset(map(subtask, text.split()))


def in_words(those: Iterable[SubtaskId]) -> str:
    """Subtasks as ``subtasks`` reads them, in order."""
    return " ".join(f"{one.vertex}{one.subtask_index}" for one in sorted(those))


def partition(text: str) -> KeptOutput:
    """The partition of ``a>b/0``: what subtask 0 of ``a`` sends to ``b``."""
    edge, _, index = text.partition("/")
    return KeptOutput(edge, SubtaskId(edge[0], int(index)))


def partitions(text: str) -> frozenset[KeptOutput]:
    """The partitions of ``a>b/0 a>b/1``."""
    return frozenset(map(partition, text.split()))
