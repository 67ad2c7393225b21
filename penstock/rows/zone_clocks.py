"""What clocks in zones show from 2038 on, where Arrow knows no summer time: computed with Python's zones.

The changes of a zone are looked up once, from 2038 until its rules have repeated for 400 years. Earlier times are left to Arrow.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.rows.nested_casts import also_of_scalars

Kernel = Callable[[Any], Any]
_Integers = np.ndarray[Any, np.dtype[np.int64]]

_PER_SECOND = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}
_LAST = (1 << 63) - 1
_A_DAY = 86_400 * 10**9
"""In nanoseconds."""
_FAR = 2_145_916_800
"""2038, in seconds since 1970."""
_REGULAR = 4_102_444_800
"""2100: from here on no zone has changes of a single year, and all of them are again 400 years later."""
_CYCLE = 146_097 * 86_400
_STEP = 2 * 86_400
"""Two changes of a zone are further apart (in Gaza a week less an hour)."""
_WITHOUT_SUMMER = re.compile(r"UTC|[+-].*")
_OF_ZONE = re.compile(r"%%|%[EO]?z|%Z")


class _Kind(NamedTuple):
    offset: int
    is_dst: bool
    name: str


class _Zone(NamedTuple):
    """The changes of a zone: when each of its times begins, in seconds, and which of its kinds that is."""

    starts: _Integers
    kinds: list[_Kind]
    kind_at: _Integers

    @property
    def offsets(self) -> _Integers:
        return np.array([kind.offset for kind in self.kinds])[self.kind_at]


def is_far(times: Any, zone: str | None = None) -> bool:
    """Whether timestamps, an array or a scalar, are in a zone with a name and reach 2038.

    Args:
        zone: the zone, where it is not that of the type.
    """
    zone = zone or (times.type.tz if pt.is_timestamp(times.type) else None)
    if zone is None or _WITHOUT_SUMMER.fullmatch(zone):
        return False
    last = times if isinstance(times, pa.Scalar) else pc.max(times)
    return bool(last.is_valid) and last.value >= _FAR * _PER_SECOND[times.type.unit]


def by_clock(kernel: Kernel) -> Kernel:
    """A kernel that reads the clock of timestamps, so that it reads the right one in far times too."""

    def apply(times: Any) -> Any:
        check_clocks(times)
        return kernel(clock_times(times) if is_far(times) else times)

    return apply


def check_clocks(times: Any) -> None:
    """Whether what the clock shows in the zone of each timestamp or date, an array or a scalar, is a time of its type.

    Raises:
        pa.ArrowInvalid: one lies so near to the end of it that it is not: Arrow goes on from the other end.
    """
    kind = times.type
    if not pt.is_timestamp(kind) or kind.unit != "ns" or kind.tz is None:
        return
    for bound in [times] if isinstance(times, pa.Scalar) else pc.min_max(times).values():
        if bound.is_valid and abs(bound.value) > _LAST - _A_DAY:
            clock = pc.local_timestamp(bound).value
            if (clock > 0) != (bound.value > 0):
                raise pa.ArrowInvalid(
                    f"a {kind} of {bound.value} shows no time of its type in its zone; cast it to another zone or unit first"
                )


def clock_times(times: Any) -> Any:
    """What the clock shows in the zone of each timestamp, an array or a scalar: Arrow's ``local_timestamp``.

    >>> noon = dt.datetime(2055, 7, 15, 12, tzinfo=dt.UTC)
    >>> str(clock_times(pa.scalar(noon, pa.timestamp("s", "America/New_York"))))
    '2055-07-15 08:00:00'
    """
    return _of_far(pc.local_timestamp, _far_clocks)(times)


def is_summer_time(times: Any) -> Any:
    """Arrow's ``is_dst``."""
    return _of_far(pc.is_dst, _far_summers)(times)


def clock_texts(times: Any, format_: str, locale: str = "C") -> Any:
    """Arrow's ``strftime``.

    >>> noon = dt.datetime(2055, 7, 15, 12, tzinfo=dt.UTC)
    >>> clock_texts(pa.scalar(noon, pa.timestamp("s", "America/New_York")), "%H %Z").as_py()
    '08 EDT'
    """

    def far_texts(times: Any) -> Any:
        clocks = pc.cast(_far_clocks(times), pa.timestamp(times.type.unit, "UTC"))
        zone = _zone(times.type.tz)
        at = zone.kind_at[_places(zone, times)]
        texts = pa.nulls(len(times), pa.string())
        for index in np.unique(at).tolist():
            in_kind = _written(format_, zone.kinds[index])
            found = pc.strftime(clocks, format=in_kind, locale=locale)
            texts = pc.if_else(pa.array(at == index), found, texts)
        return texts

    return _of_far(lambda near: pc.strftime(near, format=format_, locale=locale), far_texts)(times)


