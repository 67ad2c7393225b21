"""Specifications of window operators and batches of rows, for tests."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import penstock.aggregates.aggregates as agg
from penstock.aggregates.aggregates import Aggregate
from penstock.functions.user_code import pickle_function
from penstock.graph.window_schemas import (
    running_aggregate_schema,
    window_aggregate_schema,
    window_function_schema,
)
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_to_bytes

SCHEMA = pa.schema(
    [
        pa.field("k", pa.int64()),
        pa.field("x", pa.int64()),
        pa.field("f", pa.float64()),
        pa.field("s", pa.string()),
        pa.field(EVENT_TIME, pa.int64(), nullable=False),
    ]
)

NUMBERS: dict[str, Aggregate] = {
    "n": agg.count(),
    "nx": agg.count("x"),
    "sum_x": agg.sum("x"),
    "min_x": agg.min("x"),
    "max_x": agg.max("x"),
    "mean_x": agg.mean("x"),
    "sum_f": agg.sum("f"),
    "min_f": agg.min("f"),
    "max_f": agg.max("f"),
}

COUNTED: dict[str, Aggregate] = {
    "kinds_s": agg.count_distinct("s"),
    "n": agg.count(),
    "sum_x": agg.sum("x"),
    "kinds_f": agg.count_distinct("f"),
    "mean_x": agg.mean("x"),
}
"""Partial rows stand for one of the values each."""

OBJECTS: dict[str, Aggregate] = {
    "first_s": agg.first("s"),
    "last_x": agg.last("x"),
    "distinct_s": agg.count_distinct("s"),
    "list_x": agg.collect_list("x"),
    "min_s": agg.min("s"),
    "max_s": agg.max("s"),
}


def batch_of(rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Rows as a batch."""
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def window_aggregate_spec(
    window: graph_pb2.WindowSpec,
    keys: tuple[str, ...],
    aggregates: dict[str, Aggregate],
    *,
    schema: pa.Schema = SCHEMA,
    phase: graph_pb2.AggregationPhase.ValueType = graph_pb2.AGGREGATION_PHASE_COMPLETE,
) -> graph_pb2.Operator:
    """A ``WindowAggregateSpec`` as the planner makes it."""
    output = window_aggregate_schema(schema, keys, window, aggregates)
    if phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
        output = schema
    return graph_pb2.Operator(
        name="window",
        input_schema=schema_to_bytes(schema),
        output_schema=schema_to_bytes(output),
        window_aggregate=graph_pb2.WindowAggregateSpec(
            window=window,
            keys=keys,
            aggregates=[a.to_proto(name) for name, a in aggregates.items()],
            phase=phase,
        ),
    )


def running_aggregate_spec(
    keys: tuple[str, ...],
    aggregates: dict[str, Aggregate],
    *,
    schema: pa.Schema = SCHEMA,
    phase: graph_pb2.AggregationPhase.ValueType = graph_pb2.AGGREGATION_PHASE_COMPLETE,
) -> graph_pb2.Operator:
    """A ``RunningAggregateSpec`` as the planner makes it."""
    output = running_aggregate_schema(schema, keys, aggregates)
    if phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
        output = schema
    return graph_pb2.Operator(
        name="running",
        input_schema=schema_to_bytes(schema),
        output_schema=schema_to_bytes(output),
        running_aggregate=graph_pb2.RunningAggregateSpec(
            keys=keys,
            aggregates=[a.to_proto(name) for name, a in aggregates.items()],
            phase=phase,
        ),
    )


def window_function_spec(
    window: graph_pb2.WindowSpec,
    keys: tuple[str, ...],
    function: object,
    *,
    declared: pa.Schema | None = None,
    schema: pa.Schema = SCHEMA,
) -> graph_pb2.Operator:
    """A ``WindowFunctionSpec``: ``process`` where an output schema is declared, else ``reduce``."""
    kind = (
        graph_pb2.WINDOW_FUNCTION_KIND_REDUCE
        if declared is None
        else graph_pb2.WINDOW_FUNCTION_KIND_PROCESS
    )
    output = window_function_schema(schema, keys, window, kind, declared)
    return graph_pb2.Operator(
        name="window",
        input_schema=schema_to_bytes(schema),
        output_schema=schema_to_bytes(output),
        window_function=graph_pb2.WindowFunctionSpec(
            window=window,
            keys=keys,
            kind=kind,
            function=pickle_function(function, operator="window"),
        ),
    )
