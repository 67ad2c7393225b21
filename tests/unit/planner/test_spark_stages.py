"""Aim: what runs on Spark is planned as one task between blocking exchanges, and what it cannot be is refused by name.

Method: small plans; refusals are taken at the call or where the job is planned, whichever is first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from jobmanager.rpc.graph_convert import plan_of
from jobmanager.scheduler.admission import CodeStamp, TaskManagerFacts, admission_problem
from penstock.config.spark_keys import spark_problem
from penstock.errors import ConfigurationError, JobRejected
from penstock.graph.exchanges import BLOCKING
from penstock.graph.job_graph import explain
from penstock.pb import graph_pb2
from penstock.planner.planner import SPARK_SLOT_GROUP
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.rows.spark_types import carried_type

N = {"n": "int64"}


def batch(**config: object) -> ps.Environment:
    env = ps.Environment(parallelism=2, config=config)
    env.set_runtime_mode("batch")
    return env


def numbers(env: ps.Environment) -> ps.Stream:
    return env.from_arrow(pa.table({"n": [1, 2, 3], "ts": [1, 2, 3]}))


def frames(*given: Any) -> Any:
    return given[0]


def session(spark: Any) -> Any:
    return spark


def vertex_of(graph: graph_pb2.JobGraph, operator: str) -> graph_pb2.Vertex:
    return next(v for v in graph.vertices if any(o.name == operator for o in v.operators))


def test_a_stage_is_one_task_between_blocking_exchanges_without_what_is_ours() -> None:
    env = batch()
    timed = numbers(env).with_event_time("ts").key_by("n")
    stage = timed.spark(
        frames, numbers(env), numbers(env).select("n"), schema=N, timeout="2s", cores=3
    )
    stage.name("bulk").key_by("n").aggregate(c=ps.count()).discard()
    env.spark(session, schema=N).name("table").spark(frames, schema=N).name("second").discard()
    graph = env.plan().graph

    bulk = vertex_of(graph, "bulk")
    assert (bulk.parallelism, bulk.slot_group) == (1, SPARK_SLOT_GROUP)
    assert (bulk.operators[0].spark.timeout_ms, bulk.operators[0].spark.cores) == (2000, 3)
    into = [edge for edge in graph.edges if edge.target_vertex == bulk.id]
    assert [edge.target_input for edge in into] == [0, 1, 2]
    assert {edge.partition_type for edge in into} == {BLOCKING}
    assert {edge.spill_format for edge in into} == {graph_pb2.SPILL_FORMAT_PARQUET}
    schemas = [schema_from_bytes(schema).names for schema in bulk.operators[0].spark.input_schemas]
    assert schemas == [["n", "ts"], ["n", "ts"], ["n"]]
    assert not any(EVENT_TIME in schema_from_bytes(edge.schema).names for edge in into)
    [out] = [edge for edge in graph.edges if edge.source_vertex == bulk.id]
    assert (out.partition_type, out.deterministic, out.reproducible) == (BLOCKING, False, False)
    assert out.spill_format == graph_pb2.SPILL_FORMAT_UNSPECIFIED
    behind = next(vertex for vertex in graph.vertices if vertex.id == out.target_vertex)
    assert behind.slot_group == "default"

    assert {vertex_of(graph, name).slot_group for name in ("table", "second")} == {SPARK_SLOT_GROUP}
    plan = plan_of(graph)
    assert not plan.vertex(vertex_of(graph, "table").id).source_uids  # it reads no splits
    assert not any(v.allows_rivals for v in plan.vertices if v.slot_group == SPARK_SLOT_GROUP)
    assert "frames" in explain(graph)


def test_files_that_spark_writes_are_dealt_out_where_any_consumer_may_have_any_row() -> None:
    env = batch()
    both = {"n": "int64", "text": "string"}
    made = env.spark(session, schema=both).name("made")
    made.select("n").name("few").discard()
    made.rescale().select("text").name("fewer").discard()
    made.spark(frames, schema=both).name("second").discard()
    env.spark(session, schema={"u": "uint8"}).select("u").name("wider").discard()
    env.spark(session, schema=both).key_by("n").aggregate(c=ps.count()).name("keyed").discard()
    graph = env.plan().graph

    def edge_to(name: str) -> graph_pb2.Edge:
        readers = {v.id for v in graph.vertices if any(o.name == name for o in v.operators)}
        return next(edge for edge in graph.edges if edge.target_vertex in readers)

    of_spark = graph_pb2.SPILL_FORMAT_OF_SPARK
    formats = {
        name: edge_to(name).spill_format for name in ("few", "fewer", "second", "wider", "keyed")
    }
    assert [name for name in formats if formats[name] == of_spark] == ["few", "fewer", "second"]
    # Nothing is written, so nothing is narrowed in front of the exchange.
    assert schema_from_bytes(edge_to("few").schema).names == ["n", "text"]
    assert len(vertex_of(graph, "made").operators) == 1
    assert "rebalance, blocking, files that Spark writes  (n, text)" in explain(graph)


@pytest.mark.parametrize(
    ("kind", "is_in_place"),
    [
        (pa.list_(pa.struct([("x", pa.uint64())])), True),
        (pa.timestamp("ms", "Europe/Berlin"), True),
        (pa.decimal128(38, 0), True),
        (pa.timestamp("ns"), False),
        (pa.timestamp("s"), False),
        (pa.float16(), False),
        (pa.time32("ms"), False),
    ],
)
def test_an_exchange_into_a_stage_is_of_files_that_spark_reads_where_there_are_such(
    kind: pa.DataType, *, is_in_place: bool
) -> None:
    env = batch()
    env.from_arrow(pa.table({"v": pa.array([], kind)})).rebalance().spark(
        frames, schema=N
    ).discard()
    [edge] = env.plan().graph.edges[:1]
    assert (edge.spill_format == graph_pb2.SPILL_FORMAT_PARQUET) == is_in_place


def test_a_declared_stage_gives_the_same_rows_in_any_order() -> None:
    env = batch()
    numbers(env).spark(frames, schema=N).deterministic().parallelism(1).key_by("n").discard()
    graph = env.plan().graph
    [out] = [e for e in graph.edges if e.source_vertex == vertex_of(graph, "spark").id]
    assert (out.deterministic, out.reproducible) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schema": None}, "give schema="),
        ({"schema": {}}, "no column would be left"),
        ({"schema": N, "cores": 0}, "cores=0"),
        ({"schema": N, "cores": True}, "cores=True"),
        ({"schema": N, "timeout": 0}, "timeout is 0"),
        ({"schema": N, "timeout": "soon"}, "spark: timeout: 'soon' is not a duration"),
        ({"schema": N, "timeout": -1}, "spark: timeout: -1 is negative"),
        ({"schema": {5: "int64"}}, "spark: schema: 5 is no name of a column"),
        ({"schema": {"h": "float16"}}, "'h' is halffloat"),
        ({"schema": {"t": pa.time64("us")}}, "'t' is time64"),
        ({"schema": pa.schema([("d", pa.decimal256(50, 2))])}, "38 digits"),
        ({"schema": pa.schema([("d", pa.null())])}, "Spark has no such type"),
    ],
)
def test_what_a_stage_cannot_be_is_refused_at_the_call(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobRejected, match=message):
        numbers(batch()).spark(frames, **arguments)


def test_functions_are_called_with_one_argument_per_stream() -> None:
    env = batch()
    for fn in (lambda: None, lambda a, b: a, "df"):
        with pytest.raises(JobRejected, match="spark: "):
            numbers(env).spark(fn, schema=N)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match="2 arguments"):
        numbers(env).spark(lambda a: a, numbers(env), schema=N)
    with pytest.raises(JobRejected, match="no stream"):
        numbers(env).spark(frames, 3, schema=N)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match="different environments"):
        numbers(env).spark(frames, numbers(batch()), schema=N)


def test_inputs_are_bounded_rows_that_spark_can_have() -> None:
    env = ps.Environment()
    with pytest.raises(JobRejected, match="'nexmark' reads without end"):
        env.nexmark().spark(frames, schema=N)
    interval = pa.table({"i": pa.array([None], pa.month_day_nano_interval())})
    with pytest.raises(JobRejected, match="column 'i'"):
        env.from_arrow(interval).spark(frames, schema=N)
    with pytest.raises(JobRejected, match="updates, not rows"):
        numbers(env).key_by("n").aggregate(c=ps.count()).spark(frames, schema=N)


def test_columns_that_differ_by_case_only_are_refused_unless_spark_keeps_them_apart() -> None:
    both = pa.table({"a": [1], "A": [2]})
    inside = {"o": pa.struct([("x", pa.int8()), ("X", pa.int8())])}

    def plan(**config: object) -> None:
        for make in (
            lambda env: env.from_arrow(both).spark(frames, schema=N),
            lambda env: numbers(env).spark(frames, env.from_arrow(both), schema=N),
            lambda env: env.spark(session, schema={"a": "int64", "A": "int64"}),
            lambda env: numbers(env).spark(frames, schema=inside),
        ):
            env = batch(**config)
            make(env).discard()
            if config:
                env.plan()
                continue
            with pytest.raises(JobRejected, match=r"'(a|x)' and '(A|X)' are one to Spark: rename"):
                env.plan()

    plan()
    plan(**{"spark.sql.caseSensitive": True})


def test_jobs_in_streaming_mode_or_with_checkpoints_are_refused() -> None:
    env = ps.Environment()
    numbers(env).spark(frames, schema=N).discard()
    with pytest.raises(JobRejected, match=r"env\.set_runtime_mode\('batch'\)"):
        env.plan()
    env = batch(**{"execution.checkpointing.interval": "1s"})
    env.spark(session, schema=N).discard()
    with pytest.raises(JobRejected, match=r"execution\.checkpointing\.interval"):
        env.plan()


def test_properties_that_do_not_go_with_a_stage_are_refused() -> None:
    env = batch()
    stage = numbers(env).spark(frames, schema=N)
    for action in ("skip", "bad"):
        with pytest.raises(JobRejected, match="runs on Spark, where what fails fails as a whole"):
            stage.on_error(action)
    with pytest.raises(JobRejected, match="what runs on Spark has none"):
        stage.side_output("late")
    stage.parallelism(2).discard()
    with pytest.raises(JobRejected, match="its parallelism is 1, not 2"):
        env.plan()
    env = batch()
    numbers(env).filter(ps.col("n") > 0).exchange("pipelined").spark(frames, schema=N).discard()
    with pytest.raises(JobRejected, match="it is blocking, not pipelined"):
        env.plan()
    env = batch()
    numbers(env).spark(frames, schema=N).exchange("caching").key_by("n").aggregate(
        c=ps.count()
    ).discard()
    with pytest.raises(JobRejected, match="it is blocking, not caching"):
        env.plan()


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("own", "directory", "problem"),
    [
        ({}, "", ""),
        ({"spark.master": "local[*]"}, "", ""),
        ({"spark.master": "yarn"}, "", "execution.spark.directory"),
        ({"spark.master": "yarn"}, "/shared", ""),
        ({"spark.remote": "sc://h"}, "/shared", ""),
        ({"spark.remote": "sc://h"}, "", "execution.spark.directory"),
        ({"spark.remote": "sc://h/;session_id=a"}, "/shared", "leave session_id= out"),
        ({"spark.remote": "sc://h", "spark.master": "local"}, "/shared", "two places"),
        ({"spark.remote": "sc://h", "spark.executor.memory": "1g"}, "/s", "spark.executor.memory"),
        ({"spark.remote": "sc://h", "spark.sql.ansi.enabled": "true"}, "/s", ""),
        ({"spark.master": "spark://h:7077"}, "/shared", "spark.authenticate"),
        ({"spark.master": "spark://h:7077", "spark.authenticate": "true"}, "/shared", ""),
    ],
)
def test_keys_that_contradict_each_other(own: dict[str, str], directory: str, problem: str) -> None:
    found = spark_problem(own, directory)
    assert problem in found
    assert bool(found) == bool(problem)


def test_every_key_of_sparks_is_taken_and_secrets_do_not_travel_with_jobs() -> None:
    env = batch(**{"spark.sql.ansi.enabled": True, "spark.authenticate.secret": "s3cr3t"})
    assert env.config.spark_keys["spark.sql.ansi.enabled"] == "true"
    env.spark(session, schema=N).discard()
    graph = env.plan().graph
    assert graph.config["spark.sql.ansi.enabled"] == "true"
    assert b"s3cr3t" not in graph.SerializeToString()
    with pytest.raises(ConfigurationError, match=r"execution\.spark\.driver-memory"):
        batch(**{"execution.spark.driver-memory": "64mb"})
    remote = ps.Environment("127.0.0.1:1", config={"spark.ssl.keyPassword": "x"})
    remote.from_rows([{"n": 1}]).discard()
    with pytest.raises(JobRejected, match=r"spark\.ssl\.keyPassword is not sent with a job"):
        remote.submit()


@pytest.mark.parametrize(
    ("java", "is_refused"),
    [("", True), ("1.8.0_402", True), ("11.0.2", True), ("17.0.15", False), ("21-ea", False)],
)
def test_a_cluster_without_java_takes_no_job_that_starts_spark(java: str, is_refused: bool) -> None:
    facts = [TaskManagerFacts("tm-1", "3.11", "3", (), java)]
    problem = admission_problem(CodeStamp(needs_java=True), facts)
    assert (problem is not None) == is_refused
    if problem is not None:
        assert "openjdk-17-jre-headless" in str(problem)
    assert admission_problem(CodeStamp(), facts) is None


# ---------------------------------------------------------------- imports and types


def test_submitting_a_job_with_a_spark_stage_imports_nothing_of_spark() -> None:
    program = """
