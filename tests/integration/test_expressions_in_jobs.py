"""Aim: expressions mean on a cluster what they mean in plain Python, null by null.

Method: each group is one job over a table in several batches; next to each expression stands a function of
the row. What needs a calendar or a locale is compared with DuckDB.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import penstock as ps
from penstock import col, fn, lit, when
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import assert_same_rows, rows_of

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

Row = dict[str, Any]
Oracle = Callable[[Row], Any]
UTC = dt.UTC

TABLE = pa.table(
    {
        "i": pa.array([7, -7, 0, None, 2**40, -1], pa.int64()),
        "j": pa.array([2, 3, 5, 1, None, -4], pa.int32()),
        "f": pa.array([1.5, -2.5, math.nan, None, 0.0, 1e10], pa.float64()),
        "b": pa.array([True, False, None, True, False, None]),
        "c": pa.array([True, None, None, False, False, True]),
        "s": pa.array(["Hello", "", None, "ünï code", "  pad  ", "a,b,,c"]),
        "t": pa.array(
            [
                dt.datetime(2024, 2, 29, 23, 59, 58, 123000, tzinfo=UTC),
                dt.datetime(1969, 12, 31, 0, 0, 1, tzinfo=UTC),
                None,
                dt.datetime(2001, 1, 1, tzinfo=UTC),
                dt.datetime(2024, 12, 30, 5, tzinfo=UTC),
                dt.datetime(2100, 7, 15, 12, 30, tzinfo=UTC),
            ],
            pa.timestamp("ms", "UTC"),
        ),
        "d": pa.array(
            [dt.date(2024, 2, 29), None, dt.date(1960, 6, 1), dt.date(2001, 1, 1)] + [None] * 2
        ),
        "l": pa.array([[1, 2, 3], [], None, [None, 5], [4], [6, 7]], pa.list_(pa.int64())),
        "p": pa.array(
            [{"x": 1, "y": "a"}, None, {"x": None, "y": "c"}, {"x": 4, "y": None}]
            + [{"x": 5, "y": "e"}] * 2,
            pa.struct([("x", pa.int64()), ("y", pa.string())]),
        ),
    }
)


def of(*names: str) -> Callable[[Callable[..., Any]], Oracle]:
    """Null where one of the columns is null."""

    def wrap(function: Callable[..., Any]) -> Oracle:
        def oracle(row: Row) -> Any:
            values = [row[name] for name in names]
            return None if None in values else function(*values)

        return oracle

    return wrap


def kleene_and(row: Row) -> Any:
    values = (row["b"], row["c"])
    return False if False in values else None if None in values else True


def kleene_or(row: Row) -> Any:
    values = (row["b"], row["c"])
    return True if True in values else None if None in values else False


GROUPS: dict[str, dict[str, tuple[ps.Expr, Oracle]]] = {
    "arithmetic": {
        "add": (col("i") + col("j"), of("i", "j")(lambda i, j: i + j)),
        "subtract": (10 - col("j"), of("j")(lambda j: 10 - j)),
        "multiply": (col("i") * 3, of("i")(lambda i: i * 3)),
        "divide": (col("i") / col("j"), of("i", "j")(lambda i, j: i / j)),
        "floor_divide": (col("i") // col("j"), of("i", "j")(lambda i, j: i // j)),
        "modulo": (col("i") % col("j"), of("i", "j")(lambda i, j: i % j)),
        "negative": (-col("j"), of("j")(lambda j: -j)),
        "absolute": (col("i").abs(), of("i")(abs)),
        "power": (col("j") ** 2, of("j")(lambda j: j**2)),
        "floor": (col("f").floor(), of("f")(lambda f: f if f != f else float(math.floor(f)))),
        "sign": (fn.sign(col("i")), of("i")(lambda i: (i > 0) - (i < 0))),
        "smaller": (
            fn.min_element_wise(col("i"), col("j")),
            lambda r: min((v for v in (r["i"], r["j"]) if v is not None), default=None),
        ),
    },
    "comparison": {
        "less": (col("i") < col("j"), of("i", "j")(lambda i, j: i < j)),
        "equal": (col("f") == 1.5, of("f")(lambda f: f == 1.5)),
        "unequal": (col("s") != "Hello", of("s")(lambda s: s != "Hello")),
        "between": (col("j").between(2, 5), of("j")(lambda j: 2 <= j <= 5)),
        "isin": (col("s").isin(["Hello", ""]), of("s")(lambda s: s in ("Hello", ""))),
        "and": (col("b") & col("c"), kleene_and),
        "or": (col("b") | col("c"), kleene_or),
        "not": (~col("b"), of("b")(lambda b: not b)),
        "xor": (col("b") ^ col("c"), of("b", "c")(lambda b, c: b != c)),
        "bits": (col("j") & 3, of("j")(lambda j: j & 3)),
        "after": (col("t") > dt.datetime(2001, 1, 1, tzinfo=UTC), of("t")(lambda t: t.year > 2001)),
        "by_text": (col("d") >= "2001-01-01", of("d")(lambda d: d.year >= 2001)),
    },
    "null": {
        "is_null": (col("i").is_null(), lambda r: r["i"] is None),
        "is_valid": (col("s").is_valid(), lambda r: r["s"] is not None),
        "is_not_null": (col("l").is_not_null(), lambda r: r["l"] is not None),
        "fill": (col("j").fill_null(0), lambda r: r["j"] or 0),
        "coalesce": (
            fn.coalesce(col("i"), col("j"), lit(-9)),
            lambda r: next((v for v in (r["i"], r["j"]) if v is not None), -9),
        ),
        "if_else": (
            fn.if_else(col("b"), col("i"), lit(0)),
            of("b")(lambda b: ...),
        ),
        "when": (
            when(col("i") > 5, "big").when(col("i").is_null(), "none").otherwise(col("s")),
            lambda r: "none" if r["i"] is None else "big" if r["i"] > 5 else r["s"],
        ),
        "nan": (col("f").is_nan(), of("f")(math.isnan)),
        "literal_null": (lit(None).cast("float64"), lambda r: None),
    },
    "cast": {
        "to_text": (col("i").cast("string"), of("i")(str)),
        "cut_towards_zero": (
            fn.if_else(col("f").is_finite(), col("f"), lit(0.0)).cast("int64"),
            of("f")(lambda f: int(f) if math.isfinite(f) else 0),
        ),
        "to_float": (col("j").cast("float32"), of("j")(float)),
        "from_bool": (col("b").cast("int8"), of("b")(int)),
        "to_date": (col("t").cast("date32"), of("t")(lambda t: t.date())),
        "epoch": (
            col("t").cast("int64"),
            of("t")(
                lambda t: (t - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(milliseconds=1)
            ),
        ),
    },
    "string": {
        "upper": (col("s").utf8_upper(), of("s")(str.upper)),
        "length": (col("s").utf8_length(), of("s")(len)),
        "strip": (col("s").utf8_trim_whitespace(), of("s")(str.strip)),
        "starts": (col("s").starts_with("He"), of("s")(lambda s: s.startswith("He"))),
        "contains": (col("s").match_substring("l"), of("s")(lambda s: "l" in s)),
        "replace": (
            col("s").replace_substring(pattern="l", replacement="L"),
            of("s")(lambda s: s.replace("l", "L")),
        ),
        "slice": (col("s").utf8_slice_codeunits(1, 3), of("s")(lambda s: s[1:3])),
        "split": (col("s").split_pattern(","), of("s")(lambda s: s.split(","))),
        "first_part": (col("s").split_pattern(",")[0], of("s")(lambda s: s.split(",")[0])),
        "join": (col("s") + "!", of("s")(lambda s: s + "!")),
        "join_both": (col("s") + col("i").cast("string"), of("s", "i")(lambda s, i: s + str(i))),
        "reverse": (col("s").utf8_reverse(), of("s")(lambda s: s[::-1])),
        "regex": (
            col("s").replace_substring_regex(pattern="[aeiou]", replacement="*"),
            of("s")(lambda s: "".join("*" if c in "aeiou" else c for c in s)),
        ),
    },
    "nested": {
        "field": (col("p")["x"], lambda r: r["p"] and r["p"]["x"]),
        "field_by_name": (
            col("p").field("y").utf8_upper(),
            lambda r: r["p"] and r["p"]["y"] and r["p"]["y"].upper(),
        ),
        "size": (col("l").list_value_length(), of("l")(len)),
        "fields": (
            fn.make_struct(col("i"), col("s"), field_names=["a", "b"]),
            lambda r: {"a": r["i"], "b": r["s"]},
        ),
        "x_plus": (
            col("p")["x"] + col("j"),
            lambda r: (
                None
                if r["p"] is None or r["p"]["x"] is None or r["j"] is None
                else r["p"]["x"] + r["j"]
            ),
        ),
    },
    "temporal": {
        "year": (col("t").year(), of("t")(lambda t: t.year)),
        "day": (col("t").day(), of("t")(lambda t: t.day)),
        "hour": (col("t").hour(), of("t")(lambda t: t.hour)),
        "millisecond": (col("t").millisecond(), of("t")(lambda t: t.microsecond // 1000)),
        "weekday": (col("t").day_of_week(), of("t")(lambda t: t.weekday())),
        "week": (col("t").iso_week(), of("t")(lambda t: t.isocalendar().week)),
        "later": (
            col("t") + dt.timedelta(days=1, seconds=5),
            of("t")(lambda t: t + dt.timedelta(days=1, seconds=5)),
        ),
        "month_start": (
            col("t").floor_temporal(unit="month"),
            of("t")(lambda t: t.replace(day=1, hour=0, minute=0, second=0, microsecond=0)),
        ),
        "written": (
            col("t").strftime(format="%Y/%m/%d"),
            of("t")(lambda t: t.strftime("%Y/%m/%d")),
        ),
        "read": (
            col("t").strftime(format="%Y-%m-%d").strptime(format="%Y-%m-%d", unit="ms"),
            of("t")(lambda t: dt.datetime.combine(t.date(), dt.time())),
        ),
        "date_year": (col("d").year(), of("d")(lambda d: d.year)),
        "days_between": (
            fn.days_between(col("d"), lit(dt.date(2024, 3, 1))),
            of("d")(lambda d: (dt.date(2024, 3, 1) - d).days),
        ),
    },
}


def if_else(row: Row) -> Any:
    return None if row["b"] is None else row["i"] if row["b"] else 0


GROUPS["null"]["if_else"] = (GROUPS["null"]["if_else"][0], if_else)


@pytest.mark.parametrize("group", GROUPS)
def test_expressions(new_env: NewEnvironment, group: str) -> None:
    env = new_env(config={"execution.batch-rows": 2})
    expressions = {name: expression for name, (expression, _) in GROUPS[group].items()}
    stream = env.from_arrow(TABLE).rebalance().select(**expressions)
    expected = [
        {name: oracle(row) for name, (_, oracle) in GROUPS[group].items()}
        for row in TABLE.to_pylist()
    ]
    assert_same_rows(rows_of(env, stream), expected)


def test_dates_as_duckdb_knows_them(env: ps.Environment) -> None:
    stream = (
        env.from_arrow(TABLE)
        .filter(col("t").is_valid())
        .select(
            quarter=col("t").quarter(),
            day_of_year=col("t").day_of_year(),
            hour_start=col("t").floor_temporal(unit="hour"),
            days=fn.days_between(col("t"), lit(dt.datetime(2024, 1, 1, tzinfo=UTC))),
        )
    )
    table_of_times = TABLE  # noqa: F841 - DuckDB finds it by its name
    wanted = duckdb.sql(
        "SELECT quarter(u), dayofyear(u), date_trunc('hour', u), "
        "date_diff('day', u::DATE, DATE '2024-01-01') "
        "FROM (SELECT timezone('UTC', t) AS u FROM table_of_times WHERE t IS NOT NULL)"
    ).fetchall()
    names = ["quarter", "day_of_year", "hour_start", "days"]
    expected = [dict(zip(names, row, strict=True)) for row in wanted]
    for row in expected:
        row["hour_start"] = row["hour_start"].replace(tzinfo=UTC)
    assert_same_rows(rows_of(env, stream), expected)


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        (col("i") // (col("j") - 2), "zero"),
        (col("i") * 2**40, "overflow"),
        (col("s").cast("int64"), "int64"),
        (col("i").cast("int8"), "int8"),
    ],
    ids=["division", "overflow", "text", "range"],
)
@pytest.mark.parametrize("action", ["skip", "bad"])
def test_rows_an_expression_cannot_be_computed_for(
    env: ps.Environment, expression: ps.Expr, error: str, action: str
) -> None:
    good = {  # rows that can be computed, by position
        "zero": [1, 2, 3, 4, 5],
        "overflow": [0, 1, 2, 3, 5],
        "int64": [2],
        "int8": [0, 1, 2, 3, 5],
    }[error]
    rows = [{"at": at, **row} for at, row in enumerate(TABLE.to_pylist())]
    table = TABLE.add_column(0, "at", pa.array(range(6), pa.int64()))
    stream = env.from_arrow(table).select("at", value=expression).on_error(action)
    bad = (
        stream.side_output("bad").select("at", "i", "error").collect() if action == "bad" else None
    )
    found = [row["at"] for row in rows_of(env, stream)]
    assert sorted(found) == good
    if bad is not None:
        assert sorted(row.at for row in bad) == sorted(set(range(6)) - set(good))
        assert all(row.i == rows[row.at]["i"] for row in bad)
        assert all(row.error for row in bad)
