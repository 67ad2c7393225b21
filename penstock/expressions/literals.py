"""Literals: Python values as Arrow scalars, and how they take on the type of a column beside them.

A literal adopts a type only where its value survives: ``col("i8") + 1`` stays int8, ``col("i8") + 1000``
does not. A float beside a float column takes that column's width. Text beside a time column is parsed.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import ExpressionError
from penstock.rows.column_values import ValueMismatch, encode


def literal_scalar(value: object) -> pa.Scalar:
    """A Python value as an Arrow scalar.

    Raises:
        ExpressionError: Arrow has no type for it.
    """
    if isinstance(value, pa.Scalar):
        return value
    try:
        return literal_array([value])[0]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise ExpressionError(
            f"{value!r} ({type(value).__name__}) cannot be a value in an expression: {e}"
        ) from e


def literal_array(values: list[Any]) -> pa.Array:
    """Python values as an Arrow array; integers from 2**63 on make it uint64.

    Raises:
        pa.ArrowException, TypeError, ValueError, OverflowError: Arrow has no type for them.
    """
    try:
        return pa.array(values)
    except OverflowError:
        return pa.array(values, pa.uint64())


def adopt(literal: pa.Scalar, target: pa.DataType) -> pa.Scalar:
    """The literal in the target type, or as it was where it would lose something.

    Raises:
        ExpressionError: text beside a time column that is no time.
    """
    if pt.is_dictionary(target):
        target = target.value_type
    kind = literal.type
    if kind == target:
        return literal
    if not literal.is_valid:
        return pa.nulls(1, target)[0]
    if _is_string(kind) and pt.is_temporal(target) and not pt.is_duration(target):
        return _parsed(literal.as_py(), target)
    if pt.is_timestamp(target) and (pt.is_timestamp(kind) or pt.is_date(kind)):
        return _instant(literal.as_py(), target)
    if pt.is_timestamp(target) and pt.is_duration(kind):
        target = pa.duration(target.unit)
    if pt.is_floating(kind) and pt.is_floating(target):
        return pa.scalar(literal.as_py(), target)
    if pt.is_nested(target):
        return _nested(literal, target)
    return _cast_if_lossless(literal, target) if _may_adopt(kind, target) else literal


def _may_adopt(kind: pa.DataType, target: pa.DataType) -> bool:
    return (
        (pt.is_integer(kind) and (pt.is_integer(target) or pt.is_floating(target)))
        or (_is_string(kind) and _is_string(target))
        or (_is_binary(kind) and _is_binary(target))
        or (pt.is_duration(kind) and pt.is_duration(target))
        or (pt.is_time(kind) and pt.is_time(target))
    )


def _nested(literal: pa.Scalar, target: pa.DataType) -> pa.Scalar:
    """A list, struct or map with its parts in the target's types, where all of them fit exactly."""
    try:
        return encode([literal.as_py()], pa.field("literal", target))[0]
    except ValueMismatch:
        return literal


def _is_string(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind))


def _cast_if_lossless(literal: pa.Scalar, target: pa.DataType) -> pa.Scalar:
    try:
        return literal.cast(target)
    except pa.ArrowInvalid:
        return literal


def _parsed(text: str, target: pa.DataType) -> pa.Scalar:
    try:
        if pt.is_time(target):
            return pa.scalar(dt.time.fromisoformat(text), target)
        if pt.is_date(target):
            return pa.scalar(dt.date.fromisoformat(text), target)
        return _instant(dt.datetime.fromisoformat(text), target)
    except ValueError as e:
        raise ExpressionError(
            f"the text {text!r} beside a {target} column is read as a time, but: {e}; write it as "
            "2024-05-01 or 2024-05-01T12:30:00"
        ) from e


def _instant(value: Any, target: pa.DataType) -> pa.Scalar:
    """A date or datetime (UTC where it has no zone) as a timestamp of the target's zone."""
    if not isinstance(value, dt.datetime):
        value = dt.datetime.combine(value, dt.time())
    if value.tzinfo is None:
        value = value.replace(tzinfo=dt.UTC)
    microseconds = (value - _EPOCH) // dt.timedelta(microseconds=1)
    exact = pa.scalar(microseconds, pa.int64()).cast(pa.timestamp("us", target.tz))
    return _cast_if_lossless(exact, target)


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
