"""Aim: pruning never removes a column that is needed, and every random pipeline gives a valid plan.

Method: random pipelines are built twice, as streams and as operations on lists of dicts. The planned
graph is interpreted batch by batch, with each batch checked against the planned schemas; what its sinks
take must be what the lists hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
import penstock.testing as pt
from penstock import col
from penstock.expressions import Expr
from penstock.graph.job_graph import validate
from penstock.graph.operator_checks import decode_schema
from penstock.pb import graph_pb2
from penstock.rows.rows import RowBuilder, rows_of
from penstock.rows.schema import EVENT_TIME, user_schema
from tests.support.examples import examples

Rows = list[dict[str, Any]]


@dataclass
class Pipeline:
    stream: ps.Stream
    rows: Rows

    @property
    def names(self) -> list[str]:
        return list(self.stream.schema.names)


Step = Callable[[random.Random, Pipeline], Pipeline]


def select(rng: random.Random, p: Pipeline) -> Pipeline:
    kept = rng.sample(p.names, rng.randint(1, len(p.names)))
    return Pipeline(p.stream.select(*kept), [{n: row[n] for n in kept} for row in p.rows])


def add_column(rng: random.Random, p: Pipeline) -> Pipeline:
    a, b = rng.choice(p.names), rng.choice(p.names)
    name = rng.choice([*p.names, "new", "other"])
    stream = p.stream.with_columns(**{name: col(a) + col(b)})
    rows = []
    for row in p.rows:
        changed = dict(row)
        changed[name] = row[a] + row[b]
        rows.append(changed)
    return Pipeline(stream, rows)


def drop(rng: random.Random, p: Pipeline) -> Pipeline:
    if len(p.names) == 1:
        return p
    gone = rng.choice(p.names)
    rows = [{n: v for n, v in row.items() if n != gone} for row in p.rows]
    return Pipeline(p.stream.drop(gone), rows)


def rename(rng: random.Random, p: Pipeline) -> Pipeline:
    old = rng.choice(p.names)
    new = old + "_"
    rows = [{(new if n == old else n): v for n, v in row.items()} for row in p.rows]
    return Pipeline(p.stream.rename(**{old: new}), rows)


def keep_some(rng: random.Random, p: Pipeline) -> Pipeline:
    name = rng.choice(p.names)
    return Pipeline(
        p.stream.filter(col(name) % 3 != 0), [row for row in p.rows if row[name] % 3 != 0]
    )


def keep_by_function(rng: random.Random, p: Pipeline) -> Pipeline:
    name = rng.choice(p.names)

    def wanted(row: Any) -> bool:
        return row[name] % 2 == 0

    return Pipeline(p.stream.filter(wanted), [row for row in p.rows if wanted(row)])


def map_rows(rng: random.Random, p: Pipeline) -> Pipeline:
    name = rng.choice(p.names)

    def mapped(row: Any) -> dict[str, int]:
        return {"m": row[name] + 1, "n": 7}

    stream = p.stream.map(mapped, schema={"m": "int64", "n": "int64"})
    return Pipeline(stream, [mapped(row) for row in p.rows])


def key_by_function(rng: random.Random, p: Pipeline) -> Pipeline:
    if "key" in p.names:
        return p
    name = rng.choice(p.names)

    def key(row: Any) -> int:
        return int(row[name]) % 4

    rows = [{**row, "key": key(row)} for row in p.rows]
    return Pipeline(p.stream.key_by(key), rows)


def route(rng: random.Random, p: Pipeline) -> Pipeline:
    call = rng.choice(["rebalance", "rescale"])
    return Pipeline(getattr(p.stream, call)(), p.rows)


def event_time(rng: random.Random, p: Pipeline) -> Pipeline:
    return Pipeline(p.stream.with_event_time(rng.choice(p.names)), p.rows)


def batches(rng: random.Random, p: Pipeline) -> Pipeline:
    del rng
    return Pipeline(p.stream.map_batches(lambda batch: batch, schema=p.stream.schema), p.rows)


def union(rng: random.Random, p: Pipeline) -> Pipeline:
    order = list(p.names)
    rng.shuffle(order)
    other = p.stream.select(*order)
    return Pipeline(p.stream.union(other), p.rows + p.rows)


def aggregate(rng: random.Random, p: Pipeline) -> Pipeline:
    key, value = rng.choice(p.names), rng.choice(p.names)
    stream = p.stream.key_by(key).aggregate(total=ps.sum(col(value) * 2), rows=ps.count())
    if key in ("total", "rows"):
        return p
    groups: dict[int, list[int]] = {}
    for row in p.rows:
        groups.setdefault(row[key], []).append(row[value] * 2)
    return Pipeline(stream, [{key: k, "total": sum(v), "rows": len(v)} for k, v in groups.items()])


STEPS: list[Step] = [
    select,
    add_column,
    drop,
    rename,
    keep_some,
    keep_by_function,
    map_rows,
    key_by_function,
    route,
    event_time,
    batches,
    union,
]


def build(seed: int, env: ps.Environment) -> list[Rows]:
    """Builds a random job; what its sinks have to take."""
    rng = random.Random(seed)
    rows = [{"a": i, "b": i * i % 17, "c": i % 5, "d": -i} for i in range(20)]
    open_ends = [Pipeline(env.from_rows(rows), rows)]
    expected = []
    for _ in range(rng.randint(1, 9)):
        before = rng.choice(open_ends)
        open_ends.append(rng.choice(STEPS)(rng, before))
    if rng.random() < 0.4:
        end = open_ends[-1]
        if not {"total", "rows"} & set(end.names):
            open_ends.append(aggregate(rng, end))
    for end in [open_ends[-1], *rng.sample(open_ends, min(2, len(open_ends)))]:
        end.stream.print()
        expected.append(end.rows)
    return expected


def interpret(graph: graph_pb2.JobGraph, tables: dict[str, pa.Table]) -> list[Rows]:
    """What each sink of a graph takes, in order of the sinks' uids being met."""
    outputs: dict[tuple[str, int], pa.RecordBatch] = {}
    taken: dict[str, Rows] = {}
    for vertex in graph.vertices:
        arriving = []
        for edge in graph.edges:
            if edge.target_vertex == vertex.id:
                batch = outputs[edge.source_vertex, edge.source_output.operator_index]
                assert batch.schema == decode_schema(edge.schema, "edge")
                for key in edge.key_columns:
                    assert key in batch.schema.names
                arriving.append(batch)
        for index, operator in enumerate(vertex.operators):
            if index == 0:
                given = concat(arriving) if arriving else None
            else:
                given = outputs[vertex.id, operator.input.operator_index]
            if given is not None:
                assert given.schema == decode_schema(operator.input_schema, operator.name)
            result = run(operator, given, tables)
            if operator.WhichOneof("spec") == "sink":
                assert given is not None
                taken[operator.uid] = given.select(user_schema(given.schema).names).to_pylist()
            else:
                assert result.schema == decode_schema(operator.output_schema, operator.name)
                outputs[vertex.id, index] = result
    return list(taken.values())


