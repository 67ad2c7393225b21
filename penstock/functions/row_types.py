"""Schemas of what row functions return, found in annotations or in sample results.

Annotations win: they hold for every row, samples only for those that were seen. A nullable column is an
``Optional`` field; columns found by samples are all nullable.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import JobRejected
from penstock.functions.functions import has_open
from penstock.functions.row_access import class_attribute, columns_used
from penstock.functions.user_code import trial_copy
from penstock.rows.column_values import ROW_BYTES, record_as_dict, short_repr
from penstock.rows.rows import Row, RowBuilder, RowMismatch, rows_of, schema_of, unknown_column
from penstock.rows.schema import EVENT_TIME, optional, user_batch

__all__ = [
    "RowFunctionName",
    "arrow_type",
    "columns_used",
    "infer_output_schema",
    "schema_from_annotations",
    "schema_from_samples",
]

RowFunctionName = Literal["map", "flat_map", "filter", "key"]

_PLAIN_TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us", "UTC"),
    dt.date: pa.date32(),
    dt.time: pa.time64("us"),
    dt.timedelta: pa.duration("us"),
    decimal.Decimal: pa.decimal128(38, 9),
    type(None): pa.null(),
}
_SEQUENCES = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_STREAMS = (
    list,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Iterator,
    collections.abc.Generator,
    collections.abc.Collection,
)
_SAMPLE_RESULTS = 1000


def schema_from_annotations(function: Callable[..., Any]) -> pa.Schema | None:
    """The schema that a function's return annotation promises.

    Args:
        function: a function, or an object with ``__call__`` or ``process``. Its annotation is a
            dataclass, TypedDict or NamedTuple, or an iterable of one of these.

    Returns:
        None where it is not annotated with columns.

    Raises:
        JobRejected: a column is annotated with a type that no column can have.
    """
    annotation = _return_annotation(function)
    if annotation is None:
        return None
    if get_origin(annotation) in _STREAMS and get_args(annotation):
        annotation = get_args(annotation)[0]
    annotation, _ = _without_none(annotation)
    fields = _record_fields(annotation)
    if fields is None:
        return None
    name = getattr(annotation, "__name__", str(annotation))
    return pa.schema([_field(column, kind, name) for column, kind in fields.items()])


def schema_from_samples(values: Iterable[object]) -> pa.Schema:
    """The schema that results have in common.

    Args:
        values: results of a function: dicts, rows, dataclass instances, named tuples.

    Raises:
        JobRejected: there are none, they are no rows, or a column has values of several types.
    """
    names: dict[str, None] = {}
    records = []
    rows_only: dict[str, pa.DataType] | None = {}
    for value in values:
        record = record_as_dict(value)
        if record is None:
            raise JobRejected(
                f"the function returned {short_repr(value)} ({type(value).__name__}), which has no "
                "column names; return a dict or a dataclass instance, or give schema=..."
            )
        if not isinstance(value, Row):
            rows_only = None
        elif rows_only is not None:
            rows_only |= {field.name: field.type for field in schema_of(value)}
        records.append(record)
        names.update(dict.fromkeys(map(_column_name, record)))
    if not names:
        raise JobRejected("the function returned no rows to find columns in; give schema=...")
    if rows_only is not None:
        return pa.schema([(name, rows_only[name]) for name in names])
    fields = [pa.field(name, _sampled_type(name, records)) for name in names]
    return pa.schema(
        [f if all(f.name in record for record in records) else optional(f) for f in fields]
    )


def infer_output_schema(
    function: Callable[..., Any],
    kind: RowFunctionName,
    input_schema: pa.Schema,
    sample_batch: pa.RecordBatch | None,
    no_sample: str = "the source has no rows to try it on here",
) -> pa.Schema:
    """The output schema of a row function, without the event-time column.

    Args:
        kind: "filter" keeps the input's schema, "key" adds the column ``key``.
        sample_batch: some rows of the input, where the source can be read here; the function is called
            with them.
        no_sample: why there are none, for the error.

    Raises:
        JobRejected: nothing tells the schema, or the function raised for every row of the sample.
    """
    visible = _without_event_time(input_schema)
    if kind == "filter":
        return visible
    annotated = _annotated_key(function) if kind == "key" else schema_from_annotations(function)
    if annotated is None:
        annotated = _sampled_schema(function, kind, sample_batch, no_sample)
    if kind != "key":
        return annotated
    if visible.get_field_index("key") >= 0:
        raise JobRejected(
            "key_by(function) adds the column 'key', which the stream has already; rename it, or use "
            "key_by('key')"
        )
    return visible.append(annotated.field(0))


def _sampled_schema(
    function: Callable[..., Any],
    kind: RowFunctionName,
    sample_batch: pa.RecordBatch | None,
    no_sample: str,
) -> pa.Schema:
    shown = getattr(function, "__qualname__", type(function).__name__)
    advice = (
        "give schema=pa.schema([...]), or annotate what the function returns (a dataclass, TypedDict "
        "or NamedTuple)"
    )
    if kind == "key":
        advice = "annotate what the function returns, as in def key(row) -> int"
    if sample_batch is None or sample_batch.num_rows == 0:
        raise JobRejected(
            f"the columns that {shown} returns are not known, and {no_sample}: {advice}"
        )
    if has_open(function):
        raise JobRejected(
            f"the columns that {shown} returns are not known, and it is not tried on a sample since it "
            f"has open(): {advice}"
        )
    results, failure = _tried(trial_copy(function), kind, sample_batch)
    if failure is not None and not results:
        error, row = failure
        raise JobRejected(
            f"{shown} raised {type(error).__name__}: {unknown_column(error) or error} for the row "
            f"{short_repr(row, ROW_BYTES)}, and gave no result for any row of the sample that tells its "
            f"columns; {advice}"
        ) from error
    if kind == "key":
        if any(isinstance(result, tuple) for result in results):
            raise JobRejected(_tuple_as_key(shown))
        results = [{"key": result} for result in results]
    # What is no row is a bad record when the job runs, as what raises is.
    records = [result for result in results if record_as_dict(result) is not None] or results
    try:
        schema = schema_from_samples(records)
        return _checked_sample(schema, records)
    except (JobRejected, RowMismatch) as e:
        raise JobRejected(f"the columns that {shown} returns are not clear: {e}; {advice}") from e


def _tried(
    function: Callable[..., Any], kind: RowFunctionName, sample_batch: pa.RecordBatch
) -> tuple[list[object], tuple[Exception, Row] | None]:
    """The results for the rows of a sample, and the first row that it raised for.

    Rows that it raises for are left to ``on_error`` when the job runs.
    """
    results: list[object] = []
    failure: tuple[Exception, Row] | None = None
    for row in rows_of(user_batch(sample_batch)):
        try:
            result = function(row)
            if kind == "flat_map":
                results += itertools.islice(() if result is None else result, _SAMPLE_RESULTS)
            else:
                results.append(result)
        except Exception as e:  # noqa: BLE001 - the user's code may raise anything
            failure = failure or (e, row)
        if len(results) >= _SAMPLE_RESULTS:
            break
    return results, failure


def _checked_sample(schema: pa.Schema, results: Sequence[object]) -> pa.Schema:
    for field in schema:
        if pt.is_null(field.type):
            raise JobRejected(f"column {field.name!r} is None in every row of the sample")
        if field.name == EVENT_TIME:
            raise JobRejected(f"the column name {EVENT_TIME} is reserved")
    builder = RowBuilder(schema)
    builder.extend(results)
    builder.build()
    return schema


def _tuple_as_key(shown: str) -> str:
    return (
        f"key_by: {shown} returns a tuple, and the key that a function returns is one value; for a key "
        "of several columns name them: key_by('k', 'v'), behind with_columns(...) where they are computed"
    )


def _annotated_key(function: Callable[..., Any]) -> pa.Schema | None:
    annotation = _return_annotation(function)
    if annotation is None or annotation is Any:
        return None
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, tuple):
        raise JobRejected(_tuple_as_key(getattr(function, "__qualname__", str(function))))
    return pa.schema([_field("key", annotation, "the key function")])


def _return_annotation(function: Any) -> Any:
    """The resolved return annotation, None where there is none."""
    if not (inspect.isroutine(function) or isinstance(function, type)):
        function = (
            getattr(function, "func", None)  # functools.partial
            or class_attribute(function, "__call__")
            or getattr(function, "process", None)
        )
    if isinstance(function, type):
        return function if _record_fields(function) is not None else None
    try:
        return typing.get_type_hints(function, include_extras=True).get("return")
    except (NameError, TypeError, AttributeError):
        annotation = getattr(function, "__annotations__", {}).get("return")
        return None if isinstance(annotation, str) else annotation


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """The annotation without ``None``, and whether that was allowed."""
    if get_origin(annotation) in (typing.Required, typing.NotRequired):
        inner, allowed = _without_none(get_args(annotation)[0])
        return inner, allowed or get_origin(annotation) is typing.NotRequired
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [a for a in get_args(annotation) if a is not type(None)]
        if len(rest) == 1 and len(get_args(annotation)) > 1:
            return _without_none(rest[0])[0], True
    return annotation, False


def _record_fields(annotation: Any) -> dict[str, Any] | None:
    """Field -> annotation of a dataclass, TypedDict or NamedTuple; None for anything else."""
    if not isinstance(annotation, type):
        return None
    is_record = (
        dataclasses.is_dataclass(annotation)
        or typing.is_typeddict(annotation)
        or (issubclass(annotation, tuple) and hasattr(annotation, "_fields"))
    )
    if not is_record:
        return None
    try:
        hints = typing.get_type_hints(annotation, include_extras=True)
    except NameError as e:
        raise JobRejected(
            f"the annotations of {annotation.__name__} cannot be read: {e}; define the names it uses "
            "at the top of the module"
        ) from e
    if dataclasses.is_dataclass(annotation):
        return {f.name: hints[f.name] for f in dataclasses.fields(annotation)}
    optional_keys: frozenset[str] = getattr(annotation, "__optional_keys__", frozenset())
    return {
        name: typing.NotRequired[_without_none(kind)[0]] if name in optional_keys else kind
        for name, kind in hints.items()
    }


def _field(name: str, annotation: Any, owner: str) -> pa.Field:
    kind, nullable = _without_none(annotation)
    field = pa.field(name, arrow_type(kind, f"{owner}.{name}"), nullable=nullable)
    return optional(field) if get_origin(annotation) is typing.NotRequired else field


def arrow_type(annotation: Any, where: str = "the annotation") -> pa.DataType:
    """The column type of an annotation: ``list[int]``, ``datetime``, a dataclass, ``T | None``.

    Args:
        where: what is annotated, for the error.

    Raises:
        JobRejected: no column can hold it.
    """
    annotation, _ = _without_none(annotation)
    if isinstance(annotation, pa.DataType):
        return annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        chosen = [a for a in arguments[1:] if isinstance(a, pa.DataType)]
        return chosen[0] if chosen else arrow_type(arguments[0], where)
    if origin is Literal:
        return arrow_type(type(arguments[0]), where)
    if isinstance(annotation, type) and annotation in _PLAIN_TYPES:
        return _PLAIN_TYPES[annotation]
    fields = _record_fields(annotation)
    if fields is not None:
        return pa.struct([_field(name, kind, where) for name, kind in fields.items()])
    items = tuple(a for a in arguments if a is not Ellipsis)
    if origin in _SEQUENCES and len(set(items)) == 1:
        return pa.list_(arrow_type(items[0], where))
    if origin in (dict, collections.abc.Mapping) and len(items) == 2:
        return pa.map_(arrow_type(items[0], where), arrow_type(items[1], where))
    raise JobRejected(
        f"{where}: no column can hold {annotation!r}; use bool, int, float, str, bytes, datetime, date, "
        "time, timedelta, Decimal, list[T], dict[K, V], a dataclass, or Annotated[T, pa.<type>()]"
    )


def _sampled_type(name: str, records: Sequence[Any]) -> pa.DataType:
    values = [record.get(name) for record in records]
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {int, float}:
        values = [None if value is None else float(value) for value in values]
    elif (len(kinds) > 1 and bool in kinds) or {dt.date, dt.datetime} <= kinds:
        raise JobRejected(f"column {name!r} has values of several types: {_names(kinds)}")
    try:
        return pa.array([_plain_sample(value) for value in values]).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise JobRejected(
            f"column {name!r} has values of several types, or of one that no column can hold "
            f"({_names(kinds)}): {e}"
        ) from e


def _plain_sample(value: Any) -> Any:
    """Nested records as dicts, so that Arrow sees structs."""
    if isinstance(value, dict):
        return {key: _plain_sample(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_sample(item) for item in value]
    record = record_as_dict(value)
    return value if record is None else {k: _plain_sample(v) for k, v in record.items()}


def _column_name(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise JobRejected(f"a column name must be a text, the function returned the key {key!r}")
    return key


def _names(kinds: Iterable[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def _without_event_time(schema: pa.Schema) -> pa.Schema:
    position = schema.get_field_index(EVENT_TIME)
    return schema if position < 0 else schema.remove(position)
