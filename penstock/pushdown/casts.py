"""Changes of type that both engines do alike; all others are refused.

Ours cut fractions and refuse what does not fit. Spark's ANSI casts do so between numbers, but round decimals.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as pt

from penstock.pushdown.sql_text import NotCompiledError, cast, failing, plain_kind
from penstock.pushdown.values import Value, is_text

_UNITS = ("s", "ms", "us")
_FROM_NUMBER = {"s": "timestamp_seconds", "ms": "timestamp_millis", "us": "timestamp_micros"}
_TO_NUMBER = {"s": "unix_seconds", "ms": "unix_millis", "us": "unix_micros"}


def change_of_type(value: Value, kind: pa.DataType, *, is_safe: bool) -> str:
    """A cast.

    Raises:
        NotCompiledError: the engines do it differently.
    """
    source, target = value.kind, plain_kind(kind)
    if source == target or (is_text(source) and is_text(target)):
        return value.text
    if pt.is_null(source):
        return cast("NULL", target)
    rule = next((rule for is_it, rule in _RULES if is_it(source)), None)
    text = None if rule is None else rule(value, target)
    if text is None or (is_safe and not _loses_nothing(source, target)):
        how = ", safe=True" if is_safe and text is not None else ""
        raise NotCompiledError(f"a cast from {source} to {target}{how}")
    return text


def _loses_nothing(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether a value that can be cast is the same behind it."""
    if pt.is_integer(source):
        return bool(pt.is_integer(target) or pt.is_decimal(target) or is_text(target))
    if pt.is_floating(source):
        return bool(pt.is_floating(target) and target.bit_width >= source.bit_width)
    return bool(pt.is_boolean(source) or (pt.is_decimal(source) and pt.is_decimal(target)))


def _of_integer(value: Value, target: pa.DataType) -> str | None:
    if pt.is_uint64(value.kind):
        return cast(value.text, target) if pt.is_int64(target) else None
    if pt.is_timestamp(target) and target.unit in _UNITS and pt.is_signed_integer(value.kind):
        instant = f"{_FROM_NUMBER[target.unit]}({cast(value.text, pa.int64())})"
        return cast(instant, target)
    if _is_number(target) or pt.is_boolean(target) or pt.is_decimal128(target):
        return cast(value.text, target)
    return cast(value.text, target) if is_text(target) else None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_signed_integer(kind) or pt.is_float32(kind) or pt.is_float64(kind))


def _of_float(value: Value, target: pa.DataType) -> str | None:
    if pt.is_int64(target):
        # Spark lets 2 ** 63 pass, and makes 2 ** 63 - 1 of it.
        error = failing(f"a {value.kind} is too large for an int64")
        whole = cast(value.text, target)
        return f"CASE WHEN {value.text} >= 9.223372036854775807E18D THEN {error} ELSE {whole} END"
    return cast(value.text, target) if _is_number(target) else None


def _of_decimal(value: Value, target: pa.DataType) -> str | None:
    is_wider = pt.is_decimal128(target) and target.scale >= value.kind.scale
    # Arrow computes a float32 in float32, digit by digit: not the nearest one.
    is_number = _is_number(target) and not pt.is_float32(target)
    if pt.is_signed_integer(target):
        # Spark makes smaller ones by way of a float.
        return cast(cast(value.text, pa.int64()), target)
    return cast(value.text, target) if is_wider or is_number else None


def _of_boolean(value: Value, target: pa.DataType) -> str | None:
    return cast(value.text, target) if _is_number(target) or is_text(target) else None


def _of_date(value: Value, target: pa.DataType) -> str | None:
    is_plain_time = pt.is_timestamp(target) and target.unit in _UNITS and not target.tz
    return cast(value.text, target) if is_plain_time else None


def _of_timestamp(value: Value, target: pa.DataType) -> str | None:
    kind = value.kind
    if kind.unit not in _UNITS:
        return None
    if pt.is_int64(target):
        return f"{_TO_NUMBER[kind.unit]}({cast(value.text, pa.timestamp('us', 'UTC'))})"
    if pt.is_date32(target) and kind.tz in (None, "UTC"):
        return cast(value.text, target)
    is_finer = (
        pt.is_timestamp(target)
        and target.unit in _UNITS
        and _UNITS.index(target.unit) >= _UNITS.index(kind.unit)
        and bool(target.tz) == bool(kind.tz)
    )
    return value.text if is_finer else None


_RULES: list[tuple[Callable[[pa.DataType], bool], Callable[[Value, pa.DataType], str | None]]] = [
    (pt.is_integer, _of_integer),
    (pt.is_floating, _of_float),
    (pt.is_decimal128, _of_decimal),
    (pt.is_boolean, _of_boolean),
    (pt.is_date32, _of_date),
    (pt.is_timestamp, _of_timestamp),
]
