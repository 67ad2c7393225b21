"""Aim: expressions mean what SQL and Python mean. Method: against DuckDB and Python, row by row, and on the
rows that only a part that is not needed would fail for."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
from penstock import col, when
from penstock.errors import ExpressionError
from penstock.expressions import BadRow, evaluate_each

fn = ps.fn

ROWS = pa.RecordBatch.from_pydict(
    {
        "a": pa.array([7, 8, 9, None, 5, -7], pa.int64()),
        "b": pa.array([2, 0, None, 3, 0, 2], pa.int64()),
        "s": pa.array(["1", "x", None, "4", "5", ""]),
        "l": pa.array([[1], [], None, [4, 5], [6], []], pa.list_(pa.int64())),
        "t": pa.array([True, False, None, True, False, None]),
    }
)


def values(expression: ps.Expr, rows: pa.RecordBatch = ROWS) -> list[Any]:
    return expression.compile(rows.schema)(rows).to_pylist()


QUOTIENT = col("a") // col("b")
NUMBER = col("s").cast("int64")
ITEM = col("l")[0]


@pytest.mark.parametrize(
    ("expression", "sql"),
    [
        (
            fn.if_else(col("b") > 0, QUOTIENT, None),
            "if(b is null, null, if(b > 0, floor(a / b), null))",
        ),
        (
            fn.if_else(col("b") == 0, -1, QUOTIENT),
            "if(b is null, null, if(b = 0, -1, floor(a / b)))",
        ),
        (when(col("b") > 0, QUOTIENT).otherwise(0), "case when b > 0 then floor(a / b) else 0 end"),
        (
            when(col("b").is_null(), -1).when(col("b") == 0, -2).otherwise(QUOTIENT),
            "case when b is null then -1 when b = 0 then -2 else floor(a / b) end",
        ),
        (
            when(col("b") == 0, -2).when(QUOTIENT > 2, 3).otherwise(4),  # conditions wait as well
            "case when b = 0 then -2 when floor(a / b) > 2 then 3 else 4 end",
        ),
        (
            when(fn.list_value_length(col("l")) > 0, ITEM).otherwise(None),
            "case when len(l) > 0 then l[1] end",
        ),
        (
            fn.if_else(col("s").match_substring_regex("^[0-9]+$"), NUMBER, -1),
            "case when s is null then null when regexp_matches(s, '^[0-9]+$') then s::bigint else -1 end",
        ),
        ((col("b") > 0) & (QUOTIENT > 2), "b > 0 and floor(a / b) > 2"),
        ((col("b") == 0) | (QUOTIENT > 2), "b = 0 or floor(a / b) > 2"),
        (fn.and_kleene(col("b") > 0, QUOTIENT > 2), "b > 0 and floor(a / b) > 2"),
        (fn.or_kleene(col("b") == 0, QUOTIENT > 2), "b = 0 or floor(a / b) > 2"),
        (fn.and_not_kleene(col("b") > 0, QUOTIENT > 2), "b > 0 and not floor(a / b) > 2"),
        (
            fn.choose((col("b") > 0).cast("int64"), 0, QUOTIENT),
            "if(b is null, null, if(b > 0, floor(a / b), 0))",
        ),
        (
            fn.if_else(col("b") > 0, fn.if_else(col("t"), QUOTIENT, QUOTIENT + 1), None),
            "if(b > 0, if(t is null, null, if(t, floor(a / b), floor(a / b) + 1)), null)",
        ),
        (~col("a").isin([7, 9]), "not a in (7, 9)"),
        (col("a").isin([7, 9]) | (col("b") == 0), "a in (7, 9) or b = 0"),
        (~col("s").isin(["x"]), "not s in ('x')"),
    ],
    ids=str,
)
def test_a_part_is_evaluated_on_the_rows_that_need_it(expression: ps.Expr, sql: str) -> None:
    connection = duckdb.connect()
    connection.register("rows", pa.Table.from_batches([ROWS]))
    expected = [row[0] for row in connection.execute(f"select {sql} from rows").fetchall()]
    assert values(expression) == expected
    for i in range(
        ROWS.num_rows
    ):  # one by one, too: a part that fails anywhere must not matter elsewhere
        assert values(expression, ROWS.slice(i, 1)) == expected[i : i + 1]


def test_a_coalesce_looks_further_only_where_all_before_are_null() -> None:
    rows = pa.RecordBatch.from_pydict({"a": [1, None, None], "b": [0, 2, None], "c": [0, 0, 5]})
    assert values(col("a").fill_null(10 // col("b")), rows.slice(0, 2)) == [1, 5]
    assert values(fn.coalesce(col("a"), 10 // col("b"), 10 // col("c")), rows) == [1, 5, 2]


def test_times_of_other_zones_and_units_are_not_taken_for_each_other() -> None:
    times = {"a": pa.timestamp("us", "Europe/Berlin"), "b": pa.timestamp("s", "UTC")}
    rows = pa.RecordBatch.from_pydict(
        {"a": pa.nulls(1, times["a"]), "b": pa.array([7], times["b"]), "n": [1]}
    )
    chosen = fn.choose(col("n"), col("a"), col("b"))
    for mixed in (fn.coalesce(col("a"), col("b")), col("b").fill_null(col("a")), chosen):
        with pytest.raises(ps.ExpressionError, match="are no times of one zone; cast one first"):
            mixed.compile(rows.schema)
    same = col("a").fill_null(col("b").cast("timestamp[us, tz=Europe/Berlin]"))
    assert values(same.cast("int64"), rows) == [7_000_000]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.decimal128(5, 2), pa.int64()),
        (pa.decimal128(5, 2), pa.decimal128(5, 1)),
        (pa.duration("s"), pa.duration("ms")),
        (pa.timestamp("s"), pa.timestamp("ms")),
        (pa.date32(), pa.timestamp("ms")),
        (pa.string(), pa.large_string()),
        (pa.float16(), pa.float32()),
        (pa.bool_(), pa.int8()),
        (pa.float64(), pa.bool_()),
    ],
)
def test_choose_does_not_take_values_of_one_type_for_those_of_another(
    first: pa.DataType, second: pa.DataType
) -> None:
    schema = pa.schema([("n", pa.int64()), ("a", first), ("b", second)])
    for arguments in ((col("a"), col("b")), (col("b"), col("a"))):
        with pytest.raises(ps.ExpressionError, match="are not chosen among; cast one first"):
            fn.choose(col("n"), *arguments).compile(schema)
    same = fn.choose(col("n"), col("a"), col("b").cast(first), None)
    assert same.compile(schema)(_one(schema)).type == first


def _one(schema: pa.Schema) -> pa.RecordBatch:
    """A row of nulls and a 0."""
    arrays = [pa.array([0])] + [pa.nulls(1, field.type) for field in list(schema)[1:]]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def test_a_part_that_fails_where_it_is_needed_names_the_row() -> None:
    compiled = fn.if_else(col("a") > 6, QUOTIENT, None).compile(ROWS.schema)
    with pytest.raises(BadRow, match="divide by zero") as failure:
        compiled(ROWS)
    assert failure.value.row_index == 1
    project = lambda rows: pa.RecordBatch.from_arrays([compiled(rows)], names=["q"])  # noqa: E731
    results, bad = evaluate_each(ROWS, project)
    assert [i for i, _ in bad] == [1]
    assert sum(r.num_rows for r in results) == ROWS.num_rows - 1


def test_what_no_row_needs_is_evaluated_for_none() -> None:
    rows = ROWS.slice(1, 1)
    for part in (
        fn.if_else(False, QUOTIENT, col("a")),
        fn.if_else(col("b") > 0, QUOTIENT, col("a")),
    ):
        assert values(part, rows) == [8]
    assert values(fn.if_else(col("b") > 0, QUOTIENT, col("a")), rows.slice(0, 0)) == []


def test_a_list_with_none_finds_nulls() -> None:
    assert values(col("a").isin([7, None])) == [True, False, False, True, False, False]


def test_values_that_the_column_cannot_hold_are_in_no_row() -> None:
    rows = pa.RecordBatch.from_pydict({"i": [1, 2**53 + 1, None], "f": [1.5, 2.0**53, None]})
    assert values(col("i").isin([1.0, 0.5, 1e300]), rows) == [True, False, None]
    assert values(col("f").isin([2**53 + 1, 2**53]), rows) == [False, True, None]


def test_decimals_are_found_in_lists_by_their_value() -> None:
    """Values with more digits than the column ended the job at rows that have many in front of the point."""
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([Decimal("1.23"), Decimal("99999999.99"), None], pa.decimal128(10, 2)),
            pa.array([1, 2**62, None], pa.int64()),
            pa.array([1.5, 2.0, None]),
        ],
        names=["d", "i", "f"],
    )
    sought = [Decimal("1.2300"), Decimal("1.234")]
    assert values(col("d").isin(sought), rows) == [True, False, None]
    assert values(col("d").isin([*sought, None]), rows) == [True, False, True]
    assert values(col("d").isin([1, 10**15]), rows) == [False, False, None]
    assert values(col("d").isin([1.23]), rows) == [True, False, None]
    assert values(col("i").isin([Decimal("1.0"), Decimal("1.5")]), rows) == [True, False, None]
    assert values(col("f").isin([Decimal("1.50"), Decimal(2)]), rows) == [True, True, None]


@pytest.mark.parametrize(
    ("digits", "divisor"), [((5, 0), (5, 3)), ((4, 1), (9, 7)), ((9, 4), (3, 1)), ((20, 0), (3, 3))]
)
def test_division_of_decimals_rounds_down(
    digits: tuple[int, int], divisor: tuple[int, int]
) -> None:
    """A quotient is cut at so many digits that -1.00001 was taken for -1, and the remainder had the wrong sign."""
    kinds = pa.decimal128(*digits), pa.decimal128(*divisor)
    unit = Decimal(10) ** -divisor[1]
    below = Decimal(10) ** min(divisor[0] - divisor[1], digits[0] - digits[1] - 1) - unit
    pairs = [
        (Decimal(a), b) for a in (-10, 10, -7, 7, 0) for b in (below, -below, unit, -unit) if b
    ]
    pairs += [(Decimal(10) ** (divisor[0] - divisor[1]) * sign, below) for sign in (1, -1) if below]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(side, kind) for side, kind in zip(zip(*pairs, strict=True), kinds, strict=True)],
        names=["a", "b"],
    )
    expected = [math.floor(Fraction(a) / Fraction(b)) for a, b in pairs]
    assert values(col("a") // col("b"), rows) == expected
    rests = [a - whole * b for whole, (a, b) in zip(expected, pairs, strict=True)]
    assert values(col("a") % col("b"), rows) == rests
    whole_numbers = pa.RecordBatch.from_arrays(
        [pa.array([-100, 100]), pa.array([Decimal("99.999")] * 2)], ["a", "b"]
    )
    assert values(col("a") // col("b"), whole_numbers) == [-2, 1]


def test_decimals_that_are_rounded_down_to_a_digit_more_are_not_0() -> None:
    """Arrow rounds -9.99 down to 0 where that has room for one digit and others follow: ``%`` was -9.99."""
    numbers = [Decimal("-9.99"), Decimal("9.99")]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(numbers, pa.decimal128(3, 2)), pa.array([Decimal(1)] * 2, pa.decimal128(1, 0))],
        ["a", "b"],
    )
    assert values(col("a") % col("b"), rows) == [Decimal("0.01"), Decimal("0.99")]
    with pytest.raises(BadRow, match="does not fit in precision"):
        values(col("a") // col("b"), rows)


@pytest.mark.parametrize(
    "wraps",
    [
        fn.add(col("x"), 1),
        fn.subtract(-col("x"), 2),
        fn.multiply(col("x"), 2),
        fn.power(col("x"), 2),
        fn.negate(-1 - col("x")),
        fn.divide(-1 - col("x"), -1),
        fn.shift_left(col("x"), 64),
        fn.shift_left(col("x"), 1),
        col("x").shift_left_checked(62),
        fn.shift_right(col("x"), -1),
        col("x").add(col("x")),
    ],
    ids=str,
)
def test_integers_do_not_wrap_under_the_names_of_arrows_functions(wraps: ps.Expr) -> None:
    rows = pa.RecordBatch.from_pydict({"x": [2**63 - 1]})
    with pytest.raises(BadRow, match=r"overflow|shift amount"):
        values(wraps, rows)


@pytest.mark.parametrize("bits", [8, 64])
def test_a_shift_to_the_left_loses_no_bit(bits: int) -> None:
    """It lost the high ones: the int8 64 was shifted to -128, and 127 to -2."""
    for kind, low, high in (
        (f"int{bits}", -(1 << bits - 1), (1 << bits - 1) - 1),
        (f"uint{bits}", 0, (1 << bits) - 1),
    ):
        numbers = [n for n in (0, 1, -1, 3, -3, 63, 64, 127, -64, -128, low, high) if low <= n]
        for places in range(bits - (low < 0)):
            expression = fn.shift_left(col("x"), places)
            for number in numbers:
                rows = pa.record_batch({"x": pa.array([None, number], pa.type_for_alias(kind))})
                if low <= number << places <= high:
                    assert values(expression, rows) == [None, number << places]
                else:
                    with pytest.raises(BadRow, match="overflow"):
                        values(expression, rows)


@pytest.mark.parametrize("parts", [2, 3, -2, -3, 7, 10, -(2**63), 2**63 - 1])
def test_a_duration_by_an_integer_is_the_nearest(parts: int) -> None:
    """It was cut: 7 s by 2 were 3 s."""
    numbers = [*range(-25, 26), 2**62 + 1, -(2**62) - 3, 2**63 - 1, 1 - 2**63, None]
    rows = pa.record_batch({"d": pa.array(numbers, pa.int64()).cast(pa.duration("us"))})
    expected = [None if n is None else round(Fraction(n, parts)) for n in numbers]
    assert values((col("d") / parts).cast("int64"), rows) == expected
    with pytest.raises(BadRow, match="divide by zero"):
        values(col("d") / 0, rows)


def test_zeros_are_equal_in_lists_and_every_nan_is_one() -> None:
    other_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    for kind in (pa.float32(), pa.float64()):
        floats = pa.array([0.0, -0.0, 1.5, None, math.nan, other_nan], pa.float64()).cast(kind)
        rows = pa.RecordBatch.from_pydict({"f": floats})
        for zero in (0.0, -0.0, 0):
            found = values(col("f").isin([zero]), rows)
            assert (
                found == values(col("f") == zero, rows) == [True, True, False, None, False, False]
            )
        assert values(col("f").isin([math.nan]), rows) == [False, False, False, None, True, True]
        index = fn.index_in(col("f"), value_set=[1.5, -0.0, math.nan])
        assert values(index, rows) == [1, 1, 0, None, 2, 2]
    with pytest.raises(ps.ExpressionError, match="is_in"):
        values(
            col("f").isin([0.0]), pa.RecordBatch.from_pydict({"f": pa.array([0.0]).cast("float16")})
        )


INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOAT = st.one_of(
    st.floats(),
    st.integers(-(2**64), 2**64).map(float),
    st.sampled_from([2.0**63, -(2.0**63), 2.0**64, 2.0**53, 0.5, -0.5]),
)
OPERATORS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
FUNCTIONS = (fn.equal, fn.not_equal, fn.less, fn.less_equal, fn.greater, fn.greater_equal)


@given(
    st.one_of(
        st.tuples(
            st.just(("int64", "double")),
            st.lists(st.tuples(INT64 | st.none(), FLOAT | st.none()), min_size=1),
        ),
        st.tuples(
            st.just(("uint64", "double")),
            st.lists(st.tuples(UINT64 | st.none(), FLOAT | st.none()), min_size=1),
        ),
        st.tuples(
            st.just(("int64", "uint64")),
            st.lists(st.tuples(INT64 | st.none(), UINT64 | st.none()), min_size=1),
        ),
    )
)
@example((("int64", "double"), [(2**53 + 1, 2.0**53), (2**63 - 1, 2.0**63), (None, 1e300)]))
@example(
    (("int64", "double"), [(2**53 + 1, math.nan), (-(2**63), -(2.0**63)), (3, 3.5), (-4, -3.5)])
)
@example((("int64", "uint64"), [(-1, 2**63), (2**63 - 1, 2**63), (None, 2**64 - 1), (-1, None)]))
def test_numbers_are_compared_exactly(
    drawn: tuple[tuple[str, str], list[tuple[int | None, float | int | None]]],
) -> None:
    kinds, pairs = drawn
    left = pa.array([a for a, _ in pairs], kinds[0])
    right = pa.array([b for _, b in pairs], kinds[1])
    rows = pa.RecordBatch.from_arrays([left, right], names=["x", "y"])
    for compare, function in zip(OPERATORS, FUNCTIONS, strict=True):
        there = [None if a is None or b is None else compare(a, b) for a, b in pairs]
        back = [None if a is None or b is None else compare(b, a) for a, b in pairs]
        assert values(compare(col("x"), col("y")), rows) == there
        assert values(compare(col("y"), col("x")), rows) == back
        assert values(function(col("x"), col("y")), rows) == there
        b = pairs[0][1]
        if b is not None:
            expected = [None if x is None else compare(x, b) for x, _ in pairs]
            assert values(compare(col("x"), ps.lit(pa.scalar(b, kinds[1]))), rows) == expected


@given(st.lists(st.tuples(st.none() | st.floats(), st.none() | st.floats()), min_size=1))
@example(
    [
        (1.0, 0.1),
        (-1.0, 0.1),
        (5.0, math.inf),
        (-5.0, math.inf),
        (1.0, 0.0),
        (0.0, 0.0),
        (-1.0, -0.0),
    ]
)
def test_division_of_floats_is_pythons_and_ieee_by_zero(
    pairs: list[tuple[float | None, float | None]],
) -> None:
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([a for a, _ in pairs], pa.float64()),
            pa.array([b for _, b in pairs], pa.float64()),
        ],
        names=["x", "y"],
    )

    def expected(function: Any, a: float | None, b: float | None) -> float | None:
        if a is None or b is None:
            return None
        if b == 0:
            if function is operator.mod or a == 0 or math.isnan(a):
                return math.nan
            return math.copysign(math.inf, a) * math.copysign(1, b)
        if (
            function is operator.floordiv
            and math.isinf(a)
            and not math.isnan(b)
            and not math.isinf(b)
        ):
            return None  # Python: NaN, numpy and IEEE: infinite; either is right
        return function(a, b)

    for function in (operator.floordiv, operator.mod):
        for got, (a, b) in zip(values(function(col("x"), col("y")), rows), pairs, strict=True):
            want = expected(function, a, b)
            if want is None:
                assert got is None or (a is not None and math.isinf(a))
            else:
                assert got == want or (math.isnan(got) and math.isnan(want)), (function, a, b)


_DIVIDED = [
    pa.int8(), pa.uint64(), pa.float32(), pa.decimal128(5, 2), pa.decimal256(50, 2), pa.duration("ms"),
    pa.timestamp("ms"), pa.date32(), pa.time32("ms"), pa.string(), pa.bool_(), pa.null(), pa.list_(pa.int64()),
]  # fmt: skip


@pytest.mark.parametrize("sign", ["/", "//", "%"])
def test_what_cannot_be_divided_is_refused_when_it_is_written(sign: str) -> None:
    divide = {"/": operator.truediv, "//": operator.floordiv, "%": operator.mod}[sign]
    for types in itertools.product(_DIVIDED, repeat=2):
        rows = pa.record_batch({"a": pa.nulls(2, types[0]), "b": pa.nulls(2, types[1])})
        try:
            quotient = divide(col("a"), col("b")).compile(rows.schema)
        except ExpressionError:
            continue
        assert quotient(rows).null_count == 2, types


def test_the_least_integer_modulo_minus_one_is_zero() -> None:
    for bits in (8, 16, 32, 64):
        kind = pa.int64() if bits == 64 else getattr(pa, f"int{bits}")()
        rows = pa.RecordBatch.from_pydict(
            {
                "a": pa.array([-(2 ** (bits - 1)), 7, -7, None], kind),
                "b": pa.array([-1, -1, 3, -1], kind),
            }
        )
        assert values(col("a") % col("b"), rows) == [0, 0, 2, None]
        assert values(col("a") % -1, rows) == [0, 0, 0, None]
        with pytest.raises(BadRow, match="divide by zero"):
            values(col("a") % (col("b") + 1), rows)
        with pytest.raises(BadRow):
            values(col("a") // col("b"), rows)


BIG = pa.RecordBatch.from_pydict(
    {
        "x": pa.array([2**62, 2**62 + 1, -(2**63), None, 3], pa.int64()),
        "f": pa.array([0.5, 1.0, None, 2.0, 0.25]),
    }
)


@pytest.mark.parametrize(
    ("expression", "python"),
    [
        (col("x") * 0.5, lambda x, f: x * 0.5),
        (1.0 - col("x"), lambda x, f: 1.0 - x),
        (col("x") + col("f"), operator.add),
        (col("x") ** 1.5 * 0, lambda x, f: x**1.5 * 0 if x > 0 else math.nan),
        (col("x") / col("f"), operator.truediv),
        (col("x") // col("f"), operator.floordiv),
        (col("x") % 0.75, lambda x, f: x % 0.75),
        (fn.max_element_wise(col("x"), col("f"), skip_nulls=False), lambda x, f: max(float(x), f)),
    ],
    ids=["*", "1-", "+", "**", "/", "//", "%", "max"],
)
def test_integers_of_64_bits_beside_floats_are_floats(
    expression: ps.Expr, python: Callable[[int, float], float]
) -> None:
    for x, f, found in zip(*BIG.to_pydict().values(), values(expression, BIG), strict=True):
        needed = (x, f) if "f" in str(expression) else (x, 0.0)
        expected = None if None in needed else python(*needed)
        assert found == expected or (found != found and expected != expected)


def test_a_choice_between_integers_and_floats_is_a_float() -> None:
    for choice in (
        when(col("f") > 0, col("x")).otherwise(0.5),
        fn.if_else(col("f") > 0, col("x"), 0.5),
        fn.coalesce(col("x"), col("f")),
    ):
        assert values(choice, BIG)[:2] == [2.0**62, 2.0**62]


@pytest.mark.parametrize("compute", [operator.add, operator.mul, operator.floordiv, operator.mod])
def test_a_null_beside_a_large_unsigned_number_is_null(
    compute: Callable[[ps.Expr, ps.Expr], ps.Expr],
) -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array([2**63, 6, None], pa.uint64()), pa.array([None, 3, 3], pa.int64())], ["u", "i"]
    )
    assert values(compute(col("u"), col("i")), rows) == [None, compute(6, 3), None]
    assert values(compute(col("i"), col("u")), rows) == [None, compute(3, 6), None]


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.date32()])
def test_a_time_that_has_no_text_is_an_error(kind: pa.DataType) -> None:
    """It came out as the text "<value out of range: 4503599627370496>", with a zone as that of the year 13611."""
    beyond, number = (10**8, pa.int32()) if pa.types.is_date32(kind) else (2**52, pa.int64())
    rows = pa.RecordBatch.from_arrays([pa.array([0, None, beyond], number).cast(kind)], ["t"])
    assert values(col("t").cast("string"), rows.slice(0, 2))[0].startswith("1970-01-01")
    with pytest.raises(BadRow, match=f"of {beyond} has no text"):
        values(col("t").cast("string"), rows)


@pytest.mark.parametrize(
    "kind", [pa.decimal128(4, 2), pa.decimal128(38, 36), pa.decimal256(40, 38)]
)
@pytest.mark.parametrize(
    "rounded",
    [
        lambda x: x.round(1),
        lambda x: x.round(0),
        lambda x: x.ceil(),
        lambda x: fn.round_to_multiple(x, multiple=Decimal("0.50")),
    ],
)
def test_a_decimal_that_is_rounded_beyond_its_digits_is_an_error(
    rounded: Callable[[ps.Expr], ps.Expr], kind: pa.DataType
) -> None:
    """Arrow gives 0 for it where another value follows that fits."""
    numbers = pa.array([Decimal("99.99"), Decimal("-0.01"), None, Decimal("1.10")], kind)
    rows = pa.RecordBatch.from_pydict({"d": numbers})
    with pytest.raises(BadRow, match="does not fit in precision") as failed:
        values(rounded(col("d")), rows)
    assert failed.value.row_index == 0
    fits = values(rounded(col("d")), rows.slice(1))
    assert fits[1] is None
    assert fits[0] == 0
    assert fits[2] in (Decimal("1.10"), Decimal(1), Decimal(2))


@pytest.mark.parametrize(
    "kind", [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
)
@pytest.mark.parametrize("safe", [False, True])
def test_an_integer_beyond_the_day_is_no_time(kind: pa.DataType, safe: bool) -> None:
    """Arrow takes it: 86,400 s read as 00:00, -1 s as 23:59:59, each beside the true one as another key."""
    units = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[kind.unit]
    number = pa.int32() if pa.types.is_time32(kind) else pa.int64()
    cast = col("n").cast(kind, safe=safe)
    for outside in (86_400 * units, -1):
        rows = pa.RecordBatch.from_pydict({"n": pa.array([0, None, outside], number)})
        assert cast.compile(rows.schema)(rows.slice(0, 2)).cast(number).to_pylist() == [0, None]
        with pytest.raises(BadRow, match=f"{outside} is no time of day") as failed:
            values(cast, rows)
        assert failed.value.row_index == 2
    last = pa.RecordBatch.from_pydict({"n": pa.array([86_400 * units - 1], number)})
    assert cast.compile(last.schema)(last).cast(number).to_pylist() == [86_400 * units - 1]
    with pytest.raises(ps.ExpressionError, match="is no time of day"):
        values(ps.lit(pa.scalar(-1, number)).cast(kind, safe=safe))


@pytest.mark.parametrize("kind", [pa.int16(), pa.int64(), pa.uint64()])
def test_a_safe_cast_of_an_integer_to_half_a_float_loses_nothing(kind: pa.DataType) -> None:
    """Arrow's own safe cast makes 2,049 2,048, and 1,000,000 infinity."""
    cast = col("n").cast("float16", safe=True)
    fits = pa.RecordBatch.from_pydict({"n": pa.array([2048, None, 0], kind)})
    assert values(cast, fits) == [2048.0, None, 0.0]
    for lost in [2049] if kind == pa.int16() else [2049, 1_000_000]:
        with pytest.raises(BadRow, match=f"{lost} would change|inf was truncated"):
            values(cast, pa.RecordBatch.from_pydict({"n": pa.array([lost], kind)}))


