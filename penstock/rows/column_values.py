"""Arrow columns as Python values and back: what a row function sees, and what it may return.

Decoding keeps every value: one with digits below the microseconds that Python's own ``datetime`` has is refused.
Encoding is strict where Arrow is lenient: a fraction is no integer, ``True`` is no number, a key that a struct does
not have is an error, so that nothing a function returns is lost silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import struct
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.rows.casting import UNITS_PER_DAY, cast_kernel

_FIRST_DATETIME_US = -62_135_596_800_000_000
_LAST_DATETIME_US = 253_402_300_799_999_999
_SHOWN_BYTES = 200
ROW_BYTES = 1000
"""As much of a row as an error shows."""


class ValueMismatch(ValueError):  # noqa: N818 - reads as what happened
    """A Python value does not fit the column it is meant for.

    Attributes:
        index: position of the value among those that were given, -1 where it is not known.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def decode(array: pa.Array) -> list[Any]:
    """The values of a column as Python objects, nulls as None.

    Args:
        array: any Arrow array, n values.

    Returns:
        n values: int, float, str, bytes, bool, Decimal, datetime (time zone kept), date, time,
        timedelta, list, dict.

    Raises:
        ValueError: a timestamp or date lies outside of the years 1 to 9999, or a value has nanoseconds.
    """
    kind = array.type
    if pt.is_timestamp(kind):
        return _decode_timestamps(array)
    if pt.is_date(kind):
        days = _cast(array, pa.date32())
        _check_datetime_range(days, 86_400_000_000)
        return _as_list(days, "datetime64[D]")
    if pt.is_duration(kind):
        return _as_list(_cast(array, pa.duration("us")), "timedelta64[us]")
    if pt.is_decimal(kind):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    if pt.is_dictionary(kind):
        values = decode(array.dictionary)
        return [None if i is None else values[i] for i in array.indices.to_pylist()]
    if pt.is_nested(kind) or pt.is_time(kind):
        return list(_cast(array, _python_precision(kind)).to_pylist())
    return list(array.to_pylist())


def without_scalars(values: Iterable[Any]) -> list[Any]:
    """Python values, of Arrow's scalars those that they hold: what iterating over an array gives."""
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in values]


def is_never_changed(kind: pa.DataType) -> bool:
    """Whether Python cannot change a decoded value in its place, as it can a list."""
    if isinstance(kind, pa.BaseExtensionType):
        return False
    if pt.is_dictionary(kind):
        return is_never_changed(kind.value_type)
    return not pt.is_nested(kind)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        if not pt.is_nested(kind):
            return array.cast(kind)
        return cast_kernel(array.type, kind, safe=True)(array)
    except pa.ArrowInvalid as error:
        kind = _python_precision(array.type)
        raise ValueError(
            f"a {array.type} value has more digits than Python's own values have ({error}); cut it first, as "
            f".cast({str(kind)!r}) does, or take it in a function of batches"
        ) from error


def encode(values: Sequence[object], field: pa.Field) -> pa.Array:
    """The values as a column of the field's type.

    Args:
        values: n Python values; None = null. ``datetime`` without a time zone is taken as UTC.
        field: name, type and nullability of the column.

    Returns:
        n values of the field's type.

    Raises:
        ValueMismatch: a value does not fit; names column, expected type, value.
    """
    kind = field.type
    format_ = _PACKED.get(kind)
    if format_ is not None and set(map(type, values)) == {_PACKED_TYPES[format_]}:
        try:
            packed = struct.pack(f"={len(values)}{format_}", *values)
            return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(packed)])
        except struct.error:
            pass  # out of range: found again, with its position, below
    array = _numbers(values, kind)
    if array is None:
        if pt.is_nested(kind):
            values = [_plain(value, kind, field, i) for i, value in enumerate(values)]
        else:
            values = _exact(values, field)
        try:
            array = pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
            _raise_first_mismatch(values, field, e)
    if array.null_count and not field.nullable:
        index = array.is_null().index(True).as_py()
        raise ValueMismatch(f"column {field.name!r} may not be null, got None", index)
    return array


