"""Aim: what has to be done again from its first row on is known, and refused where that row is gone."""

from __future__ import annotations

from jobmanager.failover.rebuilt_regions import rebuild_problem, rebuilt_regions
from jobmanager.failover.regions import RegionGraph
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
