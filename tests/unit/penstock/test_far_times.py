"""Aim: what the calendar says of a time is right at every time, or an error that names it. Method: whole numbers of nanoseconds and the
algorithm of days and months in Python's integers, which have no end, are the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from penstock import col
from penstock.errors import ExpressionError
from penstock.expressions import BadRow
from penstock.expressions.expression import Expr

DAY = 86_400 * 10**9
UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
TYPES = {**{pa.timestamp(unit): size for unit, size in UNITS.items()}, pa.date32(): DAY}
FIXED = {"microsecond": 1000, "minute": 60 * 10**9, "hour": 3600 * 10**9, "day": DAY}
MONTHS = {"month": 1, "quarter": 3, "year": 12}


def civil(nanoseconds: int) -> tuple[int, int, int]:
    """Year, month and day (Howard Hinnant, chrono-compatible low-level date algorithms)."""
    days = nanoseconds // DAY + 719_468
    era, day = divmod(days, 146_097)
    of_era = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    of_year = day - (365 * of_era + of_era // 4 - of_era // 100)
    month = (5 * of_year + 2) // 153
    year = of_era + 400 * era + (month >= 10)
    return year, (month + 2) % 12 + 1, of_year - (153 * month + 2) // 5 + 1


def first_of(month: int) -> int:
    """Nanoseconds of the first day of a month that is counted from the year 0."""
    year, of_year = divmod(month, 12)
    year -= of_year < 2
    era, of_era = divmod(year, 400)
    day = (153 * ((of_year - 2) % 12) + 2) // 5 + of_era * 365 + of_era // 4 - of_era // 100
    return (era * 146_097 + day - 719_468) * DAY


def bits(kind: pa.DataType) -> int:
    """Of the number that a time of the type is."""
    return 32 if kind == pa.date32() else 64


def samples(kind: pa.DataType) -> list[int]:
    """Numbers of units: the ends of the type, of the calendar and of years."""
    limit = 1 << bits(kind) - 1
    years = (1, 1970, 2024, 32_767, 32_768, 65_536, -32_767)
    starts = [first_of(12 * year) // TYPES[kind] for year in years]
    near = [start + beside for start in starts for beside in (-1, 0)]
    return [n for n in [-limit, -limit // 2, *near, limit // 2, limit - 1] if -limit <= n < limit]


def times(kind: pa.DataType, numbers: list[int]) -> pa.Array:
    """Times by their numbers."""
    stored = pa.int32() if bits(kind) == 32 else pa.int64()
    return pa.array(numbers, stored).view(kind)


def computed(expression: Expr, column: pa.Array) -> list[Any]:
    """Each row's value by itself, of times their numbers, "error" where it is refused by the number."""
    sent = Expr.from_proto(expression.to_proto())
    compute = sent.compile(pa.schema({"t": column.type}))
    found = []
    for i, time in enumerate(column):
        try:
            value = compute(pa.record_batch({"t": column.slice(i, 1)}))[0]
            found.append(value.value if pa.types.is_temporal(value.type) else value.as_py())
        except BadRow as error:
            found.append("error" if str(time.value) in str(error) else str(error))
    return found