_PACKED = {pa.int64(): "q", pa.float64(): "d"}
"""Formats of the types whose Python values are packed as they are, four times as fast as one by one."""
_PACKED_TYPES = {"q": int, "d": float}


def encode_columns(columns: Sequence[Sequence[object]], schema: pa.Schema) -> pa.RecordBatch:
    """The batch of columns in the order of the schema, each with n values.

    Raises:
        ValueMismatch: see ``encode``.
    """
    arrays = [encode(values, field) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def short_repr(value: object, limit: int = _SHOWN_BYTES) -> str:
    """``repr`` cut to ``limit`` bytes; a value whose ``repr`` raises is named by its type."""
    try:
        text = repr(value)
    except Exception as e:  # noqa: BLE001 - a user's __repr__ may raise anything; it must not hide the real error
        text = f"<{type(value).__name__} whose repr raised {type(e).__name__}>"
    return cut_text(text, limit)


def cut_text(text: str, limit: int = ROW_BYTES) -> str:
    """The text, of which no more than ``limit`` bytes of UTF-8 are left, the last of them dots."""
    if 4 * len(text) <= limit:
        return text
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= limit:
        return text
    return encoded[: limit - 3].decode("utf-8", "ignore") + "..."


def row_text(batch: pa.RecordBatch, index: int) -> str:
    """One row as a person reads it in an error, whatever is in it."""
    return short_repr(shown_row(batch, index), ROW_BYTES)


def shown_row(batch: pa.RecordBatch, index: int) -> dict[str, object]:
    """The values of one row as a person reads them, also those that Python does not have."""
    return {name: shown_value(batch[name][index]) for name in batch.schema.names}


def shown_value(value: pa.Scalar) -> object:
    """A value as a person reads it, also one that Python does not have."""
    if pt.is_timestamp(value.type) or value.type == pa.time64("ns"):
        return pc.cast(value, pa.string()).as_py()
    try:
        return value.as_py()
    except (ValueError, OverflowError):  # times that Python's datetime cannot hold
        if pt.is_date(value.type):
            return pc.cast(value, pa.string()).as_py()
        return f"<{value.type}>"


def _decode_timestamps(array: pa.Array) -> list[Any]:
    zone = array.type.tz
    _check_datetime_range(array, _UNIT_US[array.type.unit])
    if zone is not None and zone.upper() not in _UTC_NAMES:
        return list(_cast(array, pa.timestamp("us", zone)).to_pylist())
    values = _as_list(_cast(array, pa.timestamp("us", None)), "datetime64[us]")
    if zone is None:
        return values
    utc = dt.UTC
    return [None if value is None else value.replace(tzinfo=utc) for value in values]


_UTC_NAMES = frozenset({"UTC", "ETC/UTC", "Z", "+00:00", "GMT"})
_UNIT_US: dict[str, float] = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 0.001}


def _check_datetime_range(array: pa.Array, unit_us: float) -> None:
    """Refuses what ``datetime`` cannot hold, before a cast could wrap around."""
    low, high = pc.min_max(
        array.view(pa.int32() if pt.is_date32(array.type) else pa.int64())
    ).values()
    if low.is_valid and (
        low.as_py() * unit_us < _FIRST_DATETIME_US or high.as_py() * unit_us > _LAST_DATETIME_US
    ):
        raise ValueError(
            f"a {array.type} value lies outside of the years 1 to 9999 that Python's datetime can "
            f"hold (smallest {low.as_py()}, largest {high.as_py()} as a number)"
        )


def _as_list(array: pa.Array, dtype: str) -> list[Any]:
    values = array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return list(values.tolist())