def test_half_a_float_is_cast_to_an_integer() -> None:
    rows = pa.RecordBatch.from_pydict({"f": pa.array([1.5, -1.5, None]).cast("float16")})
    assert values(col("f").cast("int8"), rows) == [1, -1, None]


def test_the_larger_of_binaries_is_that_of_the_row_in_a_part_of_a_batch() -> None:
    """Those of the first rows of the whole array were compared, whatever part of it was."""
    texts = [b"abc", None, b"ghi", b"aaa", b"zzz"]
    rows = pa.record_batch(
        {"x": pa.array(texts, pa.binary(3)), "y": pa.array(texts[::-1], pa.binary(3))}
    )
    for name, choose in (("max_element_wise", max), ("min_element_wise", min)):
        larger = getattr(col("x"), name)(col("y"), b"ccc")
        expected = [
            choose(each for each in (x, y, b"ccc") if each is not None)
            for x, y in zip(texts, texts[::-1], strict=True)
        ]
        for start in range(5):
            assert values(larger, rows.slice(start, 2)) == expected[start : start + 2]


def test_coded_values_are_compared_as_exactly_as_plain_ones() -> None:
    numbers = [1, 2**53 + 1, 2**63 - 1, None]
    coded = pa.array(numbers, pa.int64()).dictionary_encode()
    rows = pa.record_batch(
        {"x": coded, "u": pa.array([2**63] * 4, pa.uint64()), "f": [2.0**53] * 4}
    )
    assert values(col("x") < col("u"), rows) == [True, True, True, None]
    assert values(col("x") > col("f"), rows) == [False, True, True, None]
    decimals = pa.array([Decimal("0.1"), None], pa.decimal128(3, 1)).dictionary_encode()
    rows = pa.record_batch({"d": decimals, "f": [0.1, 0.1]})
    assert values(col("d") == col("f"), rows) == [False, None]
    assert values(col("d") == 0.1, rows) == [True, None]


