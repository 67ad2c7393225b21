"""Aim: what is computed of one value is the same on Spark to the last bit, or an error there as well.

Method: columns of the values that are odd for their type, and of each every cast, function and comparison that compiles; our
engine, row by row, is the oracle. Only the sums and means of ``test_engines.py`` may differ in their last digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from decimal import Context, Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
import pytest
from pyspark.errors import PySparkException

import penstock as ps
from penstock import col
from penstock.expressions import BadRow, Expr
from penstock.expressions.compiled import compile_expression
from penstock.pushdown.scalars import scalar_sql
from penstock.rows.spark_types import converted
from tests.support.engines import frame_of
from tests.support.examples import RUNS_ALL
from tests.support.random_tables import MICROS, TEXTS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.sampled(8)]

EXACT = Context(prec=80)
NAN, INF = math.nan, math.inf
FLOATS = [
    *(0.0, -0.0, NAN, INF, -INF, 0.5, -0.5, 1.5, -2.5, 0.1, 1 / 3, 5e-324, 1e300, -1e300, 1e22, 3.4028235677973366e38),
    *(2.0**53, 2.0**53 + 2, 2.0**63, -(2.0**63), 2.0**31 - 0.5, -(2.0**31) - 0.5, 127.9, -128.9, 16777217.0),
    *(0.49999999999999994, -0.49999999999999994, 4503599627370497.5, 2.2250738585072014e-308),
]  # fmt: skip
DAYS = [0, -1, 1, -719_162, 2_932_896, 19_000, -141_427, -141_428, 11_016, 59]
LEAP_AND_CALENDAR = [1_483_228_799_000_000, 951_782_400_000_000, -12_219_292_800_000_001]
"""Beside a leap second, on the 29th of February, and beside the first day of the Gregorian calendar."""


def integers(kind: pa.DataType) -> list[int]:
    low = -(2 ** (kind.bit_width - 1)) if pt.is_signed_integer(kind) else 0
    high = low + 2**kind.bit_width - 1
    near = [0, 1, 2, 3, 7, -1, -2, -7, 2**24 + 1, 2**31, 2**53 + 1, -(2**53) - 1]
    return [low, low + 1, high - 1, high, *(one for one in near if low < one < high)]


def decimals(kind: pa.DataType) -> list[Decimal]:
    random, most = Random(kind.precision), 10**kind.precision - 1
    units = [0, 1, -1, most, -most, *(random.randint(-most, most) for _ in range(12))]
    return [Decimal(number).scaleb(-kind.scale, EXACT) for number in units]


def times(unit: str, zone: str | None) -> pa.Array:
    per_unit = {"s": 10**6, "ms": 1000, "us": 1}[unit]
    numbers = [micros // per_unit for micros in (*MICROS, *LEAP_AND_CALENDAR)]
    return pa.array([*numbers, None], pa.int64()).cast(pa.timestamp(unit, zone))


INTEGERS = [*(pa.int8(), pa.int16(), pa.int32(), pa.int64()), *(pa.uint8(), pa.uint32(), pa.uint64())]  # fmt: skip
DECIMALS = [
    pa.decimal128(*digits)
    for digits in ((1, 0), (38, 38), (9, 3), (18, 18), (38, 0), (38, 10), (35, 6), (19, 0))
]
COLUMNS = {
    **{str(kind): pa.array([*integers(kind), None], kind) for kind in INTEGERS},
    **{str(kind): pa.array([*decimals(kind), None], kind) for kind in DECIMALS},
    "float32": pa.array([*FLOATS, None], pa.float32()),
    "float64": pa.array([*FLOATS, None]),
    "string": pa.array([*TEXTS, "%_", "[a-z].*", "\\", "\n", None]),
    "bool": pa.array([True, False, None]),
    "date32": pa.array([*DAYS, None], pa.int32()).cast(pa.date32()),
    "seconds": times("s", None),
    "millis": times("ms", "UTC"),
    "micros": times("us", "America/New_York"),
}
TARGETS = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint64", "float32", "float64", "string", "date32", "binary"),
    *("timestamp[s]", "timestamp[ms]", "timestamp[us]", "timestamp[ms, tz=UTC]", "timestamp[us, tz=UTC]"),
    *("decimal128(12, 3)", "decimal128(38, 0)", "decimal128(38, 18)", "decimal128(38, 38)", "decimal128(19, 0)"),
]  # fmt: skip
FUNCTIONS: list[Callable[[Expr], Expr]] = [
    *(lambda x: -x, abs, lambda x: ~x),
    *(lambda x: x.floor(), lambda x: x.ceil(), lambda x: x.trunc(), lambda x: x.round(), lambda x: x.sqrt()),
    *(lambda x: x.utf8_length(), lambda x: x.binary_length(), lambda x: x.ascii_lower(), lambda x: x.ascii_upper()),
    *(lambda x: x.year(), lambda x: x.month(), lambda x: x.day(), lambda x: x.hour(), lambda x: x.minute(), lambda x: x.second()),
    *(lambda x: x.is_null(nan_is_null=True), lambda x: x.is_nan(), lambda x: x.is_finite(), lambda x: x.is_inf()),
    lambda x: x.isin([0.0, -1.5, 2.5, 0.1, 0.5, 1e300, INF, -INF, 2.0**53, 3.0, 4.0, 5.0]),
    *(lambda x: x.isin(list(range(-2, 12))), lambda x: x.isin(list(TEXTS[:12]))),
]  # fmt: skip
CONSTANTS: list[Any] = [
    *(0, -1, 3, -3, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 0.0, -0.0, 0.5, -0.3, NAN, INF, 5e-324, 1e300, None),
    *("", "a", "ß", "\U0001f600", "\\", "%_", "[a-z].*", "1969-12-31", "1969-12-31T23:59:59.999999", Decimal("-0.001")),
]  # fmt: skip
OF_TWO: list[Callable[[Any, Any], Expr]] = [
    *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a % b),
    *(lambda a, b: a == b, lambda a, b: a != b, lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a & b, lambda a, b: a ^ b),
    *(lambda a, b: b - a, lambda a, b: b / a, lambda a, b: b // a, lambda a, b: b % a, lambda a, b: a.fill_null(b)),
    *(lambda a, b: a.starts_with(b), lambda a, b: a.ends_with(b), lambda a, b: a.match_substring(b)),
]  # fmt: skip


OF_TWO_COLUMNS: list[Callable[[Any, Any], Expr]] = [
    *OF_TWO,
    *(lambda a, b: a.coalesce(b), lambda a, b: ps.when(a.is_null(), b).otherwise(a), lambda a, b: (a < b).if_else(a, b)),
    *(lambda a, b: a | b, lambda a, b: (a == b) | (a < b), lambda a, b: (a + b) * a, lambda a, b: -(a - b)),
    *(lambda a, b: abs(a) % b, lambda a, b: (a // b) * b + a % b),
]  # fmt: skip
PAIRS = [
    *(("int8", "int8"), ("int64", "int64"), ("int32", "int64"), ("int64", "uint64"), ("int8", "float32"), ("int64", "float64")),
    *(("float64", "float64"), ("float32", "float64"), ("float32", "float32"), ("bool", "bool"), ("string", "string")),
    *(("decimal128(9, 3)", "decimal128(18, 18)"), ("decimal128(19, 0)", "decimal128(9, 3)"), ("decimal128(38, 10)", "int64")),
    *(("int32", "decimal128(35, 6)"), ("date32", "date32")),
    *(("seconds", "seconds"), ("uint8", "uint64")),
]  # fmt: skip
PAIRED_ROWS = 200


def expressions(schema: pa.Schema) -> list[Expr]:
    """All that compile of a column ``x``."""
    x = col("x")
    pairs = list(itertools.product(OF_TWO, CONSTANTS))
    made: list[Callable[[], Expr]] = [
        *((lambda t=target, s=safe: x.cast(t, safe=s)) for target in TARGETS for safe in (False, True)),
        *((lambda f=function: f(x)) for function in FUNCTIONS),
        *((lambda f=two, c=constant: f(x, c)) for two, constant in pairs[:: 1 if RUNS_ALL else 7]),
    ]  # fmt: skip
    return compiling(made, schema)


def of_two_columns(schema: pa.Schema) -> list[Expr]:
    """All that compile of columns ``x`` and ``y``."""
    made = [(lambda f=two: f(col("x"), col("y"))) for two in OF_TWO_COLUMNS]
    return compiling(made, schema)


def compiling(made: list[Callable[[], Expr]], schema: pa.Schema) -> list[Expr]:
    """Those that there are of such columns on Spark."""
    found = []
    for make in made:
        try:
            expression = make()
            if not isinstance(expression, Expr):  # "%" of a text is Python's own
                continue
            scalar_sql(expression, schema)
        except (ps.JobRejected, ps.ExpressionError, TypeError, ValueError, OverflowError):
            continue
        found.append(expression)
    return found


def numbers(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values as they compare: times as numbers, which Python has not all of, NaN and zeros as texts with their signs."""
    if pt.is_temporal(column.type):
        narrow = pt.is_date32(column.type)
        column = column.cast(pa.int32() if narrow else pa.int64())
    values = column.to_pylist()
    if pt.is_decimal(column.type):
        return [None if value is None else value.as_tuple() for value in values]
    return [repr(value + 0.0) if isinstance(value, float) else value for value in values]


