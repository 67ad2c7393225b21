"""Aim: times in expressions are compared, found and filled in with all of their digits. Method: whole numbers of
nanoseconds are the oracle; every expression goes over the wire first."""

from __future__ import annotations

import datetime as dt
import operator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.expressions import BadRow
from penstock.expressions.expression import Expr

fn = ps.fn
UTC = dt.UTC
NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
COUNTS = [0, 1, 2, 1499, 1500, 1501, -1, -2, None]


def values(expression: ps.Expr, column: pa.Array) -> list[Any]:
    """The values, of times their numbers."""
    rows = pa.record_batch({"t": column})
    sent = Expr.from_proto(expression.to_proto())
    found = sent.compile(rows.schema)(rows)
    return (
        found.cast("int64").to_pylist() if pa.types.is_temporal(found.type) else found.to_pylist()
    )


def named(parameter: Any) -> str:
    """Of a test; the same in each process."""
    return parameter.__name__ if callable(parameter) else repr(parameter)


LITERALS = [
    (pa.timestamp, pd.Timestamp(1500)),
    (pa.timestamp, pd.Timestamp(1500, tz="Europe/Berlin")),
    (pa.timestamp, np.datetime64(1500, "ns")),
    (pa.timestamp, pa.scalar(1500, pa.timestamp("ns"))),
    (pa.timestamp, "1970-01-01T00:00:00.000001500"),
    (pa.timestamp, "1970-01-01T02:00:00.0000015+02:00"),
    (pa.duration, pd.Timedelta(1500)),
    (pa.duration, np.timedelta64(1500, "ns")),
    (pa.duration, pa.scalar(1500, pa.duration("ns"))),
    (pa.time64, pa.scalar(1500, pa.time64("ns"))),
    (pa.time64, "00:00:00.000001500"),
]


@pytest.mark.parametrize("unit", ["us", "ns"])
@pytest.mark.parametrize(("kind", "literal"), LITERALS, ids=named)
def test_a_time_keeps_its_nanoseconds(kind: Any, literal: Any, unit: str) -> None:
    """Everything behind the microseconds was cut: a row of 1 us was equal to 1500 ns, and one of 1500 ns was not."""
    counts = [n for n in COUNTS if n is None or n >= 0 or kind is not pa.time64]
    column, scale = pa.array(counts, pa.int64()).cast(kind(unit)), NANOSECONDS[unit]
    exact = [None if n is None else n * scale for n in counts]
    for compare in COMPARISONS:
        expected = [None if n is None else compare(n, 1500) for n in exact]
        assert values(compare(col("t"), literal), column) == expected
        columns = [column, pa.array([1500] * len(column), pa.int64()).cast(kind("ns"))]
        rows = pa.RecordBatch.from_arrays(columns, ["t", "u"])
        both = compare(col("t"), col("u")).compile(rows.schema)(rows)
        assert both.to_pylist() == expected
    is_in = [None if n is None else n == 1500 for n in exact]
    assert values(col("t").isin([literal]), column) == is_in
    assert values(fn.index_in(col("t"), [literal]), column) == [
        0 if n == 1500 else None for n in exact
    ]
    same = col("t") == literal
    assert str(Expr.from_proto(same.to_proto())) == str(same)
    filled = [1500 if n is None else n for n in exact]
    assert values(col("t").fill_null(literal).cast(kind("ns")), column) == filled
    chosen = ps.when(col("t").is_null(), literal).otherwise(col("t"))
    assert values(chosen.cast(kind("ns")), column) == filled
    assert values(col("t").between(literal, literal), column) == [
        None if n is None else n == 1500 for n in exact
    ]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()], ids=str)
