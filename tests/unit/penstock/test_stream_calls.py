"""Aim: each call on a stream gives the right columns, or an error in the user's words at once.

Method: schemas are compared with what the documentation says; errors with the words they must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from penstock.errors import JobRejected, StreamError
from penstock.streams.stream import Stream

SCHEMA = pa.schema(
    [
        ("auction", pa.int64()),
        ("price", pa.float64()),
        ("ts", pa.int64()),
        ("text", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.timestamp("us")),
    ]
)
ROWS = [{"auction": 1, "price": 2.5, "ts": 3, "text": "x", "tags": ["a"], "at": None}]


@pytest.fixture
def env() -> ps.Environment:
    return ps.Environment(parallelism=2)


@pytest.fixture
def bids(env: ps.Environment) -> Stream:
    return env.from_rows(ROWS, schema=SCHEMA)


def columns(stream: Stream) -> dict[str, str]:
    return {field.name: str(field.type) for field in stream.schema}


# ---------------------------------------------------------------- what comes out


def test_select_with_columns_drop_rename(bids: Stream) -> None:
    assert columns(bids.select(a="text!", b=ps.lit("price"))) == {"a": "string", "b": "string"}
    assert columns(bids.select("price", col("ts"), cents=col("price") * 100)) == {
        "price": "double",
        "ts": "int64",
        "cents": "double",
    }
    added = bids.with_columns(price=col("ts"), one=1)
    assert list(columns(added)) == [*SCHEMA.names, "one"]
    assert columns(added)["price"] == "int64"
    assert "text" not in columns(bids.drop("text", "tags"))
    assert list(columns(bids.rename(auction="id", text="auction")))[:4] == [
        "id",
        "price",
        "ts",
        "auction",
    ]
    assert bids.filter(col("price") > 1).schema == SCHEMA


def test_window_and_running_aggregates(bids: Stream) -> None:
    keyed = bids.with_event_time("at", out_of_orderness="5s", idle_timeout="1 min").key_by(
        "auction"
    )
    windowed = keyed.window(ps.tumbling("10s")).aggregate(n=ps.count(), best=ps.max("text"))
    assert columns(windowed) == {
        "auction": "int64",
        "window_start": "timestamp[ms, tz=UTC]",
        "window_end": "timestamp[ms, tz=UTC]",
        "n": "int64",
        "best": "string",
    }
    counted = keyed.window(ps.count_window(3)).aggregate(total=ps.sum(col("ts") + 1))
    assert columns(counted) == {"auction": "int64", "window_index": "int64", "total": "int64"}
    running = keyed.aggregate(mean=ps.mean("ts"))
    assert columns(running) == {"auction": "int64", "mean": "double"}
    everything = bids.with_event_time("ts").window(ps.session("1s")).aggregate(n=ps.count())
    assert list(columns(everything)) == ["window_start", "window_end", "n"]
    again = windowed.window(ps.tumbling("1 min")).aggregate(n=ps.sum("n"))
    assert columns(again)["n"] == "int64"


class Emit(ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        out.emit(n=len(rows))
        out.side("odd", rows[0])


def test_window_functions(env: ps.Environment, bids: Stream) -> None:
    window = bids.with_event_time("ts").key_by("auction").window(ps.tumbling("1s"))
    done = window.process(Emit(), schema={"n": "int64"})
    assert columns(done) == {"n": "int64"}
    assert done.side_output("odd").schema == SCHEMA
    reduced = window.reduce(lambda a, b: a)
    assert list(columns(reduced)) == [
        "auction",
        "window_start",
        "window_end",
        *(name for name in SCHEMA.names if name != "auction"),
    ]
    done.side_output("odd").print()
    reduced.discard()
    env.plan()


def test_side_outputs(env: ps.Environment, bids: Stream) -> None:
    broken = bids.on_error("broken").side_output("broken")
    assert columns(broken) == {"where": "string", "text": "string", "error": "string"}
    kept = bids.select("auction", "ts").filter(col("ts") > 0).on_error("bad")
    assert columns(kept.side_output("bad")) == {
        "auction": "int64",
        "ts": "int64",
        "error": "string",
    }
    window = bids.with_event_time("ts").key_by("auction").window(ps.tumbling("1s"), late_to="late")
    counts = window.aggregate(n=ps.sum(col("ts") * 2))
    late = counts.side_output("late")
    assert late.schema == SCHEMA
    late.key_by("auction").window(ps.tumbling("1h")).aggregate(n=ps.count()).discard()
    counts.discard()
    broken.print()
    env.plan()


@dataclass
class Parsed:
    words: list[str]
    length: int | None


class Word(TypedDict):
    word: str


def test_schemas_of_functions(bids: Stream) -> None:
    def parse(row: Any) -> Parsed:
        return Parsed([row.text], 1)

    def words(row: Any) -> Iterator[Word]:
        yield {"word": row.text}

    assert list(columns(bids.map(parse))) == ["words", "length"]
    assert columns(bids.flat_map(words)) == {"word": "string"}
    assert columns(bids.map(lambda row: {"twice": row.price * 2})) == {"twice": "double"}
    assert columns(bids.map(lambda r: (1, "a"), schema={"n": "int32", "s": str})) == {
        "n": "int32",
        "s": "string",
    }
    assert list(columns(bids.map(lambda row: None, schema=Parsed))) == ["words", "length"]
    assert columns(bids.map_batches(lambda b: b.select(["ts"]))) == {"ts": "int64"}
    assert columns(bids.map_batches(lambda b: pa.table({"n": [b.num_rows]}))) == {"n": "int64"}
    assert columns(
        bids.select("price").map(lambda r: {"p": r.price}).map(lambda r: {"q": r.p})
    ) == {"q": "double"}


def test_key_by_function_adds_the_key(bids: Stream) -> None:
    keyed = bids.key_by(lambda row: row.text.upper())
    assert keyed.keys == ("key",)
    assert columns(keyed)["key"] == "string"
    assert columns(keyed.aggregate(n=ps.count())) == {"key": "string", "n": "int64"}


def test_union_takes_the_columns_of_the_first(bids: Stream) -> None:
    both = bids.select("auction", "ts").union(bids.select("ts", "auction"))
    assert list(columns(both)) == ["auction", "ts"]


def test_sources(env: ps.Environment, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"n": 1, "s": "x"},\n {"n": 2, "s": "y"}]')
    (tmp_path / "a.csv").write_text("n,s\n1,x\n2,y\n")
    json_rows, csv_rows = env.read_json(tmp_path / "a.json"), env.read_csv(tmp_path / "a.csv")
    for stream in (json_rows, csv_rows):
        assert columns(stream) == {"n": "int64", "s": "string"}
        assert columns(stream.map(lambda row: {"sum": row.n + 1})) == {"sum": "int64"}
    table = pa.table({"n": [1, 2]})
    assert columns(env.from_arrow(table).map(lambda row: {"m": str(row.n)})) == {"m": "string"}
    generated = env.generate(
        lambda start, count: pa.record_batch({"i": list(range(start, start + count))})
    )
    assert columns(generated.map(lambda row: {"j": row.i / 2})) == {"j": "double"}
    assert "price" in columns(env.nexmark(100))
    assert columns(env.read_socket("localhost", 9)) == {"line": "string"}


# ---------------------------------------------------------------- what is refused


def with_time(s: Stream) -> Stream:
    return s.with_event_time("ts")


REFUSED: dict[str, tuple[Callable[[Stream], object], str]] = {
    "unknown column": (
        lambda s: s.select("prise"),
        r"select: there is no column 'prise' \(did you mean 'price'\?\); the columns are auction, price",
    ),
    "unknown column in expression": (
        lambda s: s.filter(col("prize") > 1),
        "no column 'prize'.*'price'",
    ),
    "unknown key": (
        lambda s: s.key_by("auctions"),
        "key_by: there is no column 'auctions'.*'auction'",
    ),
    "unknown column in aggregate": (
        lambda s: s.key_by("auction").aggregate(m=ps.max("prices")),
        r"aggregate m=max\(prices\): there is no column 'prices'.*'price'",
    ),
    "unknown column to drop": (lambda s: s.drop("nope"), "drop: there is no column 'nope'"),
    "unknown column to rename": (lambda s: s.rename(nope="x"), "rename: there is no column 'nope'"),
    "reserved name": (lambda s: s.with_columns(__event_time=1), "'__event_time' is reserved"),
    "column twice": (lambda s: s.rename(price="ts"), "'ts' would be there twice"),
    "nothing left": (lambda s: s.select(), "no column would be left"),
    "nothing added": (lambda s: s.with_columns(), "give at least one column"),
    "nameless expression": (lambda s: s.select(col("ts") + 1), r"needs a name: select\(name=...\)"),
    "no column": (lambda s: s.select(3), "neither a column name nor an expression"),  # type: ignore[arg-type]
    "text or column": (
        lambda s: s.select(cents="price"),
        r"select: cents='price' would be this text in every row, .*col\('price'\) is the column",
    ),
    "added text or column": (
        lambda s: s.with_columns(price="text"),
        r"with_columns: price='text' would be this text.*ps.lit\('text'\) the text",
    ),
    "filter is no condition": (
        lambda s: s.filter(col("price") + 1),
        "is double, not true or false",
    ),
    "filter is nothing": (lambda s: s.filter(3), "filter: 3 is no function"),  # type: ignore[arg-type]
    "no keys": (lambda s: s.key_by(), "name the key columns"),
    "key twice": (lambda s: s.key_by("ts", "ts"), "named twice"),
    "nested key": (lambda s: s.key_by("tags"), r"'tags' of type list<.*cannot be a key"),
    "computed key": (lambda s: s.key_by(col("ts") % 3), "make it one with .with_columns"),
    "union of others": (
        lambda s: s.union(s.select("auction", ts=col("text"), new=col("price"))),
        "'price' is missing in the second.*'new' is missing in the first.*'ts' is int64 in the first",
    ),
    "union of nothing": (lambda s: s.union(), "at least one other stream"),
    "window without event time": (
        lambda s: s.key_by("auction").window(ps.tumbling("1s")),
        r"no event time: call \.with_event_time",
    ),
    "window of partly timed union": (
        lambda s: s.union(with_time(s)).window(ps.tumbling("1s")),
        "on each of its streams",
    ),
    "no window": (lambda s: s.window("10s"), "'10s' is no window; write ps.tumbling"),  # type: ignore[arg-type]
    "event time of wrong type": (
        lambda s: s.with_event_time("tags"),
        "'tags' is list<.*>; event time is",
    ),
    "event time of text": (lambda s: s.with_event_time("text"), r"cast\('timestamp\[ms\]'\)"),
    "unknown event time": (lambda s: s.with_event_time("time"), "no column 'time'"),
    "sum of text": (
        lambda s: s.key_by("ts").aggregate(n=ps.sum("text")),
        "cannot take the sum of .*string",
    ),
    "no aggregates": (lambda s: s.key_by("ts").aggregate(), "at least one aggregate"),
    "no aggregate": (lambda s: s.key_by("ts").aggregate(n="x"), "is no aggregate"),  # type: ignore[arg-type]
    "aggregate named as key": (
        lambda s: s.key_by("ts").aggregate(ts=ps.count()),
        "two output columns",
    ),
    "aggregate named as window column": (
        lambda s: with_time(s).window(ps.tumbling("1s")).aggregate(window_start=ps.count()),
        "two output columns are named 'window_start'",
    ),
    "unknown tag": (
        lambda s: s.side_output("late"),
        r"no side output 'late': it gets one by \.on_error",
    ),
    "nearly known tag": (
        lambda s: s.on_error("broken").side_output("brken"),
        r"no side output 'brken' \(did you mean 'broken'\?\); it has 'broken'",
    ),
    "key named as window column": (
        lambda s: (
            with_time(s)
            .rename(auction="window_start")
            .key_by("window_start")
            .window(ps.tumbling("1s"))
            .aggregate(n=ps.count())
        ),
        r"'window_start'.*\.rename\(window_start='\.\.\.'\)",
    ),
    "side output of a window": (
        lambda s: (
            with_time(s).window(ps.tumbling("1s")).aggregate(n=ps.count()).side_output("late")
        ),
        r"no side output 'late': it gets one by \.window\(\.\.\., late_to='late'\) for late rows$",
    ),
    "side output of a running aggregate": (
        lambda s: s.key_by("ts").aggregate(n=ps.count()).side_output("late"),
        "no side output 'late': a running aggregate has none",
    ),
    "bad records of a window": (
        lambda s: with_time(s).window(ps.tumbling("1s")).aggregate(n=ps.count()).on_error("skip"),
        r"has no bad records of its own: late rows go to \.window\(\.\.\., late_to='late'\)",
    ),
    "bad records of a window function": (
        lambda s: with_time(s).window(ps.tumbling("1s")).reduce(lambda a, b: a).on_error("bad"),
        "'reduce' works on groups of rows",
    ),
    "bad records of a running aggregate": (
        lambda s: s.key_by("ts").aggregate(n=ps.count()).on_error("bad"),
        "'aggregate' works on groups of rows",
    ),
    "tag of bad records is nearly an action": (
        lambda s: s.on_error("Skip"),
        "would be the name of a side output; did you mean 'skip'",
    ),
    "a list of keys": (
        lambda s: s.key_by(["auction", "ts"]),
        r"write key_by\('auction', 'ts'\)$",
    ),
    "tag of bad records is empty": (lambda s: s.on_error(""), "is not 'fail', 'skip' or the name"),
    "error column is taken": (
        lambda s: s.rename(text="error").filter(col("ts") > 1).on_error("bad"),
        "has one already; rename it first",
    ),
    "property of routing": (lambda s: s.rebalance().uid("x"), r"uid\(\) applies to an operator"),
    "property of key_by": (
        lambda s: s.key_by("ts").parallelism(2),
        r"parallelism\(\) applies to an op",
    ),
    "property of a side output": (
        lambda s: s.on_error("bad").side_output("bad").name("x"),
        "a side output is none",
    ),
    "uid twice": (
        lambda s: s.uid("a").select("ts").uid("a"),
        "'a' is already that of operator 'from_rows'",
    ),
    "empty uid": (lambda s: s.uid(" "), "is not a name"),
    "parallelism of zero": (lambda s: s.parallelism(0), "is not a number from 1 to 32768"),
    "max parallelism too high": (
        lambda s: s.max_parallelism(40_000),
        "is not a number from 1 to 32768",
    ),
    "collect nothing": (lambda s: s.collect(limit=0), "at least 1"),
    "collect text": (lambda s: s.collect(limit="5"), "limit is '5'; it must be a whole number"),  # type: ignore[arg-type]
    "collect a fraction": (lambda s: s.collect(limit=2.5), r"limit is 2\.5"),  # type: ignore[arg-type]
    "collect True": (lambda s: s.collect(limit=True), "limit is True"),
    "collect too much": (lambda s: s.collect(limit=2**64), "limit is 18446744073709551616"),
    "sink is a class": (lambda s: s.sink(ps.Sink), r"is no penstock.Sink.*pass Sink\(\)"),  # type: ignore[arg-type]
    "partition by unknown": (
        lambda s: s.write_parquet("/tmp/x", partition_by=["no"]),
        'no column "no"',
    ),
    "csv of lists": (lambda s: s.write_csv("/tmp/x"), "CSV cannot hold"),
    "window function is a class": (
        lambda s: with_time(s).window(ps.tumbling("1s")).process(Emit),  # type: ignore[arg-type]
        r"derive a class from ps\.WindowFunction and pass Emit\(\)",
    ),
    "window function without schema": (
        lambda s: with_time(s).window(ps.tumbling("1s")).process(Emit()),
        "rows that Emit emits are not known",
    ),
    "schema is nothing": (lambda s: s.map(lambda r: r, schema=3), "schema=3 is no schema"),
    "key function where there is a key": (
        lambda s: s.rename(text="key").key_by(lambda r: 1),
        "adds the column 'key', and there is one already",
    ),
    "late rows of a count window": (
        lambda s: s.window(ps.count_window(3), late_to="x"),
        "late_to does not",
    ),
    "map_batches returns rows": (
        lambda s: s.map_batches(lambda b: b.to_pylist()),
        r"returned list, not a pyarrow\.RecordBatch",
    ),
    "map_batches raises": (
        lambda s: s.map_batches(lambda b: b["nope"]),
        "the function raised KeyError",
    ),
    "map returns no row": (lambda s: s.map(lambda row: 3), "not clear"),
    "a case without its end": (
        lambda s: s.select(size=ps.when(col("ts") > 1, "late")),
        r"unfinished ps.when\(...\): end it with .otherwise\(value\)",
    ),
    "the sum of a case without its end": (
        lambda s: s.key_by("ts").aggregate(n=ps.count(ps.when(col("ts") > 1, 1))),
        "end it with .otherwise",
    ),
    "idle at once": (
        lambda s: s.with_event_time("ts", idle_timeout=0),
        "idle_timeout is 0; every split would be silent",
    ),
    "several addresses as a list": (
        lambda s: ps.Environment(["a:1", "b:1"]),  # type: ignore[arg-type]
        r"address is \['a:1', 'b:1'\]; write 'host:port'",
    ),
    "configuration by its file": (
        lambda s: ps.Environment(config="penstock.yaml"),  # type: ignore[arg-type]
        "config is 'penstock.yaml'; it must be a dict",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_call(bids: Stream, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(StreamError, match=message):
        call(bids)


def test_streams_of_two_environments_do_not_meet(bids: Stream) -> None:
    with pytest.raises(JobRejected, match="different environments"):
        bids.union(ps.Environment().from_rows(ROWS, schema=SCHEMA))


def test_schema_is_asked_for_where_there_is_no_sample(env: ps.Environment, bids: Stream) -> None:
    lines = env.read_socket("localhost", 9)
    with pytest.raises(JobRejected, match=r"give schema=pa\.schema"):
        lines.map(lambda row: {"n": len(row.line)})
    with pytest.raises(JobRejected, match=r"give schema=pa\.schema"):
        lines.map_batches(lambda batch: batch)
    behind_a_window = bids.key_by("auction").aggregate(n=ps.count())
    with pytest.raises(JobRejected, match="give schema"):
        behind_a_window.map(lambda row: {"m": row.n})


def test_bad_sources_are_refused(env: ps.Environment, tmp_path: Path) -> None:
    with pytest.raises(JobRejected, match="no such file"):
        env.read_parquet(tmp_path / "gone.parquet")
    with pytest.raises(JobRejected, match="is no source"):
        env.source(ps.Source)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match=r"is no pyarrow\.Table"):
        env.from_arrow([{"a": 1}])
    with pytest.raises(JobRejected, match="reserved"):
        env.from_arrow(pa.table({"__event_time": [1]}))
    with pytest.raises(JobRejected, match="watch"):
        env.read_json(tmp_path, watch=0)
    with pytest.raises(JobRejected, match="is no function"):
        env.generate(3)  # type: ignore[arg-type]


def test_names_of_later_versions_are_absent(env: ps.Environment, bids: Stream) -> None:
    assert not hasattr(bids.key_by("ts"), "iterate")
    for name in ("iterate", "write_kafka", "write_sql"):
        assert not hasattr(bids, name)
    for name in ("read_nats", "read_kafka"):
        assert not hasattr(env, name)


def test_runtime_modes(env: ps.Environment) -> None:
    assert env.config.runtime_mode == "streaming"
    for mode in ("batch", "streaming"):
        env.set_runtime_mode(mode)
        assert env.config.runtime_mode == mode
    for wrong in ("Streaming", "", None):
        with pytest.raises(JobRejected, match="there are 'streaming' and 'batch'"):
            env.set_runtime_mode(wrong)  # type: ignore[arg-type]


def test_a_chain_of_300_operators_has_a_name_of_its_ends(env: ps.Environment) -> None:
    stream = env.from_rows([{"v": 1}])
    for _ in range(300):
        stream = stream.with_columns(v=col("v") + 1)
    stream.discard()
    _, vertex = env.plan().graph.vertices
    assert vertex.name.startswith("with_columns -> with_columns")
    assert " ... 301 operators ... " in vertex.name
    assert vertex.name.endswith("with_columns -> discard")
    assert len(vertex.name) < 1_100


def test_import_is_light() -> None:
    import subprocess
    import sys

    code = (
        "import sys, penstock\n"
        "heavy = {'numba', 'grpc', 'pyspark', 'pandas', 'boto3', 'kazoo', 'rocksdict'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import penstock.cli.main\n"
        "builders = {'penstock.streams.environment', 'penstock.planner', 'boto3'} & set(sys.modules)\n"
        "assert not builders, builders"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_no_job_can_change_is_told_where_the_cluster_runs_already(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"taskmanager.numberOfTaskSlots": 4, "state.backend.type": "rocksdb"}
    config |= {"restart-strategy.type": "none", "restart-strategy.fixed-delay.attempts": 3}
    env = ps.Environment("127.0.0.1:1", config=config)
    env.from_rows(ROWS, schema=SCHEMA).discard()
    with caplog.at_level("WARNING", "penstock"), pytest.raises(ps.StreamError, match="refused"):
        env.submit("in vain")
    (told,) = [message for message in caplog.messages if "run already" in message]
    assert told.startswith("taskmanager.numberOfTaskSlots: the daemons at 127.0.0.1:1 ")
    (told,) = [message for message in caplog.messages if "without effect" in message]
    assert "restart-strategy.fixed-delay.attempts: without effect, since restart" in told