def ours(expression: Expr, rows: pa.RecordBatch) -> dict[int, Any]:
    """Values by rows; rows that cannot be computed are left out."""
    compiled = compile_expression(expression, rows.schema)
    found = {}
    for number in range(rows.num_rows):
        try:
            [found[number]] = numbers(compiled(rows.slice(number, 1)))
        except BadRow:
            continue
    return found


def sparks(
    session: Any, directory: Path, table: pa.Table, given: list[Expr]
) -> dict[int, tuple[Any, ...]]:
    """Values of several expressions by rows."""
    texts = [scalar_sql(one, table.schema) for one in given]
    columns = [f"{text} AS `x{number}`" for number, text in enumerate(texts)]
    result = frame_of(session, table, directory).selectExpr("`row`", *columns).toArrow()
    kinds = [(f"x{number}", one.type(table.schema)) for number, one in enumerate(given)]
    result = converted(result, pa.schema([("row", pa.int64()), *kinds]), "the result")
    rows, *values = (numbers(column) for column in result.columns)
    return dict(zip(rows, zip(*values, strict=True), strict=True))


def is_beyond_microseconds(value: Any, kind: pa.DataType) -> bool:
    """Whether Spark has no such time, as docs/spark.md says."""
    per_unit = {"s": 10**6, "ms": 1000}
    is_coarse = pt.is_timestamp(kind) and kind.unit in per_unit and value is not None
    return is_coarse and not -(2**63) <= value * per_unit[kind.unit] < 2**63


