"""Aim: updates are never counted as rows unless the user says so.

Method: a running aggregate, everything that may stand behind it, and an aggregate or a window behind that;
what is meant is run in the harness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock import col
from penstock.errors import JobRejected

SCHEMA = {"k": "string", "n": "int64", "ts": "int64"}
Call = Callable[[Any], Any]


@pytest.fixture
def env() -> ps.Environment:
    return ps.Environment(parallelism=2)


def rows(env: ps.Environment) -> ps.Stream:
    return env.from_rows([{"k": "a", "n": 1, "ts": 1}], schema=SCHEMA).with_event_time("ts")


def best(env: ps.Environment) -> ps.Stream:
    return rows(env).key_by("k").aggregate(n=ps.max("n")).name("best")


class Plain(ps.ProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        out.emit(row)


class Keyed(ps.KeyedProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        out.emit(row)


class Pairs(ps.CoProcessFunction):
    @override
    def process_left(self, row: Any, ctx: Any, out: Any) -> Any:
        out.emit(row)

    @override
    def process_right(self, row: Any, ctx: Any, out: Any) -> Any:
        out.emit(row)


class Ruled(ps.BroadcastProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> Any:
        out.emit(row)

    @override
    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> Any:
        pass


def number(row: Any) -> int:
    return int(row.n)


OUT = {"k": "string", "n": "int64"}

BETWEEN: dict[str, Call] = {
    "nothing": lambda s: s,
    "filter": lambda s: s.filter(col("n") > 0),
    "filter function": lambda s: s.filter(lambda row: row.n > 0),
    "map": lambda s: s.map(lambda row: row, schema=OUT),
    "flat_map": lambda s: s.flat_map(lambda row: [row], schema=OUT),
    "map_batches": lambda s: s.map_batches(lambda batch: batch, schema=s.schema),
    "columns": lambda s: (
        s.with_columns(m=col("n") * 2).select("k", n=col("m")).rename(n="x").select("k", n=col("x"))
    ),
    "process": lambda s: s.process(Plain(), schema=OUT),
    "keyed process": lambda s: s.key_by("k").process(Keyed(), schema=OUT),
    "side output": lambda s: s.process(Plain(), schema=OUT).side_output("some"),
    "bad records": lambda s: (
        s.filter(lambda r: r.n > 0).on_error("bad").side_output("bad").drop("error")
    ),
    "connect": lambda s: s.connect(plain_of(s)).process(Pairs(), schema=OUT),
    "connect second": lambda s: plain_of(s).connect(s).process(Pairs(), schema=OUT),
    "connect broadcast": lambda s: s.connect(plain_of(s).broadcast()).process(Ruled(), schema=OUT),
    "union": lambda s: plain_of(s).union(s),
    "union first": lambda s: s.union(plain_of(s)),
    "rebalance": lambda s: s.rebalance(),
    "window join": lambda s: s.join(plain_of(s), on="k", window=ps.tumbling("1s")).select("k", "n"),
    "interval join": lambda s: (
        plain_of(s).join(s, on="k", within=(0, 5)).select("k", n=col("n_right"))
    ),
    "keys": lambda s: s.key_by("k"),
    "key function": lambda s: s.key_by(number).select("k", "n"),
    "names": lambda s: s.uid("x").name("top"),
    "time": lambda s: s.with_columns(ts=1).with_event_time("ts").select("k", "n"),
}


def plain_of(stream: Any) -> ps.Stream:
    """Rows of the same environment."""
    source = stream._source.node
    while source.inputs:
        source = source.inputs[0].node
    from penstock.graph.logical import NodeInput

    raw = ps.Stream(stream._builder, NodeInput(source))
    return raw.with_event_time("ts").select("k", "n")


COUNTS: dict[str, Call] = {
    "aggregate": lambda s: s.key_by("k").aggregate(mean=ps.mean("n")),
    "expression": lambda s: s.key_by("k").aggregate(mean=ps.mean(col("n") * 2)),
    "window": lambda s: (
        s.key_by("k").window(ps.tumbling("1s"), time="processing").aggregate(x=ps.sum("n"))
    ),
    "window_all": lambda s: s.window_all(ps.count_window(2)).aggregate(x=ps.sum("n")),
    "window process": lambda s: (
        s.key_by("k").window(ps.session("1s"), time="processing").reduce(lambda x, _: x)
    ),
}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("between", BETWEEN)
def test_updates_are_refused_where_they_would_count_as_rows(
    env: ps.Environment, between: str, counts: str
) -> None:
    stream = BETWEEN[between](best(env))
    name = "top" if between == "names" else "best"
    with pytest.raises(
        JobRejected, match=rf"updates, not rows: '{name}'.*\.as_rows\(\) behind '{name}'"
    ):
        COUNTS[counts](stream)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("between", BETWEEN)
def test_who_means_to_count_updates_says_so(env: ps.Environment, between: str, counts: str) -> None:
    COUNTS[counts](BETWEEN[between](best(env).as_rows())).discard()
    if between != "names":
        COUNTS[counts](BETWEEN[between](best(env)).as_rows()).discard()
    env.plan()


def test_what_one_reader_says_is_not_said_for_another(env: ps.Environment) -> None:
    updates = best(env)
    updates.as_rows().key_by("k").aggregate(n=ps.count())
    with pytest.raises(JobRejected, match="updates"):
        updates.key_by("k").aggregate(n=ps.count())


def test_a_running_aggregate_of_counted_updates_gives_out_updates_again(
    env: ps.Environment,
) -> None:
    counts = best(env).as_rows().key_by("k").aggregate(n=ps.count()).name("counts")
    with pytest.raises(JobRejected, match="'counts' gives out"):
        counts.key_by("k").aggregate(n=ps.count())


def test_rows_are_aggregated_as_ever(env: ps.Environment) -> None:
    per_window = rows(env).key_by("k").window(ps.tumbling("1s")).aggregate(n=ps.count())
    per_window.key_by("k").aggregate(n=ps.max("n")).discard()
    best(env).key_by("k").process(Keyed(), schema=OUT).discard()
    env.plan()


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_the_mean_of_updates_is_what_was_asked_for(backend: Any) -> None:
    with pt.harness(
        lambda s: (
            s.key_by("k")
            .aggregate(n=ps.max("n"))
            .as_rows()
            .key_by("k")
            .aggregate(mean=ps.mean("n"))
        ),
        schema={"k": str, "n": int},
        backend=backend,
    ) as h:
        for n in (1, 2, 3):
            h.push({"k": "a", "n": n})
        assert h.output[-1] == {"k": "a", "mean": 2.0}


def test_a_keyed_stream_stays_keyed(env: ps.Environment) -> None:
    assert isinstance(best(env).key_by("k").as_rows(), ps.KeyedStream)


def test_the_plan_says_what_is_given_out(env: ps.Environment) -> None:
    best(env).discard()
    assert "note: gives out updates" in str(env.plan())


def test_types_of_aggregates_do_not_matter(env: ps.Environment) -> None:
    last = rows(env).key_by("k").aggregate(n=ps.last("n"), l=ps.collect_list("n"))
    with pytest.raises(JobRejected, match="updates"):
        last.key_by("k").aggregate(n=ps.count("n"))
    assert last.schema.field("l").type == pa.list_(pa.int64())


# ---------------------------------------------------------------- windows that fire again


def refired(env: ps.Environment) -> ps.Stream:
    windows = rows(env).key_by("k").window(ps.tumbling("1s"), allowed_lateness="1s", late_to="late")
    return windows.aggregate(n=ps.sum("n")).name("refired")


@pytest.mark.parametrize("counts", COUNTS)
def test_windows_that_fire_again_for_late_rows_may_be_aggregated(
    env: ps.Environment, counts: str
) -> None:
    COUNTS[counts](refired(env).select("k", "n")).discard()
    env.plan()


def test_rows_that_come_too_late_are_rows(env: ps.Environment) -> None:
    late = refired(env).side_output("late")
    late.key_by("k").aggregate(n=ps.sum("n")).discard()
    env.plan()


def test_windows_without_lateness_give_out_rows(env: ps.Environment) -> None:
    once = rows(env).key_by("k").window(ps.tumbling("1s")).aggregate(n=ps.sum("n"))
    once.key_by("k").aggregate(n=ps.sum("n")).discard()
    env.plan()


def test_a_stream_that_is_split_and_joined_again_40_times_is_planned(env: ps.Environment) -> None:
    stream = best(env)
    for n in range(40):
        stream = stream.filter(col("n") > n).union(stream.filter(col("n") <= n))
    stream.discard()
    assert len(env.plan().graph.vertices) > 40