import sys
import penstock as ps
env = ps.Environment()
env.set_runtime_mode("batch")
env.from_rows([{"n": 1}]).spark(lambda df: df, schema={"n": "int64"}).discard()
env.plan()
import taskmanager.task.slot_process, taskmanager.main, jobmanager.main
print([name for name in sys.modules if name.partition(".")[0] in ("pyspark", "py4j")])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ours", "carried"),
    [
        (pa.uint8(), pa.int16()),
        (pa.uint64(), pa.decimal128(20, 0)),
        (pa.float16(), pa.float32()),
        (pa.timestamp("ns", "Asia/Tokyo"), pa.timestamp("us", "UTC")),
        (pa.timestamp("s"), pa.timestamp("us")),
        (pa.duration("ns"), pa.int64()),
        (pa.time32("s"), pa.int32()),
        (pa.decimal256(38, 38), pa.decimal128(38, 38)),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.string()),
        (pa.list_(pa.uint32(), 3), pa.list_(pa.int64())),
        (pa.uuid(), pa.binary()),
    ],
)
def test_types_are_carried_without_loss(ours: pa.DataType, carried: pa.DataType) -> None:
    assert carried_type(ours) == carried


def test_parquet_beside_a_stage_is_spark_s_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1], "m": [2]}), tmp_path / "in.parquet")
    env = batch()
    source = env.read_parquet(str(tmp_path / "in.parquet"))
    stage = source.spark(frames, numbers(env), schema=N).name("stage")
    stage.write_parquet(str(tmp_path / "out")).uid("sink").name("write")
    env.spark(session, schema=N).name("table").write_parquet(str(tmp_path / "of-table"))
    graph = env.plan().graph

    vertex = vertex_of(graph, "stage")
    [head, sink] = vertex.operators
    assert [(one.input, one.source.path) for one in head.spark.files] == [
        (0, str(tmp_path / "in.parquet"))
    ]
    assert list(head.spark.files[0].source.columns) == ["n", "m"]
    assert (head.spark.output_directory, head.spark.output_uid) == (str(tmp_path / "out"), "sink")
    assert (sink.name, vertex.parallelism) == ("write", 1)
    into = [edge.target_input for edge in graph.edges if edge.target_vertex == vertex.id]
    assert into == [1]
    of_table = vertex_of(graph, "table").operators
    assert of_table[0].source.spark.output_directory == str(tmp_path / "of-table")
    assert len(graph.vertices) == 3  # and no source of files
    assert f"reads {tmp_path / 'in.parquet'}, writes {tmp_path / 'out'}" in explain(graph)