def compare(session: Any, directory: Path, table: pa.Table, given: list[Expr]) -> int:
    """How many values of expressions of a table's columns were compared; all were equal. Rows that are an error are left
    out."""
    [rows] = table.to_batches()
    groups: dict[tuple[int, ...], list[tuple[Expr, dict[int, Any]]]] = {}
    compared = 0
    for expression in given:
        kind = expression.type(table.schema)
        known = {
            row: value
            for row, value in ours(expression, rows).items()
            if not is_beyond_microseconds(value, kind)
        }
        groups.setdefault(tuple(known), []).append((expression, known))
    for good, several in groups.items():
        if not good:
            continue
        found = sparks(session, directory, table.take(list(good)), [one for one, _ in several])
        for number, (expression, known) in enumerate(several):
            wrong = {
                row: (value, found[row][number])
                for row, value in known.items()
                if found[row][number] != value
            }
            first = table.slice(next(iter(wrong), 0), 1).to_pylist
            assert not wrong, f"{expression!r} of {first()}: {wrong}"
            compared += len(known)
    return compared


@pytest.mark.parametrize("name", COLUMNS)
def test_values_are_the_same_to_the_last_bit(session: Any, tmp_path: Path, name: str) -> None:
    column = COLUMNS[name]
    table = pa.table({"x": column, "row": range(len(column))})
    assert compare(session, tmp_path, table, expressions(table.schema)) > 30


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_values_of_two_columns_are_the_same_to_the_last_bit(
    session: Any, tmp_path: Path, left: str, right: str
) -> None:
    xs, ys = COLUMNS[left], COLUMNS[right]
    met = [*itertools.product(range(len(xs)), range(len(ys)))]
    met = Random(f"{left} {right}").sample(met, min(len(met), PAIRED_ROWS))
    table = pa.table(
        {
            "x": xs.take([row for row, _ in met]),
            "y": ys.take([row for _, row in met]),
            "row": range(len(met)),
        }
    )
    given = of_two_columns(table.schema)
    assert compare(session, tmp_path, table, given) >= len(met)
    [rows] = table.to_batches()
    for expression in given:
        found = ours(expression, rows)
        bad = next((row for row in range(len(met)) if row not in found), None)
        if bad is not None:
            with pytest.raises(PySparkException):
                sparks(session, tmp_path, table.slice(bad, 1), [expression])