@pytest.mark.parametrize("digits", [-1, 0, 2])
def test_long_decimals_are_rounded_and_divided_exactly(digits: int) -> None:
    """Arrow's own division of 256 bits is off by one for some: 99...9.99 was rounded down to 99...8."""
    numbers = [
        Decimal("9" * 50 + "." + "9" * 14),
        Decimal("-" + "9" * 32 + "." + "9" * 14),
        Decimal("2.5"),
    ]
    rows = pa.record_batch({"x": pa.array([*numbers, None], pa.decimal256(76, 14))})
    with localcontext(prec=300):
        digit = Decimal(1).scaleb(-digits)
        half_even = [number.quantize(digit, ROUND_HALF_EVEN) for number in numbers]
        assert values(col("x").round(digits), rows) == [*half_even, None]
        up = [number.quantize(digit, ROUND_CEILING) for number in numbers]
        assert values(col("x").round(digits, "up"), rows) == [*up, None]
        below = [number.to_integral_value(ROUND_FLOOR) for number in numbers]
        assert values(col("x").floor(), rows) == [*below, None]
    assert values(col("x").trunc(), rows.slice(2)) == [Decimal(2), None]
    rows = pa.record_batch(
        {"i": [2**63 - 1], "d": pa.array([Decimal("-0.5")], pa.decimal64(18, 3))}
    )
    assert values(col("i") // col("d"), rows) == [-2 * (2**63 - 1)]
    rows = pa.record_batch(
        {"i": [2**63 - 1, 7], "d": pa.array([Decimal(-4), None], pa.decimal256(29, 21))}
    )
    assert values(col("i") / col("d"), rows) == [Decimal(2**63 - 1) / -4, None]
    with pytest.raises(BadRow, match="divide by zero"):
        values(col("i") // (col("d") + 4), rows)


def test_decimals_by_zero_are_wrong_only_where_they_are_asked_for() -> None:
    kind = pa.decimal128(5, 2)
    rows = pa.record_batch(
        {"q": [0, 6], "d": pa.array([Decimal(0), Decimal("1.5")], kind), "zero": [0, 0]}
    )
    guarded = when(col("d") != 0, col("q") // col("d")).otherwise(0)
    assert values(guarded, rows) == [0, 4]
    for quotient in (col("q") // col("d"), col("q") % col("d")):
        with pytest.raises(BadRow, match=r"(?i)divide by zero"):
            values(quotient, rows)
    wide = pa.record_batch({"x": pa.array([Decimal("9" * 62), Decimal(1)], pa.decimal256(76, 14))})
    assert values(col("x").round(500), wide)[1] == 1
    with pytest.raises(BadRow, match=r"more digits|does not fit"):
        values(col("x").round(-1), wide)


def nearly_words(divisor: int) -> list[int]:
    """Numbers of which the quotient has words of 32 bits with almost only ones."""
    edges = [(divisor << bits) + more for bits in (32, 64) for more in (-divisor // 2, -2, -1, 0)]
    return [sign * edge for edge in edges if edge < 10**37 for sign in (1, -1)]


@pytest.mark.parametrize("kind", [pa.decimal128(38, 14), pa.decimal256(60, 14)], ids=str)
def test_decimals_of_words_of_ones_are_cut_and_rounded(kind: pa.DataType) -> None:
    """Arrow cuts 4294967295.99999999999999 to 4294967294."""
    numbers = [Decimal(number).scaleb(-14) for number in nearly_words(10**14)]
    rows = pa.RecordBatch.from_pydict({"x": pa.array(numbers, kind)})
    whole = [int(number) for number in numbers]
    assert values(col("x").cast("decimal(38, 0)"), rows) == whole
    assert values(col("x").cast("string").cast("decimal(38, 0)"), rows) == whole
    assert values(col("x").trunc(), rows) == whole
    assert values(col("x").floor(), rows) == [math.floor(number) for number in numbers]
    up = [math.floor(number + Decimal("0.5")) for number in numbers]
    assert values(col("x").round(0, "half_up"), rows) == up
    assert values(fn.round_to_multiple(col("x"), Decimal(1), "half_up"), rows) == up
    few = rows.slice(0, 8)
    assert values(col("x").cast("int64"), few) == whole[:8]
    with pytest.raises(ExpressionError, match="is rounded to as many digits"):
        values(fn.round_binary(col("x"), 1), rows)


def test_quotients_of_words_of_ones_are_right() -> None:
    """Arrow has 922337203.68541 for 922337203685477580.7 by 1000000000."""
    dividends = [Decimal("922337203685477580.7"), Decimal("-922337203685477580.7"), Decimal(1)]
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([*dividends, None], pa.decimal128(19, 1)),
            pa.array([Decimal(10**9)] * 4, pa.decimal128(17, 5)),
        ],
        ["a", "b"],
    )
    expected = [Decimal("922337203.6854775807"), Decimal("-922337203.6854775807"), Decimal("1E-9")]
    for quotient in (col("a") / col("b"), fn.divide(col("a"), col("b"))):
        assert values(quotient, rows) == [*expected, None]


@pytest.mark.parametrize(
    ("kind", "number", "digits", "wanted"),
    [
        (pa.decimal128(20, 18), "42.5", -3, "0"),
        (pa.decimal128(20, 18), "42.5", -1, "40"),
        (pa.decimal256(58, 58), "0.5", -2, "0"),
    ],
)
def test_long_decimals_are_rounded_to_more_than_they_hold(
    kind: pa.DataType, number: str, digits: int, wanted: str
) -> None:
    batch = pa.record_batch({"x": pa.array([Decimal(number)], kind)})
    [found] = col("x").round(ndigits=digits).compile(batch.schema)(batch).to_pylist()
    assert found == Decimal(wanted)