def test_a_moment_within_a_day_is_no_date(kind: pa.DataType) -> None:
    """Lists of moments were cut to days."""
    days = pa.array([0, 86_400_000, None]).cast(pa.timestamp("ms")).cast(kind)
    day = dt.datetime.fromisoformat("1970-01-02")
    for sought in (day, day.replace(tzinfo=UTC), dt.date(1970, 1, 2), pd.Timestamp(day)):
        assert values(col("t").isin([sought]), days) == [False, True, None]
        assert values(col("t") == sought, days) == [False, True, None]
        assert values(fn.index_in(col("t"), [sought]), days) == [None, 0, None]
    for sought in (day.replace(hour=12), day.replace(microsecond=1), pd.Timestamp(1500)):
        assert values(col("t").isin([sought]), days) == [False, False, None]
        assert values(col("t").isin([sought, day, None]), days) == [False, True, True]
        assert values(col("t") == sought, days) == [False, False, None]
        assert values(fn.index_in(col("t"), [sought, None, day]), days) == [None, 2, 1]


def test_values_that_the_column_cannot_hold_leave_the_others_their_places() -> None:
    whole = pa.array([1, 2**53 + 1, None])
    assert values(fn.index_in(col("t"), [0.5, 2.0**53, 1.0]), whole) == [2, None, None]


def test_times_are_compared_where_the_finer_unit_has_no_room_for_them() -> None:
    """Rows that are no nanoseconds ended the job, where only another row of them was compared with."""
    for kind in (pa.timestamp, pa.duration):
        far = pa.array([-(2**61), 1, 2, 2**61, None], pa.int64()).cast(kind("s"))
        limit = pa.scalar(1_500_000_000, kind("ns"))
        assert values(col("t") < limit, far) == [True, True, False, False, None]
        assert values(limit > col("t"), far) == [True, True, False, False, None]
        assert values(col("t") == pa.scalar(2 * 10**9, kind("ns")), far) == [
            False, False, True, False, None
        ]  # fmt: skip
    days = pa.array([-(2**30), 1, 2**30], pa.int32()).cast(pa.date32())
    assert values(col("t") <= pa.scalar(86_400 * 10**9, pa.timestamp("ns")), days) == [
        True, True, False
    ]  # fmt: skip
    assert values(
        col("t") > dt.datetime(9999, 1, 1, tzinfo=UTC), pa.array([0], pa.timestamp("ns"))
    ) == [False]


def test_nanoseconds_within_lists_and_keys_are_kept() -> None:
    lists = pa.array([None], pa.list_(pa.timestamp("ns")))
    filled = col("t").fill_null([pd.Timestamp(1500)])[0]
    assert values(filled, lists) == [1500]
    keys = pa.array([1000, 1500]).cast(pa.timestamp("ns"))
    maps = pa.MapArray.from_arrays([0, 2], keys, pa.array([1, 2]))
    assert values(col("t")[pd.Timestamp(1500)], maps) == [2]
    lookup = fn.map_lookup(col("t"), query_key=pd.Timestamp(1500), occurrence="first")
    assert values(lookup, maps) == [2]
    micros = maps.cast(pa.map_(pa.timestamp("us"), pa.int64()), safe=False)
    with pytest.raises(ps.ExpressionError, match="a key of type"):
        values(col("t")[pd.Timestamp(1500)], micros)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (pa.time64("us"), "12:00+02:00", "a time of day has no zone"),
        (pa.timestamp("ns"), "2024-05-01T12:00:00.1234567891", "digits behind the nanoseconds"),
        (pa.date32(), "2024-05-01T12:00:00", "Invalid isoformat"),
    ],
    ids=str,
)
def test_text_that_says_more_than_the_column_holds_is_refused(
    kind: pa.DataType, text: str, reason: str
) -> None:
    """The zone of a time of day, and digits behind the microseconds, were left out."""
    for expression in (col("t") == text, col("t").isin([text]), col("t").fill_null(text)):
        with pytest.raises(ps.ExpressionError, match=reason):
            values(expression, pa.nulls(1, kind))


