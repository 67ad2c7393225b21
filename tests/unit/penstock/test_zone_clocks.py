"""Aim: what the clock in a zone shows is right on both sides of 2038, where Arrow's knowledge of summer time ends. Method: Python's zoneinfo
is the oracle, at every change of some years and beside it; what Python has no times for is compared with the same time 400 years before."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from penstock import col, lit
from penstock.errors import ExpressionError
from penstock.expressions import BadRow
from penstock.expressions.expression import Expr

ZONES = [
    "America/New_York",
    "Europe/Berlin",
    "Europe/Dublin",
    "Australia/Sydney",
    "Australia/Lord_Howe",
    "Africa/Casablanca",
    "Asia/Kathmandu",
    "UTC",
    "+05:30",
]
UNITS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}
YEARS = (2037, 2038, 2055, 2100)
NEAR = dt.timedelta(minutes=40)
HOUR = dt.timedelta(hours=1)
CYCLE = 146_097 * 86_400
"""Seconds of 400 years."""


def tzinfo_of(zone: str) -> dt.tzinfo:
    return dt.timezone(dt.timedelta(hours=5.5)) if zone == "+05:30" else ZoneInfo(zone)


def samples(zone: str) -> list[dt.datetime]:
    """In that zone: the first of each month, and around each change, of years on both sides of 2038."""
    found = []
    for year in YEARS:
        months = [dt.datetime(year, month, 1, 12, tzinfo=dt.UTC) for month in range(1, 13)]
        months.append(months[-1] + 31 * dt.timedelta(days=1))
        found += months
        for low, high in pairwise(each.astimezone(tzinfo_of(zone)) for each in months):
            if low.utcoffset() != high.utcoffset():
                found += around_change(low.astimezone(dt.UTC), high.astimezone(dt.UTC), zone)
    return [each.astimezone(tzinfo_of(zone)) for each in found]


def around_change(low: dt.datetime, high: dt.datetime, zone: str) -> list[dt.datetime]:
    before = low.astimezone(tzinfo_of(zone)).utcoffset()
    while high - low > dt.timedelta(seconds=1):
        middle = (low + (high - low) / 2).replace(microsecond=0)
        is_before = middle.astimezone(tzinfo_of(zone)).utcoffset() == before
        low, high = (middle, high) if is_before else (low, middle)
    return [high + each for each in (-2 * NEAR, -NEAR, low - high, high - high, NEAR, 2 * NEAR)]


def computed(expression: Expr, values: pa.Array) -> pa.Array:
    batch = pa.record_batch([values], names=["t"])
    return expression.compile(batch.schema)(batch)


def column(moments: list[dt.datetime], unit: str, zone: str | None) -> pa.Array:
    return pa.array([*moments, None], pa.timestamp(unit, zone))


def plain(moment: dt.datetime) -> dt.datetime:
    return moment.replace(tzinfo=None, fold=0)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("unit", UNITS)
def test_the_clock_of_a_zone_is_read(unit: str, zone: str) -> None:
    moments = samples(zone)
    times = column(moments, unit, zone)

    def check(expression: Expr, expected: list[Any]) -> None:
        assert computed(expression, times).to_pylist() == [*expected, None], str(expression)

    check(col("t").local_timestamp(), [plain(each) for each in moments])
    check(col("t").hour(), [each.hour for each in moments])
    check(col("t").day_of_week(), [each.weekday() for each in moments])
    check(col("t").cast("date32"), [each.date() for each in moments])
    check(col("t").cast("date64"), [each.date() for each in moments])
    check(col("t").cast("time32[s]"), [each.time() for each in moments])
    check(
        col("t").floor_temporal(1, "day").local_timestamp(),
        [plain(each).replace(hour=0, minute=0, second=0) for each in moments],
    )
    if zone != "+05:30":  # which has no name
        check(col("t").is_dst(), [bool(each.dst()) for each in moments])
    without_name = "%Y-%m-%d %H %%Z %z"
    name = "" if zone == "+05:30" else " %Z"
    check(
        col("t").strftime(format=without_name + name),
        [each.strftime(without_name + name) for each in moments],
    )
    digits = {"s": "", "ms": ".000", "us": ".000000", "ns": ".000000000"}[unit]
    mark = "Z" if zone == "UTC" else "%z"
    check(
        col("t").cast("string"),
        [each.strftime(f"%Y-%m-%d %H:%M:%S{digits}{mark}") for each in moments],
    )


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("unit", UNITS)
def test_a_clock_in_a_zone_is_a_moment(unit: str, zone: str) -> None:
    clocks = sorted(
        {plain(each) + beside for each in samples(zone) for beside in (-HOUR, 0 * HOUR)}
    )
    zoned = tzinfo_of(zone)
    for which, fold in (("earliest", 0), ("latest", 1)):
        found = computed(
            col("t").assume_timezone(zone, ambiguous=which, nonexistent="latest"),
            column(clocks, unit, None),
        )
        for clock, moment in zip(clocks, found.cast(pa.timestamp(unit)).to_pylist(), strict=False):
            expected = clock.replace(tzinfo=zoned, fold=fold).astimezone(dt.UTC)
            if plain(expected.astimezone(zoned)) != clock:  # never: the change itself
                before, after = (clock.replace(tzinfo=zoned, fold=n).utcoffset() for n in (0, 1))
                assert before is not None
                assert after is not None
                change = moment.replace(tzinfo=dt.UTC)
                assert change.astimezone(zoned).utcoffset() == after
                assert (change - dt.timedelta(seconds=1)).astimezone(zoned).utcoffset() == before
            else:
                assert moment == plain(expected), (clock, which)


@pytest.mark.parametrize("year", [2037, 2038, 2055, 2455])
def test_a_clock_that_is_shown_twice_or_never_is_an_error_or_chosen(year: int) -> None:
    first_sunday = 7 - dt.date(year, 3, 1).weekday()
    never = dt.datetime(year, 3, first_sunday + 7, 2, 30)  # noqa: DTZ001
    twice = dt.datetime(year, 11, 7 - dt.date(year, 11, 1).weekday(), 1, 30)  # noqa: DTZ001
    for clock in (never, twice):
        with pytest.raises(BadRow, match="New_York"):
            computed(col("t").assume_timezone("America/New_York"), column([clock], "us", None))
    for which in ("earliest", "latest"):
        option = {"ambiguous": which, "nonexistent": which}
        found = computed(
            col("t").assume_timezone("America/New_York", **option),
            column([never, twice], "us", None),
        ).cast(pa.timestamp("us"))
        is_late = which == "latest"
        change = never.replace(hour=7, minute=0) - dt.timedelta(microseconds=not is_late)
        assert found.to_pylist()[:2] == [change, twice.replace(hour=6 if is_late else 5)]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("cycles", [1, 20, 74])
def test_years_that_python_has_not_are_like_those_400_years_before(zone: str, cycles: int) -> None:
    moments = [each for each in samples(zone) if each.year >= 2100]
    seconds = [int(each.timestamp()) + cycles * CYCLE for each in moments]
    times = pa.array(seconds, pa.int64()).cast(pa.timestamp("s", zone))
    assert computed(col("t").hour(), times).to_pylist() == [each.hour for each in moments]
    clocks = computed(col("t").local_timestamp(), times)
    again = computed(col("t").assume_timezone(zone, ambiguous="earliest"), clocks)
    assert computed(col("t").local_timestamp(), again).equals(clocks)


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo", "UTC"])
def test_the_last_time_of_all_has_a_clock(zone: str) -> None:
    last = pa.array([dt.datetime(9999, 12, 31, 12, tzinfo=dt.UTC)], pa.timestamp("us", zone))
    expected = {"America/New_York": 7, "Asia/Tokyo": 21, "UTC": 12}[zone]
    assert computed(col("t").hour(), last).to_pylist() == [expected]
    assert computed(col("t").cast("date32"), last).to_pylist() == [dt.date(9999, 12, 31)]


@pytest.mark.parametrize("name", ["floor_temporal", "ceil_temporal", "round_temporal"])
def test_days_of_a_zone_begin_at_its_midnight(name: str) -> None:
    noon = dt.datetime(2055, 7, 15, 11, tzinfo=ZoneInfo("America/New_York"))
    found = computed(getattr(col("t"), name)(1, "day"), column([noon], "us", "America/New_York"))
    day = 16 if name == "ceil_temporal" else 15
    assert found.to_pylist()[0] == dt.datetime(2055, 7, day, 4, tzinfo=dt.UTC)


def test_constants_and_slices_have_the_same_clock() -> None:
    noon = dt.datetime(2055, 7, 15, 12, tzinfo=ZoneInfo("America/New_York"))
    times = column([noon, noon.replace(year=2024)], "us", "America/New_York")
    for expression in (
        lit(noon).assume_timezone("Europe/Berlin"),
        lit(noon).hours_between(noon.astimezone(ZoneInfo("Europe/Berlin"))),
    ):
        with pytest.raises(ExpressionError, match="New_York"):
            computed(expression, times)
    assert computed(col("t").hour(), times.slice(1)).to_pylist() == [12, None]
    batch = pa.record_batch([times], names=["t"])
    days = (dt.date(2055, 7, 15) - dt.date(2024, 7, 15)).days
    for expression, expected in (
        (col("t").hours_between(noon), [0, 24 * days, None]),
        (col("t").nanoseconds_between(noon), [0, 86_400 * 10**9 * days, None]),
    ):
        assert expression.compile(batch.schema)(batch).to_pylist() == expected


def test_changes_less_than_a_week_apart_are_found() -> None:
    """As around Ramadan in Gaza."""
    zone = ZoneInfo("Asia/Gaza")
    moments = [dt.datetime(2040, 1, 1, tzinfo=zone) + dt.timedelta(day) for day in range(34 * 365)]
    times = column(moments, "s", "Asia/Gaza")
    shown = computed(col("t").local_timestamp(), times).to_pylist()
    assert shown == [*(plain(each) for each in moments), None]


@pytest.mark.parametrize("target", ["date32", "time64[ns]", "string"])
@pytest.mark.parametrize("sign", [1, -1])
def test_nanoseconds_whose_clock_is_past_the_end_of_their_type(target: str, sign: int) -> None:
    last = sign * (2**63 - 1)
    zone = "Asia/Kolkata" if sign > 0 else "America/New_York"
    kind = pa.timestamp("ns", zone)
    rows = pa.record_batch({"t": pa.array([0, last], pa.int64()).cast(kind)})
    with pytest.raises(BadRow, match=f"of {last} shows no time of its type"):
        col("t").cast(target).compile(rows.schema)(rows)
    other = rows["t"].cast(pa.timestamp("ns", "Etc/GMT+5" if sign > 0 else "Etc/GMT-5"))
    rows = pa.record_batch({"t": other})
    assert col("t").cast(target).compile(rows.schema)(rows).null_count == 0