def zoned_times(
    clocks: Any, zone: str, ambiguous: str = "raise", nonexistent: str = "raise"
) -> Any:
    """The timestamps at which clocks in a zone show these: Arrow's ``assume_timezone``.

    Raises:
        pa.ArrowInvalid: a clock shows one twice or never, and the options do not say which one is meant.
    """

    def far_times(clocks: Any) -> Any:
        found = _zone(zone)
        seconds = _seconds(clocks)
        folded, offsets = _folded(seconds), found.offsets
        before, after = offsets[:-1], offsets[1:]
        first_at, second_at = (
            np.searchsorted(found.starts[1:] + pick(before, after), folded, side="right")
            for pick in (np.maximum, np.minimum)
        )
        first, second = offsets[first_at], offsets[second_at]
        _refuse(clocks, (first > second) & (ambiguous == "raise"), f"is shown twice in {zone!r}")
        _refuse(clocks, (first < second) & (nonexistent == "raise"), f"is never shown in {zone!r}")
        per_second = _PER_SECOND[clocks.type.unit]
        shift = (second if ambiguous == "latest" else first) * per_second
        moved = pc.subtract_checked(_numbers(clocks), pa.array(shift))
        change = (found.starts[second_at] + seconds - folded) * per_second
        change = pa.array(change - (nonexistent == "earliest"))
        return pc.if_else(pa.array(first < second), change, moved).cast(
            pa.timestamp(clocks.type.unit, zone)
        )

    def near_times(clocks: Any) -> Any:
        return pc.assume_timezone(clocks, zone, ambiguous=ambiguous, nonexistent=nonexistent)

    return _of_far(near_times, far_times, zone)(clocks)


def _of_far(near: Kernel, far: Kernel, zone: str | None = None) -> Kernel:
    """Arrow's kernel for what lies before 2038, and the other one for what does not.

    Args:
        far: of arrays without nulls.
    """

    def split(times: Any) -> Any:
        limit = pa.scalar(_FAR * _PER_SECOND[times.type.unit], pa.int64())
        is_there = pc.fill_null(pc.greater_equal(_numbers(times), limit), False)
        of_near = near(pc.if_else(is_there, pa.scalar(None, times.type), times))
        return pc.replace_with_mask(of_near, is_there, far(times.filter(is_there)))

    return lambda times: also_of_scalars(split)(times) if is_far(times, zone) else near(times)


def _far_clocks(times: Any) -> Any:
    zone, unit = _zone(times.type.tz), times.type.unit
    offsets = zone.offsets[_places(zone, times)] * _PER_SECOND[unit]
    try:
        moved = pc.add_checked(_numbers(times), pa.array(offsets))
    except pa.ArrowInvalid as error:
        last = pc.max(times).value
        raise pa.ArrowInvalid(
            f"{last} of {times.type} or one before it shows no time of its type in its zone"
        ) from error
    return moved.cast(pa.timestamp(unit))


def _far_summers(times: Any) -> Any:
    zone = _zone(times.type.tz)
    is_dst = np.array([kind.is_dst for kind in zone.kinds])
    return pa.array(is_dst[zone.kind_at[_places(zone, times)]])


def _places(zone: _Zone, times: Any) -> _Integers:
    """Which change of the zone was the last one."""
    return np.searchsorted(zone.starts, _folded(_seconds(times)), side="right") - 1


def _numbers(times: Any) -> Any:
    return pc.cast(times, pa.int64())


def _seconds(times: Any) -> _Integers:
    seconds: _Integers = _numbers(times).to_numpy() // _PER_SECOND[times.type.unit]
    return seconds


def _folded(seconds: _Integers) -> _Integers:
    """The same times, and those of 2500 and later as far before it as there is a like calendar."""
    return np.where(seconds < _REGULAR, seconds, _REGULAR + (seconds - _REGULAR) % _CYCLE)


def _refuse(clocks: Any, is_wrong: Any, problem: str) -> None:
    if is_wrong.any():
        text = pc.cast(clocks[int(np.flatnonzero(is_wrong)[0])], pa.string())
        raise pa.ArrowInvalid(
            f"{text} {problem}; say with ambiguous= and nonexistent= what is meant"
        )


def _written(format_: str, kind: _Kind) -> str:
    """A format with the name and the offset of a zone put in."""
    hours, minutes = divmod(abs(kind.offset) // 60, 60)
    sign = "-" if kind.offset < 0 else "+"

    def part(found: re.Match[str]) -> str:
        directive = found[0]
        if directive == "%%":
            return directive
        between = ":" if len(directive) == 3 else ""
        offset = f"{sign}{hours:02}{between}{minutes:02}"
        return kind.name if directive == "%Z" else offset

    return _OF_ZONE.sub(part, format_)


@lru_cache(maxsize=64)
def _zone(name: str) -> _Zone:
    try:
        zone = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise pa.ArrowInvalid(
            f"Python knows no time zone {name!r}, and so not what is from 2038 on: install tzdata"
        ) from error

    def kind(second: int) -> _Kind:
        there = dt.datetime.fromtimestamp(second, zone)
        return _Kind(_elapsed(there.utcoffset()), bool(there.dst()), str(there.tzname()))

    starts = [_FAR - 2 * _STEP]
    found = [kind(starts[0])]
    for low in range(starts[0], _REGULAR + _CYCLE + 2 * _STEP, _STEP):
        high = low + _STEP
        after = kind(high)
        if after == found[-1]:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if kind(middle) == after else (middle, high)
        starts.append(high)
        found.append(after)
    kinds = list(dict.fromkeys(found))
    return _Zone(np.array(starts), kinds, np.array([kinds.index(each) for each in found]))


def _elapsed(offset: dt.timedelta | None) -> int:
    return 0 if offset is None else int(offset.total_seconds())
