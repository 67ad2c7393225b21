"""Expressions: values against DuckDB, typing errors in the user's words, protobuf round trip."""

from __future__ import annotations

import copy
import datetime as dt
import functools
import itertools
import operator
import pickle
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.message_bounds import check_message
from penstock.errors import BadRecord, ExpressionError
from penstock.expressions import BadRow, Expr, col, evaluate_each, fn, lit, when
from penstock.expressions.nodes import plain_column
from penstock.expressions.wire import OPTIONS_MAX
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from tests.support.examples import examples

BATCH = pa.record_batch(
    {
        "x": pa.array([7, -7, None, 3]),
        "y": pa.array([2.5, -1.5, 0.0, None]),
        "s": pa.array(["a", "5", None, "d"]),
        "i8": pa.array([1, 2, 3, 100], pa.int8()),
        "u": pa.array([1, 2, 3, None], pa.uint16()),
        "f32": pa.array([0.5, 1.5, None, 2.0], pa.float32()),
        "t": pa.array([0, 1000, None, 86_400_000], pa.timestamp("ms", "UTC")),
        "d": pa.array([0, 1, None, 3], pa.date32()),
        "l": pa.array([[1], [2, 3], None, [4]]),
        "st": pa.array([{"a": 1, "b": "z"}, None, {"a": 3, "b": None}, {"a": 4, "b": "q"}]),
        "m": pa.array([[("k", 1)], [], None, [("k", 2)]], pa.map_(pa.string(), pa.int64())),
        "c": pa.array(["u", "v", "u", None]).dictionary_encode(),
        "b": pa.array([True, False, None, True]),
        "dec": pa.array([Decimal("1.25"), Decimal("-2.50"), None, Decimal("9.99")]),
        EVENT_TIME: pa.array([1, 2, 3, 4]),
    }
)
UTC = dt.UTC


def values(expression: Expr, batch: pa.RecordBatch = BATCH) -> list[object]:
    compiled = expression.compile(batch.schema)
    result = compiled(batch)
    result.validate(full=True)
    assert len(result) == batch.num_rows
    assert result.type == compiled.type == expression.type(batch.schema)
    again = Expr.from_proto(
        graph_pb2.Expression.FromString(expression.to_proto().SerializeToString())
    )
    assert str(again) == str(expression)
    assert again.compile(batch.schema)(batch).equals(result) or "nan" in str(result)
    computed: list[object] = result.to_pylist()
    return computed


