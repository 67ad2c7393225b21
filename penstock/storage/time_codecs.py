"""Codecs of dates, times, timestamps and durations: whole numbers of the type's unit.

Python's own values have microseconds; a value that they, or the unit of its type, cannot hold exactly is
refused.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.storage.arrow_codecs import PlainCodec
from penstock.storage.codec import StateError

_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - without a zone on purpose
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_DAY_MS = 86_400_000
_MICROSECOND = dt.timedelta(microseconds=1)
_PER_UNIT_US = {"s": 1_000_000, "ms": 1000, "us": 1}
_NS_PER_US = 1000
_INT64_MAX = 2**63 - 1
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")
_UTC_NAMES = frozenset({"UTC", "ETC/UTC", "Z", "GMT"})


class TimeCodec(PlainCodec):
    """Values that are a whole number of days or of a unit of time."""

    _struct = struct.Struct("<q")

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        self._zone = _zone(type_.tz) if pt.is_timestamp(type_) and type_.tz else None

    @override
    def for_keys(self) -> PlainCodec:
        return self if self._zone is None else TimeKeyCodec(self.type, self.name)

    @override
    def check(self, value: Any) -> Any:
        return self.unwire(self.wire(value))

    @override
    def wire(self, stored: Any) -> int:
        """The value as a whole number of units.

        Raises:
            ValueError: it is no such value, or no whole number of units.
        """
        if pt.is_date(self.type):
            return self._days(stored)
        if pt.is_time(self.type):
            _expect(stored, dt.time)
            if stored.tzinfo is not None:
                raise ValueError("which has a time zone: give a time without one")
            since_midnight = dt.timedelta(
                hours=stored.hour,
                minutes=stored.minute,
                seconds=stored.second,
                microseconds=stored.microsecond,
            )
            return self._units(since_midnight)
        if pt.is_duration(self.type):
            _expect(stored, dt.timedelta)
            return self._units(stored)
        return self._units(self._since_epoch(stored))

    @override
    def unwire(self, wire: Any) -> Any:
        if pt.is_date32(self.type):
            return dt.date.fromordinal(_EPOCH_DAY + wire)
        if pt.is_date64(self.type):
            return dt.date.fromordinal(_EPOCH_DAY + wire // _DAY_MS)
        unit = self.type.unit
        microseconds = wire // _NS_PER_US if unit == "ns" else wire * _PER_UNIT_US[unit]
        elapsed = dt.timedelta(microseconds=microseconds)
        if pt.is_duration(self.type):
            return elapsed
        moment = _EPOCH + elapsed
        if pt.is_time(self.type):
            return moment.time()
        if self._zone is None:
            return moment
        return moment.replace(tzinfo=dt.UTC).astimezone(self._zone)

    def _days(self, value: Any) -> int:
        if isinstance(value, dt.datetime):
            raise ValueError("which is a datetime: call .date()")  # noqa: TRY004 - as below
        _expect(value, dt.date)
        days: int = value.toordinal() - _EPOCH_DAY
        return days if pt.is_date32(self.type) else days * _DAY_MS

    def _since_epoch(self, value: Any) -> dt.timedelta:
        _expect(value, dt.datetime)
        if value.tzinfo is None:
            return value - _EPOCH
        if self._zone is None:
            raise ValueError("which has a time zone: the type of the state has none")
        return value - _EPOCH.replace(tzinfo=dt.UTC)

    def _units(self, elapsed: dt.timedelta) -> int:
        microseconds = elapsed // _MICROSECOND
        unit = self.type.unit
        if getattr(elapsed, "nanoseconds", 0):  # of pandas
            raise ValueError("which is no whole number of us, as Python's values are: cut it first")
        if unit == "ns":
            units = microseconds * _NS_PER_US
        else:
            units, rest = divmod(microseconds, _PER_UNIT_US[unit])
            if rest:
                raise ValueError(f"which is no whole number of {unit}: cut it first")
        if not -_INT64_MAX <= units <= _INT64_MAX:
            raise ValueError(f"which is out of range for {self.type}")
        return units

    @override
    def encode(self, stored: Any) -> bytes:
        return b"" if stored is None else self._struct.pack(self.wire(stored))

    @override
    def decode(self, data: bytes) -> Any:
        return self.unwire(self._struct.unpack(data)[0]) if data else None

    @override
    def column(self, stored: list[Any]) -> pa.Array:
        units = [None if value is None else self.wire(value) for value in stored]
        return pa.array(units, self._unit_type).view(self.type)

    @override
    def stored(self, column: pa.Array) -> list[Any]:
        units = column.view(self._unit_type).to_pylist()
        return [None if unit is None else self.unwire(unit) for unit in units]

    @property
    def _unit_type(self) -> pa.DataType:
        return pa.int32() if self.type.bit_width == 32 else pa.int64()


class TimeKeyCodec(TimeCodec):
    """Timestamps with a zone as keys of a map: in UTC, where each is equal to itself alone.

    In a zone of its own a datetime is compared by what the clock shows: the two moments of an hour that comes twice would be one key.
    """

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        self._zone = dt.UTC

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return TimeKeyCodec, (self.type, self.name)


def _expect(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError("")  # noqa: TRY004 - every misfit is one error here


def _zone(name: str) -> dt.tzinfo:
    if name.upper() in _UTC_NAMES:
        return dt.UTC
    offset = _OFFSET.fullmatch(name)
    if offset is not None:
        sign, hours, minutes = offset.groups()
        elapsed = dt.timedelta(hours=int(hours), minutes=int(minutes))
        return dt.timezone(-elapsed if sign == "-" else elapsed)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise StateError(
            f"a state cannot hold timestamps of the unknown time zone {name!r}"
        ) from error
