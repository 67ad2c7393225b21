"""Aim: a chain of operators that compiles for Spark gives the rows there that our engine gives.

Method: the same tables go through both, in this process; rows are compared in any order. Tables hold what the engines
think differently about: nulls, NaN, both zeros, the ends of integers, decimals, texts beyond ASCII, times before 1970,
rows out of order, columns that differ by case only.
"""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from tests.integration.spark.test_spark_stages import table_of_types
from tests.support.engines import (
    Chain,
    assert_same_rows,
    last_per_key,
    rows_of_penstock,
    rows_of_spark,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.sampled(3)]

MIN, MAX = -(2**63), 2**63 - 1
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("g", pa.float64()),
        ("i", pa.int64()),
        ("j", pa.int64()),
        ("b", pa.int8()),
        ("f", pa.float64()),
        ("e", pa.float32()),
        ("d", pa.decimal128(10, 2)),
        ("t", pa.timestamp("us", "UTC")),
        ("n", pa.timestamp("ms")),
        ("y", pa.date32()),
        ("A", pa.int32()),
        ("a", pa.int32()),
        ("u", pa.uint16()),
        ("c", pa.bool_()),
        ("ts", pa.int64()),
    ]
)
INF, NAN = math.inf, math.nan
DAY = dt.date(1969, 12, 31)
TIME = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
ROWS = [
    ("x", NAN, -7, 2, -128, NAN, 0.1, "1.25", TIME, 1, DAY, 1, -1, 65535, True, 12_345),
    ("x", -0.0, 7, -2, 127, -0.0, -0.0, "-0.01", TIME, -1, DAY, 2, -2, 0, False, -1),
    ("y", 0.0, MAX, 1, 1, 0.0, NAN, "99999999.99", TIME, 86_399_999, DAY, 3, -3, 1, None, 5_000),
    ("y", NAN, 0, -1, 0, 5.5, 1.5, None, None, None, None, None, None, None, True, 4_999),
    (None, None, None, 7, None, None, None, "0.00", TIME, 0, DAY, 4, -4, 2, True, 0),
    ("Ä'${s}\\", 1.5, -8, 3, -1, INF, INF, "2.50", TIME, 5, DAY, 5, -5, 3, False, 20_001),
    ("", 1.5, 8, None, 5, -INF, -2.5, "1.00", TIME, 5, DAY, 6, 6, 4, False, 20_000),
    ("\U0001f600", -2.5, 2**53 + 1, 5, 7, float(2**53), 3.5, "7.77", TIME, 5, DAY, 7, 7, 5, None, 3),
    ("x", 0.5, MIN + 1, 4, 9, -1.5, -0.5, "0.50", TIME, 9, DAY, -8, 8, 6, True, -10_000),
]  # fmt: skip


