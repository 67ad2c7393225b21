"""Aim: what has to be done again from its first row on is known, and refused where that row is gone, or where
its output has been committed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from jobmanager.failover.rebuilt_regions import rebuild_problem, rebuilt_regions
from jobmanager.failover.regions import RegionGraph
from jobmanager.rpc.graph_convert import plan_of
from tests.support.drawn_plans import drawn


def graph(*edges: str) -> RegionGraph:
    return RegionGraph(drawn("a:2 b:2 c:1", *edges))


def test_regions_that_write_blocking_partitions_do_their_work_again() -> None:
    assert rebuilt_regions(graph("a>b hash caching", "b>c hash pipelined")) == frozenset()
    blocking = graph("a>b hash pipelined", "b>c hash blocking")
    assert rebuilt_regions(blocking) == {0}
    assert rebuild_problem(blocking) is None
    assert rebuild_problem(graph("a>b hash blocking", "b>c hash blocking")) is None
    assert rebuild_problem(graph("a>b hash blocking", "b>c hash caching")) is None


def test_caching_in_front_of_blocking_is_refused_with_a_way_out() -> None:
    for caching in ("caching", "caching-memory"):
        problem = rebuild_problem(graph(f"a>b hash {caching}", "b>c hash blocking"))
        assert problem is not None
        assert "vertex b reads the caching exchange a>b" in problem
        assert "make the exchange in front of it blocking as well" in problem


def committing(*edges: str) -> RegionGraph:
    """The sink is in c."""
    plan = drawn("a:2 b:2 c:2", *edges)
    *others, sink = plan.vertices
    return RegionGraph(replace(plan, vertices=(*others, replace(sink, commits_output=True))))


def test_output_that_would_be_committed_again_is_refused_with_a_way_out() -> None:
    for beside in ("forward", "hash"):
        problem = rebuild_problem(committing("a>b hash blocking", f"a>c {beside} pipelined"))
        assert problem is not None
        assert "vertex c writes output that checkpoints commit" in problem
        assert "the blocking exchange a>b" in problem
        assert "make the exchange in front of the sink blocking as well" in problem
    # Behind a blocking exchange it goes on from its own checkpoint.
    assert rebuild_problem(committing("a>b hash blocking", "b>c hash pipelined")) is None
    assert rebuild_problem(committing("a>b hash blocking", "a>c forward blocking")) is None
    # Beside another subtask it is joined with nothing that has to be done again.
    assert rebuild_problem(committing("a>c forward pipelined", "a>b hash caching")) is None


class Idempotent(ps.Sink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        return

    @override
    def flush(self) -> None:
        return


class TwoPhase(ps.TwoPhaseSink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        return

    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        return []

    @override
    def commit(self, committable: bytes) -> None:
        return

    @override
    def abort(self, committable: bytes) -> None:
        return


@pytest.mark.parametrize(
    ("write", "commits"),
    [
        (lambda rows: rows.write_parquet("/out"), True),
        (lambda rows: rows.collect(), True),
        (lambda rows: rows.sink(TwoPhase()), True),
        (lambda rows: rows.sink(Idempotent()), False),
        (lambda rows: rows.print(), False),
        (lambda rows: rows.discard(), False),
    ],
)
def test_which_sinks_checkpoints_commit(
    write: Callable[[ps.Stream], object], commits: bool
) -> None:
    env = ps.Environment()
    rows = env.from_rows([{"x": 1}])
    write(rows)
    rows.select("x").exchange("blocking").key_by("x").aggregate(n=ps.count()).discard()
    plan = plan_of(env.plan("job").graph)
    assert any(vertex.commits_output for vertex in plan.vertices) is commits
    assert (rebuild_problem(RegionGraph(plan)) is not None) is commits
