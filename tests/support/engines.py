"""One chain of operators on both engines: Penstock's, in this process, and Spark's, in a local session."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock import testing
from penstock.pushdown.part_compiler import compile_part
from penstock.rows.spark_types import carried_schema, converted, spark_json_of_columns

Chain = Callable[..., ps.Stream]
Rows = list[dict[str, Any]]

BATCH = {"execution.runtime-mode": "batch"}
RELATIVE = 1e-9


def rows_of_penstock(chain: Chain, tables: Sequence[pa.Table], rows_max: int = 7) -> Rows:
    """What our engine gives out for whole tables, which come in batches of at most so many rows."""
    schemas = [table.schema for table in tables]
    second = schemas[1] if len(schemas) > 1 else None
    with testing.harness(
        chain, schema=schemas[0], second_schema=second, event_time=False, config=BATCH
    ) as job:
        for number, table in enumerate(tables):
            for batch in table.to_batches(max_chunksize=rows_max):
                job.push_many(batch, input=number)
        job.end()
        return job.output


def rows_of_spark(session: Any, chain: Chain, tables: Sequence[pa.Table], directory: Path) -> Rows:
    """What Spark gives out: the compiled chain over files such as a stage is given."""
    env = ps.Environment()
    stream = chain(*(env.from_arrow(table) for table in tables))
    part, inputs = compile_part(stream._source)
    places = {id(given.source.node): given for given in inputs}
    assert len(places) == len(inputs)
    order = {node.index: number for number, node in enumerate(_sources(stream))}
    frames = []
    for given in inputs:
        table = tables[order[given.source.node.index]].select(given.columns.names)
        frames.append(frame_of(session, table, directory))
    result = part(*frames).toArrow()
    return converted(result, stream.schema, "the result").to_pylist()


def _sources(stream: ps.Stream) -> list[Any]:
    from penstock.graph.logical import ReadSource, reachable

    nodes = reachable([stream._source.node])
    return [node for node in nodes if isinstance(node.operation, ReadSource)]


def frame_of(session: Any, table: pa.Table, directory: Path) -> Any:
    """A table as a stage is given it."""
    from pyspark.sql.types import StructType

    carried = carried_schema(table.schema)
    file = directory / f"{uuid4().hex}.parquet"
    pq.write_table(converted(table, carried, "the input"), file, coerce_timestamps="us")
    schema = StructType.fromJson(spark_json_of_columns(carried))
    return session.read.schema(schema).parquet(f"file://{file}")


def last_per_key(rows: Rows, *keys: str) -> Rows:
    """What the updates of a running aggregate end in; NaN is one key, and so are both zeros."""
    return list({tuple(_key(row[name]) for name in keys): row for row in rows}.values())


def _key(value: Any) -> str:
    return repr(value + 0.0 if isinstance(value, float) else value)


def assert_same_rows(ours: Rows, sparks: Rows) -> None:
    """Equal rows in any order: floats within 1e-9 of each other, NaN equal to NaN, -0.0 to 0.0; so within lists and structs."""
    assert len(ours) == len(sparks), (ours, sparks)
    left = sorted(ours, key=_order)
    right = sorted(sparks, key=_order)
    for mine, other in zip(left, right, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert _equal(value, other[name]), (name, mine, other)


def _order(row: dict[str, Any]) -> list[Any]:
    return [_sortable(value) for value in row.values()]


def _sortable(value: Any) -> tuple[Any, ...]:
    match value:
        case None:
            return (0,)
        case float() if math.isnan(value):
            return (2,)
        case float():
            return (1, float(f"{value:.8g}") + 0.0)
        case dict():
            return (1, [(name, _sortable(item)) for name, item in value.items()])
        case list() | tuple():
            return (1, [_sortable(item) for item in value])
        case _:
            return (1, value)


def _equal(mine: Any, other: Any) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        if math.isnan(mine) or math.isnan(other):
            return math.isnan(mine) and math.isnan(other)
        return math.isclose(mine, other, rel_tol=RELATIVE, abs_tol=0.0)
    if isinstance(mine, Decimal):
        return isinstance(other, Decimal) and mine.as_tuple() == other.as_tuple()
    if type(mine) is not type(other):
        return False
    match mine:
        case dict():
            return mine.keys() == other.keys() and all(
                _equal(item, other[name]) for name, item in mine.items()
            )
        case list() | tuple():
            return len(mine) == len(other) and all(map(_equal, mine, other))
        case _:
            return bool(mine == other)
