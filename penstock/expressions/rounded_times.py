"""``floor_temporal``, ``ceil_temporal`` and ``round_temporal``: exact, or refused.

Multiples are counted from 1970, weeks from the first day of one, years from the year 0; with
``calendar_based_origin`` from the start of the next larger unit. Of a time in a zone the clock there is rounded, and where that shows a time twice,
the one that is meant is the nearest on the right side. Arrow wraps what its types do not have, ends the process for a multiple of 0,
goes on to the next month from the first moment of one, and fails for clocks that are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.errors import ExpressionError
from penstock.expressions.calendar_times import check_calendar
from penstock.expressions.literals import array_of_scalars
from penstock.expressions.moments import DAY, resolution
from penstock.rows.zone_clocks import clock_times, zoned_times

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""
_Integers = np.ndarray[Any, np.dtype[np.int64]]
_Starts = Callable[[_Integers], tuple[_Integers, _Integers]]
"""Times in, how long before each the multiple that it is in began, and how long behind it the next does."""

ROUNDED = frozenset({"ceil_temporal", "floor_temporal", "round_temporal"})
_FIXED = {
    "nanosecond": 1,
    "microsecond": 1000,
    "millisecond": 10**6,
    "second": 10**9,
    "minute": 60 * 10**9,
    "hour": 3600 * 10**9,
    "day": DAY,
    "week": 7 * DAY,
}
_MONTHS = {"month": 1, "quarter": 3, "year": 12}
_LARGER = [*_FIXED][:-1]
_MONTHS_BEFORE_1970 = 1970 * 12
_DATE64_DAY = 86_400_000
"""Milliseconds, which a date64 counts."""


def rounded_times(name: str, kind: pa.DataType, given: Mapping[str, Any]) -> Apply:
    """How times of a type are rounded.

    Args:
        name: of ``ROUNDED``.
        kind: of the times.
        given: options of the function by name.

    Raises:
        ExpressionError: the type has no such multiples.

    >>> floor = rounded_times("floor_temporal", pa.timestamp("s"), {"multiple": 15, "unit": "minute"})
    >>> floor([pa.scalar(1000, pa.timestamp("s"))]).value
    900
    """
    multiple = given.get("multiple", 1)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ExpressionError(f"{name} takes a whole multiple from 1, got {multiple!r}")
    unit_of_type = DAY if pt.is_date64(kind) else resolution(kind)
    starts = _starts(name, kind, unit_of_type, given)
    is_strict = bool(given.get("ceil_is_strictly_greater", False))

    def shift(counts: _Integers) -> _Integers:
        behind, ahead = starts(counts)
        if name == "floor_temporal":
            return -behind
        if name == "round_temporal":
            return np.where(behind >= ahead, ahead, -behind)
        return np.where((behind == 0) & (not is_strict), 0, ahead)

    if pt.is_timestamp(kind) and kind.tz is not None:
        return _of_arrays(lambda times: _in_zone(times, shift))
    return _of_arrays(lambda times: _shifted(times, shift))


def _starts(name: str, kind: pa.DataType, unit_of_type: int, given: Mapping[str, Any]) -> _Starts:
    multiple, unit = given.get("multiple", 1), given.get("unit", "day")
    from_larger = bool(given.get("calendar_based_origin", False))
    is_of_months = unit in _MONTHS
    step = multiple * _FIXED.get(unit, DAY)
    if is_of_months:  # at most: 400 years, or 4800 months, have 146097 days
        step = (multiple * _MONTHS[unit] * 146_097 // 4800 + 2) * DAY
    whole, rest = divmod(step, unit_of_type)
    if from_larger and pt.is_duration(kind):
        raise ExpressionError(
            f"{name}: {kind} is in no larger unit; leave calendar_based_origin away"
        )
    if is_of_months and pt.is_duration(kind):
        raise ExpressionError(
            f"{name}: how long a {unit} is depends on the month, so {kind} has none"
        )
    if pt.is_time(kind) and step > DAY:
        raise ExpressionError(f"{name}: a {kind} is within one day, and not in {multiple} {unit}")
    if rest or not whole:
        if unit_of_type % step == 0:
            return lambda counts: (np.zeros_like(counts), np.ones_like(counts))
        raise ExpressionError(
            f"{name}: {kind} has no multiples of {multiple} {unit}; cast it to one with a finer unit first"
        )
    if whole >= 1 << 63:
        raise ExpressionError(f"{name}: {multiple} {unit} is more than {kind} can count")
    per_day = DAY // unit_of_type
    if from_larger and unit == "week" and multiple > 1:
        raise ExpressionError(
            f"{name}: weeks of a year are not counted; leave calendar_based_origin away"
        )
    if is_of_months or (from_larger and unit == "day"):
        return lambda counts: _in_days(counts, per_day, _day_starts(given))
    if from_larger and unit != "week":
        return _within(whole, _FIXED[_LARGER[_LARGER.index(unit) + 1]] // unit_of_type)
    first = 0
    if unit == "week" and not pt.is_duration(kind):
        first = (-3 if given.get("week_starts_monday", True) else -4) * per_day
    return _regular(whole, first)


def _regular(step: int, first: int) -> _Starts:
    def starts(counts: _Integers) -> tuple[_Integers, _Integers]:
        behind = np.mod(np.mod(counts, step) - first % step, step)
        return behind, step - behind

    return starts


def _within(step: int, larger: int) -> _Starts:
    def starts(counts: _Integers) -> tuple[_Integers, _Integers]:
        behind = np.mod(np.mod(counts, larger), step)
        return behind, step - behind

    return starts


def _in_days(counts: _Integers, per_day: int, starts: _Starts) -> tuple[_Integers, _Integers]:
    days, rest = np.divmod(counts, per_day)
    behind, ahead = starts(days)
    return behind * per_day + rest, ahead * per_day - rest


def _day_starts(given: Mapping[str, Any]) -> _Starts:
    """Of days since 1970, for units that a calendar is needed for."""
    multiple, unit = given.get("multiple", 1), given.get("unit", "day")
    from_larger = bool(given.get("calendar_based_origin", False))

    def starts(days: _Integers) -> tuple[_Integers, _Integers]:
        months = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
        if unit in _MONTHS:
            step = multiple * _MONTHS[unit]
            within = months + _MONTHS_BEFORE_1970 if unit == "year" else months
            if from_larger and unit != "year":
                within = np.mod(months, 12)
            first = months - np.mod(within, step)
            return days - _first_day(first), _first_day(first + step) - days
        behind = np.mod(days - _first_day(months), multiple)
        return behind, multiple - behind

    return starts


def _first_day(months: _Integers) -> _Integers:
    days: _Integers = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    return days


def _of_arrays(rounded: Callable[[pa.Array], pa.Array]) -> Apply:
    def apply(args: list[Any]) -> Any:
        times = args[0]
        if isinstance(times, pa.Scalar):
            return rounded(array_of_scalars([times], times.type))[0]
        return rounded(times)

    return apply


def _shifted(times: pa.Array, shift: Callable[[_Integers], _Integers]) -> pa.Array:
    kind = times.type
    counts, nulls = _counts(times)
    moves = shift(counts)
    found = counts + moves
    low, high = _limits(kind)
    wrong = (found < low) | (found >= high) if high else (found < counts) != (moves < 0)
    if nulls is not None:
        wrong &= ~nulls
    if wrong.any():
        value = times[int(np.flatnonzero(wrong)[0])].value
        raise pa.ArrowInvalid(f"a {kind} of {value} is rounded to none that its type has")
    if pt.is_date64(kind):
        return pa.array(found * _DATE64_DAY, pa.int64(), mask=nulls).view(kind)
    stored = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array(found, stored, mask=nulls).view(kind)


def _in_zone(times: pa.Array, shift: Callable[[_Integers], _Integers]) -> pa.Array:
    check_calendar(times)
    clock = clock_times(times)
    found = _shifted(clock, shift)
    check_calendar(found)
    first, second = (
        zoned_times(found, times.type.tz, ambiguous=which, nonexistent="latest")
        for which in ("earliest", "latest")
    )
    above = pc.if_else(pc.greater_equal(first, times), first, second)
    below = pc.if_else(pc.less_equal(second, times), second, first)
    return pc.if_else(pc.greater(found, clock), above, below)


def _counts(times: pa.Array) -> tuple[_Integers, np.ndarray[Any, np.dtype[np.bool_]] | None]:
    """Times as numbers of units, of a date64 days, and which are null."""
    numbers = pc.cast(
        times.view(pa.int32() if times.type.bit_width == 32 else pa.int64()), pa.int64()
    )
    nulls = None
    if numbers.null_count:
        nulls = numbers.is_null().to_numpy(zero_copy_only=False)
        numbers = pc.fill_null(numbers, 0)
    counts = numbers.to_numpy(zero_copy_only=False)
    return (counts // _DATE64_DAY if pt.is_date64(times.type) else counts), nulls


def _limits(kind: pa.DataType) -> tuple[int, int]:
    """What a type counts: from the one number to before the other; both 0 = what 64 bits hold."""
    if pt.is_time(kind):
        return 0, DAY // resolution(kind)
    if pt.is_date(kind):
        most = (1 << 31) - 1 if pt.is_date32(kind) else (1 << 63) // _DATE64_DAY
        return -most - pt.is_date32(kind), most + 1
    return 0, 0