def table(rows: list[tuple[Any, ...]] | None = None) -> pa.Table:
    columns = list(zip(*(ROWS if rows is None else rows), strict=True))
    arrays = []
    for field, column in zip(SCHEMA, columns, strict=True):
        given = column
        if pa.types.is_decimal(field.type):
            given = [None if value is None else Decimal(value) for value in column]
        arrays.append(pa.array(given, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def project(**columns: Any) -> Chain:
    return lambda stream: stream.select(**columns)


def same_on_both(session: Any, tmp_path: Path, chain: Chain, *tables: pa.Table) -> None:
    given = tables or (table(),)
    ours = rows_of_penstock(chain, given)
    assert_same_rows(ours, rows_of_spark(session, chain, given, tmp_path))


i, j, b, f, e, g, d, k, t, n, y = map(col, "ijbfegdktny")
LONG = ps.lit(Decimal("1234567890123456789012345678901234.56"))
"""More digits than Spark's minus keeps."""

SCALARS = {
    "integers": {
        "down": i // j, "rest": i % j, "down8": b // 2, "rest8": b % -3, "true": i / j,
        "minus": j - 1, "times": col("A") * col("a"), "wider": b + col("A"), "bits": (j & 3) | 4, "flip": ~j,
    },
    "floats": {
        "by": f / g, "by0": f / 0.0, "by_minus0": 1.0 / g, "down": f // g, "rest": f % g, "down2": f // 0.1,
        "rest2": f % -0.3, "sum": f + g, "product": f * e, "minus": -f, "size": abs(f), "root": f.sqrt(),
        "floor": f.floor(), "ceil": f.ceil(), "cut": f.trunc(), "even": f.round(), "low": e.floor(), "more": e + 1, "short": e / e, "short0": e / (e - e),
        "short2": (b / e).cast("float64"), "short3": (e / 3).cast("float64"),
    },
    "comparisons": {
        "lt": f < g, "le": f <= g, "gt": f > g, "ge": f >= g, "eq": f == g, "ne": f != g, "five": f > 5, "not": ~(f > 5),
        "never": f == ps.lit(NAN),
        "always": ps.lit(NAN) != e,
        "mixed": i > f, "mixed2": f >= i, "mixed3": i == f, "mixed4": i != 7.5, "mixed5": i <= 7.5, "small": b < e,
        "text": k > "x", "text2": k == "Ä'${s}\\", "time": t > "1969-12-31T23:59:59", "naive": n <= "1970-01-01",
        "day": y == "1969-12-31", "decimal": d > 1, "unsigned": col("u") > 1, "case": col("A") > col("a"),
    },
    "logic": {
        "and": (i > 0) & col("c"), "or": (i > 0) | col("c"), "xor": (i > 0) ^ col("c"), "null": f.is_null(),
        "nan": f.is_nan(), "valid": k.is_valid(), "null_nan": f.is_null(nan_is_null=True), "finite": f.is_finite(),
        "inf": f.is_inf(), "in": j.isin([1, 2, -2]), "in_text": k.isin(["x", "Ä'${s}\\"]), "in_none": j.isin([]),
        "if": ps.fn.if_else(i > 0, j, 0), "case": ps.when(i > 0, "plus").when(i < 0, "minus").otherwise(None),
        "fill": f.fill_null(g), "guarded": ps.fn.if_else(j != 2, 10 // (j - 2), None), "lazy": (j == 2) | (1 // (j - 2) > 0),
    },
    "texts": {
        "plus": k + "-'${x}\\n", "long": k.utf8_length(), "bytes": k.binary_length(), "up": k.ascii_upper(),
        "low": k.ascii_lower(), "starts": k.starts_with("Ä'$"), "ends": k.ends_with("\\"), "has": k.match_substring("${"),
        "shown": i.cast("string"), "flag": col("c").cast("string"),
    },
    "decimals": {
        "plus": d + d, "minus": d - 1, "times": d * d, "neg": -d, "size": abs(d), "neg36": -(LONG + d), "size36": abs(d - LONG), "wider": d.cast("decimal128(12, 4)"),
        "whole": d.cast("int64"), "float": d.cast("float64"), "with": d * b,
    },
    "casts": {
        "whole": g.fill_null(0.0).is_nan(), "down": e.fill_null(0.0).is_nan(), "cut": (col("A") / 3).cast("int32"), "wide": b.cast("int64"),
        "half": f.cast("float32"), "double": e.cast("float64"), "bool": b.cast("bool"), "of_bool": col("c").cast("int8"),
        "u": col("u").cast("int32"), "stamp": j.cast("timestamp[ms]"), "stamp_z": j.cast("timestamp[s, tz=UTC]"),
        "number": t.cast("int64"), "number_ms": n.cast("int64"), "day": n.cast("date32"), "start": y.cast("timestamp[ms]"),
        "i2f": i.cast("float64"), "text": (k + "").cast("large_string"),
    },
    "times": {
        "year": t.year(), "month": t.month(), "day": t.day(), "hour": t.hour(), "minute": t.minute(), "second": t.second(),
        "naive": n.hour(), "of_day": y.year(),
    },
    "untouched": {name: col(name) for name in SCHEMA.names},
}  # fmt: skip


@pytest.mark.parametrize("group", SCALARS)
def test_expressions_have_the_same_values(session: Any, tmp_path: Path, group: str) -> None:
    same_on_both(session, tmp_path, project(**SCALARS[group]))


FAILURES = {
    "int64 +": i + 1,
    "int64 -": i - 2**62 - 2**62 - 2,
    "int8 *": b * 2,
    "int8 neg": -b,
    "int8 abs": abs(b),
    "//0": j // (j - 2),
    "%0": j % (j - 2),
    "least//-1": (i - 1) // -1,
    "int8//-1": b // -1,
    "cast": i.cast("int32"),
    "cast of NaN": f.cast("int64"),
    "cast of 2**63": (f.fill_null(0.0) * 0 + 2.0**63).cast("int64"),
    "digits": d.cast("decimal128(4, 2)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_computed_is_an_error_on_both(
    session: Any, tmp_path: Path, name: str
) -> None:
    chain = project(x=FAILURES[name])
    with pytest.raises(ps.JobFailed):
        rows_of_penstock(chain, [table()])
    with pytest.raises(Exception, match=r".") as raised:
        rows_of_spark(session, chain, [table()], tmp_path)
    assert type(raised.value).__module__.startswith("pyspark.")


# ---------------------------------------------------------------- rows, keys, windows, joins


AGGREGATES = {
    "rows": ps.count(), "there": ps.count("f"), "sum": ps.sum("b"), "of_bool": ps.sum("c"), "of_u": ps.sum("u"),
    "of_d": ps.sum("d"), "of_f": ps.sum("e"), "least": ps.min("f"), "most": ps.max("f"), "most_i": ps.max("i"),
    "least_k": ps.min("k"), "most_t": ps.max("t"), "least_n": ps.min("n"), "most_y": ps.max("y"), "least_d": ps.min("d"),
    "most_e": ps.max("e"), "most_u": ps.max("u"), "any": ps.max("c"), "mean": ps.mean("A"), "mean_d": ps.mean("d"),
    "mean_f": ps.mean("g"), "kinds": ps.count_distinct("g"), "kinds_k": ps.count_distinct("k"), "expr": ps.sum(col("A") * 2),
}  # fmt: skip


@pytest.mark.parametrize("keys", [("k",), ("g",), ("c", "e"), ("t", "d", "u")])
def test_aggregates_per_key_end_in_the_same_values(
    session: Any, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    def chain(stream: ps.Stream) -> ps.Stream:
        return stream.filter((f > 0) | f.is_null() | ~(f > 0)).key_by(*keys).aggregate(**AGGREGATES)

    ours = last_per_key(rows_of_penstock(chain, [table()]), *keys)
    assert_same_rows(ours, rows_of_spark(session, chain, [table()], tmp_path))


def test_a_sum_that_overflows_is_an_error_on_both(session: Any, tmp_path: Path) -> None:
    def chain(stream: ps.Stream) -> ps.Stream:
        return stream.key_by("c").aggregate(x=ps.sum("i"))

    rows = [(*row[:2], MAX, *row[3:]) for row in ROWS]
    with pytest.raises(ps.JobFailed, match="leaves the range of int64"):
        rows_of_penstock(chain, [table(rows)])
    with pytest.raises(Exception, match="OVERFLOW") as raised:
        rows_of_spark(session, chain, [table(rows)], tmp_path)
    assert type(raised.value).__module__.startswith("pyspark.")


DAYS = ps.tumbling("1d")
WINDOWS = {
    "tumbling": ps.tumbling("5s"),
    "offset": ps.tumbling("5s", offset="-1s"),
    "sliding": ps.sliding("10s", "5s"),
    "uneven": ps.sliding("7s", "3s", offset="1s"),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_have_the_same_rows(session: Any, tmp_path: Path, name: str) -> None:
    def keyed(stream: ps.Stream) -> ps.Stream:
        timed = stream.with_event_time("ts", out_of_orderness="1s")
        return timed.key_by("g").window(WINDOWS[name]).aggregate(**AGGREGATES)

    def twice(stream: ps.Stream) -> ps.Stream:
        timed = stream.filter(t.is_valid()).with_event_time("t")
        first = timed.window(WINDOWS[name]).aggregate(n=ps.count(), s=ps.sum("A"))
        later = first.filter(col("n") > 0).window(ps.tumbling("1 min"))
        return later.aggregate(n=ps.sum("n"), most=ps.max("window_end"))

    same_on_both(session, tmp_path, keyed)
    same_on_both(session, tmp_path, twice)


def test_a_row_without_event_time_is_an_error_on_both(session: Any, tmp_path: Path) -> None:
    def windowed(stream: ps.Stream) -> ps.Stream:
        return stream.with_event_time("t").window(ps.tumbling("1s")).aggregate(n=ps.count())

    def unneeded(stream: ps.Stream) -> ps.Stream:
        return stream.with_event_time("t").select("k")

    for chain in (windowed, unneeded):
        with pytest.raises(ps.JobFailed, match="null"):
            rows_of_penstock(chain, [table()])
        with pytest.raises(Exception, match="column t is null"):
            rows_of_spark(session, chain, [table()], tmp_path)


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
@pytest.mark.parametrize("window", ["tumbling", "sliding"])
def test_window_joins_have_the_same_pairs(
    session: Any, tmp_path: Path, how: str, window: str
) -> None:
    def chain(left: ps.Stream, right: ps.Stream) -> ps.Stream:
        first = left.with_event_time("ts").filter(b != 5)
        second = right.select("k", "g", "A", "d", "ts").with_event_time("ts").filter(col("A") > 1)
        return first.join(second, on=["k", "g"], window=WINDOWS[window], how=how)

    same_on_both(session, tmp_path, chain, table(), table(ROWS[::-1]))


def test_interval_joins_and_what_follows_them_are_the_same(session: Any, tmp_path: Path) -> None:
    def chain(left: ps.Stream, right: ps.Stream) -> ps.Stream:
        second = right.select("c", "A", "ts").with_event_time("ts")
        pairs = left.with_event_time("ts").join(second, on="c", within=("-5s", "8s"))
        counted = (
            pairs.key_by("c")
            .window(ps.tumbling("10s"))
            .aggregate(n=ps.count(), x=ps.sum("A_right"))
        )
        return counted.with_columns(y=col("n") % 3)

    same_on_both(session, tmp_path, chain, table(), table(ROWS[::-1]))


def test_unions_have_all_rows_of_all(session: Any, tmp_path: Path) -> None:
    def chain(left: ps.Stream, right: ps.Stream) -> ps.Stream:
        first = left.with_event_time("ts").select("k", "A", "ts")
        second = right.with_event_time("ts").select("ts", "A", "k").filter(col("A") > 0)
        both = first.union(second.select("k", "A", "ts"), first)
        return both.key_by("k").window(ps.tumbling("5s")).aggregate(n=ps.count(), s=ps.sum("A"))

    same_on_both(session, tmp_path, chain, table(), table(ROWS[:4]))


def test_columns_that_differ_by_case_or_have_odd_names_stay_apart(
    session: Any, tmp_path: Path
) -> None:
    odd = "a.b `c` ${spark.master} 'd'"

    def chain(stream: ps.Stream) -> ps.Stream:
        named = stream.rename(k=odd, b="B", i="l.k", j="part").with_columns(K=col("a"), ä=col("A"))
        kept = named.select(
            odd, "A", "a", "K", "ä", "B", "l.k", "part", "ts", sum=col("A") - col("a")
        )
        return kept.key_by(odd, "K").aggregate(
            A=ps.max("A"), a=ps.max("a"), n=ps.max("part"), N=ps.min("sum")
        )

    ours = last_per_key(rows_of_penstock(chain, [table()]), odd, "K")
    assert_same_rows(ours, rows_of_spark(session, chain, [table()], tmp_path))


@pytest.mark.parametrize("odd", ["__window_start_ms", "l.__event_time"])
def test_columns_of_windows_and_joins_have_any_name(session: Any, tmp_path: Path, odd: str) -> None:
    def chain(left: ps.Stream, right: ps.Stream) -> ps.Stream:
        keyed = left.select("ts", **{odd: k}).with_event_time("ts").key_by(odd)
        counted = keyed.window(ps.sliding("10s", "5s")).aggregate(n=ps.count()).select(odd, "n")
        named = right.select("ts", **{odd: col("A")}).with_event_time("ts").window(DAYS)
        sums = named.aggregate(**{odd: ps.sum(odd)}).select(**{odd: ps.lit("")}, n=col(odd))
        return counted.join(counted, on=odd, window=DAYS).select(odd, "n").union(sums)

    same_on_both(session, tmp_path, chain, table(), table())


def test_no_rows_are_no_rows(session: Any, tmp_path: Path) -> None:
    def chain(stream: ps.Stream) -> ps.Stream:
        timed = stream.with_event_time("ts").filter(f > 1e300).filter(f < 0)
        return timed.window(ps.tumbling("1s")).aggregate(n=ps.count())

    assert rows_of_spark(session, chain, [table()], tmp_path) == []
    same_on_both(session, tmp_path, chain)


def test_columns_of_other_types_go_through_untouched(session: Any, tmp_path: Path) -> None:
    def chain(stream: ps.Stream) -> ps.Stream:
        return stream.filter(col("id") > 0).with_columns(more=col("id") + 1)

    same_on_both(session, tmp_path, chain, table_of_types())
