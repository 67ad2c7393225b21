"""Aim: keys get from key_by to what needs them, or the call that needs them says where they were lost.

Method: every public call of a stream is in exactly one of the tables below, so that a new one has to be decided;
plans are counted for hash exchanges, and graphs that lie about keys are handed to the JobManager's checks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock import col
from penstock.errors import JobRejected
from penstock.graph.job_graph import validate
from penstock.pb import graph_pb2
from penstock.streams.kept_keys import lost_keys
from penstock.streams.keyed_stream import KeyedStream
from penstock.streams.stream import Stream

HASH = graph_pb2.PARTITIONING_HASH
SCHEMA = {"a": "int64", "b": "int64", "ts": "int64"}
WINDOW = ps.tumbling("1s")


class Sums(ps.KeyedProcessFunction):
    total = ps.ValueState("total", pa.int64())

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        total = (self.total.value() or 0) + row.b
        self.total.update(total)
        out.emit(a=row.a, total=total)


class Plain(ps.ProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)


class Both(ps.KeyedCoProcessFunction):
    total = ps.ValueState("total", pa.int64())

    @override
    def process_left(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(a=row.a, total=0)

    @override
    def process_right(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(a=row.a, total=1)


class Pairs(ps.CoProcessFunction):
    @override
    def process_left(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)

    @override
    def process_right(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)


class Bursts(ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        out.emit(a=key, n=len(rows))


class Nothing(ps.Sink):
    @override
    def write(self, batch: pa.RecordBatch) -> None:
        pass

    @override
    def flush(self) -> None:
        pass


@pytest.fixture
def env() -> ps.Environment:
    return ps.Environment(parallelism=2)


def rows(env: ps.Environment) -> Stream:
    return env.from_rows([{"a": 1, "b": 2, "ts": 3}], schema=SCHEMA).with_event_time("ts")


def broken(row: Any) -> bool:
    return 1 / (row.b - 2) > 0


Call = Callable[[Any], Any]

KEEPS: dict[str, dict[str, Call]] = {
    "filter": {
        "expression": lambda s: s.filter(col("b") > 0),
        "function": lambda s: s.filter(lambda row: row.b > 0),
    },
    "with_event_time": {"": lambda s: s.with_event_time("ts", "1s")},
    "with_columns": {
        "new": lambda s: s.with_columns(c=col("b") + 1),
        "other": lambda s: s.with_columns(b=col("a") + 1),
        "the same": lambda s: s.with_columns(a=col("a")),
    },
    "select": {
        "with the key": lambda s: s.select("b", "a", "ts", c=1),
        "by expression": lambda s: s.select(a=col("a"), b=col("b"), ts=col("ts")),
    },
    "drop": {"another": lambda s: s.with_columns(c=1).drop("c")},
    "rename": {"another": lambda s: s.with_columns(c=1).rename(c="d")},
    "name": {"": lambda s: s.filter(col("b") > 0).name("positive")},
    "uid": {"": lambda s: s.filter(col("b") > 0).uid("positive")},
    "parallelism": {"": lambda s: s.filter(col("b") > 0).parallelism(2)},
    "max_parallelism": {"": lambda s: s.filter(col("b") > 0).max_parallelism(64)},
    "slot_group": {"": lambda s: s.filter(col("b") > 0).slot_group("other")},
    "colocate": {"": lambda s: s.filter(col("b") > 0).colocate("pair")},
    "exchange": {"": lambda s: s.filter(col("b") > 0).exchange("caching")},
    "deterministic": {"": lambda s: s.filter(broken).deterministic()},
    "on_error": {"": lambda s: s.filter(broken).on_error("skip")},
    "side_output": {
        "bad records": lambda s: s.filter(broken).on_error("bad").side_output("bad"),
        "late rows": lambda s: (
            s.window(WINDOW, late_to="late").aggregate(n=ps.count()).side_output("late")
        ),
    },
    "union": {
        "of keyed": lambda s: s.union(s.filter(col("b") > 1)),
        "in another order": lambda s: s.union(s.select("ts", "b", "a")),
    },
    "as_rows": {"": lambda s: s.filter(col("b") > 0).as_rows()},
    "key_by": {
        "again": lambda s: s.filter(col("b") > 0).key_by("a"),
    },
}
"""What stays keyed by ``a``, over one hash exchange."""

LOSES: dict[str, dict[str, Call]] = {
    "map": {"": lambda s: s.map(lambda row: row, schema=SCHEMA)},
    "flat_map": {"": lambda s: s.flat_map(lambda row: [row], schema=SCHEMA)},
    "map_batches": {"": lambda s: s.map_batches(lambda batch: batch, schema=s.schema)},
    "rebalance": {
        "at once": lambda s: s.rebalance(),
        "later": lambda s: s.filter(col("b") > 0).rebalance(),
        "and on": lambda s: s.rebalance().filter(col("b") > 0),
    },
    "rescale": {"": lambda s: s.rescale()},
    "broadcast": {"": lambda s: s.broadcast()},
    "forward": {"": lambda s: s.filter(col("b") > 0).forward()},
    "with_columns": {"of the key": lambda s: s.with_columns(a=col("a") + 0)},
    "select": {"without the key": lambda s: s.select("b", "ts")},
    "drop": {"of the key": lambda s: s.drop("a")},
    "rename": {
        "of the key": lambda s: s.rename(a="id"),
        "swapped": lambda s: s.rename(a="b", b="a"),
    },
    "union": {
        "with a plain one": lambda s: s.union(s.map(lambda row: row, schema=SCHEMA)),
        "by other keys": lambda s: s.union(s.key_by("b")),
    },
    "process": {"": lambda s: s.process(Plain(), schema=SCHEMA)},
    "connect": {"": lambda s: s.connect(s.broadcast()).process(Ruled(), schema=SCHEMA)},
    "side_output": {
        "of a function": lambda s: s.process(Plain(), schema=SCHEMA).side_output("some"),
        "late or else": lambda s: (
            s.window(WINDOW, late_to="late")
            .process(Bursts(), schema={"a": "int64", "n": "int64"})
            .side_output("late")
        ),
    },
}
"""What gives a plain stream that remembers."""

GROUPS = {"aggregate", "window", "window_all", "join", "spark", "engine"}
"""What gives out a stream of its own, which never had keys."""

ENDS = {
    "write_parquet",
    "write_csv",
    "write_json",
    "print",
    "discard",
    "collect",
    "persist",
    "sink",
}
LOOKS = {"schema", "keys"}


class Ruled(ps.KeyedBroadcastProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)

    @override
    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        pass


def flat(table: dict[str, dict[str, Call]]) -> list[Any]:
    return [
        pytest.param(call, id=f"{name} {case}".strip())
        for name, cases in table.items()
        for case, call in cases.items()
    ]


def test_every_call_of_a_stream_is_decided() -> None:
    public = {name for name in dir(KeyedStream) if not name.startswith("_")}
    decided = [set(KEEPS) | set(LOSES), GROUPS, ENDS, LOOKS]
    assert set().union(*decided) == public
    assert sum(map(len, decided)) == len(public)


CONSUMERS: dict[str, Call] = {
    "aggregate": lambda s: s.aggregate(n=ps.count()),
    "window aggregate": lambda s: s.window(WINDOW).aggregate(n=ps.count(), m=ps.sum(col("b") * 2)),
    "window reduce": lambda s: s.window(ps.count_window(2)).reduce(lambda x, _: x),
    "window process": lambda s: s.window(WINDOW).process(
        Bursts(), schema={"a": "int64", "n": "int64"}
    ),
    "session": lambda s: s.window(ps.session("1s")).aggregate(n=ps.count()),
    "process": lambda s: s.process(Sums(), schema={"a": "int64", "total": "int64"}),
    "plain process": lambda s: s.process(Plain(), schema=SCHEMA),
    "connect broadcast": lambda s: s.connect(other(s).broadcast()).process(Ruled(), schema=SCHEMA),
}


def other(stream: Any) -> Stream:
    """Another stream of the same environment."""
    return rows(stream._test_env)


def hash_edges(env: ps.Environment) -> int:
    graph = env.plan().graph
    return sum(edge.partitioning == HASH for edge in graph.edges)


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("call", flat(KEEPS))
def test_a_keyed_stream_stays_keyed_without_another_exchange(
    env: ps.Environment, call: Call, consumer: str
) -> None:
    keyed = rows(env).key_by("a")
    stream = call(keyed)
    assert isinstance(stream, KeyedStream)
    assert stream.keys == ("a",)
    if not stream._source.node.has_event_time and not stream._source.tag:
        pytest.fail("event time was lost")
    if stream._source.tag == "bad":  # bad records have no event time
        stream = stream.with_event_time("ts")
    stream.__dict__["_test_env"] = env
    CONSUMERS[consumer](stream).discard()
    edges = env.plan().graph.edges
    hashed = [edge for edge in edges if edge.partitioning == HASH]
    assert {tuple(edge.key_columns) for edge in hashed} == {("a",)}
    sources = [edge.source_vertex for edge in hashed]
    assert set(sources) == {"v0"}, "an exchange behind the first"


@pytest.mark.parametrize("call", flat(KEEPS))
def test_joins_and_connected_streams_use_the_keys_that_are_there(
    env: ps.Environment, call: Call
) -> None:
    left, right = call(rows(env).key_by("a")), rows(env).key_by("a").filter(col("b") > 3)
    if left._source.tag == "bad":
        left = left.with_event_time("ts")
    left.connect(right).process(Both(), schema={"a": "int64", "total": "int64"}).discard()
    left.join(right, on="a", window=WINDOW).discard()
    left.join(right, on=["a"], within=("-1s", "1s")).discard()
    graph = env.plan().graph
    heads = {vertex.id: vertex.operators[0].WhichOneof("spec") for vertex in graph.vertices}
    met = [edge for edge in graph.edges if heads[edge.target_vertex] in ("join", "process")]
    assert len(met) >= 6
    assert all(
        edge.partitioning == graph_pb2.PARTITIONING_FORWARD or edge.source_vertex in sources(graph)
        for edge in met
    )


def sources(graph: graph_pb2.JobGraph) -> set[str]:
    return {v.id for v in graph.vertices if v.operators[0].WhichOneof("spec") == "source"}


@pytest.mark.parametrize("call", flat(LOSES))
def test_a_stream_that_lost_its_keys_refuses_what_needs_them(
    env: ps.Environment, call: Call
) -> None:
    stream = call(rows(env).key_by("a"))
    assert not isinstance(stream, KeyedStream)
    remedy = r"was keyed by a, and .* call \.key_by\(\.\.\.\) again"
    for attempt in (
        lambda: stream.window(WINDOW, time="processing"),
        lambda: stream.aggregate(n=ps.count()),
        lambda: stream.process(Sums(), schema=SCHEMA),
        lambda: stream.connect(rows(env).key_by("a")),
        lambda: rows(env).key_by("a").connect(stream),
        lambda: stream.connect(stream).process(Both(), schema=SCHEMA),
    ):
        if stream._source.routing.partitioning == graph_pb2.PARTITIONING_BROADCAST:
            continue  # says other things about broadcast streams
        with pytest.raises(JobRejected, match=remedy):
            attempt()
    with pytest.raises(JobRejected, match=r"\.window_all\(\.\.\.\) for one window over all rows"):
        stream.window(WINDOW)
    with pytest.raises(AttributeError, match="again"):
        stream.aggregate(n=ps.count())
    assert not hasattr(stream, "aggregate")
    everything = stream.window_all(WINDOW, time="processing").aggregate(n=ps.count())
    assert "a" not in everything.schema.names
    everything.discard()
    env.plan()


def test_what_spark_gives_out_never_had_keys(env: ps.Environment) -> None:
    mapped = rows(env).key_by("a").map(lambda row: row, schema=SCHEMA)
    for stream in (rows(env).key_by("a"), mapped):
        made = stream.spark(lambda frame: frame, schema=SCHEMA)
        assert lost_keys(made._source) is None
        made.window(ps.count_window(2), time="processing").aggregate(n=ps.count())


def test_a_function_without_keys_may_read_what_lost_them(env: ps.Environment) -> None:
    mapped = rows(env).key_by("a").map(lambda row: row, schema=SCHEMA)
    mapped.process(Plain(), schema=SCHEMA).discard()
    mapped.connect(mapped).process(Pairs(), schema=SCHEMA).discard()
    mapped.key_by("a").aggregate(n=ps.count()).discard()
    env.plan()


def test_the_result_of_windows_joins_and_aggregates_never_had_keys(env: ps.Environment) -> None:
    keyed = rows(env).key_by("a")
    per_key = keyed.window(WINDOW).aggregate(n=ps.count())
    joined = keyed.join(rows(env), on="a", window=WINDOW).drop("window_start", "window_end")
    reduced = keyed.window(ps.count_window(2)).reduce(lambda x, _: x)
    for stream in (per_key, joined, reduced.with_columns(c=1)):
        assert type(stream) is Stream
        stream.window(WINDOW).aggregate(most=ps.max("a")).discard()
    env.plan()


def test_a_key_function_adds_a_key_that_stays(env: ps.Environment) -> None:
    keyed = rows(env).key_by(lambda row: row.a % 3)
    stream = keyed.filter(col("b") > 0).with_columns(c=col("key") + 1)
    assert isinstance(stream, KeyedStream)
    assert stream.keys == ("key",)
    stream.aggregate(n=ps.count()).discard()
    assert hash_edges(env) == 1
    with pytest.raises(JobRejected, match="was keyed by key, and 'rename'"):
        stream.rename(key="k").window(WINDOW)


def test_several_keys_have_an_order(env: ps.Environment) -> None:
    keyed = rows(env).key_by("a", "b").filter(col("b") > 0)
    assert keyed.keys == ("a", "b")
    keyed.key_by("b", "a").aggregate(n=ps.count()).discard()
    keyed.aggregate(n=ps.count()).discard()
    assert hash_edges(env) == 2
    assert not isinstance(keyed.with_columns(b=col("b") + 1), KeyedStream)


def test_a_name_in_the_message_is_the_users(env: ps.Environment) -> None:
    stream = rows(env).key_by("a").map(lambda row: row, schema=SCHEMA).name("parse")
    with pytest.raises(JobRejected, match="keyed by a, and 'parse' may"):
        stream.filter(col("b") > 0).window(WINDOW)


# ---------------------------------------------------------------- exchanges


@pytest.mark.parametrize(
    ("setting", "exchanges"),
    [
        (lambda s: s.parallelism(3), 2),
        (lambda s: s.parallelism(2), 1),
        (lambda s: s.max_parallelism(64), 2),
        (lambda s: s.max_parallelism(256), 1),
    ],
)
@pytest.mark.parametrize("chaining", [True, False])
def test_a_second_exchange_where_subtasks_or_key_groups_differ(
    setting: Call, exchanges: int, *, chaining: bool
) -> None:
    env = ps.Environment(parallelism=2, config={"pipeline.operator-chaining.enabled": chaining})
    kept = rows(env).key_by("a").filter(col("b") > 0).max_parallelism(256)
    setting(kept.window(WINDOW).aggregate(n=ps.count())).discard()
    graph = env.plan().graph
    assert sum(edge.partitioning == HASH for edge in graph.edges) == exchanges


def test_vertices_whose_rows_stay_have_equal_key_groups() -> None:
    env = ps.Environment(parallelism=2, config={"pipeline.operator-chaining.enabled": False})
    kept = rows(env).key_by("a").filter(col("b") > 0).with_columns(c=1)
    kept.aggregate(n=ps.count()).discard()
    kept.aggregate(n=ps.count()).max_parallelism(512).discard()
    graph = env.plan().graph
    assert hash_edges(env) == 2
    of_kept = {v.max_parallelism for v in graph.vertices if v.name in ("filter", "with_columns")}
    of_state = [v.max_parallelism for v in graph.vertices if v.name == "aggregate"]
    assert of_kept == {min(of_state)}
    assert max(of_state) == 512


def test_a_union_of_differently_split_streams_brings_them_together(env: ps.Environment) -> None:
    few = rows(env).key_by("a").filter(col("b") > 0).max_parallelism(64)
    many = rows(env).key_by("a").filter(col("b") > 1).max_parallelism(512)
    few.union(many).aggregate(n=ps.count()).discard()
    graph = env.plan().graph
    assert hash_edges(env) == 3
    assert graph.vertices[-1].max_parallelism == 64


def test_a_graph_that_lies_about_keys_is_refused(env: ps.Environment) -> None:
    kept = rows(env).key_by("a").with_columns(c=col("b") + 1)
    kept.window(WINDOW).aggregate(n=ps.count(), c=ps.max("c")).discard()
    graph = env.plan().graph
    validate(graph)
    (columns,) = (
        operator.project.columns
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.name == "with_columns"
    )
    next(c for c in columns if c.name == "a").expression.nodes[0].column = "b"
    with pytest.raises(JobRejected, match="no exchange brings the rows of a key together"):
        validate(graph)


def test_a_forward_edge_between_other_key_groups_is_refused() -> None:
    env = ps.Environment(parallelism=2, config={"pipeline.operator-chaining.enabled": False})
    rows(env).key_by("a").filter(col("b") > 0).aggregate(n=ps.count()).discard()
    graph = env.plan().graph
    validate(graph)
    next(v for v in graph.vertices if v.name == "filter").max_parallelism = 4
    with pytest.raises(JobRejected, match="does not bring the rows of a key together"):
        validate(graph)


# ---------------------------------------------------------------- plan, harness


def test_the_plan_has_a_note_at_a_window_without_keys(env: ps.Environment) -> None:
    rows(env).window(WINDOW).aggregate(n=ps.count()).discard()
    assert "note: one window for all rows" in str(env.plan())
    notes = [o["note"] for v in env.plan().to_dict()["vertices"] for o in v["operators"]]
    assert sum(map(bool, notes)) == 1


def test_no_note_at_a_window_with_keys(env: ps.Environment) -> None:
    rows(env).key_by("a").filter(col("b") > 0).window(WINDOW).aggregate(n=ps.count()).discard()
    assert "note" not in str(env.plan())


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_windows_behind_a_filter_are_per_key(backend: Any) -> None:
    with pt.harness(
        lambda s: s.key_by("a").filter(col("b") > 0).window(WINDOW).aggregate(total=ps.sum("b")),
        schema={"a": int, "b": int},
        backend=backend,
    ) as h:
        h.push_many(
            [{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 4}, {"a": 2, "b": -1}], [0] * 4
        )
        h.watermark(2000)
        assert {(row["a"], row["total"]) for row in h.output} == {(1, 5), (2, 2)}


def test_sinks_take_a_keyed_stream(env: ps.Environment, tmp_path: Path) -> None:
    keyed = rows(env).key_by("a").filter(col("b") > 0)
    keyed.write_parquet(str(tmp_path))
    keyed.sink(Nothing()).parallelism(1)
    env.plan()
