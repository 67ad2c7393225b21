"""Aim: ``strptime`` reads no day, second or zone that there is not. Method: Python's dates are the oracle."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.expressions import BadRow, parsed_times

DAYS = [
    (year, month, day)
    for year in (1900, 1999, 2000, 2023, 2024)
    for month in range(1, 13)
    for day in (1, 2, 3, 15, 27, 28, 29, 30, 31)
]


def epoch_seconds(year: int, month: int, day: int) -> int | None:
    try:
        return int(dt.datetime(year, month, day, tzinfo=dt.UTC).timestamp())
    except ValueError:
        return None


def parsed(texts: list[str | None], format_: str, **options: Any) -> list[int | None]:
    rows = pa.record_batch({"s": texts})
    times = col("s").strptime(format=format_, unit="s", **options).compile(rows.schema)
    return list(times(rows).cast("int64").to_pylist())


@pytest.mark.parametrize(
    ("format_", "text", "seconds"),
    [
        ("%Y-%m-%d", "{0:04}-{1:02}-{2:02}", 0),
        ("%F", "{0}-{1}-{2}", 0),
        ("%Y%m%d", "{0:04}{1:02}{2:02}", 0),
        ("%d. %b %Y %H:%M", "{2}. {3} {0} 23:59", 86_340),
        ("%B %e, %Y", "{3} {2:2}, {0}", 0),
        ("%a %d/%m/%Y %I:%M %p", "Mon {2:02}/{1:02}/{0} 01:30 PM", 48_600),
        ("%Y-%m-%dT%H:%M:%S%z", "{0:04}-{1:02}-{2:02}T01:00:00+0200", -3600),
        ("%Y-%m-%dT%H:%M:%S%z", "{0:04}-{1:02}-{2:02}T23:00:00-0300", 93_600),
    ],
)
def test_a_day_that_there_is_not_is_an_error(format_: str, text: str, seconds: int) -> None:
    """Arrow counts on from it: February 30 was March 1."""
    months = [f"{dt.date(2000, month, 1):%b}" for month in range(1, 13)]
    texts = [text.format(*day, months[day[1] - 1]) for day in DAYS]
    days = [epoch_seconds(*day) for day in DAYS]
    expected = [None if day is None else day + seconds for day in days]
    assert parsed([*texts, None], format_, error_is_null=True) == [*expected, None]
    there = [i for i, day in enumerate(expected) if day is not None]
    assert parsed([texts[i] for i in there], format_) == [expected[i] for i in there]
    first = expected.index(None)
    with pytest.raises(BadRow, match=f"there is no day or time '{texts[first][:4]}") as failed:
        parsed(texts, format_)
    assert failed.value.row_index == first


@pytest.mark.parametrize(
    ("format_", "there", "none"),
    [
        ("%Y-%m-%d %H:%M:%S", "2024-01-31 23:59:59", "2024-01-31 23:59:60"),
        ("%H:%M:%S", "10:00:59", "10:00:61"),
        ("%T", "01:01:01", "01:00:60"),
        ("%I:%M:%S %p", "12:59:01 AM", "11:59:60 PM"),
        ("%r", "11:59:59 PM", "11:59:60 PM"),
        ("%c", "Mon Jan  1 10:00:00 2024", "Mon Jan  1 10:00:60 2024"),
        ("%OS s", "6 s", "60 s"),
        ("%Y-%m-%dT%H:%M:%S%z", "2024-05-30T01:00:00-23:59", "2024-05-30T01:00:60Z"),
        ("%FT%T%z", "2024-05-30T01:00:00+2359", "2024-05-30T01:00:00+2400"),
        ("%FT%T%z", "2024-05-30T01:00:00Z", "2024-05-30T01:00:00-30:00"),
    ],
)
def test_a_second_60_and_a_zone_a_day_away_are_errors(format_: str, there: str, none: str) -> None:
    """10:00:60 was 10:01:00."""
    known = parsed([there], format_)
    assert parsed([none, there, None], format_, error_is_null=True) == [None, *known, None]
    with pytest.raises(BadRow, match="there is no day or time") as failed:
        parsed([there, none], format_)
    assert failed.value.row_index == 1


def test_other_ways_to_say_a_day() -> None:
    leap = [epoch_seconds(2024, 12, 31), None]
    assert parsed(["2024 366", "2023 366"], "%Y %j", error_is_null=True) == leap
    short = [epoch_seconds(2024, 2, 29), None, epoch_seconds(1972, 2, 29)]
    texts = ["02/29/24", "02/29/23", "02/29/72"]
    assert parsed(texts, "%D", error_is_null=True) == short
    assert parsed(["12:30 100%"], "%H:%M 100%%") == [
        int(dt.datetime(1900, 1, 1, 12, 30, tzinfo=dt.UTC).timestamp())
    ]
    for format_, text in (
        ("%%F %Y-%m-%d", "%F 2024-02-30"),
        ("%d %Y-%m-%d", "01 2024-02-30"),  # the last one counts
        ("%x", "02/30/24"),
    ):
        assert parsed([text], format_, error_is_null=True) == [None]
    constant = ps.lit("2023-02-29").strptime(format="%F", unit="s")
    with pytest.raises(ps.ExpressionError, match="there is no day or time '2023-02-29'"):
        constant.compile(pa.schema([]))


@pytest.mark.parametrize(
    ("format_", "text"),
    [("%F", "2024-05-01"), ("%FT%T%z", "2024-04-30T10:00:00+0000"), ("%d %b %Y", "01 May 2024")],
)
def test_days_that_every_month_has_cost_no_call_of_python(
    format_: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a stream may be of the day behind a short month."""

    def is_none(_pattern: Any, text: str) -> bool:
        raise AssertionError(f"{text} is a day of any year")

    monkeypatch.setattr(parsed_times, "_is_none", is_none)
    assert None not in parsed([text] * 3, format_)
