"""Aim: decimals and floats are compared exactly. Method: Python's decimals are the oracle."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import col

fn = ps.fn


def values(expression: ps.Expr, rows: pa.RecordBatch) -> list[Any]:
    return expression.compile(rows.schema)(rows).to_pylist()


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def exactly(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    """Python's answer, which has none where a decimal is ordered beside NaN."""
    if math.isfinite(left) and math.isfinite(right):
        return compare(left, right)
    return compare(float(left), float(right))


DECIMALS = st.builds(
    lambda units, scale: Decimal(units).scaleb(-scale),
    st.integers(-(10**18), 10**18) | st.integers(-300, 300),
    st.integers(0, 6),
)
FLOATS_NEAR = DECIMALS.map(float) | st.floats(width=64) | st.integers(-(2**70), 2**70).map(float)


@given(st.lists(st.tuples(DECIMALS, FLOATS_NEAR), min_size=1, max_size=20))
@settings(max_examples=30)
@example([(Decimal("0.1"), 0.1), (Decimal("0.5"), 0.5), (Decimal("1.23"), math.nan)])
@example([(Decimal(2**53 + 1), 2.0**53), (Decimal(-1), -math.inf), (Decimal("0.3"), 0.1 + 0.2)])
def test_decimals_are_compared_with_floats_exactly(pairs: list[tuple[Decimal, float]]) -> None:
    """They were compared as floats: 2**53 + 1 was equal to 2.0**53, and 0.1 to the float that is a little more."""
    decimals = pa.array([*(a for a, _ in pairs), None, Decimal(1)], pa.decimal128(38, 6))
    floats = pa.array([*(b for _, b in pairs), 1.0, None])
    rows = pa.RecordBatch.from_arrays([decimals, floats], ["d", "f"])
    for compare in COMPARISONS:
        expected = [exactly(compare, a, b) for a, b in pairs]
        assert values(compare(col("d"), col("f")), rows) == [*expected, None, None]
        swapped = [exactly(compare, b, a) for a, b in pairs]
        assert values(compare(col("f"), col("d")), rows) == [*swapped, None, None]
        one = pa.scalar(pairs[0][0], decimals.type)
        assert values(compare(ps.lit(one), col("f")), rows) == [
            *(exactly(compare, pairs[0][0], b) for _, b in pairs), exactly(compare, pairs[0][0], 1.0), None
        ]  # fmt: skip
    halves = rows.set_column(1, "f", floats.cast(pa.float32(), safe=False))
    narrow = halves.column(1).to_pylist()
    assert values(col("d") < col("f"), halves) == [
        *(exactly(operator.lt, a, b) for (a, _), b in zip(pairs, narrow, strict=False)), None, None
    ]  # fmt: skip


def test_a_float_constant_beside_decimals_is_the_number_that_is_written() -> None:
    amounts = [Decimal("0.10"), Decimal("1.23"), Decimal("-5.00"), None]
    rows = pa.RecordBatch.from_arrays([pa.array(amounts, pa.decimal128(10, 2))], ["d"])
    for constant in (0.1, 1.23, -5.0, 1.234, 1e300, -1e-300, math.inf, math.nan):
        is_number = math.isfinite(constant)
        written = Decimal(repr(constant)) if is_number else constant
        for compare in COMPARISONS:
            expected = [None if n is None else exactly(compare, n, written) for n in amounts]
            assert values(compare(col("d"), constant), rows) == expected
            assert values(compare(ps.lit(constant), col("d")), rows) == [
                None if n is None else exactly(compare, written, n) for n in amounts
            ]
        is_in = [None if n is None else n == written for n in amounts]
        assert values(col("d").isin([constant]), rows) == is_in
        assert values(col("d").isin([7.5, constant]), rows) == is_in
    assert values(col("d").between(0.1, 1.23), rows) == [True, True, False, None]
    assert values(fn.index_in(col("d"), [1e300, 0.125, 1.23, 0.1]), rows) == [3, 2, None, None]
    for kind in (pa.float64(), pa.float32()):
        floats = pa.RecordBatch.from_arrays([pa.array([0.1, 0.5], kind)], ["f"])
        for exact, expected in (("0.1", [False, False]), ("0.5", [False, True])):
            assert values(col("f") == Decimal(exact), floats) == expected
            assert values(col("f").isin([Decimal(exact)]), floats) == expected


def test_each_decimal_is_settled_once_and_a_dictionary_of_them_is_one_of_decimals() -> None:
    counted = [Decimal(n % 7) / 10 for n in range(50)]
    for kind in (pa.decimal32(3, 1), pa.decimal128(9, 1), pa.decimal256(50, 1)):
        decimals = pa.array(counted, kind)
        rows = pa.record_batch({"d": decimals, "f": pa.array(map(float, counted))})
        for compare in COMPARISONS:
            exact = [compare(d, float(d)) for d in counted]
            assert values(compare(col("d"), col("f")), rows) == exact
    coded = pa.array([Decimal("0.10")], pa.decimal128(9, 2)).dictionary_encode()
    assert values(col("d") == 0.1, pa.record_batch({"d": coded})) == [True]
    whole = pa.record_batch({"i": pa.array([3])})
    assert values(col("i").isin([Decimal(10) ** 29, Decimal(3)]), whole) == [True]


def test_a_constant_that_is_computed_is_the_decimal_that_it_is_written_as() -> None:
    """``0.1`` was, and ``-ps.lit(-0.1)`` was not."""
    rows = pa.record_batch({"d": pa.array([Decimal("0.10"), None], pa.decimal128(9, 2))})
    for constant in (
        ps.lit(0.1),
        -ps.lit(-0.1),
        ps.lit(0.1) * 1,
        fn.if_else(True, 0.1, 0.2),
        fn.coalesce(None, 0.1),
    ):
        assert values(col("d") == constant, rows) == [True, None]
        assert values(constant >= col("d"), rows) == [True, None]
    for other in (
        ps.lit(0.1).cast("float64"),
        ps.lit(0.1) + 0.2 - 0.2,
        ps.lit(0.1).cast("float32"),
    ):
        assert values(col("d") == other, rows) == [False, None]
