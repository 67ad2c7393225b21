"""Tables of random values: of every type that engines may think differently about, at its ends and beside them."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
TEXTS = (
    "",
    "a",
    "A",
    "İ",
    "i̇",
    "ß",
    "SS",
    "\u017f",
    "z'${b}\\",
    "\U0001f600",
    "\uffff",
    "a\0",
    " a",
    "é",
    "e\u0301",
)
FLOATS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, -2.5, 0.25, 3.0, -7.0)
MICROS = (
    0,
    -1,
    1,
    999,
    -999,
    -1_000,
    999_999,
    -1_000_001,
    86_399_999_999,
    -62_135_500_000_000_000,
    253_402_200_799_999_999,
    1_729_990_800_000_000,
    1_711_846_799_999_999,
)
"""Times: beside 1970, at both ends of the years that Python has, and beside changes of summer time in Berlin."""

KINDS: dict[str, pa.DataType] = {
    "i8": pa.int8(), "i16": pa.int16(), "i32": pa.int32(), "i64": pa.int64(),
    "u8": pa.uint8(), "u16": pa.uint16(), "u32": pa.uint32(), "u64": pa.uint64(),
    "f32": pa.float32(), "f": pa.float64(), "g": pa.float64(),
    "d93": pa.decimal128(9, 3), "d50": pa.decimal128(5, 0), "d38": pa.decimal128(38, 10), "d18": pa.decimal128(18, 18),
    "k": pa.string(), "lk": pa.large_string(), "dk": pa.dictionary(pa.int32(), pa.string()), "b": pa.binary(), "fb": pa.binary(2),
    "c": pa.bool_(), "y": pa.date32(), "y64": pa.date64(),
    "ts_s": pa.timestamp("s"), "ts_ms": pa.timestamp("ms", "UTC"), "ts_us": pa.timestamp("us", "Europe/Berlin"),
    "ts_n": pa.timestamp("us"), "ts_ns": pa.timestamp("ns", "UTC"), "tm": pa.time32("ms"), "du": pa.duration("ms"),
    "l": pa.list_(pa.int64()), "o": pa.struct([("a", pa.int8()), ("A", pa.string())]),
    "m": pa.map_(pa.string(), pa.uint32()), "fl": pa.list_(pa.float32(), 2), "ll": pa.large_list(pa.list_(pa.date64())),
    "lo": pa.list_(pa.struct([("d", pa.decimal128(9, 3)), ("t", pa.timestamp("ms", "Europe/Berlin"))])),
    "om": pa.struct([("m", pa.map_(pa.int16(), pa.list_(pa.duration("us")))), ("u", pa.uuid())]),
}  # fmt: skip
"""Columns that tables are made of."""
_OM_STORED = pa.struct([KINDS["om"].field("m"), ("u", pa.binary(16))])

TIMES = (
    pa.int64(),
    pa.timestamp("ms", "UTC"),
    pa.timestamp("us"),
    pa.timestamp("ns", "UTC"),
    pa.timestamp("s"),
    pa.date32(),
)


def value(random: Random, kind: pa.DataType) -> Any:
    """A value of a type, one time in six null."""
    return None if random.random() < 1 / 6 else _value(random, kind)


def _value(random: Random, kind: pa.DataType) -> Any:
    if pt.is_integer(kind):
        low = -(2 ** (kind.bit_width - 1)) if pt.is_signed_integer(kind) else 0
        high = low + 2**kind.bit_width - 1
        return random.choice(
            [low, high, high // 2 + 1, *range(max(low, -3), 4), *range(max(low, -3), 4)]
        )
    if pt.is_floating(kind):
        return random.choice([*FLOATS, *((0.1, 2.0**53, 1e300) if pt.is_float64(kind) else (0.1,))])
    if pt.is_decimal(kind):
        most = 10**kind.precision - 1
        number = random.choice(
            [0, 1, -1, most, -most, 25, -15, 10 ** (kind.scale or 1) % (most + 1)]
        )
        return Decimal((int(number < 0), Decimal(abs(number)).as_tuple().digits, -kind.scale))
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_dictionary(kind):
        return random.choice(TEXTS)
    if pt.is_fixed_size_binary(kind):
        return random.choice([b"\0\0", b"\xff\xff", b"ab"])
    if pt.is_binary(kind):
        return random.choice([b"", b"\0", b"\xff\x80", b"ab"])
    if pt.is_boolean(kind):
        return random.random() < 0.5
    if pt.is_date(kind):
        return dt.date(1970, 1, 1) + dt.timedelta(
            days=random.choice([0, -1, 1, -719_162, 2_932_896, 19_000])
        )
    if pt.is_timestamp(kind):
        micros = random.choice(MICROS)
        if kind.unit == "ns" and abs(micros) > 9_000_000_000_000_000:
            micros %= 10**12
        moment = EPOCH + dt.timedelta(microseconds=micros)
        return moment if kind.tz else moment.replace(tzinfo=None)
    if pt.is_time(kind):
        return random.choice([dt.time(0), dt.time(23, 59, 59, 999_000)])
    if pt.is_duration(kind):
        return dt.timedelta(milliseconds=random.choice([0, -1, 10**9]))
    return _nested(random, kind)


def _nested(random: Random, kind: pa.DataType) -> Any:
    if isinstance(kind, pa.UuidType):
        return random.choice([b"\0" * 16, b"0123456789abcdef"])
    if pt.is_fixed_size_list(kind):
        return [value(random, kind.value_type) for _ in range(kind.list_size)]
    if pt.is_list(kind) or pt.is_large_list(kind):
        return [_of_field(random, kind.value_field) for _ in range(random.randint(0, 2))]
    if pt.is_map(kind):
        keys = {_value(random, kind.key_type) for _ in range(random.randint(0, 2))}
        return [(key, value(random, kind.item_type)) for key in sorted(keys)]
    return {one.name: _of_field(random, one) for one in kind}


def _of_field(random: Random, one: pa.Field) -> Any:
    return value(random, one.type) if one.nullable else _value(random, one.type)


def table(random: Random, kinds: dict[str, pa.DataType], count: int, time: pa.DataType) -> pa.Table:
    """Rows, with a column ``ts`` of event times, out of order and on both sides of 1970."""
    fields = [_field(random, name, kind) for name, kind in kinds.items()]
    all_null = {one.name for one in fields if one.nullable and random.random() < 1 / 12}
    arrays = [
        _array(
            [None if one.name in all_null else _of_field(random, one) for _ in range(count)],
            one.type,
        )
        for one in fields
    ]
    millis = [
        random.choice([random.randint(-30_000, 30_000), *(-1, 0, -7_000, 10_000)])
        for _ in range(count)
    ]
    if time == pa.date32():
        times = pa.array([number % 5 - 2 for number in millis], pa.int32()).cast(time)
    elif time == pa.int64():
        times = pa.array(millis, time)
    else:
        per_ms = {"s": 0.001, "ms": 1, "us": 1000, "ns": 1_000_000}[time.unit]
        odd = 999 if time.unit == "us" else 0
        times = pa.array(
            [int(number * per_ms) - random.choice([0, odd]) for number in millis], pa.int64()
        ).cast(time)
    return pa.table([*arrays, times], schema=pa.schema([*fields, ("ts", time)]))


def _field(random: Random, name: str, kind: pa.DataType) -> pa.Field:
    """A column, one time in eight one without nulls."""
    return pa.field(name, kind, nullable=random.random() >= 1 / 8)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pt.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    if kind == KINDS["om"]:  # Arrow makes no extension types within others of Python's values
        return pa.array(values, _OM_STORED).view(kind)
    return pa.array(values, kind)
