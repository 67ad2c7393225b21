"""Aim: process functions, connected streams and joins are refused at the call that is wrong, with what to
write instead; their outputs have the columns that are promised. Method: one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.errors import ConfigurationError, JobRejected
from penstock.graph.join_schemas import joined_columns
from penstock.pb import graph_pb2
from penstock.planner import plan_job
from penstock.streams.stream import Stream

BIDS = pa.schema([("k", pa.int64()), ("ts", pa.int64()), ("x", pa.string())])
RULES = pa.schema([("rule", pa.int64()), ("ts", pa.int64()), ("y", pa.float64())])


@dataclass
class Alert:
    k: int
    text: str | None


class Keyed(ps.KeyedProcessFunction):
    seen = ps.ValueState("seen", pa.bool_())

    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector[Alert]) -> None:
        out.emit(k=row.k, text=row.x)


class Plain(ps.ProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(k=row.k)


class WithListState(Plain):
    rows = ps.OperatorListState("rows", pa.int64())


class Batch(ps.KeyedBatchFunction):
    def process_batch(
        self, keys: pa.Array, batch: pa.RecordBatch, out: ps.BatchCollector[Alert]
    ) -> None:
        out.emit(batch)


class Ruled(ps.BroadcastProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector[Alert]) -> None:
        out.emit(k=row.k, text="")

    def process_broadcast(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        assert row.y


class KeyedRuled(Ruled, ps.KeyedBroadcastProcessFunction):
    pass


class Both(ps.CoProcessFunction):
    def process_left(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector[Alert]) -> None:
        out.emit(k=row.k, text="")

    def process_right(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        assert row["y"]


class KeyedBoth(Both, ps.KeyedCoProcessFunction):
    pass


@pytest.fixture
def env() -> ps.Environment:
    return ps.Environment(parallelism=2)


def no_rows(schema: pa.Schema) -> Callable[[int, int], pa.RecordBatch]:
    return lambda start, count: pa.RecordBatch.from_pylist([], schema=schema)


@pytest.fixture
def bids(env: ps.Environment) -> Stream:
    return env.generate(no_rows(BIDS), rows=1, schema=BIDS).with_event_time("ts")


@pytest.fixture
def rules(env: ps.Environment) -> Stream:
    return env.generate(no_rows(RULES), rows=1, schema=RULES).with_event_time("ts")


def columns(stream: Stream) -> dict[str, str]:
    return {field.name: str(field.type) for field in stream.schema}


# ---------------------------------------------------------------- process


def test_output_columns_come_from_the_schema_or_the_collector(bids: Stream, rules: Stream) -> None:
    alert = {"k": "int64", "text": "string"}
    keyed = bids.key_by("k")
    assert columns(keyed.process(Keyed())) == alert
    assert columns(keyed.process(Batch())) == alert
    assert columns(bids.connect(rules.broadcast()).process(Ruled())) == alert
    assert columns(keyed.connect(rules.broadcast()).process(KeyedRuled())) == alert
    assert columns(bids.connect(rules).process(Both())) == alert
    assert columns(keyed.connect(rules.key_by("rule")).process(KeyedBoth())) == alert
    assert columns(bids.process(Plain(), schema={"k": "int32"})) == {"k": "int32"}
    with pytest.raises(
        JobRejected, match=r"that Plain emits are not known.*def process\(.*Collector"
    ):
        bids.process(Plain())


def test_the_output_of_a_keyed_function_is_an_ordinary_stream(bids: Stream) -> None:
    result = bids.key_by("k").process(Keyed())
    assert type(result) is Stream
    with pytest.raises(JobRejected, match=r"KeyedProcessFunction, which is used as stream\.key_by"):
        result.process(Keyed())


def test_a_plain_function_may_follow_key_by(env: ps.Environment, bids: Stream) -> None:
    bids.key_by("k").process(Plain(), schema={"k": "int64"}).discard()
    graph = env.plan().graph
    (edge,) = graph.edges
    assert edge.partitioning == graph_pb2.PARTITIONING_HASH
    head = graph.vertices[1].operators[0].process
    assert (head.kind, list(head.keys)) == (graph_pb2.PROCESS_KIND_PLAIN, [])


Wrong = Callable[[Stream, Stream], object]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, r: b.process(Keyed()), r"Keyed is a KeyedProcessFunction.*use a ps.ProcessFunction"),
        (lambda b, r: b.process(Plain), r"pass an object, Plain\(\)"),
        (lambda b, r: b.process(lambda row: row), r"plain function.*\.map or \.flat_map"),
        (lambda b, r: b.process(3), "is no process function"),
        (lambda b, r: b.key_by("k").process(KeyedBoth()), r"first\.key_by\('user'\)\.connect"),
        (lambda b, r: b.key_by("x").process(Plain()), "not known"),
        (lambda b, r: b.connect(r.key_by("rule")), r"call \.key_by\(\.\.\.\) on the first too"),
        (lambda b, r: b.key_by("k").connect(r), r"\.key_by\(\.\.\.\) or \.broadcast\(\) on the second"),
        (lambda b, r: b.broadcast().connect(r), "it is the second that may be"),
        (lambda b, r: b.key_by("x").connect(r.key_by("rule")), r"string.*'rule' int64.*\.cast\('string', safe=True\)"),
        (lambda b, r: b.key_by("k", "x").connect(r.key_by("rule")), "as many"),
        (lambda b, r: b.connect(3), "is no stream"),
        (lambda b, r: b.connect(r.broadcast()).process(Both()), "use a ps.BroadcastProcessFunction"),
        (lambda b, r: b.connect(r).process(KeyedBoth()), "use a ps.CoProcessFunction"),
        (lambda b, r: b.key_by("k").process(Batch()).on_error("skip"), "whole batches"),
    ],
)  # fmt: skip
def test_wrong_use_is_refused(bids: Stream, rules: Stream, call: Wrong, message: str) -> None:
    with pytest.raises(JobRejected, match=message):
        call(bids, rules)


def test_streams_of_two_environments_do_not_meet(bids: Stream) -> None:
    other = ps.Environment().from_rows([{"k": 1, "ts": 2}]).with_event_time("ts")
    with pytest.raises(JobRejected, match="different environments"):
        bids.connect(other)
    with pytest.raises(JobRejected, match="different environments"):
        bids.join(other, on="k", within=(0, 0))


def test_states_are_checked_where_the_function_is_used(bids: Stream) -> None:
    class Twice(Keyed):
        a = ps.ValueState("same", pa.int64())
        b = ps.ListState("same", pa.int64())

    class KeyedStateInPlain(Plain):
        seen = ps.ValueState("seen", pa.bool_())

    with pytest.raises(JobRejected, match="same name"):
        bids.key_by("k").process(Twice())
    with pytest.raises(JobRejected, match="state per key needs a keyed stream"):
        bids.process(KeyedStateInPlain(), schema={"k": "int64"})


def test_side_outputs_have_the_columns_of_the_first_input(bids: Stream, rules: Stream) -> None:
    result = bids.connect(rules.broadcast()).process(Ruled())
    assert result.side_output("any").schema == BIDS
    assert result.on_error("bad").side_output("bad").schema.names == [*BIDS.names, "error"]


def test_event_time_goes_on_where_all_inputs_have_it(
    env: ps.Environment, bids: Stream, rules: Stream
) -> None:
    plain = env.generate(no_rows(RULES), rows=1, schema=RULES)
    bids.connect(rules).process(Both()).window(ps.tumbling("1s")).aggregate(n=ps.count())
    with pytest.raises(JobRejected, match="no event time"):
        bids.connect(plain).process(Both()).window(ps.tumbling("1s"))


def test_operators_with_state_want_a_uid(bids: Stream, rules: Stream, env: ps.Environment) -> None:
    def warned(stream: Stream) -> bool:
        stream.discard()
        planned = plan_job("job", env._builder.sinks, env.config)
        env._builder.start_next_job()
        return bool(planned.warnings)

    assert warned(bids.key_by("k").process(Keyed()))
    assert not warned(bids.key_by("k").process(Keyed()).uid("seen"))
    assert warned(bids.connect(rules.broadcast()).process(Ruled()))
    assert warned(bids.process(WithListState(), schema={"k": "int64"}))
    assert not warned(bids.process(Plain(), schema={"k": "int64"}))
    assert not warned(bids.connect(rules).process(Both()))
    assert warned(bids.join(rules.rename(rule="k"), on="k", within=(0, 1)))
    bids.key_by("k").process(Keyed()).uid("twice")
    with pytest.raises(JobRejected, match="'twice' is already that of operator 'Keyed'"):
        bids.join(bids, on="k", within=(0, 1)).uid("twice")


def test_derived_uids_can_be_refused() -> None:
    env = ps.Environment(config={"pipeline.auto-generate-uids": "false"})
    stream = env.from_rows([{"k": 1, "x": "a"}]).key_by("k").process(Keyed())
    stream.discard()
    with pytest.raises(JobRejected, match=r"no uid: 'Keyed'"):
        env.plan()
    stream.uid("keyed")
    env.plan()


# ---------------------------------------------------------------- join


def test_columns_of_joins(bids: Stream, rules: Stream) -> None:
    right = rules.rename(rule="k")
    interval = bids.join(right, on="k", within=("-5s", "5s"))
    assert interval.schema.names == ["k", "ts", "x", "ts_right", "y"]
    full = bids.join(right, on=["k"], window=ps.tumbling("10s"), how="full")
    assert full.schema.names == ["k", "window_start", "window_end", "ts", "x", "ts_right", "y"]
    assert columns(bids.key_by("x").join(right, on="k", within=(0, 0))) == columns(interval)
    two = bids.join(right, on=["ts", "k"], within=(0, 0))
    assert two.schema.names == ["ts", "k", "x", "y"]
    # What a join gives has event time.
    interval.key_by("k").window(ps.tumbling("1s")).aggregate(n=ps.count())


def test_columns_that_may_be_missing_are_nullable() -> None:
    schema = pa.schema([pa.field(n, pa.int64(), nullable=False) for n in ("k", "v")])

    def nullable(how: graph_pb2.JoinKind.ValueType) -> set[str]:
        joined = joined_columns(schema, schema, ["k"], how, None)
        return {field.name for field in joined.schema if field.nullable}

    assert nullable(graph_pb2.JOIN_KIND_INNER) == set()
    assert nullable(graph_pb2.JOIN_KIND_LEFT) == {"v_right"}
    assert nullable(graph_pb2.JOIN_KIND_RIGHT) == {"v"}
    assert nullable(graph_pb2.JOIN_KIND_FULL) == {"v", "v_right"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, r: b.join(r, on="k", within=(0, 1)), r"right stream: there is no column 'k'"),
        (lambda b, r: b.join(r, on="rule", within=(0, 1)), r"left stream: there is no column 'rule'"),
        (lambda b, r: b.join(r, on=3, within=(0, 1)), "name the columns"),
        (lambda b, r: b.join(r, on=[], within=(0, 1)), "name the columns"),
        (lambda b, r: b.join(r, on=["ts", "ts"], within=(0, 1)), "a column twice"),
        (lambda b, r: b.join(r, on="ts"), "give either within"),
        (lambda b, r: b.join(r, on="ts", within=(0, 1), window=ps.session(1)), "give either within"),
        (lambda b, r: b.join(r, on="ts", within="5s"), "has two bounds"),
        (lambda b, r: b.join(r, on="ts", within=("2s", "1s")), "is empty"),
        (lambda b, r: b.join(r, on="ts", within=(0, "9999999d")), "10,000 years"),
        (lambda b, r: b.join(r, on="ts", within=(0, 1), how="left"), "goes with window="),
        (lambda b, r: b.join(r, on="ts", window=ps.session(1), how="outer"), "'inner', 'left'"),
        (lambda b, r: b.join(r, on="ts", window="10s"), "is no window"),
        (lambda b, r: b.join(r, on="ts", window=ps.count_window(2)), "count windows"),
        (lambda b, r: b.join(r.rename(rule="x"), on="x", within=(0, 1)), r"'x' is string.*int64.*safe=True"),
        (lambda b, r: b.join(r.broadcast(), on="ts", within=(0, 1)), r"\.broadcast\(\).*leave"),
        (lambda b, r: b.rebalance().join(r, on="ts", within=(0, 1)), r"left stream is routed"),
        (lambda b, r: b.join(r.map(lambda x: x, schema=RULES).side_output("a"), on="ts"), "side output"),
        (
            lambda b, r: b.with_columns(window_end=1).join(r, on="ts", window=ps.session(1)),
            r"left column 'window_end'.*\.rename\(window_end=",
        ),
        (
            lambda b, r: b.with_columns(x_right=1).join(b, on="ts", within=(0, 1)),
            r"right column 'x'.*'x_right'.*\.rename\(x=",
        ),
        (lambda b, r: b.join(b, on="k", within=(0, 1)).on_error("skip"), "no bad records"),
        (lambda b, r: b.join(b, on="k", within=(0, 1)).side_output("late"), "a join has none"),
    ],
)  # fmt: skip
def test_wrong_joins_are_refused(bids: Stream, rules: Stream, call: Wrong, message: str) -> None:
    with pytest.raises(JobRejected, match=message):
        call(bids, rules)


def test_both_sides_of_a_join_need_event_time(env: ps.Environment, bids: Stream) -> None:
    plain = env.generate(no_rows(BIDS), rows=1, schema=BIDS)
    with pytest.raises(JobRejected, match="the right stream has no event time"):
        bids.join(plain, on="k", within=(0, 1))
    with pytest.raises(JobRejected, match="the left stream has no event time"):
        plain.join(bids, on="k", window=ps.session(1))


# ---------------------------------------------------------------- sinks


class Flushing(ps.Sink):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def flush(self) -> None: ...


class Neither(ps.Sink):
    def write(self, batch: pa.RecordBatch) -> None: ...


class Half(Neither):
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        return []


class TwoPhase(Half):
    def commit(self, committable: bytes) -> None: ...


class Declared(ps.TwoPhaseSink):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        return []

    def commit(self, committable: bytes) -> None: ...

    def abort(self, committable: bytes) -> None: ...


def test_sinks_are_idempotent_or_two_phase(bids: Stream) -> None:
    for sink in (Flushing(), TwoPhase(), Declared()):
        bids.sink(sink)
    with pytest.raises(JobRejected, match="neither flush nor prepare_commit"):
        bids.sink(Neither())
    with pytest.raises(JobRejected, match="has prepare_commit and no commit"):
        bids.sink(Half())
    TwoPhase().abort(b"")


def test_files_roll_by_size_age_and_silence(bids: Stream, tmp_path: Path) -> None:
    sink = bids.write_parquet(str(tmp_path), roll="1mb", roll_interval="1 min", inactivity="10s")
    spec = sink._node.operation.spec.files
    assert (spec.roll_size_bytes, spec.roll_interval_ms, spec.inactivity_interval_ms) == (
        1 << 20,
        60_000,
        10_000,
    )
    plain = bids.filter(col("k") > 0).write_csv(str(tmp_path))._node.operation.spec.files
    assert (plain.roll_interval_ms, plain.inactivity_interval_ms) == (0, 0)
    with pytest.raises(JobRejected, match="roll_interval is 0; it must be longer than zero"):
        bids.write_json(str(tmp_path), roll_interval=0)
    with pytest.raises(ConfigurationError):
        bids.write_json(str(tmp_path), inactivity="soon")
