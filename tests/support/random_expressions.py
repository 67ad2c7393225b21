"""Random expressions over the columns of a stream, of those that compile for Spark."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa

import penstock as ps
from penstock import col
from penstock.pushdown.scalars import scalar_sql

_TWO: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a % b,
    lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b, lambda a, b: a.fill_null(b), ps.fn.coalesce,
    lambda a, b: ps.fn.if_else(a == b, a, b), lambda a, b: ps.fn.if_else(b != 0, a, None), lambda a, b: ps.when(a > b, a).otherwise(b),
)  # fmt: skip
_ONE: tuple[Callable[[Any], Any], ...] = (
    lambda a: -a, abs, lambda a: ~a, lambda a: a.floor(), lambda a: a.ceil(), lambda a: a.trunc(), lambda a: a.round(), lambda a: a.sqrt(),
    lambda a: a.utf8_length(), lambda a: a.binary_length(), lambda a: a.ascii_lower(), lambda a: a.ascii_upper(),
    lambda a: a.year(), lambda a: a.month(), lambda a: a.day(), lambda a: a.hour(), lambda a: a.minute(), lambda a: a.second(),
)  # fmt: skip
_CASTS = (
    *(
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint64",
        "float32",
        "float64",
        "bool",
        "string",
        "large_string",
        "date32",
    ),
    *(
        "timestamp[s]",
        "timestamp[ms]",
        "timestamp[us]",
        "timestamp[us, tz=UTC]",
        "timestamp[ms, tz=UTC]",
        "timestamp[ms, tz=Asia/Kolkata]",
    ),
    *("decimal128(12, 3)", "decimal128(38, 0)", "decimal128(38, 18)"),
)
_COMPARED: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a == b, lambda a, b: a != b, lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b, lambda a, b: a >= b,
)  # fmt: skip
_ASKED: tuple[Callable[[Any], Any], ...] = (
    lambda a: a.is_null(), lambda a: a.is_valid(), lambda a: a.is_nan(), lambda a: a.is_finite(), lambda a: a.is_inf(),
    lambda a: a.is_null(nan_is_null=True), lambda a: a.starts_with("a"), lambda a: a.ends_with("\\"), lambda a: a.match_substring("̇"),
    lambda a: a.isin([1, 2]), lambda a: a.isin(["a", "ß"]), lambda a: a.between(-1, 2), lambda a: a.isin([0.0, 1.5]),
)  # fmt: skip


def expression(random: Random, schema: pa.Schema, depth: int = 3) -> Any:
    """An expression over some columns that compiles."""
    if depth == 0 or random.random() < 0.1:
        return col(random.choice(schema.names))
    given = expression(random, schema, depth - 1)
    for _ in range(12):
        made = _over(random, schema, given, depth - 1)
        if _compiles(made, schema):
            return made()
    return given


def _over(random: Random, schema: pa.Schema, given: Any, depth: int) -> Callable[[], Any]:
    chance = random.random()
    if chance < 0.5:
        function, other = random.choice(_TWO), _other(random, schema, depth)
        return lambda: function(given, other)
    if chance < 0.7:
        function = random.choice(_ONE)
        return lambda: function(given)
    if chance < 0.9:
        kind = random.choice(_CASTS)
        return lambda: given.cast(kind)
    asked = question(random, schema, depth)
    return lambda: asked


def _compiles(made: Callable[[], Any], schema: pa.Schema) -> bool:
    try:
        scalar_sql(made(), schema)
    except (ps.JobRejected, ps.ExpressionError, TypeError, ValueError, OverflowError):
        return False
    return True


def _other(random: Random, schema: pa.Schema, depth: int) -> Any:
    constants = [
        0,
        1,
        -3,
        2**31,
        0.0,
        -1.5,
        math.nan,
        "a",
        "ß",
        True,
        Decimal("1.25"),
        dt.date(1969, 12, 31),
        None,
    ]
    return (
        ps.lit(random.choice(constants))
        if random.random() < 0.35
        else expression(random, schema, depth)
    )


def question(random: Random, schema: pa.Schema, depth: int = 2) -> Any:
    """A condition."""
    if depth and random.random() < 0.25:
        left, right = question(random, schema, depth - 1), question(random, schema, depth - 1)
        return random.choice([left & right, left | right, left ^ right, ~left])
    given = expression(random, schema, depth)
    for _ in range(12):
        made = _asked(random, schema, given, depth)
        if _compiles(made, schema):
            return made()
    return given.is_valid()


def _asked(random: Random, schema: pa.Schema, given: Any, depth: int) -> Callable[[], Any]:
    if random.random() < 0.7:
        function, other = random.choice(_COMPARED), _other(random, schema, max(depth - 1, 0))
        return lambda: function(given, other)
    function = random.choice(_ASKED)
    return lambda: function(given)
