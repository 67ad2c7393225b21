"""Rows that the client holds: lists of dictionaries and Arrow tables, shipped as an artifact."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.inference import plain_schema
from penstock.connectors.messages import name_list, nearest_name, shorten
from penstock.errors import JobRejected
from penstock.pb import graph_pb2
from penstock.rows.column_values import ValueMismatch, encode
from penstock.rows.handed_over import handed_over_whole
from penstock.rows.schema import EVENT_TIME


def arrow_source(artifact_id: str, schema: pa.Schema) -> tuple[graph_pb2.SourceSpec, pa.Schema]:
    """A source that reads an artifact: a table in Arrow's IPC file format.

    Returns:
        The source and the schema of its rows (encodings such as dictionaries removed).
    """
    if EVENT_TIME in schema.names:
        raise JobRejected(f'the column name "{EVENT_TIME}" is reserved; rename the column')
    if not schema.names:
        raise JobRejected("the table has no columns")
    spec = graph_pb2.SourceSpec(arrow=graph_pb2.ArrowSource(artifact=artifact_id), bounded=True)
    return spec, plain_schema(schema)


def check_nulls(table: pa.Table) -> None:
    """That no column has a null which its own schema declares as never null: Arrow does not look.

    Raises:
        JobRejected: one has; the message names row and column.
    """
    for field, column in zip(table.schema, table.columns, strict=True):
        if not field.nullable and column.null_count:
            index = pc.index(pc.is_null(column), True).as_py()
            raise JobRejected(
                f"from_arrow: row {index}: a null in column {field.name!r}, which is declared as never null"
            )


def rows_to_table(rows: Iterable[Mapping[str, Any]], schema: pa.Schema | None = None) -> pa.Table:
    """Dictionaries as a table.

    Args:
        rows: one dictionary per row; a key that is missing is null. A generator is read once, to its end.
        schema: the columns; None infers them from all rows, in order of first appearance.

    Raises:
        JobRejected: a row is no dictionary, has an unknown column, or a value does not fit; the
            message names row and column.
    """
    rows = list(rows) if isinstance(rows, list | tuple) else list(map(handed_over_whole, rows))
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise JobRejected(
                f"row {index}: expected a dict, got {type(row).__name__}: {row!r:.200}"
            )
    names = _column_names(rows, schema)
    arrays = [_column(rows, name, None if schema is None else schema.field(name)) for name in names]
    fields = [pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema or pa.schema(fields))


def _column_names(rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None) -> list[str]:
    if schema is None:
        if not rows:
            raise JobRejected("there are no rows to infer a schema from; give schema=")
        names: dict[str, None] = {}
        for index, row in enumerate(rows):
            for name in row:
                if not isinstance(name, str):
                    raise JobRejected(f"row {index}: column names must be str, not {name!r}")
                names[name] = None
        if not names:
            raise JobRejected("the rows have no columns")
        return list(names)
    known = set(schema.names)
    for index, row in enumerate(rows):
        for name in row:
            if name not in known:
                raise JobRejected(
                    f'row {index}: column "{name}" is not in the schema'
                    f"{nearest_name(str(name), schema.names)}; columns: {name_list(schema.names)}"
                )
    return list(schema.names)


def _column(rows: Sequence[Mapping[str, Any]], name: str, field: pa.Field | None) -> pa.Array:
    values = [row.get(name) for row in rows]
    if field is None:
        return _inferred(values, name)
    try:
        return encode(values, field)
    except ValueMismatch as error:
        if error.index < 0:
            raise JobRejected(f'column "{name}": {error}') from error
        given = shorten(repr(values[error.index]), 200)
        raise JobRejected(
            f'row {error.index}, column "{name}": {given} is not {field.type}: {error.__cause__ or error}'
        ) from error


def _inferred(values: list[Any], name: str) -> pa.Array:
    try:
        array = pa.array(values)
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        pa.ArrowNotImplementedError,
        OverflowError,
    ) as error:
        raise JobRejected(_misfit(values, name, error)) from error
    if pa.types.is_date(array.type):
        for index, value in enumerate(values):
            if isinstance(value, dt.datetime):
                raise JobRejected(
                    f'row {index}, column "{name}": {value!r} is a time beside dates; give schema='
                )
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def _misfit(values: list[Any], name: str, error: Exception) -> str:
    """Names the first row whose value does not fit the type of the rows before it."""
    good, bad = 0, len(values)
    while good < bad - 1:
        middle = (good + bad) // 2
        try:
            pa.array(values[:middle])
        except (
            pa.ArrowInvalid,
            pa.ArrowTypeError,
            pa.ArrowNotImplementedError,
            OverflowError,
        ):
            bad = middle
        else:
            good = middle
    wanted = f" is not {pa.array(values[:good]).type}" if good else " has no Arrow type"
    return f'row {bad - 1}, column "{name}": {shorten(repr(values[bad - 1]), 200)}{wanted}: {error}'
