"""Literals: Python values as Arrow scalars, and how they take on the type of a column beside them.

A literal adopts a type only where its value survives: ``col("i8") + 1`` stays int8, ``col("i8") + 1000``
does not. A float beside a float column takes that column's width. Text beside a time column is parsed.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import ExpressionError
from penstock.expressions.moments import (
    array_of,
    is_moment,
    moment_of_text,
    nanoseconds,
    of_nanoseconds,
    time_of_day_of_text,
    times_in,
)
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
        return array_of(values)
    except OverflowError:
        return pa.array(values, pa.uint64())


def array_of_scalars(scalars: Sequence[pa.Scalar], kind: pa.DataType) -> pa.Array:
    """An array of values of one type, with all of their digits: Python's own times have microseconds."""
    try:
        return pa.array([scalar if scalar.is_valid else None for scalar in scalars], kind)
    except pa.ArrowNotImplementedError:  # a part without a type, as None in a dict is
        return pa.array([scalar.as_py() for scalar in scalars], kind)


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
    if pt.is_timestamp(target) and is_moment(kind):
        return _moment(nanoseconds(literal), "s" if pt.is_date(kind) else kind.unit, target)
    if pt.is_timestamp(target) and pt.is_duration(kind):
        target = pa.duration(target.unit)
    if pt.is_floating(kind) and pt.is_floating(target):
        return pa.scalar(literal.as_py(), target)
    if pt.is_nested(target):
        return _nested(literal, target)
    return _cast_if_lossless(literal, target) if _may_adopt(kind, target) else literal


def written_decimal(literal: pa.Scalar, target: pa.DataType) -> pa.Scalar:
    """The decimal that a float is written as, where it is compared with decimals that have it: 0.1, which no float is.

    >>> written_decimal(pa.scalar(0.1), pa.decimal128(9, 2)).as_py()
    Decimal('0.10')
    """
    if pt.is_dictionary(target):
        target = target.value_type
    if not (pt.is_decimal(target) and pt.is_floating(literal.type) and literal.is_valid):
        return literal
    try:
        return pa.scalar(Decimal(repr(literal.as_py())), target)
    except pa.ArrowInvalid:  # no number, or one of more digits
        return literal


def key_of(key: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    """A key of a map, in the type of its keys.

    Raises:
        TypeError, pa.ArrowException: it is of another type, or no such key.
    """
    if not pt.is_temporal(kind):
        return pa.scalar(key.as_py(), kind)
    is_date = pt.is_date(kind) and is_moment(key.type) and key.is_valid
    adopted = (of_nanoseconds(nanoseconds(key), kind) or key) if is_date else adopt(key, kind)
    if adopted.type != kind:
        raise TypeError(f"a key of type {key.type} is none of the map's, which are {kind}")
    return adopted


def _may_adopt(kind: pa.DataType, target: pa.DataType) -> bool:
    return (
        (pt.is_integer(kind) and (pt.is_integer(target) or pt.is_floating(target)))
        or (_is_string(kind) and _is_string(target))
        or (_is_binary(kind) and (_is_binary(target) or pt.is_fixed_size_binary(target)))
        or (pt.is_duration(kind) and pt.is_duration(target))
        or (pt.is_time(kind) and pt.is_time(target))
    )


def _nested(literal: pa.Scalar, target: pa.DataType) -> pa.Scalar:
    """A list, struct or map with its parts in the target's types, where all of them fit exactly."""
    try:
        found = encode([literal.as_py()], pa.field("literal", target))[0]
    except (ValueMismatch, pa.ArrowException):
        return literal
    return literal if Counter(times_in(literal)) - Counter(times_in(found)) else found


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
            return _time_of_day(time_of_day_of_text(text), target)
        if pt.is_date(target):
            return pa.scalar(dt.date.fromisoformat(text), target)
        moment = moment_of_text(text)
    except ValueError as e:
        raise ExpressionError(
            f"the text {text!r} beside a {target} column is read as a time, but: {e}; write it as "
            "2024-05-01 or 2024-05-01T12:30:00"
        ) from e
    return _moment(moment, "us", target)


def _moment(number: int, unit: str, target: pa.DataType) -> pa.Scalar:
    """Nanoseconds since the epoch as a timestamp of the target's zone, in its unit where that holds them all."""
    for each in (target.unit, unit, "ms", "us", "ns"):
        found = of_nanoseconds(number, pa.timestamp(each, target.tz))
        if found is not None:
            return found
    raise ExpressionError(f"there is no timestamp of {number} ns since 1970")


def _time_of_day(number: int, target: pa.DataType) -> pa.Scalar:
    found = of_nanoseconds(number, target)
    return of_nanoseconds(number, pa.time64("ns")) if found is None else found
