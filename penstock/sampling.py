"""A few rows of a stream while the job is being built, to find out what the user's functions return.

Only sources that can be read here have rows, and only operations on single rows are tried; behind
anything else there is no sample, and the user is asked for a schema.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.logical import (
    AssignEventTime,
    BatchFunction,
    Filter,
    NodeInput,
    Project,
    ReadSource,
    RowFunction,
    Union,
)
from penstock.pb import graph_pb2
from penstock.rows import RowBuilder, rows_of

SAMPLE_ROWS = 100


def sample(source: NodeInput) -> pa.RecordBatch | None:
    """Some rows of an input; None where none can be had here."""
    if source.tag:
        return None
    operation = source.node.operation
    if isinstance(operation, ReadSource):
        return None if operation.sample is None else operation.sample(SAMPLE_ROWS)
    if isinstance(operation, Union):
        samples = (sample(each) for each in source.node.inputs)
        found = next((rows for rows in samples if rows is not None and rows.num_rows), None)
        return None if found is None else found.select(source.node.schema.names)
    if not isinstance(operation, (Project, Filter, RowFunction, BatchFunction, AssignEventTime)):
        return None
    rows = sample(source.node.inputs[0])
    if rows is None or not rows.num_rows:
        return rows
    try:
        return _apply(operation, rows, source.node.schema)
    except Exception:  # noqa: BLE001 - what the user's code raises is for on_error when the job runs
        return None


def one_batch(result: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """What a batch function returned, as a batch."""
    if isinstance(result, pa.RecordBatch):
        return result
    columns = [column.combine_chunks() for column in result.columns]
    return pa.RecordBatch.from_arrays(columns, schema=result.schema)


def _apply(
    operation: Project | Filter | RowFunction | BatchFunction | AssignEventTime,
    rows: pa.RecordBatch,
    schema: pa.Schema,
) -> pa.RecordBatch:
    match operation:
        case AssignEventTime():
            return rows
        case Project(columns=columns):
            arrays = [expression.compile(rows.schema)(rows) for _, expression in columns]
            return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in columns])
        case Filter(predicate=predicate):
            return rows.filter(predicate.compile(rows.schema)(rows))
        case BatchFunction(function=function):
            return one_batch(function(rows))
        case RowFunction():
            return _apply_row_function(operation, rows, schema)


def _apply_row_function(
    operation: RowFunction, rows: pa.RecordBatch, schema: pa.Schema
) -> pa.RecordBatch:
    function: Any = operation.function
    results = [function(row) for row in rows_of(rows)]
    if operation.kind == graph_pb2.ROW_FUNCTION_KIND_FILTER:
        return rows.filter(pa.array([bool(kept) for kept in results]))
    if operation.kind == graph_pb2.ROW_FUNCTION_KIND_KEY:
        return rows.append_column(schema.names[-1], pa.array(results, schema.types[-1]))
    builder = RowBuilder(schema)
    if operation.kind == graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP:
        for several in results:
            builder.extend(several)
    else:
        builder.extend(results)
    return builder.build()
