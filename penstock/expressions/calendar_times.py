"""Functions of the calendar, for times that it has: Arrow's has the years -32767 to 32767 and goes on from one end at the other.

A time in a zone is looked at by the clock there, up to a day beside its own, and so ends a year before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.expressions.moments import DAY, is_moment, resolution
from penstock.rows.zone_clocks import clock_texts, clock_times, is_far, is_summer_time, zoned_times

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""

_PARTS = (
    "day day_of_week day_of_year hour is_dst is_leap_year iso_calendar iso_week iso_year microsecond millisecond minute month "
    "nanosecond quarter second subsecond us_week us_year week year year_month_day"
)
_DISTANCES = "day_time days hours microseconds milliseconds minutes month_day_nano month nanoseconds quarters seconds weeks years"
CALENDAR = frozenset(
    {*_PARTS.split(), "assume_timezone", "local_timestamp", "strftime"}
    | {f"{unit}_between" for unit in _DISTANCES.split()}
    | {f"{unit}_interval_between" for unit in _DISTANCES.split()}
)
"""Functions of pyarrow.compute that read times as the calendar does, but for those that round."""
_YEARS = 32_767
_DAYS_OF_YEARS = {32_766: (-12_687_063, 11_248_373), _YEARS: (-12_687_428, 11_248_738)}
"""The first day of the years from minus so many to so many, and the day behind the last, as days since 1970."""


def in_calendar(
    name: str, kernel: Apply, types: Sequence[pa.DataType], given: Mapping[str, Any]
) -> Apply:
    """The kernel of a function of ``CALENDAR``, which refuses times that it has no right values for.

    Args:
        given: options of the function by name.

    >>> year = in_calendar("year", pc.get_function("year").call, [pa.date32()], {})
    >>> year([pa.scalar(10**8, pa.int32()).cast(pa.date32())])
    Traceback (most recent call last):
    pyarrow.lib.ArrowInvalid: a date32[day] of 100000000 is not in the calendar: it lies outside of the years -32767 to 32767
    """
    if name == "nanoseconds_between" and all(kind == types[0] for kind in types):
        kernel = _nanoseconds_between
    if not any(map(is_moment, types)):
        return kernel
    kernel = _by_clock(name, kernel, types, given)

    def apply(args: list[Any]) -> Any:
        for arg in args:
            if is_moment(arg.type):
                check_calendar(arg)
        return kernel(args)

    return apply


def _by_clock(
    name: str, kernel: Apply, types: Sequence[pa.DataType], given: Mapping[str, Any]
) -> Apply:
    """The kernel with the right clocks in zones from 2038 on."""
    zones = {getattr(kind, "tz", None) for kind in types}
    if name == "assume_timezone" and pt.is_timestamp(types[0]) and zones == {None}:
        options = dict(given)
        zone = options.pop("timezone")
        return lambda args: zoned_times(args[0], zone, **options)
    if name == "assume_timezone" or len(zones) > 1 or None in zones:
        return kernel  # of several zones Arrow has none
    if name == "is_dst":
        return lambda args: is_summer_time(args[0])
    if name == "strftime":
        format_ = given.get("format", "%Y-%m-%dT%H:%M:%S")
        return lambda args: clock_texts(args[0], format_, given.get("locale", "C"))
    return lambda args: kernel([*map(clock_times, args)] if any(map(is_far, args)) else args)


def check_calendar(times: Any) -> None:
    """Whether the calendar has timestamps or dates, an array or a scalar.

    Raises:
        pa.ArrowInvalid: it has one not.
    """
    kind = times.type
    is_in_zone = pt.is_timestamp(kind) and kind.tz is not None
    if pt.is_timestamp(kind) and kind.unit == "ns":
        if not is_in_zone:
            return
        low, high = DAY - (1 << 63), (1 << 63) - DAY
        limits = "within a day of the end of what its type has"
    else:
        years = _YEARS - is_in_zone
        low, high = (day * DAY // resolution(kind) for day in _DAYS_OF_YEARS[years])
        limits = f"outside of the years {-years} to {years}"
    for bound in [times] if isinstance(times, pa.Scalar) else pc.min_max(times).values():
        if bound.is_valid and not low <= bound.value < high:
            raise pa.ArrowInvalid(
                f"a {kind} of {bound.value} is not in the calendar: it lies {limits}"
            )


def _nanoseconds_between(args: list[Any]) -> Any:
    """Arrow's own wraps: nanoseconds are counted for 292 years in each direction."""
    kind = args[0].type
    start, end = (_count(arg) for arg in args)
    return pc.multiply_checked(pc.subtract_checked(end, start), resolution(kind))


def _count(time: Any) -> Any:
    if pt.is_timestamp(time.type) and time.type.tz is not None:
        time = pc.local_timestamp(time)
    if time.type.bit_width == 32:
        time = pc.cast(time, pa.int32())
    return pc.cast(time, pa.int64())
