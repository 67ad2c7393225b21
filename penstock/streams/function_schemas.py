"""What the user's functions return: a schema that is given, annotated, or found by trying a few rows."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.expressions import data_type
from penstock.functions.row_types import (
    RowFunctionName,
    infer_output_schema,
    schema_from_annotations,
)
from penstock.functions.user_code import trial_copy
from penstock.graph.column_checks import check_output_names
from penstock.graph.logical import NodeInput, input_schema
from penstock.streams.sampling import no_sample, sample

FunctionName = typing.Literal["map", "flat_map"]


def declared_schema(call: str, schema: Any) -> pa.Schema:
    """The columns that ``schema=`` says.

    Args:
        call: for errors.
        schema: a pa.Schema, a dataclass, TypedDict or NamedTuple, or a mapping of names to types.

    Raises:
        JobRejected: it is none of these, or a name cannot be a column.
    """
    if isinstance(schema, pa.Schema):
        found = schema.remove_metadata()
    elif isinstance(schema, Mapping):
        found = pa.schema([pa.field(name, _type(call, name, t)) for name, t in schema.items()])
    else:
        annotated = schema_from_annotations(schema) if isinstance(schema, type) else None
        if annotated is None:
            raise JobRejected(
                f"{call}: schema={schema!r} is no schema; give a pa.schema([...]), a dataclass, a "
                "TypedDict, or {'name': 'int64', ...}"
            )
        found = annotated
    check_output_names(f"{call}: schema", found.names)
    return found


def row_output_schema(
    call: FunctionName, fn: Callable[[Any], Any], schema: Any, source: NodeInput
) -> pa.Schema:
    """The output schema of ``map`` and ``flat_map``.

    Raises:
        JobRejected: nothing tells it.
    """
    if schema is not None:
        return declared_schema(call, schema)
    annotated = schema_from_annotations(fn)
    found = annotated or _sampled_schema(fn, call, source)
    check_output_names(call, found.names)
    return found


def key_type(fn: Callable[[Any], Any], source: NodeInput) -> pa.DataType:
    """The type of the key that a function returns.

    Raises:
        JobRejected: nothing tells it.
    """
    schema = input_schema(source)
    try:
        keyed = infer_output_schema(fn, "key", schema, None)
    except JobRejected:
        keyed = _sampled_schema(fn, "key", source)
    return keyed.field(len(keyed) - 1).type


def _sampled_schema(
    fn: Callable[[Any], Any], kind: RowFunctionName, source: NodeInput
) -> pa.Schema:
    found = sample(source)
    rows = None if found is None else found.rows
    return infer_output_schema(fn, kind, input_schema(source), rows, no_sample(found))


def batch_output_schema(
    fn: Callable[[pa.RecordBatch], pa.RecordBatch], schema: Any, source: NodeInput
) -> pa.Schema:
    """The output schema of ``map_batches``.

    Raises:
        JobRejected: nothing tells it, or the function does not return a RecordBatch.
    """
    if schema is not None:
        return declared_schema("map_batches", schema)
    found = sample(source)
    if found is None or not found.rows.num_rows:
        raise JobRejected(
            "map_batches: the columns that the function returns are not known, and "
            f"{no_sample(found)}: give schema=pa.schema([...])"
        )
    try:
        result = trial_copy(fn)(found.rows)
    except Exception as error:
        raise JobRejected(
            f"map_batches: the function raised {type(error).__name__}: {error} for the sample that "
            "tells its columns; give schema=pa.schema([...])"
        ) from error
    if not isinstance(result, (pa.RecordBatch, pa.Table)):
        raise JobRejected(
            f"map_batches: the function returned {type(result).__name__}, not a pyarrow.RecordBatch"
        )
    check_output_names("map_batches", result.schema.names)
    return result.schema.remove_metadata()


def window_output_schema(function: Any, schema: Any) -> pa.Schema:
    """The columns of the rows that a window function emits.

    Raises:
        JobRejected: it is no window function, or nothing tells them.
    """
    from penstock.functions.functions import WindowFunction

    if not isinstance(function, WindowFunction):
        hint = f"{function.__name__}()" if isinstance(function, type) else "an object of it"
        raise JobRejected(
            f"process: {function!r} is no window function; derive a class from ps.WindowFunction and "
            f"pass {hint}"
        )
    if schema is not None:
        return declared_schema("process", schema)
    raise JobRejected(
        f"process: the columns of the rows that {type(function).__name__} emits are not known: give "
        "schema=pa.schema([...]), a dataclass, or {'name': 'int64', ...}"
    )


def process_output_schema(function: Any, methods: Sequence[str], schema: Any) -> pa.Schema:
    """The columns of the rows that a process function emits.

    They are not found by trying: a function with state would start the job with what it has seen.

    Args:
        function: an object of one of the classes for process functions.
        methods: its methods that take rows.
        schema: what the user gave; None = from the annotation ``out: ps.Collector[Record]`` of a method, or
            of what it returns.

    Raises:
        JobRejected: nothing tells them.
    """
    if schema is not None:
        return declared_schema("process", schema)
    found = next(
        filter(None, (_emitted_schema(getattr(function, method)) for method in methods)), None
    )
    if found is None:
        raise JobRejected(
            f"process: the columns of the rows that {type(function).__name__} emits are not known: give "
            "schema=pa.schema([...]), a dataclass, or {'name': 'int64', ...}, or annotate what it "
            f"collects with a dataclass: def {methods[0]}(..., out: ps.Collector[Alert])"
        )
    check_output_names("process", found.names)
    return found


def _emitted_schema(method: Callable[..., Any]) -> pa.Schema | None:
    """The columns of ``Record`` in ``out: Collector[Record]``, or in ``-> Iterator[Record]``."""
    from penstock.functions.functions import Collector
    from penstock.processing.process_functions import BatchCollector

    try:
        hints = typing.get_type_hints(method)
    except (NameError, TypeError, AttributeError):  # names that are imported for type checkers only
        return None
    for hint in hints.values():
        if typing.get_origin(hint) in (Collector, BatchCollector):
            (record,) = typing.get_args(hint)
            return schema_from_annotations(record) if isinstance(record, type) else None
    return schema_from_annotations(method)


def _type(call: str, name: object, given: Any) -> pa.DataType:
    if not isinstance(name, str):
        raise JobRejected(f"{call}: schema: {name!r} is no name of a column: give a text")
    if isinstance(given, (str, pa.DataType)):
        return data_type(given)
    record = typing.TypedDict("Columns", {name: given})  # type: ignore[misc]
    annotated = schema_from_annotations(record)
    if annotated is None:
        raise JobRejected(f"{call}: {given!r} is no type for column {name!r}")
    return annotated.field(0).type
