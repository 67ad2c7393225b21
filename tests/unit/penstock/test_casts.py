"""Aim: casts are right where Arrow's own are not. Method: Python's values are the oracle."""

from __future__ import annotations

from decimal import Context, Decimal
from math import inf
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from penstock import col
from penstock.connectors.text_parsing import parse_csv
from penstock.errors import ExpressionError
from penstock.expressions import BadRow
from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed_column

KINDS = [(1, 0), (9, 3), (18, 0), (18, 2), (18, 18), (19, 0), (38, 0), (38, 10), (38, 38), (5, -3)]
EXACT = Context(prec=80)


def as_received(lists: pa.ListArray) -> pa.ListArray:
    """Lists without items as they come out of an exchange: there is no memory of items."""
    items = pa.Array.from_buffers(lists.type.value_type, 0, [None, None])
    buffers = lists.buffers()[:2]
    return pa.Array.from_buffers(lists.type, len(lists), buffers, children=[items])


def cast(values: list[Decimal | None], source: pa.DataType, target: Any, *, safe: bool) -> Any:
    rows = pa.RecordBatch.from_arrays([pa.array(values, source)], ["d"])
    return col("d").cast(target, safe=safe).compile(rows.schema)(rows).to_pylist()


@pytest.mark.parametrize(("precision", "scale"), KINDS)
def test_a_decimal_becomes_the_nearest_float(precision: int, scale: int) -> None:
    """Arrow's own cast gives 999999.9990000001 for 999999.999, and so another value than Spark's or Python's."""
    random, most = Random(precision * 100 + scale), 10**precision - 1
    units = [0, 1, -1, most, -most, *(random.randint(-most, most) for _ in range(300))]
    few = [number % 10 ** min(precision, 15) for number in units]
    for numbers in (units, few):
        values = [Decimal(number).scaleb(-scale, EXACT) for number in numbers]
        kind = pa.decimal128(precision, scale)
        found = cast([*values, None], kind, "float64", safe=False)
        assert found == [*map(float, values), None]


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    ("source", "target", "inside", "outside"),
    [
        ((9, 3), (38, 38), "0.125", "566471.825"),
        ((38, 0), (38, 18), "-12345678901234567890", "15741039017486249860865048160678632550"),
        ((1, 0), (38, 38), "0", "-7"),
    ],
)
def test_a_decimal_that_does_not_fit_is_an_error(
    source: tuple[int, int], target: tuple[int, int], inside: str, outside: str, safe: bool
) -> None:
    """Arrow's own safe cast wraps around: -7 came out as -0.19435266158123073073250785136463577088."""
    kinds = pa.decimal128(*source), pa.decimal128(*target)
    assert cast([Decimal(inside), None], *kinds, safe=safe) == [Decimal(inside), None]
    with pytest.raises(BadRow, match="does not fit in precision") as failed:
        cast([Decimal(inside), None, Decimal(outside)], *kinds, safe=safe)
    assert failed.value.row_index == 2


def test_a_safe_cast_of_a_decimal_loses_no_digit() -> None:
    kind = pa.decimal128(9, 3)
    assert cast([Decimal("1.500")], kind, pa.decimal128(9, 1), safe=True) == [Decimal("1.5")]
    assert cast([Decimal("0.125")], kind, "float64", safe=True) == [0.125]
    for target in (pa.decimal128(9, 1), pa.int64()):
        with pytest.raises(BadRow, match=r"truncat|would"):
            cast([Decimal("1.250")], kind, target, safe=True)


@pytest.mark.parametrize(
    ("target", "largest", "beyond"), [("float64", 1e308, "-1e400"), ("float32", 1e38, "1e39")]
)
def test_a_safe_cast_of_text_is_infinite_where_the_text_is(
    target: str, largest: float, beyond: str
) -> None:
    texts = [str(largest), None, "inf", "-Infinity"]
    expected = pa.array([largest, None, inf, -inf]).cast(target).to_pylist()
    assert cast(texts, pa.string(), target, safe=True) == expected
    assert cast([beyond, None], pa.string(), target, safe=False) == [inf * float(beyond), None]
    with pytest.raises(BadRow, match=f"the number '{beyond}' is beyond") as failed:
        cast([*texts, beyond], pa.string(), target, safe=True)
    assert failed.value.row_index == 4


