"""Python's arithmetic in Spark's SQL: what overflows is an error, ``//`` goes down, ``%`` has the sign of the divisor.

Spark in ANSI mode checks integers itself. A float divided by zero is an error there, and infinite or NaN here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.types as pt

from penstock.pushdown.sql_text import NotCompiledError, cast
from penstock.pushdown.values import CAST_FIRST, Value, as_kind, is_text

Compile = Callable[[Sequence[Value], pa.DataType], str]
"""Arguments and the type of the result in, SQL out."""

_NAN = "CAST('NaN' AS DOUBLE)"
_DIGITS_OF_MINUS = 34
_SCALE_KEPT = 6
"""As many places behind the point stay when a difference has more than 38 digits."""


def _simple(symbol: str) -> Compile:
    def compile_it(arguments: Sequence[Value], kind: pa.DataType) -> str:
        left, right = arguments
        if is_text(kind) and symbol == "+":
            return f"concat({as_kind(left, kind)}, {as_kind(right, kind)})"
        _check_number(kind)
        if pt.is_decimal(kind):
            return cast(f"({_decimal(left)} {symbol} {_decimal(right)})", kind)
        return f"({as_kind(left, kind)} {symbol} {as_kind(right, kind)})"

    return compile_it


def _decimal(value: Value) -> str:
    """A side of decimal arithmetic; integers have as many digits as Arrow gives them."""
    if pt.is_decimal128(value.kind):
        return value.text
    digits = {8: 3, 16: 5, 32: 10, 64: 19}
    if not pt.is_signed_integer(value.kind):
        raise NotCompiledError(f"a {value.kind} beside a decimal; {CAST_FIRST}")
    return cast(value.text, pa.decimal128(digits[value.kind.bit_width], 0))


def _check_number(kind: pa.DataType) -> None:
    if not (
        pt.is_signed_integer(kind)
        or pt.is_float32(kind)
        or pt.is_float64(kind)
        or pt.is_decimal128(kind)
    ):
        raise NotCompiledError(f"arithmetic of {kind}; {CAST_FIRST}")


def _divide(arguments: Sequence[Value], kind: pa.DataType) -> str:
    left, right = arguments
    if not pt.is_floating(kind):
        raise NotCompiledError("/ of decimals; cast them to float64 first, if that is meant")
    if all(pt.is_signed_integer(v.kind) or pt.is_boolean(v.kind) for v in arguments):
        a, b = (cast(value.text, kind) for value in arguments)
    else:
        a, b = as_kind(left, kind), as_kind(right, kind)
    # Spark divides as float64, whatever the sides are.
    inside = cast(f"({a} / {b})", kind) if pt.is_float32(kind) else f"({a} / {b})"
    if right.constant is not None and right.constant.is_valid and right.constant.as_py():
        return inside
    # x ** -1 is infinite for a zero, with its sign: times a that is what IEEE says.
    by_zero = cast(f"({a} * pow({b}, -1D))", kind)
    return f"CASE WHEN {b} = 0 THEN {by_zero} ELSE {inside} END"


def _floor_divide(arguments: Sequence[Value], kind: pa.DataType) -> str:
    left, right = arguments
    if pt.is_signed_integer(kind):
        a, b = as_kind(left, kind), as_kind(right, kind)
        down = f"CASE WHEN {a} % {b} <> 0 AND ({a} % {b} < 0) <> ({b} < 0) THEN 1L ELSE 0L END"
        return cast(f"(({a} div {b}) - {down})", kind)
    a, b = _doubles(arguments, kind, "//")
    rest = f"({a} % {b})"
    down = f"CASE WHEN {rest} <> 0D AND ({rest} < 0) <> ({b} < 0) THEN 1D ELSE 0D END"
    inside = f"rint(({a} - {rest}) / {b} - {down})"
    return f"CASE WHEN {b} = 0 THEN {a} * pow({b}, -1D) ELSE {inside} END"


def _modulo(arguments: Sequence[Value], kind: pa.DataType) -> str:
    left, right = arguments
    if pt.is_signed_integer(kind):
        a, b = as_kind(left, kind), as_kind(right, kind)
        rest = f"({a} % {b})"
        return (
            f"CASE WHEN {rest} <> 0 AND ({rest} < 0) <> ({b} < 0) THEN {rest} + {b} ELSE {rest} END"
        )
    a, b = _doubles(arguments, kind, "%")
    rest = f"({a} % {b})"
    signed = (
        f"CASE WHEN {rest} <> 0D AND ({rest} < 0) <> ({b} < 0) THEN {rest} + {b} ELSE {rest} END"
    )
    return f"CASE WHEN {a} IS NULL THEN NULL WHEN {b} = 0 THEN {_NAN} ELSE {signed} END"


def _doubles(arguments: Sequence[Value], kind: pa.DataType, symbol: str) -> tuple[str, str]:
    if not pt.is_float64(kind):
        raise NotCompiledError(
            f"{symbol} of {kind}; cast both sides to float64 or to integers first"
        )
    a, b = (as_kind(value, kind) for value in arguments)
    return a, b


def _negate(arguments: Sequence[Value], kind: pa.DataType) -> str:
    _check_number(kind)
    return _minus(arguments[0].text, kind)


def _minus(text: str, kind: pa.DataType) -> str:
    """A number with the other sign; Spark's own minus rounds decimals to 34 digits, its difference does not."""
    if not pt.is_decimal(kind) or kind.precision <= _DIGITS_OF_MINUS:
        return f"(- {text})"
    if kind.scale > _SCALE_KEPT:
        raise NotCompiledError(
            f"a {kind}: Spark rounds those of more than {_DIGITS_OF_MINUS} digits, {_SCALE_KEPT} of them behind the point; "
            "cast it to fewer first"
        )
    return cast(f"({cast('0', pa.decimal128(38, kind.scale))} - {text})", kind)


def _absolute(arguments: Sequence[Value], kind: pa.DataType) -> str:
    _check_number(kind)
    text = arguments[0].text
    if pt.is_decimal(kind):
        return f"CASE WHEN {text} < 0 THEN {_minus(text, kind)} ELSE {text} END"
    return f"abs({text})"


def _bits_or_logic(symbol: str, word: str) -> Compile:
    def compile_it(arguments: Sequence[Value], kind: pa.DataType) -> str:
        left, right = (as_kind(value, kind) for value in arguments)
        if pt.is_boolean(kind):
            return f"({left} {word} {right})"
        _check_bits(kind)
        return f"({left} {symbol} {right})"

    return compile_it


def _invert(arguments: Sequence[Value], kind: pa.DataType) -> str:
    if pt.is_boolean(kind):
        return f"(NOT {arguments[0].text})"
    _check_bits(kind)
    return f"(~ {arguments[0].text})"


def _check_bits(kind: pa.DataType) -> None:
    if not pt.is_signed_integer(kind):
        raise NotCompiledError(f"bits of {kind}; {CAST_FIRST}")


ARITHMETIC: dict[str, Compile] = {
    "+": _simple("+"),
    "-": _simple("-"),
    "*": _simple("*"),
    "/": _divide,
    "//": _floor_divide,
    "%": _modulo,
    "neg": _negate,
    "abs": _absolute,
    "&": _bits_or_logic("&", "AND"),
    "|": _bits_or_logic("|", "OR"),
    "^": _bits_or_logic("^", "<>"),
    "~": _invert,
}
"""Operators by their names in expressions."""
