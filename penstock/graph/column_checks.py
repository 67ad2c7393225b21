"""Checks of column names at the user's call, with messages in the user's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.expressions.expression import Column, Expr
from penstock.naming import nearest_hint
from penstock.rows.schema import EVENT_TIME


def require_columns(where: str, names: Iterable[str], schema: pa.Schema) -> None:
    """Checks that the columns exist.

    Args:
        where: the call, for the message.

    Raises:
        JobRejected: one does not; names the nearest and all there are.
    """
    for name in names:
        if not isinstance(name, str):
            raise JobRejected(
                f"{where}: {name!r} is no column name but {type(name).__name__}; write 'price'"
            )
        if name not in schema.names:
            raise JobRejected(
                f"{where}: there is no column {name!r}{nearest_hint(name, schema.names)}; "
                f"the columns are {', '.join(schema.names) or 'none'}"
            )


def check_output_names(where: str, names: Sequence[str]) -> None:
    """Checks names that an operation gives to its output.

    Raises:
        JobRejected: there are none, one comes twice, is empty, or is reserved.
    """
    if not names:
        raise JobRejected(f"{where}: no column would be left")
    for name in names:
        if not name:
            raise JobRejected(f"{where}: a column needs a name")
        if name == EVENT_TIME:
            raise JobRejected(
                f"{where}: the name {EVENT_TIME!r} is reserved for event time; choose another"
            )
        if names.count(name) > 1:
            raise JobRejected(f"{where}: column {name!r} would be there twice")


def check_schema(where: str, schema: pa.Schema) -> pa.Schema:
    """The schema, if its names can be columns of a stream.

    Raises:
        JobRejected: they cannot.
    """
    check_output_names(where, schema.names)
    return schema.remove_metadata()


def column_name(expression: Expr) -> str | None:
    """The column's name where the expression is nothing but a column."""
    return next(iter(expression.columns())) if isinstance(expression, Column) else None


def describe(schema: pa.Schema) -> str:
    """The columns and their types on one line."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def difference(left: pa.Schema, right: pa.Schema) -> str:
    """How the columns of two schemas differ, in words; "" where they do not (order aside)."""
    parts = [f"{name!r} is missing in the second" for name in left.names if name not in right.names]
    parts += [f"{name!r} is missing in the first" for name in right.names if name not in left.names]
    parts += [
        f"{field.name!r} is {field.type} in the first and {right.field(field.name).type} in the second"
        for field in left
        if field.name in right.names and right.field(field.name).type != field.type
    ]
    return "; ".join(parts)