@pytest.mark.parametrize("safe", [False, True])
def test_lists_become_lists_of_one_size(safe: bool) -> None:
    """Arrow reads items that null lists have not: its process ended by SIGSEGV where a batch had no others."""
    floats, pairs = pa.list_(pa.float32()), pa.list_(pa.float64(), 2)
    expression = col("x").cast(pairs, safe=safe)
    nulls = as_received(pa.array([None] * 5, floats))
    for column, expected in (
        (nulls, [None] * 5),
        (pa.array([[1, None], None, [3, 4], None], floats), [[1, None], None, [3, 4], None]),
        (pa.array([[9], None, [1, 2], None], floats).slice(1), [None, [1, 2], None]),
        (pa.array([], floats), []),
    ):
        rows = pa.RecordBatch.from_arrays([column], ["x"])
        assert expression.compile(rows.schema)(rows).to_pylist() == expected
    rows = pa.RecordBatch.from_pydict({"x": pa.array([[1, 2], [3]], floats)})
    with pytest.raises(BadRow, match="another size than") as failed:
        expression.compile(rows.schema)(rows)
    assert failed.value.row_index == 1


@pytest.mark.parametrize("unit", ["s", "ms"])
@pytest.mark.parametrize("target", ["date32", "date64"])
def test_a_time_beyond_the_days_that_there_are_is_an_error(unit: str, target: str) -> None:
    """Arrow keeps the lowest 32 bits: 10^18 s became a day in the year -2,362,217."""
    last = (86_400 << 31) * {"s": 1, "ms": 1000}[unit] - 1
    days = col("t").cast(target).cast("date32")
    rows = pa.record_batch({"t": pa.array([-1, None, -last - 1, last], pa.timestamp(unit))})
    found = days.compile(rows.schema)(rows)
    assert found.view(pa.int32()).to_pylist() == [-1, None, -(2**31), 2**31 - 1]
    for beyond in (last + 1, -last - 2):
        rows = pa.record_batch({"t": pa.array([0, beyond], pa.timestamp(unit))})
        with pytest.raises(BadRow, match="outside of the days") as failed:
            days.compile(rows.schema)(rows)
        assert failed.value.row_index == 1


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_a_hexadecimal_number_beyond_the_type_is_an_error(bits: int) -> None:
    """Arrow takes the first of its bits for the sign: "0xFF" was the int8 -1, in files of CSV, too."""
    random, kind = Random(bits), pa.int64() if bits == 64 else pa.type_for_alias(f"int{bits}")
    limit = 1 << bits - 1
    inside = [f"0x{random.randrange(limit):x}" for _ in range(20)] + ["-5", f"-{limit}", "017"]
    expected = [int(text, 16 if "x" in text else 10) for text in inside]
    declared = pa.field("d", kind)
    for beyond in (hex(limit), hex(2 * limit - 1).upper().replace("X", "x"), hex(limit + 3)):
        for source in (pa.string(), pa.large_string(), pa.binary()):
            texts = [text if source != pa.binary() else text.encode() for text in (*inside, beyond)]
            for safe in (False, True):
                assert cast([*texts[:-1], None], source, kind, safe=safe) == [*expected, None]
                with pytest.raises(
                    BadRow, match=f"the number '{beyond}' is beyond {kind}"
                ) as failed:
                    cast(texts, source, kind, safe=safe)
                assert failed.value.row_index == len(inside)
        with pytest.raises(ValueMismatch, match=f"the number '{beyond}' is beyond {kind}"):
            conformed_column(pa.array([*inside, beyond]), declared)
        with pytest.raises(pa.ArrowInvalid, match=f"the number '{beyond}' is beyond {kind}"):
            parse_csv("\n".join([*inside, beyond, ""]).encode(), ["d"], {"d": kind})
    found = parse_csv("\n".join([*inside, " -7 ", ""]).encode(), ["d"], {"d": kind})
    assert found.column(0).to_pylist() == [*expected, -7]


