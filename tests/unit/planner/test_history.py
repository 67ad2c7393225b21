"""Aim: what comes out of a blocking exchange, or out of Spark, is read first where it is united with what does not.

Method: small plans; the edges of each are compared as (from, to, type, first, follows or waits).
"""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.errors import JobRejected
from penstock.graph.exchanges import exchange_name
from penstock.graph.plan_text import explain
from penstock.pb import graph_pb2
from penstock.state_tables.savepoint_draft import SavepointDraft
from tests.unit.planner.test_loading import Both, environment, numbers, planned

N = {"n": "int64"}
FIRST, FOLLOWS, WAITS = "first", "follows", "waits"


def frame(*_: Any) -> Any:
    raise AssertionError("nothing runs")


def of_spark(env: ps.Environment) -> ps.Stream:
    return env.spark(frame, schema=N)


def edges(env: ps.Environment) -> list[tuple[str, str, str, str]]:
    graph = planned(env)
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    return [
        (
            vertices[edge.source_vertex].operators[edge.source_output.operator_index].name,
            vertices[edge.target_vertex].operators[0].name,
            exchange_name(edge.partition_type),
            order(edge),
        )
        for edge in graph.edges
    ]


def order(edge: graph_pb2.Edge) -> str:
    if edge.load_first:
        return FIRST
    return FOLLOWS if edge.follows else WAITS if edge.waits else ""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_declared_exchange_is_read_first_wherever_it_stands(is_first: bool) -> None:
    env = environment()
    history, live = numbers(env).exchange("blocking"), numbers(env, None).name("live")
    both = history.union(live) if is_first else live.union(history)
    both.name("both").key_by("n").aggregate(n_=ps.count()).discard()
    assert sorted(edges(env)) == [
        ("aggregate", "aggregate", "pipelined", ""),
        ("generate", "history", "blocking", ""),
        ("history", "both", "pipelined", FIRST),
        ("live", "both", "pipelined", FOLLOWS),
    ]


def test_what_lies_between_the_exchange_and_the_union_is_read_first() -> None:
    env = environment()
    history = numbers(env).exchange("blocking").filter(ps.col("n") > 1).name("kept")
    history.union(numbers(env, None)).filter(ps.col("n") > 2).discard()
    assert edges(env) == [
        ("generate", "kept", "blocking", ""),
        ("kept", "filter", "pipelined", FIRST),
        ("generate", "filter", "pipelined", FOLLOWS),
    ]
    assert "waits until its history is read whole" in explain(planned(env))


def test_out_of_spark_it_needs_no_declaration() -> None:
    env = environment()
    of_spark(env).union(of_spark(env)).union(numbers(env, None)).discard()
    assert sorted(edges(env)) == [
        ("generate", "discard", "pipelined", FOLLOWS),
        ("history", "discard", "pipelined", FIRST),
        ("history", "discard", "pipelined", FIRST),
        ("spark", "history", "blocking", ""),
        ("spark", "history", "blocking", ""),
    ]


def test_nothing_waits_where_all_is_history_or_nothing_is() -> None:
    env = environment()
    numbers(env).exchange("blocking").union(numbers(env).exchange("blocking")).discard()
    numbers(env).exchange("caching").union(numbers(env)).discard()
    assert {one for *_, one in edges(env)} == {""}


def test_not_in_batch_mode_and_not_where_the_union_has_a_type_of_its_own() -> None:
    env = environment("batch")
    numbers(env).exchange("blocking").union(numbers(env)).discard()
    of_spark(env).union(numbers(env)).discard()
    assert {one for *_, one in edges(env)} == {""}
    env = environment()
    numbers(env).exchange("blocking").union(numbers(env)).exchange("caching").rebalance().discard()
    assert {(kind, one) for _, _, kind, one in edges(env)} == {("caching", "")}


def test_another_input_of_a_function_does_not_wait_for_a_history() -> None:
    env = environment()
    both = numbers(env).exchange("blocking").union(numbers(env, None))
    side = numbers(env).name("side").broadcast(load_first=True)
    both.connect(side).process(Both(), schema=N).discard()
    assert sorted(edges(env)) == [
        ("generate", "history", "blocking", ""),
        ("generate", "union", "pipelined", FOLLOWS),
        ("history", "union", "pipelined", FIRST),
        ("side", "Both", "pipelined", FIRST),
        ("union", "Both", "pipelined", WAITS),
    ]


def test_a_stream_that_goes_on_from_its_own_history_is_kept_in_front() -> None:
    env = environment()
    rows = numbers(env).name("rows")
    rows.filter(ps.col("n") > 3).exchange("blocking").union(rows.filter(ps.col("n") < 3)).discard()
    assert ("filter", "discard", "caching", FOLLOWS) in edges(env)


def test_a_table_of_spark_is_read_first() -> None:
    env = environment()
    table = of_spark(env).broadcast(load_first=True)
    numbers(env, None).connect(table).process(Both(), schema=N).discard()
    assert sorted(edges(env)) == [
        ("generate", "Both", "pipelined", WAITS),
        ("history", "Both", "pipelined", FIRST),
        ("spark", "history", "blocking", ""),
    ]


def test_times_of_spark_say_nothing_before_its_end() -> None:
    env = environment()
    history = of_spark(env).filter(ps.col("n") > 1).with_event_time("n")
    live = numbers(env, None).with_event_time("n")
    history.union(live).key_by("n").window(ps.tumbling("1s")).aggregate(c=ps.count()).discard()
    times = [
        operator.event_time.in_any_order
        for vertex in planned(env).vertices
        for operator in vertex.operators
        if operator.WhichOneof("spec") == "event_time"
    ]
    assert sorted(times) == [False, True]


REFUSED = [
    (
        lambda env: of_spark(env).discard(),
        r"'spark' runs on Spark.*\.union\(\.\.\.\) with a stream",
    ),
    (
        lambda env: of_spark(env).union(numbers(env, None)).with_event_time("n").discard(),
        r"'with_event_time'.*call \.with_event_time\(\.\.\.\) on each of the streams",
    ),
    (
        lambda env: numbers(env, None).exchange("blocking").union(numbers(env)).discard(),
        r"source 'generate' reads without end",
    ),
    (
        lambda env: (
            numbers(env).filter(ps.col("n") > 1).engine("spark").union(numbers(env, None)).discard()
        ),
        r"batch mode only, since no row is late there",
    ),
]


@pytest.mark.parametrize(("build", "words"), REFUSED)
def test_what_cannot_be_read_first_is_refused(build: Any, words: str) -> None:
    env = environment()
    build(env)
    with pytest.raises(JobRejected, match=words):
        env.plan("job")


def test_a_savepoint_that_is_written_for_a_job_has_it_make_its_history() -> None:
    env = environment()
    numbers(env).exchange("blocking").union(numbers(env, None)).discard()
    draft = SavepointDraft(None, planned(env), None, "target")
    draft.leave_stages_out()
    assert {one.vertex for one in draft.manifest.subtasks} == {"v1", "v2", "v3"}
    draft.check_start("target")
