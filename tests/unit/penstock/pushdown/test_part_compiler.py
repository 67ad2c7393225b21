"""Aim: relational parts become steps for Spark, and everything else is refused by its name when the graph is built.

Method: no Java: what is compiled is read as text, and the graph of the job around it as a plan.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import col
from penstock.errors import JobRejected, TaskFailure
from penstock.graph.exchanges import BLOCKING
from penstock.graph.logical import SparkStage
from penstock.pb import graph_pb2
from penstock.planner.planner import SPARK_SLOT_GROUP
from penstock.pushdown.part_runner import CompiledPart, _check_session
from penstock.rows.schema import schema_from_bytes

TABLE = pa.table(
    {
        "k": pa.array(["x"]),
        "a": pa.array([1], pa.int32()),
        "A": pa.array([1], pa.int64()),
        "f": pa.array([1.0]),
        "h": pa.array([1.0], pa.float16()),
        "d": pa.array([1], pa.decimal128(10, 2)),
        "t": pa.array([0], pa.timestamp("ms", "Europe/Berlin")),
        "ns": pa.array([0], pa.timestamp("ns")),
        "u": pa.array([0], pa.uint8()),
        "l": pa.array([[1]]),
        "b": pa.array([b"x"]),
        "ts": pa.array([0]),
    }
)


def batch(**config: object) -> ps.Environment:
    env = ps.Environment(parallelism=2, config=config)
    env.set_runtime_mode("batch")
    return env


def source(env: ps.Environment | None = None) -> ps.Stream:
    return (env or batch()).from_arrow(TABLE)


def timed(env: ps.Environment | None = None) -> ps.Stream:
    return source(env).with_event_time("ts")


def part_of(stream: ps.Stream) -> CompiledPart:
    operation = stream._source.node.operation
    assert isinstance(operation, SparkStage)
    assert operation.is_compiled
    assert isinstance(operation.function, CompiledPart)
    return operation.function


def operators(graph: graph_pb2.JobGraph) -> list[str]:
    return [operator.name for vertex in graph.vertices for operator in vertex.operators]


# ---------------------------------------------------------------- what it becomes


def test_a_part_is_one_stage_that_reads_what_it_needs() -> None:
    env = batch()
    days = (
        timed(env)
        .filter(col("a") > 0)
        .with_columns(half=col("a") // 2)
        .key_by("k")
        .window(ps.tumbling("1d"))
        .aggregate(n=ps.count(), most=ps.max("half"))
        .engine("spark")
        .name("days")
    )
    text = (
        "#1 select #0: k = `k`, a = `a`, ts = `ts`, __event_time = CASE WHEN `ts` BETWEEN -4611686018427387904L AND "
        "4611686018427387904L THEN CAST(`ts` AS BIGINT) ELSE raise_error('column ts is null, or no event time: beyond "
        "2\\u002A\\u002A62 ms') END\n"
        "#2 where #1: `__event_time` IS NOT NULL\n"
        "#3 where #2: (`a` > CAST(0 AS INT))\n"
        "#4 select #3: k = `k`, half = CAST(((`a` div CAST(2 AS INT)) - CASE WHEN `a` % CAST(2 AS INT) <> 0 AND (`a` % "
        "CAST(2 AS INT) < 0) <> (CAST(2 AS INT) < 0) THEN 1L ELSE 0L END) AS INT), __event_time = `__event_time`\n"
        "#5 select #4: k = `k`, half = `half`, __event_time = (`__event_time` - pmod(`__event_time` - 0L, 86400000L))\n"
        "#6 group #5 by k, __event_time: n = count(1), most = max(`half`)\n"
        "#7 select #6: k = `k`, window_start = timestamp_millis(`__event_time`), window_end = "
        "timestamp_millis(`__event_time` + 86400000L), n = `n`, most = `most`, __event_time = "
        "(`__event_time` + 86399999L)\n"
        "#8 select #7: k = `k`, window_start = `window_start`, window_end = `window_end`, n = `n`, most = `most`"
    )
    assert str(part_of(days)) == text
    days.discard()
    graph = env.plan().graph

    assert operators(graph) == ["from_arrow", "select", "days", "discard"]
    stage = next(vertex for vertex in graph.vertices if vertex.operators[0].name == "days")
    assert (stage.parallelism, stage.slot_group) == (1, SPARK_SLOT_GROUP)
    [schema] = stage.operators[0].spark.input_schemas
    assert schema_from_bytes(schema).names == ["k", "a", "ts"]
    assert {edge.partition_type for edge in graph.edges} == {BLOCKING}
    assert graph.config["spark.sql.ansi.enabled"] == "true"
    assert graph.config["spark.sql.caseSensitive"] == "true"


def test_files_beside_a_part_are_sparks_own(tmp_path: Path) -> None:
    pq.write_table(TABLE.drop_columns(["h", "ns"]), tmp_path / "in.parquet")
    env = batch()
    read = env.read_parquet(str(tmp_path / "in.parquet"))
    read.filter(col("a") > 0).select("k", "A").write_parquet(str(tmp_path / "out"))
    graph = env.plan(engine="spark").graph
    assert operators(graph) == ["spark(filter, select)", "write_parquet"]
    [vertex] = graph.vertices
    spec = vertex.operators[0].spark
    assert spec.files[0].source.path == str(tmp_path / "in.parquet")
    assert spec.output_directory == str(tmp_path / "out")


def test_which_subtask_of_a_sink_gets_a_row_is_as_it_was_asked_for() -> None:
    env = batch()
    positive = source(env).filter(col("a") > 0).select("k", "a")
    positive.broadcast().discard().parallelism(2)
    positive.key_by("k").discard().parallelism(2)
    positive.rebalance().discard().parallelism(2)
    positive.forward().discard().parallelism(2)
    edges = env.plan(engine="spark").graph.edges
    name = graph_pb2.Partitioning.Name
    behind_spark = [name(edge.partitioning).rpartition("_")[2] for edge in edges[-4:]]
    assert behind_spark == ["BROADCAST", "HASH", "REBALANCE", "REBALANCE"]


def test_a_part_travels_without_anything_of_the_users() -> None:
    part = part_of(source().select("k").engine("spark"))
    assert cloudpickle.loads(cloudpickle.dumps(part)) == part
    assert pickle.loads(pickle.dumps(part)) == part


def test_a_part_begins_behind_sources_stages_and_what_is_for_penstock() -> None:
    env = batch()
    mapped = source(env).map(lambda row: {"n": row.a}, schema={"n": "int64"}).engine("penstock")
    bulk = source(env).select(n=col("A")).spark(lambda frame: frame, schema={"n": "int64"})
    mapped.union(bulk).filter(col("n") > 1).engine("spark").discard()
    graph = env.plan().graph
    assert sorted(operators(graph)) == sorted(
        ["from_arrow", "map", "from_arrow", "select", "spark", "spark(union, filter)", "discard"]
    )
    again = source(env).select("k").engine("spark").select(n=col("k").utf8_length())
    assert len(part_of(again.engine("spark")).steps) == 2


def test_a_whole_job_is_compiled_between_sources_and_sinks() -> None:
    env = batch()
    clean = timed(env).drop("h").filter(col("a") > 0)
    clean.discard()
    counted = clean.key_by("k").aggregate(n=ps.count())
    counted.discard()
    counted.discard()
    source(env).discard()
    graph = env.plan(engine="spark").graph
    assert operators(graph).count("spark(drop, filter)") == 1
    assert operators(graph).count("spark(drop, filter, aggregate)") == 1
    assert operators(graph).count("discard") == 4
    assert not {"filter", "aggregate"} & set(operators(graph))
    # The same job for Penstock is what it was.
    assert not any("spark" in name for name in operators(env.plan().graph))
    assert "filter" in operators(env.plan(engine="penstock").graph)


# ---------------------------------------------------------------- refusals


def by_map(stream: ps.Stream) -> ps.Stream:
    return stream.map(lambda row: {"n": 1}, schema={"n": "int64"})


REFUSED: dict[str, tuple[Callable[[ps.Stream], Any], str]] = {
    "map": (by_map, "operator 'map' .*a Python function per row"),
    "filter fn": (lambda s: s.filter(lambda row: True), "operator 'filter' .*a Python function per row"),
    "key_by fn": (
        lambda s: s.key_by(lambda row: 1).aggregate(n=ps.count()), "operator 'key_by' .*a Python function per row",
    ),
    "map_batches": (lambda s: s.map_batches(lambda b: b, schema=TABLE.schema), "a Python function per batch"),
    "reduce": (
        lambda s: s.window(ps.tumbling("1s")).reduce(lambda a, b: a), "operator 'reduce' .*a Python function per window",
    ),
    "session": (lambda s: s.window(ps.session("1s")).aggregate(n=ps.count()), "a session window"),
    "count window": (lambda s: s.window(ps.count_window(2)).aggregate(n=ps.count()), "a count window"),
    "processing time": (
        lambda s: s.window(ps.tumbling("1s"), time="processing").aggregate(n=ps.count()), "processing time",
    ),
    "first": (lambda s: s.key_by("k").aggregate(n=ps.first("a")), "operator 'aggregate' .*aggregate 'first'.*order"),
    "last": (lambda s: s.key_by("k").aggregate(n=ps.last("a")), "aggregate 'last'.*order"),
    "list": (lambda s: s.key_by("k").aggregate(n=ps.collect_list("a")), "aggregate 'collect_list'.*order"),
    "upper": (lambda s: s.select(x=col("k").utf8_upper()), "operator 'select' .*the function 'utf8_upper'"),
    "regex": (lambda s: s.select(x=col("k").match_substring_regex(pattern="a")), "'match_substring_regex'"),
    "ignore case": (
        lambda s: s.select(x=col("k").match_substring(pattern="a", ignore_case=True)), "option ignore_case=True",
    ),
    "log": (lambda s: s.select(x=col("f").ln()), "the function 'ln'"),
    "power": (lambda s: s.select(x=col("a") ** 2), r"the function '\*\*'"),
    "decimal /": (lambda s: s.select(x=col("d") / 2), "/ of decimals"),
    "too many digits": (
        lambda s: s.select(x=col("d").cast("decimal128(38, 19)") > col("A")), r"a comparison of decimal128\(38, 19\)",
    ),
    "text to number": (lambda s: s.select(x=col("k").cast("int64")), "a cast from string to int64"),
    "float to text": (lambda s: s.select(x=col("f").cast("string")), "a cast from double to string"),
    "safe cast": (lambda s: s.select(x=col("f").cast("int64", safe=True)), "safe=True"),
    "fewer digits": (lambda s: s.select(x=col("d").cast("decimal128(10, 1)")), "a cast from decimal"),
    "minus of 38 digits": (lambda s: s.select(x=-col("d").cast("decimal128(38, 10)")), "rounds those of more than 34 digits"),
    "abs of 38 digits": (lambda s: s.select(x=abs(col("d").cast("decimal128(38, 10)"))), "rounds those of more than 34 digits"),
    "decimal to float32": (lambda s: s.select(x=col("d").cast("float32")), "a cast from decimal.* to float"),
    "unsigned": (lambda s: s.select(x=col("u") + 1), "arithmetic of uint8|value of type uint8"),
    "zone": (lambda s: s.select(x=col("t").hour()), "Europe/Berlin"),
    "nanoseconds": (lambda s: s.select(x=col("ns").hour()), r"timestamp\[ns\]"),
    "half": (lambda s: s.key_by("k").aggregate(x=ps.max("h")), "the aggregate 'max' of a halffloat"),
    "list item": (lambda s: s.select(x=col("l")[0]), r"the function '\[\]'"),
    "bytes": (
        lambda s: s.select(x=col("b").binary_length()), r"'binary_length' with a value of type binary\. Have Penstock",
    ),
    "list out": (lambda s: s.select("h"), "'h' is halffloat"),
    "in null": (lambda s: s.select(x=col("a").isin([1, None])), "a null among its values"),
    "on_error": (lambda s: s.filter(col("a") > 0).on_error("skip"), r"operator 'filter' .*on_error"),
    "broadcast": (lambda s: s.filter(col("a") > 0).broadcast().select("a"), "repeats rows"),
    "late rows": (
        lambda s: s.window(ps.tumbling("1s"), late_to="l").aggregate(n=ps.count()).side_output("l").select("a"),
        "side output 'l'",
    ),
    "updates as rows": (
        lambda s: s.key_by("k").aggregate(n=ps.count()).as_rows().key_by("n").aggregate(m=ps.count()), "as_rows",
    ),
    "time of updates": (
        lambda s: s.key_by("k").aggregate(n=ps.count()).as_rows().window(ps.tumbling("1s")).aggregate(m=ps.count()),
        "as_rows",
    ),
    "session join": (lambda s: s.join(s, on="k", window=ps.session("1s")), "operator 'window_join' .*a session window"),
    "too long": (lambda s: s.select(x=nested(col("a"))), "too long for Spark"),
}  # fmt: skip


def nested(expression: Any) -> Any:
    for _ in range(14):
        expression = expression // 3
    return expression


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compile_is_refused_by_name(name: str) -> None:
    chain, message = REFUSED[name]
    with pytest.raises(JobRejected, match=message):
        chain(timed()).engine("spark")
    env = batch()
    chain(timed(env)).discard()
    with pytest.raises(JobRejected, match=message):
        env.plan(engine="spark")


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(JobRejected) as raised:
        by_map(source()).name("mine").engine("spark")
    assert str(raised.value) == (
        "engine('spark'): operator 'mine' does not compile for Spark: it is a Python function per row. Have Penstock do "
        "it: call .engine('penstock') behind it, so that Spark's part begins there, or .engine('spark') in front of it; "
        "or write it for Spark: .spark(fn, schema=...). docs/spark.md has the list of what compiles"
    )


def test_what_begins_a_part_has_an_end_and_is_rows() -> None:
    env = ps.Environment()
    with pytest.raises(JobRejected, match="'nexmark' reads without end"):
        env.nexmark().select(x=1).engine("spark")
    counted = source(env).key_by("k").aggregate(n=ps.count()).engine("penstock")
    with pytest.raises(JobRejected, match="updates, not rows"):
        counted.select("n").engine("spark")
    late = timed(env).engine("penstock").window(ps.tumbling("1s")).aggregate(n=ps.count())
    with pytest.raises(JobRejected, match="event time does not reach Spark"):
        late.engine("spark")
    with pytest.raises(JobRejected, match="has no event time"):
        timed(env).select("a").engine("spark").window(ps.tumbling("1s"))
    with pytest.raises(JobRejected, match="nothing between 'from_arrow' and this call"):
        source(env).engine("spark")
    with pytest.raises(JobRejected, match=r"'sparc' is no engine \(did you mean 'spark'"):
        source(env).select("k").engine("sparc")
    with pytest.raises(JobRejected, match="None is no engine"):
        env.plan(engine=None)  # type: ignore[arg-type]


def test_streaming_mode_is_refused() -> None:
    env = ps.Environment()
    timed(env).window(ps.tumbling("1s")).aggregate(n=ps.count()).discard()
    with pytest.raises(JobRejected, match=r"env\.set_runtime_mode\('batch'\)"):
        env.plan(engine="spark")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.sql.ansi.enabled", False),
        ("spark.sql.caseSensitive", "false"),
        ("spark.sql.session.timeZone", "Europe/Berlin"),
        ("spark.sql.parquet.outputTimestampType", "INT96"),
        ("spark.sql.files.ignoreMissingFiles", "true"),
        ("spark.sql.files.ignoreCorruptFiles", "true"),
    ],
)
def test_keys_that_change_results_are_refused(key: str, value: object) -> None:
    env = batch(**{key: value})
    source(env).select("k").engine("spark").discard()
    with pytest.raises(
        JobRejected, match=rf"operator 'spark\(select\)' is compiled for Spark.*{key} is "
    ):
        env.plan()
    env = batch(**{key: value})  # a stage of the user's own may have them
    source(env).select("k").spark(lambda frame: frame, schema={"k": "string"}).discard()
    assert env.plan().graph.config[key] == str(value).replace("False", "false")


def test_a_session_that_gives_other_results_is_refused_where_it_runs() -> None:
    class Conf:
        def get(self, key: str, default: str) -> str:
            return "false" if key == "spark.sql.ansi.enabled" else default

    class Session:
        conf = Conf()

    with pytest.raises(TaskFailure, match=r"spark\.sql\.ansi\.enabled = false"):
        _check_session(Session())
