"""Functions of expressions that compile, one by one, into Spark's SQL.

What is not here is refused: it is computed otherwise there (cases of letters, regular expressions, logarithms of what has
none), or nobody has made sure that it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.pushdown.arithmetic import ARITHMETIC
from penstock.pushdown.sql_text import NotCompiledError, constant, plain_kind, text_constant
from penstock.pushdown.values import CAST_FIRST, Value, as_kind, is_computed, is_text

Options = Mapping[str, Any]
CompileCall = Callable[[Sequence[Value], pa.DataType, Options], str]
"""Arguments, type of the result and options in, SQL out."""

_UPPER, _LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
_IN_MAX = 1_000


def _only(options: Options, **expected: Any) -> None:
    """Checks that options say what they say by default.

    Raises:
        NotCompiledError: one does not.
    """
    for name, value in options.items():
        if name not in expected or value != expected[name]:
            raise NotCompiledError(f"its option {name}={value!r}")


def _is_null(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
    given = arguments[0]
    if options.get("nan_is_null") and pt.is_floating(given.kind):
        return f"({given.text} IS NULL OR isnan({given.text}))"
    return f"({given.text} IS NULL)"


def _is_valid(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
    _only(options)
    return f"({arguments[0].text} IS NOT NULL)"


def _of_floats(condition: str, of_others: str) -> CompileCall:
    """A question about floats; of integers the answer is known."""

    def compile_it(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
        _only(options)
        text, kind = arguments[0].text, arguments[0].kind
        if not (pt.is_floating(kind) or pt.is_signed_integer(kind)):
            raise NotCompiledError(f"a {kind}; {CAST_FIRST}")
        answer = condition.format(text) if pt.is_floating(kind) else of_others
        return f"CASE WHEN {text} IS NULL THEN NULL ELSE {answer} END"

    return compile_it


def _coalesce(arguments: Sequence[Value], kind: pa.DataType, options: Options) -> str:
    _only(options)
    return f"coalesce({', '.join(as_kind(value, kind) for value in arguments)})"


def _if_else(arguments: Sequence[Value], kind: pa.DataType, options: Options) -> str:
    _only(options)
    condition, then, otherwise = arguments
    return (
        f"CASE WHEN {condition.text} THEN {as_kind(then, kind)} "
        f"WHEN NOT {condition.text} THEN {as_kind(otherwise, kind)} END"
    )


def case_when(
    conditions: Sequence[Value], values: Sequence[Value], otherwise: Value | None, kind: pa.DataType
) -> str:
    """The value behind the first condition that is true."""
    cases = " ".join(
        f"WHEN {condition.text} THEN {as_kind(value, kind)}"
        for condition, value in zip(conditions, values, strict=True)
    )
    rest = "" if otherwise is None else f" ELSE {as_kind(otherwise, kind)}"
    return f"CASE {cases}{rest} END"


def _is_in(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
    given, values = arguments[0], options["value_set"]
    kind = plain_kind(values.type)
    if options.get("null_matching_behavior") not in (None, "match", "MATCH"):
        raise NotCompiledError("its option null_matching_behavior")
    if len(values) > _IN_MAX:
        raise NotCompiledError(f"{len(values)} values; join with a stream of them instead")
    if values.null_count:
        raise NotCompiledError("a null among its values; write (... | col('x').is_null())")
    if given.kind != kind and not (is_text(given.kind) and is_text(kind)):
        raise NotCompiledError(f"values of type {kind} beside a {given.kind}; {CAST_FIRST}")
    if pt.is_floating(kind) and any(math.isnan(value.as_py()) for value in values):
        raise NotCompiledError("a NaN among its values; write (... | col('x').is_nan())")
    if not len(values):
        return f"CASE WHEN {given.text} IS NULL THEN NULL ELSE FALSE END"
    return f"({given.text} IN ({', '.join(map(constant, values))}))"


def _rounded(text: str) -> CompileCall:
    """Floats made whole; of an integer it is the float of the same value."""

    def compile_it(arguments: Sequence[Value], kind: pa.DataType, options: Options) -> str:
        _only(options, ndigits=0, round_mode="half_to_even")
        if pt.is_signed_integer(kind):
            return arguments[0].text
        if not pt.is_floating(kind):
            raise NotCompiledError(f"a {kind}; cast it to float64 first")
        x = as_kind(arguments[0], kind, is_alone=True)
        return f"CAST({text.format(x=x)} AS {'FLOAT' if pt.is_float32(kind) else 'DOUBLE'})"

    return compile_it


_FLOOR = "(rint({x}) - CASE WHEN rint({x}) > {x} THEN 1D ELSE 0D END)"
_CEIL = "(rint({x}) + CASE WHEN rint({x}) < {x} THEN 1D ELSE 0D END)"


def _square_root(arguments: Sequence[Value], kind: pa.DataType, options: Options) -> str:
    _only(options)
    if not pt.is_float64(kind):
        raise NotCompiledError(f"a {kind}; cast it to float64 first")
    return f"sqrt({as_kind(arguments[0], kind, is_alone=True)})"


def _of_text(function: str) -> CompileCall:
    def compile_it(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
        _only(options)
        if not is_text(arguments[0].kind):
            raise NotCompiledError(f"a {arguments[0].kind}")
        return function.format(arguments[0].text)

    return compile_it


def _pattern(function: str) -> CompileCall:
    def compile_it(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
        _only({k: v for k, v in options.items() if k != "pattern"}, ignore_case=False)
        if not is_text(arguments[0].kind):
            raise NotCompiledError(f"a {arguments[0].kind}")
        return f"{function}({arguments[0].text}, {text_constant(options['pattern'])})"

    return compile_it


def _part_of_time(function: str, *, of_dates: bool = False) -> CompileCall:
    def compile_it(arguments: Sequence[Value], _: pa.DataType, options: Options) -> str:
        _only(options)
        given = arguments[0]
        is_time = pt.is_timestamp(given.kind) and given.kind.tz in (None, "UTC")
        if not (is_time or (of_dates and pt.is_date32(given.kind))):
            raise NotCompiledError(
                f"a {given.kind}; it is done for times in UTC and without a zone"
            )
        return f"CAST({function}({given.text}) AS BIGINT)"

    return compile_it


def _operator(name: str) -> CompileCall:
    compile_it = ARITHMETIC[name]

    def compile_call(arguments: Sequence[Value], kind: pa.DataType, options: Options) -> str:
        _only(options)
        return compile_it(arguments, kind)

    return compile_call


FUNCTIONS: dict[str, CompileCall] = {
    **{name: _operator(name) for name in ARITHMETIC},
    "and_kleene": _operator("&"),
    "or_kleene": _operator("|"),
    "invert": _operator("~"),
    "xor": _operator("^"),
    "is_null": _is_null,
    "is_valid": _is_valid,
    "is_nan": _of_floats("isnan({0})", "FALSE"),
    "is_finite": _of_floats("NOT (isnan({0}) OR abs({0}) = CAST('Infinity' AS DOUBLE))", "TRUE"),
    "is_inf": _of_floats("abs({0}) = CAST('Infinity' AS DOUBLE)", "FALSE"),
    "coalesce": _coalesce,
    "if_else": _if_else,
    "is_in": _is_in,
    "floor": _rounded(_FLOOR),
    "ceil": _rounded(_CEIL),
    "trunc": _rounded(f"CASE WHEN {{x}} < 0 THEN {_CEIL} ELSE {_FLOOR} END"),
    "round": _rounded("rint({x})"),
    "sqrt": _square_root,
    "utf8_length": _of_text("char_length({0})"),
    "binary_length": _of_text("octet_length({0})"),
    "ascii_lower": _of_text(f"translate({{0}}, '{_UPPER}', '{_LOWER}')"),
    "ascii_upper": _of_text(f"translate({{0}}, '{_LOWER}', '{_UPPER}')"),
    "starts_with": _pattern("startswith"),
    "ends_with": _pattern("endswith"),
    "match_substring": _pattern("contains"),
    "year": _part_of_time("year", of_dates=True),
    "month": _part_of_time("month", of_dates=True),
    "day": _part_of_time("day", of_dates=True),
    "hour": _part_of_time("hour"),
    "minute": _part_of_time("minute"),
    "second": _part_of_time("second"),
}
"""Functions by their names in expressions."""


def check_computed(value: Value) -> None:
    """Checks that something may be computed of a value.

    Raises:
        NotCompiledError: not of its type.
    """
    kind = value.kind
    if not (is_computed(kind) or pt.is_null(kind)):
        is_number = pt.is_integer(kind) or pt.is_floating(kind) or pt.is_temporal(kind)
        raise NotCompiledError(f"a value of type {kind}" + (f"; {CAST_FIRST}" if is_number else ""))
