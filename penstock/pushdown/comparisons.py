"""Comparisons as ours in Spark's SQL: false for NaN (``!=``: true), exact between integers and floats.

To Spark NaN equals itself and is greater than all numbers, and an integer beside a float becomes one.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from penstock.pushdown.sql_text import NotCompiledError, cast
from penstock.pushdown.values import CAST_FIRST, Value, is_text
from penstock.rows.spark_types import DECIMAL_DIGITS_MAX

_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
COMPARISONS = frozenset(_MIRRORED)


def comparison(symbol: str, left: Value, right: Value) -> str:
    """``left symbol right``.

    Raises:
        NotCompiledError: values of these types do not compare alike.

    Example: a constant is no NaN.
        >>> import pyarrow as pa
        >>> x = Value("x", pa.float64())
        >>> comparison(">", x, Value("5D", pa.float64(), pa.scalar(5.0)))
        'CASE WHEN isnan(x) THEN FALSE ELSE x > 5D END'
    """
    if _is_long(left) and pt.is_floating(right.kind):
        return _against_float(symbol, left, right)
    if pt.is_floating(left.kind) and _is_long(right):
        return _against_float(_MIRRORED[symbol], right, left)
    _check_comparable(left, right)
    plain = f"{left.text} {_sql(symbol)} {right.text}"
    return _nan_aside(symbol, left, right, plain)


def _is_long(value: Value) -> bool:
    """Whether it may be an integer that is no float64."""
    return bool(pt.is_integer(value.kind) and value.kind.bit_width >= 64)


def _sql(symbol: str) -> str:
    return {"==": "=", "!=": "<>"}.get(symbol, symbol)


def _check_comparable(left: Value, right: Value) -> None:
    a, b = left.kind, right.kind
    if pt.is_null(a) or pt.is_null(b):
        return
    numbers = all(pt.is_integer(k) or pt.is_float32(k) or pt.is_float64(k) for k in (a, b))
    exact = all(pt.is_integer(k) or pt.is_decimal128(k) for k in (a, b)) and (
        a == b or _digits_together(a, b) <= DECIMAL_DIGITS_MAX
    )
    times = pt.is_timestamp(a) and pt.is_timestamp(b) and bool(a.tz) == bool(b.tz)
    same = a == b and (pt.is_boolean(a) or pt.is_date32(a) or pt.is_binary(a))
    if not (numbers or exact or times or same or (is_text(a) and is_text(b))):
        raise NotCompiledError(f"a comparison of {a} with {b}; {CAST_FIRST}")


def _digits_together(a: pa.DataType, b: pa.DataType) -> int:
    """How many digits a decimal has that holds values of both types, decimals or integers."""
    sizes = [
        (kind.precision - kind.scale, kind.scale) if pt.is_decimal(kind) else (20, 0)
        for kind in (a, b)
    ]
    return max(whole for whole, _ in sizes) + max(scale for _, scale in sizes)


def _nan_aside(symbol: str, left: Value, right: Value, plain: str) -> str:
    sides = [side for side in (left, right) if side.may_be_nan]
    if not sides or any(
        side.constant is not None and not side.constant.is_valid for side in (left, right)
    ):
        return f"({plain})"
    variable = [side for side in (left, right) if side.constant is None]
    unknown = " OR ".join(f"{side.text} IS NULL" for side in variable)
    # With one side alone that varies, and is the one that may be NaN: null is no NaN, and compares as null.
    is_single = len(variable) == 1 and sides == variable
    cases = [] if is_single or not unknown else [f"WHEN {unknown} THEN NULL"]
    nan = " OR ".join(f"isnan({side.text})" for side in sides)
    value = "TRUE" if symbol == "!=" else "FALSE"
    return f"CASE {' '.join([*cases, f'WHEN {nan} THEN {value}'])} ELSE {plain} END"


def _against_float(symbol: str, integer: Value, number: Value) -> str:
    """An integer of 64 bits and a float: as integers, since not every one of them is a float."""
    if not pt.is_signed_integer(integer.kind):
        raise NotCompiledError(f"a comparison of {integer.kind} with a float; {CAST_FIRST}")
    i, f = integer.text, cast(number.text, number.kind)
    is_less = {"<": "TRUE", "<=": "TRUE", ">": "FALSE", ">=": "FALSE", "==": "FALSE", "!=": "TRUE"}
    above = is_less[symbol]
    below = above if symbol in ("==", "!=") else {"TRUE": "FALSE", "FALSE": "TRUE"}[above]
    nan = "TRUE" if symbol == "!=" else "FALSE"
    match symbol:
        case "<" | ">=":
            near = f"{i} {symbol} ceil({f})"
        case "<=" | ">":
            near = f"{i} {symbol} floor({f})"
        case "==":
            near = f"rint({f}) = {f} AND {i} = floor({f})"
        case _:
            near = f"rint({f}) <> {f} OR {i} <> floor({f})"
    return (
        f"CASE WHEN {i} IS NULL OR {f} IS NULL THEN NULL WHEN isnan({f}) THEN {nan} "
        f"WHEN {f} >= 9.223372036854775807E18D THEN {above} "
        f"WHEN {f} < -9.223372036854775808E18D THEN {below} ELSE {near} END"
    )