def concat(arriving: list[pa.RecordBatch]) -> pa.RecordBatch:
    table = pa.Table.from_batches(arriving).combine_chunks()
    return table.to_batches()[0] if table.num_rows else arriving[0]


def run(
    operator: graph_pb2.Operator, given: pa.RecordBatch | None, tables: dict[str, pa.Table]
) -> pa.RecordBatch:
    schema = decode_schema(operator.output_schema, operator.name)
    kind = operator.WhichOneof("spec")
    if kind == "source":
        table = tables[operator.source.arrow.artifact].select(schema.names)
        return table.combine_chunks().to_batches()[0]
    assert given is not None
    if kind == "project":
        columns = [
            Expr.from_proto(c.expression).compile(given.schema)(given)
            for c in operator.project.columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    if kind == "filter":
        predicate = Expr.from_proto(operator.filter.predicate).compile(given.schema)
        return given.filter(predicate(given)).select(schema.names)
    if kind == "event_time":
        times = given.column(operator.event_time.column)
        return pa.RecordBatch.from_arrays([*given.columns, times], schema=schema)
    if kind == "row_function":
        return run_row_function(operator.row_function, given, schema)
    if kind == "batch_function":
        return given.select(schema.names)
    if kind == "running_aggregate":
        return run_aggregate(operator.running_aggregate, given, schema)
    return given


def run_row_function(
    spec: graph_pb2.RowFunctionSpec, given: pa.RecordBatch, schema: pa.Schema
) -> pa.RecordBatch:
    function = cloudpickle.loads(spec.function.pickled)
    results = [function(row) for row in rows_of(given)]
    if spec.kind == graph_pb2.ROW_FUNCTION_KIND_FILTER:
        return given.filter(pa.array(results, pa.bool_())).select(schema.names)
    if spec.kind == graph_pb2.ROW_FUNCTION_KIND_KEY:
        built = pa.record_batch([pa.array(results, pa.int64())], names=["key"])
    else:
        builder = RowBuilder(user_schema(schema))
        builder.extend(results)
        built = builder.build()
    columns = [
        (built if name in built.schema.names else given).column(name) for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def run_aggregate(
    spec: graph_pb2.RunningAggregateSpec, given: pa.RecordBatch, schema: pa.Schema
) -> pa.RecordBatch:
    if spec.phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
        return given
    assert EVENT_TIME not in schema.names
    wanted = [(a.column or spec.keys[0], "sum" if a.column else "count") for a in spec.aggregates]
    table = pa.Table.from_batches([given]).group_by(list(spec.keys)).aggregate(wanted)
    columns = [table[name] for name in spec.keys]
    columns += [table[f"{column}_{function}"] for column, function in wanted]
    return pa.RecordBatch.from_arrays([c.combine_chunks() for c in columns], schema=schema)


def as_bag(rows: Rows) -> list[list[tuple[str, Any]]]:
    return sorted(sorted(row.items()) for row in rows)


@examples(150)
@given(st.integers(0, 2**32), st.booleans())
def test_planned_graphs_compute_what_the_pipelines_say(seed: int, chaining: bool) -> None:
    config = {"pipeline.operator-chaining.enabled": chaining}
    env = ps.Environment(parallelism=2, config=config)
    expected = build(seed, env)
    sources = dict(reachable_sources(env))
    graph = env.plan("random").graph
    validate(graph)
    assert sorted(map(as_bag, interpret(graph, sources))) == sorted(map(as_bag, expected))


def reachable_sources(env: ps.Environment) -> list[tuple[str, pa.Table]]:
    from penstock.graph.logical import ReadSource, reachable

    found = []
    for node in reachable(env._builder.sinks):
        if isinstance(node.operation, ReadSource):
            for artifact in node.operation.artifacts:
                with pa.ipc.open_file(pa.py_buffer(artifact.data)) as reader:
                    found.append((artifact.id, reader.read_all()))
    return found


def test_only_what_is_needed_is_read_and_shipped() -> None:
    env = ps.Environment(parallelism=2)
    stream = env.from_rows([{"a": 1, "b": 2, "c": 3, "d": "x"}])
    stream.filter(col("b") > 0).key_by("a").aggregate(n=ps.count()).discard()
    graph = env.plan().graph
    source = graph.vertices[0].operators[0]
    assert decode_schema(source.output_schema, "").names == ["a", "b"]
    assert [decode_schema(edge.schema, "").names for edge in graph.edges] == [["a", "b"], ["a"]]


@pytest.mark.parametrize("chaining", [True, False])
def test_the_inputs_of_unions_keep_the_keys_that_one_of_them_is_routed_by(chaining: bool) -> None:
    config = {"pipeline.operator-chaining.enabled": chaining}
    env = ps.Environment(parallelism=2, config=config)
    rows = env.from_rows([{"a": 1, "b": 2, "c": 3}])
    keyed = rows.key_by("a")
    inner = keyed.union(keyed.select("a", "b", "c"))
    inner.union(rows.filter(col("c") > 1), rows.key_by("c")).select("b").print()
    validate(env.plan().graph)


def test_counting_rows_keeps_one_narrow_column() -> None:
    env = ps.Environment()
    rows = env.from_rows([{"text": "x", "flag": True, "n": 1}])
    rows.select("text", "flag", "n").filter(ps.lit(True)).discard()
    rows.select("text", "flag", k=ps.lit(1)).select(one=ps.lit(1)).print()
    graph = env.plan().graph
    validate(graph)


def test_which_records_are_bad_does_not_depend_on_the_columns_that_are_read() -> None:
    def counted(stream: ps.Stream) -> ps.Stream:
        parsed = stream.with_columns(t=col("at").cast("timestamp[ms]")).on_error("skip")
        return parsed.key_by("u").aggregate(n=ps.count())

    with pt.harness(counted, schema={"u": str, "at": str}, event_time=False) as h:
        h.push_many([{"u": "a", "at": "2024-05-01"}, {"u": "a", "at": "no time"}])
        assert h.take() == [{"u": "a", "n": 1}]
        assert h.bad_rows == 1


@pytest.mark.parametrize(
    ("call", "on_error", "read"),
    [
        ("read_csv", "skip", ["u", "at", "n"]),
        ("read_json", "bad", ["u", "at", "n"]),
        ("read_csv", "fail", ["u"]),
        ("read_parquet", "skip", ["u", "n"]),
    ],
)
def test_sources_read_what_tells_bad_records(
    call: str, on_error: str, read: list[str], tmp_path: Path
) -> None:
    env = ps.Environment()
    never_null = pa.field("n", pa.int64(), nullable=False)
    schema = pa.schema([("u", pa.string()), ("at", pa.timestamp("ms")), never_null])
    source = getattr(env, call)(str(tmp_path), schema=schema)
    source.on_error(on_error).select("u").discard()
    operator = env.plan().graph.vertices[0].operators[0]
    assert list(operator.source.files.columns) == read
