"""Aim: operators of two inputs get both, each with the columns it needs and no others.

Method: small plans, looked at in the graph and as text; joins whose output is read in part are run on the
operator that the plan builds; valid graphs are damaged in one place at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.errors import JobRejected
from penstock.graph.job_graph import validate
from penstock.graph.operator_checks import decode_schema
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_to_bytes
from penstock.streams.stream import Stream
from taskmanager.operators.factory import build_operator
from tests.support.operator_harness import OperatorHarness

LEFT = pa.schema([("k", pa.int64()), ("j", pa.int64()), ("a", pa.int64()), ("b", pa.int64())])
RIGHT = pa.schema([("k", pa.int64()), ("j", pa.int64()), ("a", pa.int64()), ("c", pa.int64())])


class KeyedBoth(ps.KeyedCoProcessFunction):
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(n=row.a)

    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(n=row.c)


class Ruled(ps.BroadcastProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(n=row.a)

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        self.last = row


def no_left(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=LEFT)


def no_right(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=RIGHT)


def two_streams(env: ps.Environment) -> tuple[Stream, Stream]:
    left = env.generate(no_left, rows=1, schema=LEFT).with_event_time("b")
    return left, env.generate(no_right, rows=1, schema=RIGHT).with_event_time("c")


def head(graph: graph_pb2.JobGraph, kind: str) -> tuple[graph_pb2.Vertex, graph_pb2.Operator]:
    found = [v for v in graph.vertices if v.operators[0].WhichOneof("spec") == kind]
    (vertex,) = found
    return vertex, vertex.operators[0]


def names(schema: bytes) -> list[str]:
    return list(decode_schema(schema, "test").names)


def joined(**options: Any) -> graph_pb2.JobGraph:
    env = ps.Environment(parallelism=2, **options)
    left, right = two_streams(env)
    stream = left.join(right, on="k", within=("-1s", "2s")).uid("join")
    stream.select("b", "a_right").discard()
    return env.plan("joined").graph


def test_a_join_reads_what_is_needed_behind_it() -> None:
    vertex, join = head(joined(), "join")
    assert names(join.input_schema) == ["k", "b", EVENT_TIME]
    assert names(join.second_input_schema) == ["k", "a", EVENT_TIME]
    assert names(join.output_schema) == ["k", "b", "a_right"]
    assert (vertex.parallelism, vertex.max_parallelism) == (2, 128)
    assert (join.join.is_interval, join.join.lower_ms, join.join.upper_ms) == (True, -1000, 2000)


def test_edges_say_which_input_they_feed() -> None:
    graph = joined()
    into = [edge for edge in graph.edges if edge.target_vertex == head(graph, "join")[0].id]
    assert [(e.target_input, list(e.key_columns)) for e in into] == [(0, ["k"]), (1, ["k"])]
    assert all(edge.partitioning == graph_pb2.PARTITIONING_HASH for edge in into)


def test_both_inputs_are_in_the_text_and_in_the_dictionary() -> None:
    env = ps.Environment(parallelism=2)
    left, right = two_streams(env)
    keyed = left.key_by("k").connect(right.key_by("j"))
    keyed.process(KeyedBoth(), schema={"n": "int64"}).discard()
    left.connect(right.broadcast()).process(Ruled(), schema={"n": "int64"}).discard()
    left.union(left).join(right, on=["k", "j"], window=ps.session("5s"), how="left").discard()
    plan = env.plan()
    text = str(plan)
    for line in (
        "<- input 1: v0/2  hash by k, pipelined  (k, a, __event_time)",
        "<- input 2: v1/2  hash by j, pipelined  (j, c, __event_time)",
        "<- input 2: v1/1  broadcast, pipelined  (k, j, a, c, __event_time)",
        "KeyedBoth: keyed co by k and j: ",
        "Ruled: broadcast: ",
        "window_join: left by k, j, session(5000 ms)",
    ):
        assert line in text
    inputs = [edge["target_input"] for edge in plan.to_dict()["edges"]]
    assert sorted(inputs) == [0, 0, 0, 0, 1, 1, 1]


def test_a_union_may_feed_either_input() -> None:
    env = ps.Environment(parallelism=2)
    left, right = two_streams(env)
    both = right.union(right.filter(col("c") > 1))
    left.join(both, on="k", window=ps.tumbling("1s")).select("k", "c").discard()
    graph = env.plan().graph
    vertex, join = head(graph, "join")
    into = [edge for edge in graph.edges if edge.target_vertex == vertex.id]
    assert [edge.target_input for edge in into] == [0, 1, 1]
    assert {tuple(names(edge.schema)) for edge in into[1:]} == {("k", "c", EVENT_TIME)}
    assert names(join.input_schema) == ["k", EVENT_TIME]


def test_a_stream_may_be_joined_with_itself() -> None:
    env = ps.Environment()
    left, _ = two_streams(env)
    left.join(left, on="k", within=(0, "1s")).select("a", "b_right").discard()
    _, join = head(env.plan().graph, "join")
    assert names(join.input_schema) == ["k", "a", EVENT_TIME]
    assert names(join.second_input_schema) == ["k", "b", EVENT_TIME]


def test_options_and_properties_apply() -> None:
    validate(joined(config={"pipeline.operator-chaining.enabled": False}))
    env = ps.Environment(parallelism=2)
    left, right = two_streams(env)
    result = left.key_by("k").connect(right.key_by("j")).process(KeyedBoth(), schema={"n": "int64"})
    result.parallelism(3).max_parallelism(300).slot_group("own").name("both").discard()
    vertex, operator = head(env.plan().graph, "process")
    assert (vertex.parallelism, vertex.max_parallelism, vertex.slot_group) == (3, 300, "own")
    assert (operator.name, operator.uid_is_generated) == ("both", True)


def test_derived_uids_depend_on_both_inputs_and_their_order() -> None:
    def uid(swap: bool, how: str = "interval") -> str:
        env = ps.Environment()
        left, right = two_streams(env)
        right = right.filter(col("c") > 0)
        first, second = (right, left) if swap else (left, right)
        if how == "interval":
            first.join(second, on="k", within=(0, 1)).discard()
        else:
            first.join(second, on="k", window=ps.session(1), how=how).discard()
        return head(env.plan().graph, "join")[1].uid

    assert uid(swap=False) == uid(swap=False)
    assert len({uid(swap=False), uid(swap=True), uid(swap=False, how="left")}) == 3
    assert uid(swap=False, how="left") == uid(swap=False, how="full")


@pytest.mark.parametrize("seed", range(30))
def test_columns_left_out_do_not_change_the_others(seed: int) -> None:
    rng = random.Random(seed)
    how = rng.choice(["inner", "left", "right", "full"])
    on = rng.choice([["k"], ["k", "j"]])
    window = rng.choice([None, ps.tumbling(10), ps.session(3)])

    def stream(env: ps.Environment) -> Stream:
        left, right = two_streams(env)
        if window is None:
            return left.join(right, on=on, within=(-3, 4))
        return left.join(right, on=on, window=window, how=how)

    everything = ps.Environment()
    whole = stream(everything)
    whole.discard()
    some = ps.Environment()
    kept = rng.sample(whole.schema.names, rng.randint(1, len(whole.schema.names)))
    stream(some).select(*kept).discard()

    sides = []
    for schema in (LEFT, RIGHT):
        rows = [{f.name: rng.choice([0, 1, None]) for f in schema} for _ in range(20)]
        sides.append([{**row, EVENT_TIME: rng.randrange(50)} for row in rows])

    def results(env: ps.Environment) -> list[dict[str, Any]]:
        _, operator = head(env.plan().graph, "join")
        harness = OperatorHarness(build_operator(operator))
        for side, schema in enumerate((operator.input_schema, operator.second_input_schema)):
            batch = pa.RecordBatch.from_pylist(sides[side], schema=decode_schema(schema, "test"))
            harness.push(batch, side)
        harness.end()
        return [{name: row[name] for name in kept} for row in harness.rows()]

    found = results(some)
    assert found == results(everything)


# ---------------------------------------------------------------- damaged graphs


def ruled() -> graph_pb2.JobGraph:
    env = ps.Environment(parallelism=2)
    left, right = two_streams(env)
    left.connect(right.broadcast()).process(Ruled(), schema={"n": "int64"}).discard()
    return env.plan().graph


def keyed_both() -> graph_pb2.JobGraph:
    env = ps.Environment(parallelism=2)
    left, right = two_streams(env)
    connected = left.key_by("k").connect(right.key_by("j"))
    connected.process(KeyedBoth(), schema={"n": "int64"}).discard()
    return env.plan().graph


def no_second_edge(graph: graph_pb2.JobGraph) -> None:
    del graph.edges[-1]


def second_edge_to_the_first(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].target_input = 0


def third_input(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].target_input = 2


def not_broadcast(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].partitioning = graph_pb2.PARTITIONING_REBALANCE


def other_second_keys(graph: graph_pb2.JobGraph) -> None:
    graph.edges[-1].key_columns[:] = ["c"]


def keys_of_other_type(graph: graph_pb2.JobGraph) -> None:
    text = pa.schema([("j", pa.string()), ("c", pa.int64()), (EVENT_TIME, pa.int64())])
    graph.vertices[-1].operators[0].second_input_schema = schema_to_bytes(text)


def unkeyed_kind(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[-1].operators[0].process.kind = graph_pb2.PROCESS_KIND_CO


def no_second_schema(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[-1].operators[0].second_input_schema = b""


def bounds_reversed(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[-1].operators[0].join.upper_ms = -5000


def outer_interval(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[-1].operators[0].join.how = graph_pb2.JOIN_KIND_LEFT


def no_join_keys(graph: graph_pb2.JobGraph) -> None:
    del graph.vertices[-1].operators[0].join.keys[:]


def other_output(graph: graph_pb2.JobGraph) -> None:
    schema = schema_to_bytes(pa.schema([("k", pa.int64())]))
    graph.vertices[-1].operators[0].output_schema = schema


def counted(graph: graph_pb2.JobGraph) -> None:
    graph.vertices[-1].operators[0].join.is_interval = False
    graph.vertices[-1].operators[0].join.window.kind = graph_pb2.WINDOW_KIND_COUNT


@pytest.mark.parametrize(
    ("make", "damage", "message"),
    [
        (joined, no_second_edge, "it has 2 inputs, but edges feed the inputs 0"),
        (joined, second_edge_to_the_first, "but edges feed the inputs 0"),
        (joined, third_input, "feed the inputs 0, 2"),
        (joined, bounds_reversed, "bounds are in order"),
        (joined, outer_interval, "an interval join is inner"),
        (joined, no_join_keys, "needs the columns that must be equal"),
        (joined, other_output, "does not have the columns of both sides"),
        (joined, counted, "windows of event time only"),
        (ruled, not_broadcast, "must reach all its subtasks"),
        (keyed_both, other_second_keys, r"second input must be routed by \(j\)"),
        (keyed_both, keys_of_other_type, "'j' string in the second"),
        (keyed_both, unkeyed_kind, "only such a function has them"),
        (keyed_both, no_second_schema, "schema cannot be read"),
    ],
)
def test_damaged_graphs_are_refused(
    make: Callable[[], graph_pb2.JobGraph],
    damage: Callable[[graph_pb2.JobGraph], None],
    message: str,
) -> None:
    graph = make()
    validate(graph)
    damage(graph)
    with pytest.raises(JobRejected, match=message):
        validate(graph)