def iso_year(nanoseconds: int) -> int:
    """The year of its week's Thursday."""
    return civil((nanoseconds // DAY - (nanoseconds // DAY + 3) % 7 + 3) * DAY)[0]


PARTS: dict[str, Callable[[int], Any]] = {
    "year": lambda n: civil(n)[0],
    "month": lambda n: civil(n)[1],
    "day_of_week": lambda n: (n // DAY + 3) % 7,
    "day_of_year": lambda n: (n - first_of(12 * civil(n)[0])) // DAY + 1,
    "iso_year": iso_year,
    "hour": lambda n: n % DAY // FIXED["hour"],
    "year_month_day": lambda n: dict(zip(("year", "month", "day"), civil(n), strict=True)),
    "quarter": lambda n: (civil(n)[1] + 2) // 3,
}


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_right_or_refused(part: str, kind: pa.DataType) -> None:
    """The year 32768 was -32768, the last week of a date32 the 305811364th."""
    if kind == pa.date32() and part == "hour":
        return
    numbers = samples(kind)
    found = computed(getattr(col("t"), part)(), times(kind, numbers))
    for number, value in zip(numbers, found, strict=True):
        moment = number * TYPES[kind]
        if -32_767 <= civil(moment)[0] <= 32_767:
            assert value == PARTS[part](moment)
        else:
            assert value == "error"


def test_a_time_in_a_zone_is_in_the_calendar_by_its_clock_too() -> None:
    kind = pa.timestamp("s", "Europe/Berlin")
    last = first_of(12 * 32_767) // 10**9 - 1
    column = times(pa.timestamp("s"), [0, last, last + 1, -last * 2]).view(kind)
    assert computed(col("t").year(), column) == [1970, 32_767, "error", "error"]
    assert computed(col("t").strftime(format="%Y"), column)[1:] == ["32767", "error", "error"]
    ends = pa.array([-(1 << 63), (1 << 63) - 1]).view(pa.timestamp("ns", "Europe/Berlin"))
    assert computed(col("t").hour(), ends) == ["error", "error"]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_nanoseconds_between_are_right_or_refused(kind: pa.DataType) -> None:
    numbers = [n for n in samples(kind) if abs(civil(n * TYPES[kind])[0]) <= 32_767][::5]
    pairs = list(itertools.product(numbers, numbers))
    rows = pa.record_batch(
        {
            name: times(kind, list(side))
            for name, side in zip("ab", zip(*pairs, strict=True), strict=True)
        }
    )
    compute = col("a").nanoseconds_between(col("b")).compile(rows.schema)
    for i, (start, end) in enumerate(pairs):
        expected = (end - start) * TYPES[kind]
        if -(1 << 63) <= expected < 1 << 63:
            assert compute(rows.slice(i, 1)).to_pylist() == [expected]
        else:
            with pytest.raises(BadRow, match="overflow"):
                compute(rows.slice(i, 1))


def rounded(name: str, moment: int, multiple: int, unit: str) -> int:
    """What a moment is rounded to."""
    if unit in FIXED:
        step = multiple * FIXED[unit]
        below = moment // step * step
        above = below + step
    else:
        step, first = multiple * MONTHS[unit], 0 if unit == "year" else 12 * 1970
        year, month, _ = civil(moment)
        at = (12 * year + month - 1 - first) // step * step + first
        below, above = first_of(at), first_of(at + step)
    if name == "ceil_temporal" and below < moment:
        return above
    is_nearer = name == "round_temporal" and moment - below >= above - moment
    return above if is_nearer else below


@pytest.mark.parametrize("unit", [*FIXED, *MONTHS])
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", ["floor_temporal", "ceil_temporal", "round_temporal"])
def test_rounding_is_right_or_refused(name: str, kind: pa.DataType, unit: str) -> None:
    """The first nanosecond of a timestamp was rounded down to one in 2262, and the first of a month up to the next."""
    numbers, size = samples(kind), TYPES[kind]
    for multiple in (1, 7):
        if multiple * FIXED.get(unit, size) % size and size % (multiple * FIXED.get(unit, size)):
            with pytest.raises(ExpressionError, match="has no multiples of"):
                getattr(col("t"), name)(multiple, unit).compile(pa.schema({"t": kind}))
            continue
        found = computed(getattr(col("t"), name)(multiple, unit), times(kind, numbers))
        for number, value in zip(numbers, found, strict=True):
            expected = rounded(name, number * size, multiple, unit) // size
            fits = -(1 << bits(kind) - 1) <= expected < 1 << bits(kind) - 1
            assert value == (expected if fits else "error")


@pytest.mark.parametrize("name", ["floor_temporal", "ceil_temporal", "round_temporal"])
def test_as_many_years_as_a_type_counts_are_a_multiple(name: str) -> None:
    kind = pa.timestamp("ns")
    for multiple in (144, 200, 292):
        found = computed(getattr(col("t"), name)(multiple, "year"), times(kind, samples(kind)))
        for moment, value in zip(samples(kind), found, strict=True):
            expected = rounded(name, moment, multiple, "year")
            assert value == (expected if -(1 << 63) <= expected < 1 << 63 else "error")
    with pytest.raises(ExpressionError, match="293 year is more than"):
        getattr(col("t"), name)(293, "year").compile(pa.schema({"t": kind}))


@pytest.mark.parametrize("multiple", [0, -1, 1.5, True])
def test_a_multiple_is_a_whole_number_from_one(multiple: Any) -> None:
    """0 ended the process by a signal, at the first row."""
    with pytest.raises(ExpressionError, match="takes a whole multiple from 1, got"):
        col("t").floor_temporal(multiple, "hour").compile(pa.schema({"t": pa.timestamp("s")}))


def test_times_of_day_are_rounded_within_the_day() -> None:
    last = pa.array([86_399, 3600, None], pa.int32()).view(pa.time32("s"))
    assert computed(col("t").floor_temporal(unit="hour"), last.slice(0, 2)) == [82_800, 3600]
    rows = pa.record_batch({"t": last})
    with pytest.raises(BadRow, match="rounded to none that its type has"):
        col("t").ceil_temporal(unit="hour").compile(rows.schema)(rows)
    with pytest.raises(ExpressionError, match="is within one day, and not in 1 month"):
        col("t").ceil_temporal(unit="month").compile(rows.schema)


def test_a_clock_that_is_put_back_is_rounded_on_its_own_side() -> None:
    """A job failed at the first row of the hour that Berlin has twice."""
    first = 1_729_987_200  # 2024-10-27 02:00 in summer time, an hour later the same again
    numbers = [first + 100, first + 3600 + 100, first + 7200 + 100]
    column = times(pa.timestamp("s"), numbers).view(pa.timestamp("s", "Europe/Berlin"))
    quarters = [first, first + 3600, first + 7200]
    assert computed(col("t").floor_temporal(15, "minute"), column) == quarters
    assert computed(col("t").ceil_temporal(15, "minute"), column) == [t + 900 for t in quarters]
    day = first - 2 * 3600
    assert computed(col("t").floor_temporal(unit="day"), column) == [day] * 3
    assert computed(col("t").ceil_temporal(unit="day"), column) == [day + 25 * 3600] * 3


def test_what_is_no_time_is_not_rounded_to_one() -> None:
    for kind in (pa.int64(), pa.string(), pa.dictionary(pa.int8(), pa.int64())):
        with pytest.raises(ExpressionError, match="does not work on these types"):
            col("t").floor_temporal(unit="day").compile(pa.schema({"t": kind}))
    lengths = pa.array([-1, 5, 86_405], pa.duration("s"))
    assert computed(col("t").floor_temporal(unit="day"), lengths) == [-86_400, 0, 86_400]
    with pytest.raises(ExpressionError, match="how long a month is depends"):
        col("t").floor_temporal(unit="month").compile(pa.schema({"t": lengths.type}))
    coded = times(pa.timestamp("s"), [5, 86_405]).dictionary_encode()
    rounded_down = col("t").floor_temporal(unit="day").compile(pa.schema({"t": coded.type}))
    found = rounded_down(pa.record_batch({"t": coded}))
    assert found.cast(pa.int64()).to_pylist() == [0, 86_400]


def test_durations_are_rounded_to_weeks_of_their_own() -> None:
    days = pa.array([10 * 86_400, 0, -86_400], pa.duration("s"))
    assert computed(col("t").floor_temporal(1, "week"), days) == [7 * 86_400, 0, -7 * 86_400]
    by_larger = col("t").floor_temporal(1, "hour", calendar_based_origin=True)
    with pytest.raises(ExpressionError, match="calendar_based_origin"):
        by_larger.compile(pa.schema({"t": days.type}))