@pytest.mark.parametrize(
    ("kind", "sought"),
    [(pa.int64(), ["1"]), (pa.bool_(), [1]), (pa.timestamp("us"), [1]), (pa.int64(), [True])],
    ids=str,
)
def test_what_is_not_compared_is_not_looked_for(kind: pa.DataType, sought: list[Any]) -> None:
    """Arrow made one type of the other: a text that says 1 was among integers, where ``==`` is refused."""
    for expression in (col("t") == sought[0], col("t").isin(sought), fn.index_in(col("t"), sought)):
        with pytest.raises(ps.ExpressionError, match=r"not compared|does not work on these types"):
            values(expression, pa.nulls(1, kind))


def test_times_of_day_and_durations_do_not_wrap() -> None:
    """The lowest 32 bits of a duration were added: 5 s and 2**32 s were 5 s. The least duration was its own negative."""
    times = pa.array([5, 86_399], pa.int32()).cast(pa.time32("s"))
    for shift, expected in (
        (3, [8, None]),
        (-5, [0, 86_394]),
        (2**32, [None] * 2),
        (-86_400, [None] * 2),
    ):
        duration = pa.scalar(shift, pa.duration("s"))
        for shifted in (
            col("t") + duration,
            duration + col("t"),
            col("t") - pa.scalar(-shift, pa.duration("s")),
        ):
            for row, count in enumerate(expected):
                one = times.slice(row, 1)
                if count is None:  # refused where no row could have it
                    with pytest.raises((BadRow, ps.ExpressionError), match=r"of day|acceptable"):
                        values(shifted, one)
                else:
                    assert values(shifted.cast("int32"), one) == [count]
    with_null = pa.array([10, None], pa.int32()).cast(pa.time32("s"))
    earlier = col("t") + pa.scalar(-5, pa.duration("s"))
    assert values(earlier.cast("int32"), with_null) == [5, None]
    durations = pa.array([1, -3, None], pa.int64()).cast(pa.duration("us"))
    assert values(-col("t"), durations) == [-1, 3, None]
    with pytest.raises(BadRow, match="overflow"):
        values(-col("t"), pa.array([-(2**63)], pa.int64()).cast(pa.duration("us")))


@pytest.mark.parametrize("part", [{"f": None}, {"f": 0.1}, {"x": []}, {"m": {"k": 1}}])
def test_a_time_in_a_literal_stands_beside_parts_of_any_kind(part: dict[str, Any]) -> None:
    types = {"f": pa.float32(), "x": pa.list_(pa.int64()), "m": pa.map_(pa.string(), pa.int64())}
    [name] = part
    kind = pa.struct([("at", pa.timestamp("s")), (name, types[name])])
    rows = pa.record_batch({"t": pa.nulls(1, kind)})
    moment = dt.datetime(2024, 5, 1)  # noqa: DTZ001 - as users write it
    [found] = col("t").fill_null({"at": moment, **part}).compile(rows.schema)(rows).to_pylist()
    assert found["at"] == moment
    finer = col("t").fill_null({"at": pd.Timestamp(1500), **part})
    with pytest.raises(ps.ExpressionError, match="cannot compute"):
        finer.compile(rows.schema)


def test_midnight_is_a_key_of_a_map_of_dates() -> None:
    midnight = dt.datetime(2024, 5, 1)  # noqa: DTZ001 - as users write it
    kind = pa.map_(pa.date32(), pa.int64())
    rows = pa.record_batch({"t": pa.array([[(midnight.date(), 7)]], kind)})

    def looked_up(key: dt.datetime) -> ps.Expr:
        return ps.fn.map_lookup(col("t"), query_key=key, occurrence="first")

    for expression in (col("t")[midnight], looked_up(midnight)):
        assert expression.compile(rows.schema)(rows).to_pylist() == [7]
    with pytest.raises(ps.ExpressionError, match="none of the map's"):
        looked_up(midnight.replace(hour=1)).compile(rows.schema)
