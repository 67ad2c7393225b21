"""Aim: functions of Arrow that are wrong for some rows are right here. Method: against Python, whole and cut."""

from __future__ import annotations

import datetime as dt
import math
import sys
from decimal import Decimal
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.errors import ExpressionError
from penstock.expressions import BadRow

fn = ps.fn


def values(expression: ps.Expr, rows: pa.RecordBatch) -> list[Any]:
    return expression.compile(rows.schema)(rows).to_pylist()


DAYS = [None if n % 3 == 1 else dt.date(2024, 2, n % 28 + 1) for n in range(200)]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), pa.timestamp("s")])
@pytest.mark.parametrize("start", [0, 67])
def test_parts_of_days_among_nulls(kind: pa.DataType, start: int) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(DAYS, pa.date32()).cast(kind)], ["d"])[start:]
    days = DAYS[start:]
    parts = [day and {"year": day.year, "month": day.month, "day": day.day} for day in days]
    assert values(col("d").year_month_day(), rows) == parts
    weeks = [row and list(row.values()) for row in values(col("d").iso_calendar(), rows)]
    assert weeks == [day and list(day.isocalendar()) for day in days]


def test_parts_of_a_day_that_is_not_known() -> None:
    rows = pa.record_batch({"n": [1]})
    day = ps.lit(pa.scalar(None, pa.date32()))
    assert values(fn.coalesce(day.year_month_day(), day.year_month_day()), rows) == [None]


def test_texts_are_joined_row_by_row_where_none_is_there() -> None:
    rows = pa.record_batch(
        {
            "a": pa.array([None, "a", None, None]),
            "b": pa.array(["b", "c", None, None]),
            "by": pa.array(["-", "-", "-", None]),
        }
    )
    joined = [
        fn.binary_join_element_wise(col("a"), col("b"), sep, null_handling="skip")
        for sep in ("-", col("by"))
    ]
    assert values(joined[0], rows) == ["b", "a-c", "", ""]
    assert values(joined[1], rows) == ["b", "a-c", "", None]
    coded = rows.set_column(0, "a", rows["a"].dictionary_encode())
    assert values(joined[0], coded) == ["b", "a-c", "", ""]
    kept = fn.binary_join_element_wise(col("a"), col("b"), "-")
    assert values(kept, rows) == [None, "a-c", None, None]


def test_a_character_that_is_cut_in_two_is_no_text() -> None:
    rows = pa.record_batch({"s": ["ab", "é"]})
    cut = col("s").binary_replace_slice(start=1, stop=2, replacement=b"q")
    assert values(cut, rows[:1]) == ["aq"]
    with pytest.raises(BadRow, match="UTF8"):
        values(cut, rows)
    octets = pa.record_batch({"s": pa.array(["é".encode()])})
    assert values(cut, octets) == [b"\xc3q"]


@pytest.mark.parametrize("index", [1.0, "1", True])
def test_what_is_chosen_by_is_an_integer(index: object) -> None:
    rows = pa.record_batch({"i": [index], "a": [1], "b": [2]})
    with pytest.raises(ExpressionError, match=r"choose.*no integer"):
        fn.choose(col("i"), col("a"), col("b")).compile(rows.schema)


def test_a_list_beside_a_map_is_refused_as_an_expression() -> None:
    rows = pa.record_batch({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    with pytest.raises(ExpressionError):
        fn.coalesce(col("m"), ps.lit("a")).compile(rows.schema)


BOUNDS = [0, 1, 3, 50, -1, -2, -50, sys.maxsize, -sys.maxsize]


@pytest.mark.parametrize("texts", [["", "ab", None, "aéb💩d", "a"], [None]])
@pytest.mark.parametrize("step", [1, 2, -1, sys.maxsize, -sys.maxsize - 1])
def test_parts_of_texts_and_bytes(step: int, texts: list[str | None]) -> None:
    octets = [None if text is None else text.encode() for text in texts]
    rows = pa.record_batch({"s": pa.array(texts, pa.string()), "b": pa.array(octets, pa.binary())})
    for start, stop in product(BOUNDS, [None, *BOUNDS]):
        bounds = {"start": start, "stop": stop, "step": step}
        cut = slice(start, stop, step)
        assert values(col("s").utf8_slice_codeunits(**bounds), rows) == [
            t and t[cut] for t in texts
        ]
        assert values(col("b").binary_slice(**bounds), rows) == [o and o[cut] for o in octets]


ROUNDED = {
    "down": (4, -6),
    "up": (6, -4),
    "towards_zero": (4, -4),
    "towards_infinity": (6, -6),
    "half_down": (4, -6),
    "half_up": (6, -4),
    "half_towards_zero": (4, -4),
    "half_towards_infinity": (6, -6),
    "half_to_even": (4, -4),
    "half_to_odd": (6, -6),
}


@pytest.mark.parametrize("mode", ROUNDED)
def test_long_decimals_are_rounded_to_multiples_of_many_digits(mode: str) -> None:
    step = Decimal("12345678901.5")
    numbers = [5 * step / 2, -5 * step / 2, None, 2 * step, 2 * step + Decimal("0.01")]
    rows = pa.record_batch({"x": pa.array(numbers, pa.decimal128(38, 4))})
    found = values(fn.round_to_multiple(col("x"), step, round_mode=mode), rows)
    above = 3 if mode in ("up", "towards_infinity") else 2
    assert found == [*(n * step / 2 for n in ROUNDED[mode]), None, 2 * step, above * step]


def test_a_decimal_without_whole_digits_is_divided_downwards() -> None:
    numbers = [Decimal("-0.50"), Decimal("0.99"), None]
    rows = pa.record_batch({"x": pa.array(numbers, pa.decimal128(2, 2)), "n": pa.array([2, 7, 1])})
    assert values(col("x") // col("n"), rows) == [-1, 0, None]
    assert values(col("x") // 3, rows) == [-1, 0, None]


def test_a_quotient_of_all_digits_has_no_room_for_what_is_less_than_nothing() -> None:
    numbers = pa.array([Decimal("0.5"), None], pa.decimal256(50, 50))
    rows = pa.record_batch({"x": numbers, "y": pa.array([3, 1], pa.decimal256(25, 0))})
    assert values(col("x") // col("y"), rows) == [0, None]


def test_the_rest_of_decimals_and_integers() -> None:
    numbers = [Decimal("-0.500"), Decimal("123456789.125"), None, Decimal("14.000")]
    rows = pa.record_batch({"x": pa.array(numbers, pa.decimal128(12, 3)), "n": [7, -4, 1, 7]})
    rest = [n if n is None else n - 7 * math.floor(n / 7) for n in numbers]
    assert values(col("x") % 7, rows) == rest
    assert values(col("x") % col("n"), rows) == [
        Decimal("6.5"),
        Decimal("-2.875"),
        None,
        Decimal(0),
    ]
    with pytest.raises(BadRow, match="divide by zero"):
        values(col("x") % (col("n") - 7), rows)