CASES: list[tuple[Expr, str, list[object]]] = [
    (col("x") + 1, "x + 1", [8, -6, None, 4]),
    (1 - col("x"), "1 - x", [-6, 8, None, -2]),
    (col("x") * 0.5 > 1, "x * 0.5 > 1", [True, False, None, True]),
    (col("x") / 2, "x / 2", [3.5, -3.5, None, 1.5]),
    (col("x") / 0, "x / 0", [float("inf"), float("-inf"), None, float("inf")]),
    (col("x") // 2, "x // 2", [3, -4, None, 1]),
    (col("x") % 3, "x % 3", [1, 2, None, 0]),
    (col("x") % -3, "x % -3", [-2, -1, None, 0]),
    (col("u") // 2, "u // 2", [0, 1, 1, None]),
    (col("u") % 2, "u % 2", [1, 0, 1, None]),
    (col("y") // 1, "y // 1", [2.0, -2.0, 0.0, None]),
    (col("y") % 2, "y % 2", [0.5, 0.5, 0.0, None]),
    (-(col("x") + 1), "-(x + 1)", [-8, 6, None, -4]),
    (abs(col("x")), "abs(x)", [7, 7, None, 3]),
    (col("x") ** 2, "x ** 2", [49, 49, None, 9]),
    (
        (col("x") > 0) & (col("y") > 0) | ~col("b"),
        "(x > 0) & (y > 0) | ~b",
        [True, True, None, None],
    ),
    (col("x") & 3, "x & 3", [3, 1, None, 3]),
    (~col("i8"), "~i8", [-2, -3, -4, -101]),
    (col("b") ^ True, "b ^ True", [False, True, None, False]),
    (col("s") + "_" + col("s"), "s + '_' + s", ["a_a", "5_5", None, "d_d"]),
    ("p" + col("s"), "'p' + s", ["pa", "p5", None, "pd"]),
    (col("y").cast("int64"), "cast(y, int64)", [2, -1, 0, None]),
    (col("dec").cast("int32"), "cast(dec, int32)", [1, -2, None, 9]),
    (
        col("dec").cast("decimal128(10, 1)"),
        "cast(dec, decimal128(10, 1))",
        [Decimal("1.2"), Decimal("-2.5"), None, Decimal("9.9")],
    ),
    (col("x").cast("decimal128(3, 1)"), "cast(x, decimal128(3, 1))", [Decimal("7.0"), Decimal("-7.0"), None, Decimal("3.0")]),
    (col("t").cast("int64"), "cast(t, int64)", [0, 1000, None, 86_400_000]),
    (col("x").is_null(), "is_null(x)", [False, False, True, False]),
    (col("x").is_not_null(), "is_valid(x)", [True, True, False, True]),
    (col("x").fill_null(0), "coalesce(x, 0)", [7, -7, 0, 3]),
    (col("x").isin([7, 3]), "is_in(x, value_set=[7, 3])", [True, False, None, True]),
    (col("i8").isin([1, 1000]), "is_in(i8, value_set=[1, 1000])", [True, False, False, False]),
    (
        col("t").isin(["1970-01-02"]),
        "is_in(t, value_set=['1970-01-02'])",
        [False, False, None, True],
    ),
    (col("x").between(0, 5), "(x >= 0) & (x <= 5)", [False, False, None, True]),
    (col("y").round(0), "round(y, ndigits=0)", [2.0, -2.0, 0.0, None]),
    (col("y").round(ndigits=0, round_mode="half_up"), "round(y, ndigits=0, round_mode='half_up')", [3.0, -1.0, 0.0, None]),
    (col("s").utf8_upper(), "utf8_upper(s)", ["A", "5", None, "D"]),
    (
        col("s").replace_substring(pattern="a", replacement="b"),
        "replace_substring(s, pattern='a', replacement='b')",
        ["b", "5", None, "d"],
    ),
    (col("t").strftime("%Y-%j"), "strftime(t, format='%Y-%j')", ["1970-001", "1970-001", None, "1970-002"]),
    (col("t").year(), "year(t)", [1970, 1970, None, 1970]),
    (col("t") > "1970-01-01T00:00:00.5", "t > '1970-01-01T00:00:00.5'", [False, True, None, True]),
    (col("d") >= "1970-01-02", "d >= '1970-01-02'", [False, True, None, True]),
    (fn.if_else(col("x") > 0, "p", "n"), "if_else(x > 0, 'p', 'n')", ["p", "n", None, "p"]),
    (
        when(col("x") > 5, "big").when(col("x") > 0, "small").otherwise("neg"),
        "when(x > 5, 'big').when(x > 0, 'small').otherwise('neg')",
        ["big", "neg", "neg", "small"],
    ),
    (col("l")[0], "l[0]", [1, 2, None, 4]),
    (col("l").list_value_length(), "list_value_length(l)", [1, 2, None, 1]),
    (col("st")["a"], "st['a']", [1, None, 3, 4]),
    (col("st").field("b"), "st['b']", ["z", None, None, "q"]),
    (col("m")["k"], "m['k']", [1, None, None, 2]),
    (col("c") == "u", "c == 'u'", [True, False, True, None]),
    (col("c").utf8_upper(), "utf8_upper(c)", ["U", "V", "U", None]),
    (lit(3) * 4, "3 * 4", [12] * 4),
    (lit({"a": 1}), "{'a': 1}", [{"a": 1}] * 4),
    (fn.max_element_wise(col("x"), 5), "max_element_wise(x, 5)", [7, 5, 5, 5]),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "text", "expected"), CASES, ids=[c[1] for c in CASES])
def test_values_and_text(expression: Expr, text: str, expected: list[object]) -> None:
    assert str(expression) == text
    assert values(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (col("i8") + 1, pa.int8()),
        (col("i8") + 1000, pa.int64()),
        (col("x") / 2, pa.float64()),
        (col("f32") * 0.1, pa.float32()),
        (col("f32") / col("f32"), pa.float32()),
        (col("t") + dt.timedelta(seconds=1), pa.timestamp("ms", "UTC")),
        (col("t") - col("t"), pa.duration("ms")),
        (fn.coalesce(col("i8"), 0), pa.int8()),
        (fn.if_else(col("b"), col("i8"), 0.5), pa.float64()),
        (col("s").cast("timestamp[ms, tz=UTC]"), pa.timestamp("ms", "UTC")),
        (lit(None), pa.null()),
        (lit(3).cast("int8"), pa.int8()),
    ],
    ids=str,
)
def test_types(expression: Expr, expected: pa.DataType) -> None:
    assert expression.type(BATCH.schema) == expected
    assert Expr.from_proto(expression.to_proto()).type(BATCH.schema) == expected


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: col("prize").type(pa.schema([("price", pa.int64())])), "did you mean 'price'"),
        (lambda: (col("s") + 1).type(BATCH.schema), "s is string, 1 is int64"),
        (
            lambda: ((col("x") > 0) & (col("s") > 1)).type(BATCH.schema),
            r"s > 1.*in the expression \(x > 0\) & \(s > 1\)",
        ),
        (lambda: (col("t") > "banana").type(BATCH.schema), "'banana'.*2024-05-01"),
        (lambda: col("st")["zz"].type(BATCH.schema), "no field 'zz'; its fields are a, b"),
        (lambda: col("x")["a"].type(BATCH.schema), "int64 has no items"),
        (lambda: col("l")[-1].type(BATCH.schema), "number from 0"),
        (lambda: col("x").cast("int99"), "no type 'int99'"),
        (lambda: col("x").roound(), "did you mean 'round'"),
        (lambda: col("x").cumulative_sum(), "window"),
        (lambda: fn.random(1), "replayed"),
        (lambda: col("s").replace_substring("a"), "replace_substring"),
        (lambda: col("x").round(1, "up", 3, 4), "round"),
        (lambda: col("x").abs(wrong=1), "no options"),
        (lambda: fn.if_else(col("b"), 1), "takes 3 arguments"),
        (lambda: col("x").round(col("x")), "must be a value"),
        (lambda: col("x").isin(5), "list of values"),
        (lambda: bool(col("x") > 1), "&, | and ~"),
        (lambda: 0 < col("x") < 5, "&, | and ~"),
        (lambda: col("x") == None, "is_null"),  # noqa: E711
        (lambda: lit(object()), "cannot be a value"),
        (lambda: col(""), "name of a column"),
        (lambda: (lit(1) // 0).type(BATCH.schema), "divide by zero"),
    ],
)
def test_errors_while_the_graph_is_built(build: object, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("expression", "row_index", "message"),
    [
        (col("s").cast("int64"), 0, "'a'"),
        (col("i8") + 100, 3, "overflow"),
        (col("x") // 0, 0, "divide by zero"),
        (col("x") * 2**62, 0, "overflow"),
        ((col("y") * 1e300).cast("int64"), 0, "cast"),
        (col("y").cast("int64", safe=True), 0, "2.5"),
        (col("y").cast("float32", safe=True) * 0 + (col("y") / 3).cast("float32", safe=True), 0, "change"),
        ((col("x") * 1000).cast("int8"), 0, "7000"),
        (col("dec").cast("decimal128(1, 0)") + (col("dec") * 100).cast("decimal128(2, 0)"), 0, "precision"),
        (col("t").cast("date32", safe=True), 1, "change"),
        (col("l")[1], 0, "out of bounds"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_computed_name_the_row(
    expression: Expr, row_index: int, message: str
) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        expression.compile(BATCH.schema)(BATCH)
    assert caught.value.row_index == row_index
    assert str(expression) in str(caught.value)
    assert "'x'" in caught.value.row
    assert EVENT_TIME not in caught.value.row


@examples(60)
@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_evaluate_each_computes_what_can_be_computed(good: list[bool]) -> None:
    batch = pa.record_batch({"s": [str(i) if ok else "bad" for i, ok in enumerate(good)]})
    compiled = col("s").cast("int64").compile(batch.schema)
    results, bad = evaluate_each(batch, lambda b: pa.record_batch({"n": compiled(b)}))
    assert [v for r in results for v in r["n"].to_pylist()] == [
        i for i, ok in enumerate(good) if ok
    ]
    assert [i for i, _ in bad] == [i for i, ok in enumerate(good) if not ok]
    assert all(isinstance(e, BadRecord) for _, e in bad)


SQL: list[tuple[Expr, str]] = [
    (col("a") + col("b") * 2 - 1, "a + b * 2 - 1"),
    (col("a") / col("b"), "CASE WHEN b <> 0 THEN a::DOUBLE / b WHEN b = 0 AND a > 0 THEN 'inf'::DOUBLE WHEN b = 0 AND a < 0 THEN '-inf'::DOUBLE WHEN b = 0 AND a = 0 THEN 'nan'::DOUBLE END"),
    ((col("a") > col("b")) & (col("x") > 0.5), "a > b AND x > 0.5"),
    ((col("a") > col("b")) | (col("x") > 0.5), "a > b OR x > 0.5"),
    (~(col("a") == col("b")), "NOT (a = b)"),
    (when(col("a") > 10, 1).when(col("b") > 10, 2).otherwise(3), "CASE WHEN a > 10 THEN 1 WHEN b > 10 THEN 2 ELSE 3 END"),
    (fn.coalesce(col("a"), col("b"), 0), "coalesce(a, b, 0)"),
    (col("a").isin([1, 2, 3]), "a IN (1, 2, 3)"),
    (col("x").cast("int64"), "trunc(x)::BIGINT"),
    (col("s").utf8_length(), "length(s)"),
    (col("s") + "!" , "s || '!'"),
    (col("x").floor(), "floor(x)"),
    (-col("a"), "-a"),
]  # fmt: skip

small = st.one_of(st.none(), st.integers(-50, 50))


@examples(25)
@given(
    st.lists(
        st.tuples(
            small,
            small,
            st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False)),
            st.one_of(st.none(), st.text("abcä ", max_size=4)),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_values_are_those_of_duckdb(rows: list[tuple[object, ...]]) -> None:
    a, b, x, s = zip(*rows, strict=True)
    batch = pa.record_batch(
        {
            "a": pa.array(a, pa.int64()),
            "b": pa.array(b, pa.int64()),
            "x": pa.array(x, pa.float64()),
            "s": pa.array(s, pa.string()),
        }
    )
    table = pa.Table.from_batches([batch])
    with duckdb.connect() as connection:
        connection.register("t", table)
        columns = ", ".join(f"{sql} AS c{i}" for i, (_, sql) in enumerate(SQL))
        oracle = connection.sql(f"SELECT {columns} FROM t").fetchall()
    for i, (expression, sql) in enumerate(SQL):
        result = expression.compile(batch.schema)(batch).to_pylist()
        for ours, theirs in zip(result, [row[i] for row in oracle], strict=True):
            assert ours == theirs or (ours != ours and theirs != theirs), (str(expression), sql)


@examples(100)
@given(st.integers(-(2**63) + 1, 2**63 - 1), st.integers(-(2**63) + 1, 2**63 - 1))
def test_integer_division_is_pythons(a: int, b: int) -> None:
    batch = pa.record_batch({"a": pa.array([a]), "b": pa.array([b])})
    for expression, python in (
        (col("a") // col("b"), int.__floordiv__),
        (col("a") % col("b"), int.__mod__),
    ):
        compiled = expression.compile(batch.schema)
        if b == 0:
            with pytest.raises(BadRow, match="divide by zero"):
                compiled(batch)
        else:
            assert compiled(batch).to_pylist() == [python(a, b)]


def test_literals_of_time_meet_columns_of_any_unit_and_zone() -> None:
    naive = pa.record_batch({"t": pa.array([0, 1_500_000], pa.timestamp("us"))})
    moment = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert values(col("t") >= moment, naive) == [False, True]
    assert values(col("t") >= moment.replace(tzinfo=None), BATCH) == [False, True, None, True]
    finer = dt.datetime(1970, 1, 1, 0, 0, 0, 999_999, tzinfo=UTC)
    assert values(col("t") > finer) == [False, True, None, True]
    assert values(col("t") == dt.date(1970, 1, 2)) == [False, False, None, True]
    assert values(col("t").isin([moment])) == [False, True, None, False]


def test_columns_and_constants() -> None:
    assert ((col("a") + 1) * col("b").abs()).columns() == {"a", "b"}
    assert lit(1).columns() == frozenset()
    six = (lit(2) * 3).compile(BATCH.schema).constant
    assert six is not None
    assert six.as_py() == 6
    assert (col("x") * 3).compile(BATCH.schema).constant is None


def test_expressions_hash_by_identity_and_copy() -> None:
    expression = col("x") + 1
    assert len({expression, expression, col("x") + 1}) == 2
    for other in (copy.deepcopy(expression), pickle.loads(pickle.dumps(expression))):
        assert str(other) == "x + 1"
        assert other.to_proto() == expression.to_proto()
    with pytest.raises(TypeError):
        list(expression)
    with pytest.raises(TypeError, match="isin"):
        assert 3 in expression


def test_empty_batches_and_no_rows() -> None:
    empty = BATCH.slice(0, 0)
    for expression, _, _ in CASES:
        assert len(expression.compile(BATCH.schema)(empty)) == 0


def test_all_functions_of_pyarrow_are_there() -> None:
    names = {name for name in pc.list_functions() if pc.get_function(name).kind == "scalar"}
    for name in dir(pc):
        info = getattr(getattr(pc, name), "__arrow_compute_function__", None)
        if info is not None and info["name"] in names:
            names.add(name)
    assert {"and_", "or_", "utf8_zfill"} < names
    for name in names - {"random"}:
        assert callable(getattr(fn, name))
        assert callable(getattr(col("x"), name))


KINDS = pa.schema(
    [
        ("b", pa.bool_()),
        ("i", pa.int64()),
        ("i8", pa.int8()),
        ("u", pa.uint64()),
        ("s", pa.string()),
        ("ls", pa.large_string()),
        ("sv", pa.string_view()),
        ("n", pa.null()),
        ("l", pa.list_(pa.int32())),
        ("st", pa.struct([("a", pa.int8()), ("b", pa.string())])),
        ("m", pa.map_(pa.string(), pa.int64())),
    ]
)
OF_ALL_KINDS = pa.RecordBatch.from_pylist(
    [
        {"b": True, "i": 1, "i8": 1, "u": 2**63 + 1, "s": "a", "ls": "b", "sv": "c"}
        | {"l": [1], "st": {"a": 1, "b": "x"}, "m": [("k", 1)]},
        {},
    ],
    schema=KINDS,
)


@pytest.mark.parametrize(
    ("expression", "expected", "kind"),
    [
        (when(col("b"), "a").otherwise(None), ["a", None], pa.string()),
        (when(col("b"), None).otherwise("x"), [None, "x"], pa.string()),
        (when(col("b"), None).when(None, 1).otherwise(2), [None, 2], pa.int64()),
        (when(col("b"), 1).otherwise(2.5), [1.0, 2.5], pa.float64()),
        (when(col("b"), [1]).otherwise([]), [[1], []], pa.list_(pa.int64())),
        (when(col("b"), col("l")).otherwise([]), [[1], []], pa.list_(pa.int32())),
        (when(None, col("i")).otherwise(0), [0, 0], pa.int64()),
        (when(col("i") > 0, col("ls")).otherwise("-"), ["b", "-"], pa.large_string()),
        (fn.if_else(col("b"), [], col("l")), [[], None], pa.list_(pa.int32())),
        (fn.if_else(col("b"), col("n"), 5), [None, None], pa.int64()),
        (col("l").fill_null([]), [[1], []], pa.list_(pa.int32())),
        (fn.coalesce(col("n"), col("l"), [7]), [[1], [7]], pa.list_(pa.int32())),
        (
            col("st").fill_null({"a": 2, "b": None}),
            [{"a": 1, "b": "x"}, {"a": 2, "b": None}],
            KINDS.field("st").type,
        ),
        (col("m").fill_null({}), [[("k", 1)], []], KINDS.field("m").type),
        (col("n").fill_null(0), [0, 0], pa.int64()),
        (col("n").fill_null("x"), ["x", "x"], pa.string()),
        (col("n").fill_null(col("i8")), [1, None], pa.int8()),
        (col("s") + col("ls"), ["ab", None], pa.large_string()),
        (col("sv") + "x" + col("s"), ["cxa", None], pa.string()),
        (lit(2**63), [2**63] * 2, pa.uint64()),
        (lit(2**64 - 1), [2**64 - 1] * 2, pa.uint64()),
        (col("u") == 2**63 + 1, [True, None], pa.bool_()),
        (col("u").isin([1, 2**63 + 1]), [True, None], pa.bool_()),
        (col("b").and_(True).or_(col("b")), [True, None], pa.bool_()),
        (col("s").utf8_zfill(3), ["00a", None], pa.string()),
    ],
    ids=str,
)
def test_values_and_types_of_all_kinds(
    expression: Expr, expected: list[object], kind: pa.DataType
) -> None:
    for same in (expression, Expr.from_proto(expression.to_proto())):
        compiled = same.compile(KINDS)
        assert compiled.type == kind
        assert compiled(OF_ALL_KINDS).to_pylist() == expected


def test_values_that_nulls_become_are_not_computed_while_the_graph_is_built() -> None:
    assert (10 // col("i8").fill_null(0)).type(KINDS) == pa.int8()


@pytest.mark.parametrize(
    "expression",
    [
        col("l").fill_null([1.5]),
        fn.if_else(col("b"), col("l"), ["x"]),
        col("st").fill_null({"a": 1000, "b": "z"}),
        col("st").fill_null({"a": 1, "c": "z"}),
        when(col("b"), 1).otherwise("x"),
        col("i") + 2**63,
    ],
    ids=str,
)
def test_types_that_do_not_go_together_are_errors_while_the_graph_is_built(
    expression: Expr,
) -> None:
    with pytest.raises(ExpressionError, match="cannot compute"):
        expression.type(KINDS)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod"])
def test_a_decimal_of_more_digits_than_there_are_says_what_to_do(name: str) -> None:
    kinds = pa.schema([("a", pa.decimal128(38, 10)), ("b", pa.decimal128(10, 2))])
    compute = getattr(operator, name)
    with pytest.raises(
        ExpressionError, match=r"of 38 in decimal128: cast one of them to deci"
    ) as told:
        compute(col("a"), col("b")).type(kinds)
    assert "precision out of range" not in str(told.value)
    wider = compute(col("a").cast("decimal256(38, 10)"), col("b")).compile(kinds)
    row = pa.record_batch(
        [pa.array([Decimal(7)], kinds[0].type), pa.array([2], kinds[1].type)], kinds
    )
    assert wider(row)[0].as_py() == compute(Decimal(7), Decimal(2))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize(
    "expression",
    [
        col("t").binary_repeat(2**62),
        col("t").binary_repeat(col("n")),
        col("t").utf8_lpad(width=2**62),
        col("t").utf8_center(width=2**62),
        col("t").utf8_zero_fill(width=2**62),
        col("t").ascii_rpad(width=2**62),
    ],
    ids=str,
)
def test_texts_that_no_memory_holds_are_refused(expression: Expr, kind: pa.DataType) -> None:
    """Arrow counts their bytes in 64 bits, which wraps: the process crashed."""
    batch = pa.record_batch({"t": pa.array(["ab", "c", None], kind), "n": [1, 2**62, 2**62]})
    with pytest.raises((ExpressionError, BadRow), match="texts of one batch would take"):
        expression.compile(batch.schema)(batch)
    assert values(col("t").binary_repeat(2), batch) == ["abab", "cc", None]


def _message(*before: dict[str, Any], **last: Any) -> graph_pb2.Expression:
    return graph_pb2.Expression(nodes=[graph_pb2.Expression(**node) for node in (*before, last)])


@pytest.mark.parametrize(
    "message",
    [
        graph_pb2.Expression(),
        _message(literal=graph_pb2.Literal(arrow=b"nonsense")),
        _message(call=graph_pb2.Call(function="no_such")),
        _message({"column": "x"}, call=graph_pb2.Call(function="+", argument_count=1)),
        _message({"column": "x"}, call=graph_pb2.Call(function="+", argument_count=2)),
        _message(
            {"column": "x"},
            call=graph_pb2.Call(function="round", argument_count=1, options_json='{"bad": 1}'),
        ),
        _message(call=graph_pb2.Call(function="abs_checked", options_json="[1]")),
        _message({"column": "x"}, cast=graph_pb2.Cast(type=b"x")),
        _message(cast=graph_pb2.Cast(type=b"x")),
        _message({"column": "x"}, column="y"),
        _message({}),
    ],
    ids=range(11),
)
def test_broken_messages_are_refused(message: graph_pb2.Expression) -> None:
    with pytest.raises(ExpressionError):
        Expr.from_proto(message)


def test_expressions_of_graphs_that_earlier_versions_have_stored_are_read() -> None:
    """They have their arguments inside."""

    def inside(expression: Expr) -> graph_pb2.Expression:
        node = expression.to_proto().nodes[-1]
        arguments = [inside(child) for child in expression._children()]
        if node.HasField("cast"):
            node.cast.argument.CopyFrom(arguments[0])
        elif node.HasField("call"):
            node.call.ClearField("argument_count")
            node.call.arguments.extend(arguments)
        return node

    for expression in (col("x"), (-col("x") + 1).cast("string"), fn.round(col("y") * lit(2), 1)):
        stored = inside(expression)
        assert str(Expr.from_proto(stored)) == str(expression)
        assert plain_column(stored) == ("x" if str(expression) == "x" else "")


def test_an_expression_of_150_conditions_is_computed_and_travels() -> None:
    any_of = functools.reduce(operator.or_, [col("i") == n for n in range(150)])
    again = Expr.from_proto(any_of.to_proto())
    assert str(again) == str(any_of)
    assert again.columns() == {"i"}
    batch = pa.record_batch({"i": [149, 150]})
    assert again.compile(batch.schema)(batch).to_pylist() == [True, False]


@pytest.mark.parametrize("grow", [lambda e: e + 1, lambda e: e + e], ids=["deep", "large"])
def test_an_expression_beyond_what_can_be_computed_is_refused_where_it_is_written(
    grow: Callable[[Expr], Expr],
) -> None:
    grown = itertools.accumulate(range(1_000), lambda e, _: grow(e), initial=col("i"))
    with pytest.raises(ExpressionError, match=r"calls deep: at most .*\.with_columns"):
        list(grown)


def test_more_values_than_travel_with_an_expression_are_refused_with_what_to_do() -> None:
    many = col("i").isin(list(range(500_000)))
    with pytest.raises(ExpressionError, match=r"is_in.*at most 4,194,304 .*Join with a stream"):
        many.to_proto()
    check_message(graph_pb2.Call(options_json=" " * OPTIONS_MAX))  # daemons take as many