def test_milliseconds_become_whole_days() -> None:
    """Arrow takes the number as it is: a date that prints as a day and equals none."""
    day = 86_400_000
    milliseconds = [0, 1, day - 1, day, -1, -day, -day - 1, None]
    rows = pa.record_batch({"n": pa.array(milliseconds, pa.int64())})
    days = col("n").cast("date64")
    found = days.cast("int64").compile(rows.schema)(rows).to_pylist()
    assert found == [None if n is None else n // day * day for n in milliseconds]
    equal = (days == days.cast("date32")).compile(rows.schema)(rows).to_pylist()
    assert equal == [True] * 7 + [None]
    exact = col("n").cast("date64", safe=True).compile(rows.schema)
    assert exact(rows.slice(5, 1)).cast("int64").to_pylist() == [-day]
    with pytest.raises(BadRow, match="would change when it is cast to date64") as failed:
        exact(rows)
    assert failed.value.row_index == 1


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("target", ["time32[s]", "time32[ms]", "time64[us]", "time64[ns]"])
def test_the_time_of_day_of_any_time(unit: str, target: str) -> None:
    """In a finer unit it overflowed from the year 2262 on, and in a coarser one it was a second late far before 1970."""
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    random, day, finer = (
        Random(unit),
        86_400 * per_second[unit],
        per_second[target[7:-1]],
    )
    numbers = [
        0,
        -1,
        -1001,
        1 - day,
        2**62,
        -(2**62),
        *(random.randrange(2**63) for _ in range(50)),
    ]
    rows = pa.record_batch({"t": pa.array([*numbers, None], pa.int64()).cast(pa.timestamp(unit))})
    found = col("t").cast(target).compile(rows.schema)(rows)
    whole = found.cast("int32" if "32" in target else "int64").to_pylist()
    assert whole == [*(n % day * finer // per_second[unit] for n in numbers), None]


FEW_BITS = [pa.decimal32(9, 0), pa.decimal32(9, 2), pa.decimal32(9, 9), pa.decimal64(18, 3)]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("target", [*FEW_BITS, pa.decimal256(76, 70)], ids=str)
def test_what_is_too_long_for_a_decimal_is_an_error(target: pa.DataType, safe: bool) -> None:
    """Its lowest bits were kept: the least int32 was 0."""
    numbers = [0, 1, -1, 99, 429496730, 10**9, -(2**31), 2**62, 2**63 - 1, -(2**63), 10**6]
    for number in numbers:
        fits = abs(number) * 10**target.scale < 10**target.precision
        others = (pa.int64(), pa.string()) if target.scale < 70 else (pa.string(),)
        for kind in (*others, pa.decimal128(38, 0), pa.decimal256(40, 0)):
            value = str(number) if pa.types.is_string(kind) else number
            value = Decimal(number) if pa.types.is_decimal(kind) else value
            if fits:
                assert cast([value, None], kind, target, safe=safe) == [number, None]
            else:
                with pytest.raises(BadRow, match="cannot compute"):
                    cast([value], kind, target, safe=safe)
        if not fits:
            with pytest.raises(BadRow, match="cannot compute"):
                cast([float(number)], pa.float64(), target, safe=safe)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("9" * 38 + "." + "9" * 38, pa.decimal256(76, 38)),
        ("-" + "9" * 76, pa.decimal256(76, 0)),
        ("0.5", pa.decimal256(76, 76)),
        ("1e37", pa.decimal256(76, 38)),
        ("1e40", pa.decimal256(76, 38)),
        ("1e40", pa.decimal128(38, 38)),
        ("-1e+75", pa.decimal256(76, 2)),
        ("12.345", pa.decimal256(76, 76)),
    ],
)
def test_texts_become_the_decimals_that_they_are_or_an_error(
    text: str, target: pa.DataType
) -> None:
    """Arrow's own cast wraps what has more digits than 256 bits."""
    if Decimal(text).adjusted() < 76 - target.scale:
        assert cast([text, None], pa.string(), target, safe=True) == [Decimal(text), None]
    else:
        with pytest.raises(BadRow, match="digits before the point"):
            cast([text], pa.string(), target, safe=False)


def test_decimals_are_widened_as_far_as_they_fit_there() -> None:
    whole = pa.decimal256(76, 76)
    assert cast([Decimal("0.25")], pa.decimal32(9, 2), whole, safe=True) == [Decimal("0.25")]
    assert cast([Decimal("0.5")], pa.decimal256(76, 38), whole, safe=True) == [Decimal("0.5")]
    with pytest.raises(BadRow, match="does not fit"):
        cast([Decimal("1.25")], pa.decimal32(9, 2), whole, safe=True)
    with pytest.raises(ExpressionError, match="no room for 78 more digits"):
        cast([Decimal(100)], pa.decimal128(5, -2), whole, safe=True)


def test_floats_become_decimals_of_few_bits() -> None:
    """Arrow's own cast made garbage of what is near zero, and lost digits of a float32."""
    kind = pa.decimal64(18, 3)
    found = cast([2.5e-5, -1.5, None], pa.float64(), kind, safe=False)
    assert found == [Decimal("0.000"), Decimal("-1.500"), None]
    found = cast([60636.953], pa.float32(), pa.decimal32(9, 2), safe=False)
    assert found == [Decimal("60636.95")]


@pytest.mark.parametrize("kind", [pa.decimal32(9, 0), pa.decimal64(15, 4)], ids=str)
@pytest.mark.parametrize("target", [pa.int64(), pa.uint32(), pa.uint64()], ids=str)
@pytest.mark.parametrize("safe", [False, True])
def test_decimals_of_few_bits_become_wide_integers(
    kind: pa.DataType, target: pa.DataType, safe: bool
) -> None:
    """Arrow cuts the limits of the integer to as few bits, and finds 78875 beyond them."""
    values = [Decimal(78_875), None, Decimal(513_887_836)]
    assert cast(values, kind, target, safe=safe) == [78_875, None, 513_887_836]
    with pytest.raises(BadRow):
        cast([Decimal(2**33 if kind.precision > 9 else -1)], kind, pa.uint32(), safe=safe)
