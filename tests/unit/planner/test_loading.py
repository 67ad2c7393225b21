"""Aim: what is read first makes its other inputs wait, and no plan waits for itself.

Method: small plans; the edges into each function with two inputs are compared as (input, type, first or waits).
An oracle that runs a plan with exchanges that hold nothing tells for drawn plans whether they come to their end.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import JobRejected
from penstock.graph.exchanges import CACHING, PIPELINED, exchange_name
from penstock.graph.job_graph import validate
from penstock.graph.logical import reachable
from penstock.graph.plan_text import explain
from penstock.pb import graph_pb2
from penstock.planner.loading import settle_loading
from penstock.planner.planner import Planner
from tests.support.examples import examples

N = {"n": "int64"}


class Both(ps.BroadcastProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(n=row.n)

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        pass


class KeyedBoth(Both, ps.KeyedBroadcastProcessFunction):
    pass


def environment(mode: str = "streaming", **config: object) -> ps.Environment:
    return ps.Environment(parallelism=2, config={"execution.runtime-mode": mode, **config})


def numbers(env: ps.Environment, rows: int | None = 10) -> ps.Stream:
    return env.generate(_numbers, rows=rows, schema=N)


def _numbers(start: int, count: int) -> Any:
    raise AssertionError("nothing runs")


def planned(env: ps.Environment) -> graph_pb2.JobGraph:
    graph = Planner(reachable(env._builder.sinks), env.config).plan()
    validate(graph)
    return graph


def reads(env: ps.Environment) -> list[tuple[int, str, str]]:
    """The edges into vertices that have two inputs."""
    graph = planned(env)
    two = {edge.target_vertex for edge in graph.edges if edge.target_input}
    return [
        (
            edge.target_input,
            exchange_name(edge.partition_type),
            "first" if edge.load_first else "waits" if edge.waits else "",
        )
        for edge in graph.edges
        if edge.target_vertex in two
    ]


def enriched(main: ps.Stream, side: ps.Stream, load_first: bool | None = True) -> ps.Stream:
    return main.connect(side.broadcast(load_first=load_first)).process(Both(), schema=N)


def test_the_other_input_waits_where_a_side_is_read_first() -> None:
    env = environment()
    enriched(numbers(env), numbers(env)).discard()
    assert reads(env) == [(0, "pipelined", "waits"), (1, "pipelined", "first")]
    text = explain(planned(env))
    assert "read whole first" in text
    assert "waits until the other input is read whole" in text


@pytest.mark.parametrize(
    ("mode", "load_first", "order"),
    [
        ("streaming", None, ("", "")),
        ("streaming", False, ("", "")),
        ("batch", None, ("waits", "first")),
        ("batch", True, ("waits", "first")),
        ("batch", False, ("", "")),
    ],
)
def test_it_is_the_default_in_batch_mode(
    mode: str, load_first: bool | None, order: tuple[str, str]
) -> None:
    env = environment(mode)
    enriched(numbers(env), numbers(env), load_first).discard()
    assert tuple(order for _, _, order in reads(env)) == order


@pytest.mark.parametrize(("mode", "kept"), [("streaming", "caching"), ("batch", "blocking")])
def test_a_stream_that_is_its_own_side_is_kept_in_front(mode: str, kept: str) -> None:
    env = environment(mode)
    rows = numbers(env)
    enriched(rows, rows).discard()
    assert (0, kept, "waits") in reads(env)


def test_a_keyed_stream_that_is_its_own_side_is_kept_in_front() -> None:
    env = environment()
    rows = numbers(env)
    side = rows.filter(ps.col("n") > 3).broadcast(load_first=True)
    rows.key_by("n").connect(side).process(KeyedBoth(), schema=N).discard()
    assert reads(env) == [(0, "caching", "waits"), (1, "pipelined", "first")]


def test_a_side_that_depends_on_a_consumer_of_what_waits() -> None:
    env = environment()
    rows = numbers(env)
    main = rows.rebalance().map(_same, schema=N)
    side = (
        main.rebalance().map(_same, schema=N).union(numbers(env)).rebalance().map(_same, schema=N)
    )
    enriched(main, side).discard()
    assert (0, "caching", "waits") in reads(env)


def _same(row: Any) -> Any:
    return row


def test_two_that_wait_for_each_other() -> None:
    env = environment()
    a, b = numbers(env), numbers(env)
    enriched(a, b).discard()
    enriched(b, a).discard()
    kinds = reads(env)
    assert sorted(kinds) == sorted(
        [
            (0, "caching", "waits"),
            (1, "pipelined", "first"),
            (0, "pipelined", "waits"),
            (1, "pipelined", "first"),
        ]
    )


def test_several_sides_one_after_the_other_wait_for_nothing_of_their_own() -> None:
    env = environment()
    once = enriched(numbers(env), numbers(env).union(numbers(env)))
    enriched(once, numbers(env)).discard()
    assert {kind for _, kind, _ in reads(env)} == {"pipelined"}
    assert [order for _, _, order in reads(env)].count("first") == 3


def test_an_exchange_that_would_wait_for_itself_is_refused() -> None:
    env = environment()
    rows = numbers(env).name("rows").exchange("pipelined")
    enriched(rows, rows).discard()
    with pytest.raises(JobRejected, match=r"load_first.*'rows'.*exchange\('caching'\)"):
        planned(env)


def test_one_that_keeps_its_rows_already_stays() -> None:
    env = environment(**{"execution.exchange.default": "caching-memory"})
    rows = numbers(env).exchange("caching")
    enriched(rows, rows).discard()
    assert {kind for _, kind, _ in reads(env)} == {"caching"}


def test_a_side_over_a_blocking_exchange_is_refused_in_streaming_mode() -> None:
    env = environment()
    enriched(numbers(env), numbers(env).name("side").exchange("blocking")).discard()
    with pytest.raises(JobRejected, match=r"'side' is read whole first.*caching"):
        planned(env)
    env = environment(**{"execution.exchange.default": "blocking"})
    enriched(numbers(env), numbers(env)).discard()
    assert (1, "caching", "first") in reads(env)


def test_a_side_without_end_is_refused() -> None:
    env = environment()
    enriched(numbers(env), numbers(env, None).filter(ps.col("n") > 0)).discard()
    with pytest.raises(JobRejected, match=r"never ends.*load_first=False"):
        planned(env)


@pytest.mark.parametrize("mode", ["streaming", "batch"])
def test_it_goes_with_connect_only(mode: str) -> None:
    env = environment(mode)
    numbers(env).broadcast(load_first=True).map(_same, schema=N).discard()
    with pytest.raises(JobRejected, match="goes with"):
        planned(env)


def test_it_is_true_or_false() -> None:
    with pytest.raises(JobRejected, match="load_first='yes'"):
        numbers(environment()).broadcast(load_first="yes")  # type: ignore[arg-type]


# ---------------------------------------------------------------- against an oracle


@st.composite
def graphs(draw: st.DrawFn) -> graph_pb2.JobGraph:
    """Vertices in order; those with two inputs read one of them first."""
    graph = graph_pb2.JobGraph()
    for index in range(draw(st.integers(2, 8))):
        vertex = graph.vertices.add(id=f"v{index}")
        source = graph_pb2.Operator(name=f"o{index}")
        source.source.bounded = True
        other = graph_pb2.Operator(name=f"o{index}")
        count = draw(st.integers(0, 2)) if index else 0
        vertex.operators.append(other if count else source)
        for number in range(count):
            graph.edges.add(
                id=f"e{len(graph.edges)}",
                source_vertex=f"v{draw(st.integers(0, index - 1))}",
                target_vertex=f"v{index}",
                target_input=number,
                load_first=number == 1,
                partition_type=draw(st.sampled_from([PIPELINED, PIPELINED, CACHING])),
            )
    return graph


def ends(graph: graph_pb2.JobGraph) -> bool:
    """Whether all come to their end where a pipelined exchange holds back from the first row on.

    Each vertex takes one row of each input after the other and hands it to all its outputs at once.
    """
    rows = 3
    left = {v.id: rows for v in graph.vertices}
    into = {v.id: [e for e in graph.edges if e.target_vertex == v.id] for v in graph.vertices}
    out = {v.id: [e for e in graph.edges if e.source_vertex == v.id] for v in graph.vertices}
    queued = {e.id: 0 for e in graph.edges}
    done: set[str] = set()

    def ended(edge: graph_pb2.Edge) -> bool:
        return edge.source_vertex in done and not queued[edge.id]

    def can_emit(vertex: str) -> bool:
        return all(e.partition_type != PIPELINED or not queued[e.id] for e in out[vertex])

    moved = True
    while moved:
        moved = False
        for vertex in (v.id for v in graph.vertices):
            if vertex in done or not can_emit(vertex):
                continue
            first = [e for e in into[vertex] if e.load_first]
            may_read = first if not all(map(ended, first)) else into[vertex]
            takes = next((e for e in may_read if queued[e.id]), None)
            if takes is not None:
                queued[takes.id] -= 1
            elif not into[vertex] and left[vertex]:
                left[vertex] -= 1
            elif all(map(ended, into[vertex])):
                done.add(vertex)
                moved = True
                continue
            else:
                continue
            moved = True
            for edge in out[vertex]:
                queued[edge.id] += 1
    return len(done) == len(graph.vertices)


@given(graphs())
@examples(300)
def test_no_plan_waits_for_itself(graph: graph_pb2.JobGraph) -> None:
    before = graph_pb2.JobGraph()
    before.CopyFrom(graph)
    settle_loading(graph, (), is_batch=False)
    assert ends(graph)
    changed = [
        old for old, new in zip(before.edges, graph.edges, strict=True)
        if old.partition_type != new.partition_type
    ]  # fmt: skip
    assert not (changed and ends(before)), "what comes to its end as it is stays as it is"