def _python_precision(kind: pa.DataType) -> pa.DataType:
    """The type with every temporal part at a resolution that Python has."""
    if pt.is_time64(kind):
        return pa.time64("us")
    if pt.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pt.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pt.is_struct(kind):
        return pa.struct([field.with_type(_python_precision(field.type)) for field in kind])
    if pt.is_fixed_size_list(kind):
        return pa.list_(_python_precision(kind.value_type), kind.list_size)
    if pt.is_large_list(kind):
        return pa.large_list(_python_precision(kind.value_type))
    if pt.is_list(kind):
        return pa.list_(_python_precision(kind.value_type))
    if pt.is_map(kind):
        return pa.map_(_python_precision(kind.key_type), _python_precision(kind.item_type))
    return kind


def _numbers(values: Sequence[object], kind: pa.DataType) -> pa.Array | None:
    """Numbers as floats; None = they are to be looked at one by one, or not to be floats."""
    if kind in _EVERY_INTEGER and set(map(type, values)) <= _NUMBERS:
        with contextlib.suppress(pa.ArrowInvalid):
            array = pa.array(values, kind)
            if kind not in _INFINITE_FROM or not np.isinf(array.to_numpy(False)).any():
                return array
    return None


def _exact(values: Sequence[object], field: pa.Field) -> Sequence[object]:
    """The values as Arrow takes them; refuses what it would take but cut or re-interpret."""
    kinds = set(map(type, values)) - _NONE
    kind = field.type
    if pt.is_integer(kind):
        suspects = kinds - _INT
    elif pt.is_floating(kind):
        suspects = kinds & _BOOL
        if int in kinds:
            pairs = enumerate(values)
            values = [_as_float(v, field, i) if type(v) is int else v for i, v in pairs]
        if (infinite_from := _INFINITE_FROM.get(kind)) is not None:
            for index, value in enumerate(values):
                if isinstance(value, float) and infinite_from <= abs(value) < math.inf:
                    raise _mismatch(value, field, index)
    elif pt.is_temporal(kind):
        if pt.is_time(kind):
            _check_times(values, field)
        suspects = {k for k in kinds if k is bool or issubclass(k, float | np.floating)}
    elif pt.is_binary(kind) or pt.is_large_binary(kind):
        suspects = kinds & _STR
    else:
        return values
    if suspects:
        for index, value in enumerate(values):
            if type(value) in suspects and not _is_integral(value, kind):
                raise _mismatch(value, field, index)
    return values


def _as_float(value: int, field: pa.Field, index: int) -> int | float:
    """An integer as the float that it is equal to: Arrow takes small ones only, and for float16 the nearest."""
    if abs(value) <= _EVERY_INTEGER.get(field.type, 0):
        return value
    try:
        number = float(value)
    except OverflowError:
        raise _mismatch(value, field, index) from None
    held = number if pt.is_float64(field.type) else pa.scalar(number, field.type).as_py()
    if held != value:
        raise _mismatch(value, field, index)
    return number


def _check_times(values: Sequence[object], field: pa.Field) -> None:
    """Refuses times of day with a zone, which Arrow leaves out, and numbers beyond the day."""
    for index, value in enumerate(values):
        if isinstance(value, dt.time):
            fits = value.tzinfo is None
        elif isinstance(value, int | np.integer):
            fits = 0 <= int(value) < UNITS_PER_DAY[field.type.unit]
        else:
            continue
        if not fits:
            raise _mismatch(value, field, index)


_EVERY_INTEGER = {pa.float32(): 2**24, pa.float64(): 2**53}
"""Up to which size each integer is a float of the type; Arrow refuses others of these."""
_INFINITE_FROM = {pa.float16(): 65520.0, pa.float32(): float(2**128 - 2**103)}
"""From which size Arrow takes numbers as infinite: half-way beyond the largest one of the type."""
_NUMBERS = {int, float, type(None)}
_NONE = {type(None)}
_INT = {int}
_BOOL = {bool, np.bool_}
_STR = {str}


