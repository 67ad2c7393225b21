"""Aim: what is persisted or read is named so that a cluster can run it, or refused. Method: small plans."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

import penstock as ps
from jobmanager.graph.job_plan import Exchange, plan_problem
from jobmanager.rpc.graph_convert import plan_of
from penstock import col
from penstock.errors import JobRejected
from penstock.graph.job_graph import explain, validate
from penstock.graph.logical import ReadSource
from penstock.pb import client_pb2, graph_pb2
from penstock.rows.schema import schema_to_bytes
from penstock.streams.compaction import Compaction, compact

ROWS = [{"a": 1, "b": 2}]
SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.int64())])


def persisted(env: ps.Environment, partition_count: int = 2) -> ps.Stream:
    """What ``read_persisted`` makes of what a cluster says."""
    source = graph_pb2.PersistedSource(
        name="mine",
        job_id="f" * 32,
        partition_count=partition_count,
        schema=schema_to_bytes(SCHEMA),
    )
    spec = graph_pb2.SourceSpec(persisted=source, bounded=True)
    return env._read(ReadSource(spec), "read_persisted", SCHEMA)


def test_a_sink_that_persists_is_a_blocking_output_without_a_reader() -> None:
    env = ps.Environment(parallelism=3)
    env.from_arrow(pa.table({"a": [1]})).filter(col("a") > 0).persist("mine")
    env.from_arrow(pa.table({"a": [1]})).persist("yours", overwrite=True)
    graph = env.plan().graph
    assert graph.config["execution.checkpointing.interval"] == "none"
    assert "as mine" in explain(graph)
    plan = plan_of(graph)
    assert plan_problem(plan) is None
    assert [(e.source, e.target, e.exchange, e.is_persisted) for e in plan.edges] == [
        ("v0", "", Exchange.BLOCKING, True),
        ("v1", "", Exchange.BLOCKING, True),
    ]


def test_a_source_of_persisted_rows_has_no_splits_and_reads_what_is_needed() -> None:
    env = ps.Environment(parallelism=2)
    persisted(env).select("b").discard()
    graph = env.plan().graph
    assert plan_of(graph).vertices[0].source_uids == ()
    assert f"mine of job {'f' * 32}" in explain(graph)
    read = graph.vertices[0].operators[0]
    assert pa.ipc.read_schema(pa.py_buffer(read.output_schema)).names == ["b"]


@pytest.mark.parametrize(("partition_count", "is_reproducible"), [(1, True), (2, False)])
def test_several_partitions_have_no_order(partition_count: int, *, is_reproducible: bool) -> None:
    env = ps.Environment(parallelism=1, config={"execution.exchange.default": "caching"})
    persisted(env, partition_count).key_by("a").aggregate(n=ps.count()).discard().parallelism(1)
    (edge,) = [e for e in env.plan().graph.edges if e.source_vertex == "v0"]
    assert edge.deterministic or not is_reproducible
    assert edge.reproducible is is_reproducible


def test_what_cannot_be_is_refused() -> None:
    env = ps.Environment()
    rows = env.from_rows(ROWS)
    for name in ("", "../x", ".x", "x" * 101, 7):
        with pytest.raises(JobRejected, match=r"persist: .* is no usable name"):
            rows.persist(name)  # type: ignore[arg-type]
        with pytest.raises(JobRejected, match=r"read_persisted: .* is no usable name"):
            env.read_persisted(name)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match="overwrite is 1"):
        rows.persist("mine", overwrite=1)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match="this one has run no job yet"):
        env.read_persisted("mine")
    rows.persist("mine")
    rows.persist("mine")
    with pytest.raises(JobRejected, match="two streams of the job are persisted as 'mine'"):
        env.plan()


def test_what_is_persisted_is_made_without_checkpoints() -> None:
    env = ps.Environment(config={"execution.checkpointing.interval": "1s"})
    env.from_rows(ROWS).persist("mine")
    with pytest.raises(JobRejected, match="it cannot go on from a checkpoint"):
        env.plan()


def test_what_never_ends_cannot_be_persisted() -> None:
    env = ps.Environment()
    env.nexmark().filter(col("price") > 0).persist("bids")
    with pytest.raises(JobRejected, match="source 'nexmark' reads without end"):
        env.plan()


def test_a_source_says_whose_rows_it_reads() -> None:
    env = ps.Environment()
    persisted(env).discard()
    graph = env.plan().graph
    graph.vertices[0].operators[0].source.persisted.job_id = ""
    with pytest.raises(JobRejected, match="does not say whose 'mine' it reads"):
        validate(graph)


def test_updates_of_an_earlier_job_are_not_dealt_out() -> None:
    """Whoever read them with another parallelism might have written an older value of a key last."""
    env = ps.Environment(parallelism=2)
    updates = replace(persisted(env)._source.node.operation, updates_of="totals")
    newest = env._read(updates, "read_persisted", SCHEMA).filter(col("a") > 0)
    newest.discard()
    newest.discard().parallelism(1)
    newest.key_by("a").discard().parallelism(3)
    newest.as_rows().discard().parallelism(3)
    newest.rebalance().discard().parallelism(3)
    env.plan()
    newest.select("b").discard().name("wide").parallelism(3)
    with pytest.raises(
        JobRejected, match=r"'wide' has another parallelism .* updates of an earlier job.*key_by"
    ):
        env.plan()


def test_updates_of_an_earlier_job_do_not_go_by_the_keys_of_those_beside_them() -> None:
    env = ps.Environment(parallelism=2)
    updates = replace(persisted(env)._source.node.operation, updates_of="totals")
    earlier = env._read(updates, "read_persisted", SCHEMA)
    live = persisted(env).key_by("b").aggregate(a=ps.last("a")).select("a", "b")
    earlier.union(live).discard().name("wide").parallelism(3)
    with pytest.raises(JobRejected, match=r"'wide' .* updates of an earlier job.*key_by"):
        env.plan()


@pytest.mark.parametrize(
    "kind", [pa.time64("us"), pa.float16(), pa.list_(pa.time32("s")), pa.null()]
)
def test_a_set_that_does_not_come_back_from_spark_is_not_put_in_order_there(
    kind: pa.DataType,
) -> None:
    """Who compacts on the command line has no schema to declare otherwise."""
    schema = pa.schema([("n", pa.int64()), ("v", kind)])
    before = client_pb2.PersistedDetails(name="mine", schema=schema_to_bytes(schema))
    message = "^--spark: column 'v' is .*, which does not come back from Spark as it was: leave "
    with pytest.raises(JobRejected, match=message):
        compact(Compaction("mine", on_spark=True), before, 1, lambda _: ps.Environment())
