"""Times as whole numbers of nanoseconds: exact in every unit, and beyond what Python's own times have.

Dates are their midnight and times without a zone are in UTC, as beside columns.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

_UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
DAY = 86_400 * 10**9
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_FRACTION = re.compile(r"([.,]\d{6})(\d+)")


def is_moment(kind: pa.DataType) -> bool:
    """Whether a type's values are points in time: timestamps and dates."""
    return bool(pt.is_timestamp(kind) or pt.is_date(kind))


def times_in(value: pa.Scalar) -> Iterator[int]:
    """The times of a value and its parts, as numbers of nanoseconds.

    >>> list(times_in(pa.scalar({"n": 7, "at": [dt.date(1970, 1, 2), None]})))
    [86400000000000]
    """
    kind = value.type
    if not value.is_valid:
        return
    if pt.is_struct(kind):
        parts = [value[i] for i in range(kind.num_fields)]
    elif pt.is_map(kind):
        parts = [each[i] for each in value.values for i in (0, 1)]
    elif pt.is_nested(kind):
        parts = list(value.values)
    else:
        if pt.is_temporal(kind):
            yield nanoseconds(value)
        return
    for part in parts:
        yield from times_in(part)


def nanoseconds(time: pa.Scalar) -> int:
    """A time, date, duration or time of day that is not null, as a number of nanoseconds.

    >>> nanoseconds(pa.scalar(2, pa.timestamp("us"))), nanoseconds(pa.scalar(1, pa.date32()))
    (2000, 86400000000000)
    """
    return int(time.value) * resolution(time.type)


def of_nanoseconds(number: int, kind: pa.DataType) -> pa.Scalar | None:
    """The time of that number, None where the type has none.

    >>> of_nanoseconds(1500, pa.timestamp("us")), of_nanoseconds(2000, pa.duration("us")).value
    (None, 2)
    """
    count, rest = divmod(number, resolution(kind))
    if pt.is_date64(kind) and number % DAY:
        return None
    bits = kind.bit_width
    if rest or not -(1 << bits - 1) <= count < 1 << bits - 1:
        return None
    return pa.scalar(count, pa.int64()).cast(pa.int32() if bits == 32 else pa.int64()).cast(kind)


def moment_of_text(text: str) -> int:
    """The moment that a text in ISO's notation says, as nanoseconds since the epoch.

    Raises:
        ValueError: it says none, or one with digits behind the nanoseconds.

    >>> moment_of_text("1970-01-01T01:00:00.000001500+01:00")
    1500
    """
    short, rest = _without_nanoseconds(text)
    moment = dt.datetime.fromisoformat(short)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return (moment - _EPOCH) // _MICROSECOND * 1000 + rest


def time_of_day_of_text(text: str) -> int:
    """The time of day that a text in ISO's notation says, as nanoseconds.

    Raises:
        ValueError: it says none, one with a zone, or one with digits behind the nanoseconds.
    """
    short, rest = _without_nanoseconds(text)
    time = dt.time.fromisoformat(short)
    if time.tzinfo is not None:
        raise ValueError("a time of day has no zone")
    since_midnight = dt.datetime.combine(_EPOCH, time, dt.UTC) - _EPOCH
    return since_midnight // _MICROSECOND * 1000 + rest


def array_of(values: list[Any]) -> pa.Array:
    """``pa.array`` of Python values, without a loss of the nanoseconds that times of pandas have."""
    array = pa.array(values)
    return pa.array(values, _in_nanoseconds(array.type)) if _has_nanoseconds(values) else array


def resolution(kind: pa.DataType) -> int:
    """How many nanoseconds one unit of the type has; a date64 counts milliseconds."""
    if pt.is_date32(kind):
        return DAY
    return _UNITS["ms" if pt.is_date64(kind) else kind.unit]


def _without_nanoseconds(text: str) -> tuple[str, int]:
    """A text up to the microseconds, which is as far as Python reads it, and the nanoseconds."""
    found = _FRACTION.search(text)
    if found is None:
        return text, 0
    digits = found[2].rstrip("0")
    if len(digits) > 3:
        raise ValueError("it has digits behind the nanoseconds")
    return text[: found.start(2)] + text[found.end() :], int(digits.ljust(3, "0"))


def _has_nanoseconds(value: Any) -> bool:
    if isinstance(value, dt.datetime | dt.timedelta):
        return bool(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0))
    if isinstance(value, Mapping):
        return any(map(_has_nanoseconds, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_nanoseconds, value))


def _in_nanoseconds(kind: pa.DataType) -> pa.DataType:
    if pt.is_timestamp(kind):
        return pa.timestamp("ns", kind.tz)
    if pt.is_duration(kind):
        return pa.duration("ns")
    if pt.is_list(kind):
        return pa.list_(_in_nanoseconds(kind.value_type))
    if pt.is_struct(kind):
        return pa.struct([field.with_type(_in_nanoseconds(field.type)) for field in kind])
    return kind
