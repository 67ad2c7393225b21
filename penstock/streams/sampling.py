"""A few rows of a stream while the job is being built, to find out what the user's functions return.

Only sources that can be read here have rows, and only operations on single rows are tried; behind
anything else there is no sample, and the user is asked for a schema. Rows that an operation cannot
be computed for are left out: what becomes of them is for ``on_error`` when the job runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pyarrow as pa

from penstock.expressions import evaluate_each
from penstock.functions.functions import has_open
from penstock.functions.user_code import trial_copy
from penstock.graph.logical import (
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
from penstock.rows.column_values import ValueMismatch, encode
from penstock.rows.conforming import conformed
from penstock.rows.rows import RowBuilder, rows_of
from penstock.rows.whole_batches import no_rows, one_batch

SAMPLE_ROWS = 100
SAMPLE_ROWS_MAX = 10_000
_RESULTS_PER_ROW_MAX = 1000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of an input.

    Attributes:
        rows: at most ``SAMPLE_ROWS``.
        read: how many rows of the source they were made from.
    """

    rows: pa.RecordBatch
    read: int


def sample(source: NodeInput) -> Sample | None:
    """Some rows of an input; None where none can be had here.

    Where the first rows of the source do not reach the input (a filter drops them), more are tried.
    """
    found = _sample(source, SAMPLE_ROWS)
    if found is not None and not found.rows.num_rows:
        found = _sample(source, SAMPLE_ROWS_MAX)
    return None if found is None else Sample(found.rows.slice(0, SAMPLE_ROWS), found.read)


def no_sample(found: Sample | None) -> str:
    """Why there are no rows to try a function on."""
    if found is None or not found.read:
        return "the source has no rows to try it on here"
    return f"none of the first {found.read} rows of the source reach it, so it cannot be tried here"


def _sample(source: NodeInput, rows: int) -> Sample | None:
    """What the first ``rows`` rows of the source come to."""
    if source.tag:
        return None
    operation, schema = source.node.operation, source.node.schema
    if isinstance(operation, ReadSource):
        batch = None if operation.sample is None else operation.sample(rows)
        try:
            return None if batch is None else Sample(conformed(batch, schema), batch.num_rows)
        except ValueMismatch:
            return None  # for when the job runs
    if isinstance(operation, Union):
        return _first_of(source.node.inputs, rows, source.node.schema.names)
    if not isinstance(operation, (Project, Filter, RowFunction, BatchFunction, AssignEventTime)):
        return None
    given = _sample(source.node.inputs[0], rows)
    if given is None:
        return None
    if not given.rows.num_rows:
        return Sample(no_rows(schema), given.read)
    result = _apply(operation, given.rows, schema)
    return None if result is None else Sample(result, given.read)


def _first_of(inputs: Iterable[NodeInput], rows: int, names: Sequence[str]) -> Sample | None:
    """The sample of the first input that has rows."""
    samples = [found for each in inputs if (found := _sample(each, rows)) is not None]
    if not samples:
        return None
    best = next((each for each in samples if each.rows.num_rows), samples[0])
    return Sample(best.rows.select(names), max(each.read for each in samples))


def _apply(
    operation: Project | Filter | RowFunction | BatchFunction | AssignEventTime,
    rows: pa.RecordBatch,
    schema: pa.Schema,
) -> pa.RecordBatch | None:
    match operation:
        case AssignEventTime():
            return rows
        case Project(columns=columns):
            computed = [expression.compile(rows.schema) for _, expression in columns]
            return _each(
                rows,
                schema,
                lambda batch: pa.RecordBatch.from_arrays(
                    [c(batch) for c in computed], schema=schema
                ),
            )
        case Filter(predicate=predicate):
            keeps = predicate.compile(rows.schema)
            return _each(rows, schema, lambda batch: batch.filter(keeps(batch)))
        case BatchFunction(function=function):
            if has_open(function):
                return None
            copied = trial_copy(function)
            return _called(lambda: one_batch(copied(rows)))
        case RowFunction():
            return None if has_open(operation.function) else _per_row(operation, rows, schema)


def _each(
    rows: pa.RecordBatch, schema: pa.Schema, function: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> pa.RecordBatch:
    """What a columnar function makes of the rows that it can be computed for."""
    results, _ = evaluate_each(rows, function)
    return one_batch(
        pa.Table.from_batches(results, schema=results[0].schema if results else schema)
    )


def _per_row(operation: RowFunction, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """What a row function makes of the rows that it does not raise for."""
    function: Any = trial_copy(cast("Callable[..., Any]", operation.function))
    kind = operation.kind

    def of_row(index: int, row: object) -> pa.RecordBatch:
        result = function(row)
        if kind == graph_pb2.ROW_FUNCTION_KIND_FILTER:
            return rows.slice(index, 1 if result else 0)
        if kind == graph_pb2.ROW_FUNCTION_KIND_KEY:
            key = encode([result], schema.field(len(schema) - 1))
            return rows.slice(index, 1).append_column(schema.names[-1], key)
        builder = RowBuilder(schema)
        if kind == graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP:
            builder.extend(itertools.islice(() if result is None else result, _RESULTS_PER_ROW_MAX))
        else:
            builder.append(result)
        return builder.build()

    made = [_called(lambda i=i, r=r: of_row(i, r)) for i, r in enumerate(rows_of(rows))]  # type: ignore[misc]
    batches = [batch for batch in made if batch is not None]
    return one_batch(
        pa.Table.from_batches(batches, schema=batches[0].schema if batches else schema)
    )


def _called(function: Callable[[], _T]) -> _T | None:
    """The result of the user's code; None where it raises, which is for when the job runs."""
    try:
        return function()
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return None