def test_what_spark_would_not_read_or_write_as_we_do_goes_through_exchanges(tmp_path: Path) -> None:
    path = str(tmp_path / "in.parquet")
    pq.write_table(pa.table({"n": [1], "p": [1]}), path)
    wide = {"n": "int64", "p": "int64"}

    def stage(env: ps.Environment, schema: Any = wide) -> ps.Stream:
        return env.read_parquet(path).spark(frames, schema=schema).name("stage")

    def written(
        env: ps.Environment, make: Callable[[ps.Environment], object]
    ) -> graph_pb2.SparkSpec:
        make(env)
        return vertex_of(env.plan().graph, "stage").operators[0].spark

    out = str(tmp_path / "out")
    for make in (
        lambda env: stage(env).write_parquet(out, partition_by=["p"]),
        lambda env: stage(env).write_csv(out),
        lambda env: stage(env).write_parquet("s3://bucket/out"),
        lambda env: stage(env).write_parquet(out).parallelism(2),
        lambda env: stage(env).filter(ps.col("n") > 0).write_parquet(out),
        lambda env: stage(env).rebalance().write_parquet(out),
        lambda env: stage(env, {"n": "uint8", "p": "int64"}).write_parquet(out),
    ):
        spec = written(batch(), make)
        assert not spec.output_directory
        assert spec.files
    unchained = batch(**{"pipeline.operator-chaining.enabled": False})
    assert not written(unchained, lambda env: stage(env).write_parquet(out)).output_directory

    env = batch()
    both = stage(env)
    both.write_parquet(out)
    both.discard()
    env.read_parquet(path).filter(ps.col("n") > 0).spark(frames, schema=wide).name(
        "other"
    ).discard()
    graph = env.plan().graph
    assert not vertex_of(graph, "stage").operators[0].spark.output_directory
    assert not vertex_of(graph, "other").operators[0].spark.files