def _is_integral(value: object, kind: pa.DataType) -> bool:
    if not pt.is_integer(kind) or isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, int | np.integer):
        return True
    return isinstance(value, float | np.floating) and float(value).is_integer()


def _pairs(value: Any) -> list[Any] | None:
    """Keys and values of a map, None = it is none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return None
    pairs = list(value)
    return pairs if all(isinstance(pair, Sized) and len(pair) == 2 for pair in pairs) else None


def _plain(value: Any, kind: pa.DataType, field: pa.Field, index: int) -> Any:
    """Nested results with their records as dicts; unknown keys are refused."""
    if value is None:
        return None
    if pt.is_struct(kind):
        return _plain_struct(value, kind, field, index)
    if pt.is_map(kind):
        pairs = _pairs(value)
        if pairs is None:
            raise _mismatch(value, field, index)
        keys = _plain_items([k for k, _ in pairs], kind.key_field, field, index, value)
        items = _plain_items([v for _, v in pairs], kind.item_field, field, index, value)
        return list(zip(keys, items, strict=True))
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise _mismatch(value, field, index)
        return _plain_items(list(value), kind.value_field, field, index, value)
    return value


def _plain_items(
    values: list[Any], item: pa.Field, field: pa.Field, index: int, whole: object
) -> list[Any]:
    """What stands in a list, or on one side of a map, in the same way."""
    if not item.nullable and any(value is None for value in values):
        raise _mismatch(whole, field, index)
    if pt.is_nested(item.type):
        return [_plain(value, item.type, field, index) for value in values]
    try:
        return list(_exact(values, pa.field(field.name, item.type)))
    except ValueMismatch:
        raise _mismatch(whole, field, index) from None


def _plain_struct(value: Any, kind: pa.DataType, field: pa.Field, index: int) -> dict[str, Any]:
    record = record_as_dict(value)
    if record is None:
        raise _mismatch(value, field, index)
    names = {inner.name for inner in kind}
    unknown = sorted(map(str, record.keys() - names))
    if unknown:
        raise ValueMismatch(
            f"column {field.name!r} has type {kind}, which has no field {', '.join(unknown)}: "
            f"got {short_repr(value)}",
            index,
        )
    plain: dict[str, Any] = {}
    for inner in kind:
        item = record.get(inner.name)
        if item is None and not inner.nullable:
            raise ValueMismatch(
                f"column {field.name!r} may not be null in {inner.name!r}: got {short_repr(value)}",
                index,
            )
        if item is not None and not pt.is_nested(inner.type):
            (item,) = _exact([item], pa.field(f"{field.name}.{inner.name}", inner.type))
        plain[inner.name] = _plain(item, inner.type, field, index)
    return plain


def record_as_dict(value: Any) -> Mapping[str, Any] | None:
    """A dict, row, dataclass instance or named tuple as a mapping; None for anything else."""
    names = _field_names(type(value))  # type: ignore[arg-type]
    if names is not None:
        return {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return value
    as_dict = getattr(type(value), "_asdict", None)
    return as_dict(value) if callable(as_dict) else None


@lru_cache(maxsize=256)
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Of a dataclass; None for other classes, and for one that is a mapping as well."""
    if issubclass(kind, Mapping) or not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def _mismatch(value: object, field: pa.Field, index: int) -> ValueMismatch:
    return ValueMismatch(
        f"column {field.name!r} has type {field.type}, got {short_repr(value)} "
        f"({type(value).__name__})",
        index,
    )


def _raise_first_mismatch(values: Sequence[object], field: pa.Field, cause: Exception) -> NoReturn:
    for index, value in enumerate(values):
        try:
            pa.array([value], field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise _mismatch(value, field, index) from cause
    raise ValueMismatch(f"column {field.name!r} of type {field.type}: {cause}", -1) from cause
