"""Columns that come from outside, a source, a function or Spark, as those that a schema declares.

What the declared type holds exactly is taken, everything else is an error that names the column and the first value:
rounding is for ``.cast`` of an expression to do, where a reader sees it.
"""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa
import pyarrow.types as pt

from penstock.naming import nearest_hint
from penstock.rows.casting import Kernel, cast_kernel
from penstock.rows.column_types import without_runs
from penstock.rows.column_values import ValueMismatch, cut_text

_REASON_BYTES = 300


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of the schema, in its order, types and nullability; others are left out.

    Raises:
        ValueMismatch: a column is missing, or a value does not fit.

    Example: other types are taken as far as no value changes.
        >>> schema = pa.schema([pa.field("n", pa.int8(), nullable=False)])
        >>> conformed(pa.record_batch({"more": ["x"], "n": [1.0]}), schema).to_pylist()
        [{'n': 1}]
        >>> conformed(pa.record_batch({"n": [1.0, 1.5]}), schema)
        Traceback (most recent call last):
        penstock.rows.column_values.ValueMismatch: column 'n' as double, which does not go into the declared int8 without loss: Float value 1.500000 was truncated converting to int8
    """
    if batch.schema.equals(schema):
        for field, column in zip(schema, batch.columns, strict=True):
            _refuse_nulls(column, field)
        return batch
    names = batch.schema.names
    for name in schema.names:
        if names.count(name) != 1:
            wrong = f"the column {name!r} {names.count(name)} times" if name in names else ""
            raise ValueMismatch(
                f"{wrong or f'no column {name!r}'}; columns: {', '.join(names) or 'none'}"
                f"{nearest_hint(name, names)}",
                -1,
            )
    columns = [conformed_column(batch.column(field.name), field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def conformed_column(column: pa.Array, field: pa.Field) -> pa.Array:
    """A column with the type and the nullability of a field.

    Raises:
        ValueMismatch: it has a value that this type does not have, or a null where none may be.
    """
    if column.type != field.type:
        column = _cast(without_runs(column), field)
    _refuse_nulls(column, field)
    return column


def is_castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether values of the one type can be some of the other."""
    try:
        _kernel(source, target)(without_runs(pa.nulls(0, source)))
    except pa.ArrowNotImplementedError:
        return False
    return True


def has_null(column: pa.Array) -> bool:
    """Whether a value is null, by itself or as its dictionary has it."""
    if column.null_count or not pt.is_dictionary(column.type) or not column.dictionary.null_count:
        return bool(column.null_count)
    return True in column.is_null().unique().to_pylist()


def _refuse_nulls(column: pa.Array, field: pa.Field) -> None:
    if not field.nullable and has_null(column):
        raise ValueMismatch(
            f"a null in column {field.name!r}, which is declared as never null",
            column.is_null().index(True).as_py(),
        )
    if not _has_never_null(field.type) or not _inner_null(column):
        return
    start, stop = 0, len(column)  # the first row with one is from start on, and before stop
    while stop - start > 1:
        middle = (start + stop) // 2
        if _inner_null(column.slice(start, middle - start)):
            stop = middle
        else:
            start = middle
    raise ValueMismatch(
        f"a null within column {field.name!r}, at {_inner_null(column)!r} of {field.type}, which is declared as "
        "never null",
        start,
    )


@lru_cache(maxsize=256)
def _has_never_null(kind: pa.DataType) -> bool:
    """Whether a field within a type is declared as never null; keys of maps cannot be null anyway."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_never_null(kind.storage_type)
    return any(not field.nullable or _has_never_null(field.type) for field in _inner(kind))


def _inner(kind: pa.DataType) -> list[pa.Field]:
    if pt.is_map(kind):
        return [kind.key_field, kind.item_field]
    if pt.is_struct(kind):
        return list(kind)
    return [kind.value_field] if pt.is_nested(kind) and hasattr(kind, "value_field") else []


def _inner_null(column: pa.Array) -> str:
    """The name of the first field within a column that has a null and never may have, "" = there is none.

    What lies below a null is no value.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    fields = _inner(column.type)
    if not any(not field.nullable or _has_never_null(field.type) for field in fields):
        return ""
    if column.null_count == len(
        column
    ):  # Arrow cannot leave all rows out where an extension type is within
        return ""
    valid = column.drop_null() if column.null_count else column
    if pt.is_map(column.type):
        first, last = valid.offsets[0].as_py(), valid.offsets[-1].as_py()
        parts = [part.slice(first, last - first) for part in (valid.keys, valid.items)]
    else:
        parts = valid.flatten() if pt.is_struct(column.type) else [valid.flatten()]
    for field, part in zip(fields, parts, strict=True):
        if not field.nullable and has_null(part):
            return str(field.name)
        if found := _inner_null(part):
            return found
    return ""


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return _kernel(column.type, field.type)(column)
    except pa.ArrowException as error:
        index = -1
        if not isinstance(error, pa.ArrowNotImplementedError):
            index, error = _first_misfit(column, field.type, error)
        reason = cut_text(str(error), _REASON_BYTES)
        raise ValueMismatch(
            f"column {field.name!r} as {column.type}, which does not go into the declared {field.type} "
            f"without loss: {reason}",
            index,
        ) from error


def _first_misfit(
    column: pa.Array, kind: pa.DataType, error: pa.ArrowException
) -> tuple[int, pa.ArrowException]:
    """The first value that cannot be cast, and why; -1 where each can by itself."""
    cast = _kernel(column.type, kind)
    start, stop = 0, len(column)
    while start < stop:
        middle = (start + stop) // 2
        try:
            cast(column.slice(start, middle + 1 - start))
            start = middle + 1
        except pa.ArrowException as e:
            stop, error = middle, e
    return (start if start < len(column) else -1), error


@lru_cache(maxsize=256)
def _kernel(source: pa.DataType, target: pa.DataType) -> Kernel:
    return cast_kernel(source, target, safe=True)
