"""Which Arrow types can be a key, and the canonical values of key columns.

Everything that hashes, compares or stores keys goes through this module, so that "equal" means the
same everywhere: ``-0.0`` is ``0.0``, every NaN is one value, null is a key of its own, and a
dictionary-encoded, large or view layout holds the same strings as a plain one.

Invariants: two rows of columns of the same type are equal keys exactly when their canonical values
are equal; turning canonical values back into an array and reading it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import JobRejected

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
ByteArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

CANONICAL_NAN = np.int64(0x7FF8000000000000)
"""The bits that every NaN has in a key."""

_NUMPY_OF_TYPE: dict[pa.DataType, Any] = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.uint32(): np.uint32,
    pa.uint64(): np.uint64,
    pa.float16(): np.float16,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
    pa.date32(): np.int32,
    pa.date64(): np.int64,
}


class KeyKind(Enum):
    """How the values of a key column are represented."""

    FIXED = "fixed"
    """At most 8 bytes: integers, floats, bool, dates, times, timestamps, durations."""
    VARIABLE = "variable"
    """Strings and binary of every layout."""
    WIDE = "wide"
    """A fixed number of bytes that is not a machine word: decimals, fixed-size binary."""
    NULL = "null"
    """The null type: one key only."""


def value_type(type_: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary, run-end-encoded or extension type, else the type."""
    while True:
        if isinstance(type_, (pa.DictionaryType, pa.RunEndEncodedType)):
            type_ = type_.value_type
        elif isinstance(type_, pa.BaseExtensionType):
            type_ = type_.storage_type
        else:
            return type_


def key_kind(type_: pa.DataType, column: str = "") -> KeyKind:
    """How a key column of this type is represented.

    Args:
        column: its name, for the message.

    Raises:
        JobRejected: values of this type cannot be keys.
    """
    plain = value_type(type_)
    types = pa.types
    if types.is_null(plain):
        return KeyKind.NULL
    if (
        types.is_integer(plain)
        or types.is_floating(plain)
        or types.is_boolean(plain)
        or types.is_date(plain)
        or types.is_time(plain)
        or types.is_timestamp(plain)
        or types.is_duration(plain)
    ):
        return KeyKind.FIXED
    if _is_variable(plain):
        return KeyKind.VARIABLE
    if types.is_decimal(plain) or types.is_fixed_size_binary(plain):
        return KeyKind.WIDE
    name = f"column {column!r} of type {type_}" if column else f"a value of type {type_}"
    raise JobRejected(
        f"{name} cannot be a key: keys are integers, floats, booleans, dates, times, timestamps, "
        "durations, decimals, strings or binary. Select the part of the value that identifies it, "
        "or cast it to a string."
    )


def check_key_types(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Checks that every named column can be (part of) a key.

    Raises:
        JobRejected: a column's type cannot be a key.
    """
    for name in columns:
        key_kind(schema.field(name).type, name)


def plain_array(array: pa.Array) -> pa.Array:
    """The array without dictionary, run-end or extension around its values."""
    while True:
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        elif isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        elif isinstance(array, pa.RunEndEncodedArray):
            array = pa.compute.run_end_decode(array)
        elif isinstance(array, pa.ExtensionArray):
            array = array.storage
        else:
            return array


def key_array(array: pa.Array) -> pa.Array:
    """A key column as keys are handed out: plain, and equal floats have the same bits, as pyarrow's functions want it.

    Example: the zeros of two rows are one key.
        >>> key_array(pa.array([-0.0, 0.0, None])).unique().to_pylist()
        [0.0, None]
    """
    array = plain_array(array)
    if not pa.types.is_floating(array.type):
        return array
    return fixed_array(array.type, fixed_values(array), null_rows(array))


def null_rows(array: pa.Array) -> BoolArray | None:
    """bool[n], True where the array is null; None where no row is."""
    if array.null_count == 0:
        return None
    nulls: BoolArray = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def fixed_values(array: pa.Array) -> Int64Array:
    """Canonical words of a FIXED column: int64[n], equal exactly where the keys are equal.

    Integers, dates, times, timestamps and durations are their value (uint64 reinterpreted), bool is
    0 or 1, floats are the bits of the canonical float64. Null rows hold 0. May be a read-only view
    of the array's memory.

    Args:
        array: a plain array (see ``plain_array``) of a FIXED type.
    """
    type_ = array.type
    if len(array) == 0:
        return np.empty(0, dtype=np.int64)
    if pa.types.is_boolean(type_):
        flags = array.cast(pa.uint8())
        raw = np.frombuffer(flags.buffers()[1], dtype=np.uint8, count=len(flags) + flags.offset)
        values = raw[flags.offset :].astype(np.int64)
    else:
        raw = _fixed_buffer(array)
        if raw.dtype.kind == "f":
            values = _canonical_float_bits(raw)
        elif raw.dtype.itemsize == 8:
            values = raw.view(np.int64)
        else:
            values = raw.astype(np.int64)
    nulls = null_rows(array)
    if nulls is not None:
        values = np.where(nulls, np.int64(0), values)
    return values


def fixed_array(type_: pa.DataType, values: Int64Array, nulls: BoolArray | None = None) -> pa.Array:
    """Inverse of ``fixed_values``: an array of the given type.

    Args:
        type_: the key column's type, possibly dictionary-encoded or an extension.
        values: int64[n] canonical words.
        nulls: bool[n], True for null rows; None when there are none.
    """
    plain = value_type(type_)
    if pa.types.is_boolean(plain):
        return _wrap(type_, pa.array(values.astype(np.bool_), mask=nulls))
    dtype = _numpy_type(plain)
    if np.dtype(dtype).kind == "f":
        raw = np.ascontiguousarray(values).view(np.float64).astype(dtype)
    elif np.dtype(dtype).itemsize == 8:
        raw = np.ascontiguousarray(values).view(dtype)
    else:
        raw = values.astype(dtype)
    buffers = [_validity(nulls), pa.py_buffer(np.ascontiguousarray(raw))]
    return _wrap(type_, pa.Array.from_buffers(plain, len(values), buffers))


def variable_values(array: pa.Array) -> tuple[ByteArray, Int64Array]:
    """Bytes of a VARIABLE column: data uint8[...] and offsets int64[n + 1] into it, not copied.

    What lies between the offsets of a null row is undefined.

    Args:
        array: a plain array of a VARIABLE type.
    """
    type_ = array.type
    if _is_view(type_):
        array = array.cast(pa.large_binary() if _is_binary_view(type_) else pa.large_string())
        type_ = array.type
    if len(array) == 0:
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets_buffer, data_buffer = array.buffers()
    wide = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
    stop = array.offset + len(array) + 1
    raw = np.frombuffer(offsets_buffer, dtype=np.int64 if wide else np.int32, count=stop)
    offsets: Int64Array = _aligned(raw[array.offset :].astype(np.int64, copy=False))
    if data_buffer is None:
        return np.empty(0, dtype=np.uint8), offsets
    return np.frombuffer(data_buffer, dtype=np.uint8), offsets


def variable_array(
    type_: pa.DataType, data: ByteArray, offsets: Int64Array, nulls: BoolArray | None = None
) -> pa.Array:
    """Inverse of ``variable_values``: an array of the given type.

    Raises:
        OverflowError: more than 2 GiB of bytes for a type with 32-bit offsets.
    """
    plain = value_type(type_)
    rows = len(offsets) - 1
    wide = pa.types.is_large_string(plain) or pa.types.is_large_binary(plain) or _is_view(plain)
    if not wide and len(data) > np.iinfo(np.int32).max:
        raise OverflowError(
            f"{len(data)} bytes of keys do not fit one array of type {plain}: "
            "use fewer keys at once or a large type"
        )
    build_type = plain
    if _is_view(plain):
        build_type = pa.large_binary() if _is_binary_view(plain) else pa.large_string()
    bounds = np.ascontiguousarray(offsets, dtype=np.int64 if wide else np.int32)
    buffers = [_validity(nulls), pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(data))]
    array = pa.Array.from_buffers(build_type, rows, buffers)
    return _wrap(type_, array if build_type == plain else array.cast(plain))


def wide_values(array: pa.Array) -> ByteArray:
    """Bytes of a WIDE column: uint8[n, byte width]; null rows are undefined.

    Args:
        array: a plain array of a WIDE type.
    """
    width = array.type.byte_width
    if len(array) == 0 or width == 0:
        return np.zeros((len(array), width), dtype=np.uint8)
    stop = (array.offset + len(array)) * width
    raw = np.frombuffer(array.buffers()[1], dtype=np.uint8, count=stop)
    return raw[array.offset * width :].reshape(len(array), width)


def wide_array(type_: pa.DataType, values: ByteArray, nulls: BoolArray | None = None) -> pa.Array:
    """Inverse of ``wide_values``: an array of the given type."""
    buffers = [_validity(nulls), pa.py_buffer(np.ascontiguousarray(values))]
    return _wrap(type_, pa.Array.from_buffers(value_type(type_), len(values), buffers))


def null_array(type_: pa.DataType, rows: int) -> pa.Array:
    """``rows`` nulls of the given type."""
    return pa.nulls(rows, type_)


def _is_variable(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(type_)
        or types.is_large_string(type_)
        or types.is_binary(type_)
        or types.is_large_binary(type_)
        or _is_view(type_)
    )


def _is_view(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(type_) or _is_binary_view(type_))


def _is_binary_view(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary_view(type_))


def _numpy_type(type_: pa.DataType) -> Any:
    known = _NUMPY_OF_TYPE.get(type_)
    if known is not None:
        return known
    return np.int32 if type_.bit_width == 32 else np.int64


def _fixed_buffer(array: pa.Array) -> Any:
    stop = array.offset + len(array)
    raw = np.frombuffer(array.buffers()[1], dtype=_numpy_type(array.type), count=stop)
    return _aligned(raw[array.offset :])


def _aligned(raw: Any) -> Any:
    """The same values at an aligned address: a buffer cut out of a message may lie anywhere."""
    return raw if raw.flags.aligned else raw.copy()


def _canonical_float_bits(raw: Any) -> Int64Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like the others
        floats = raw.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
    bits: Int64Array = floats.view(np.int64)
    bits[np.isnan(floats)] = CANONICAL_NAN
    return bits


def _validity(nulls: BoolArray | None) -> pa.Buffer | None:
    if nulls is None or not nulls.any():
        return None
    return pa.py_buffer(np.packbits(~nulls, bitorder="little"))


def _wrap(type_: pa.DataType, array: pa.Array) -> pa.Array:
    if array.type == type_:
        return array
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, _wrap(type_.storage_type, array))
    if isinstance(type_, pa.DictionaryType):
        inner = _wrap(type_.value_type, array)
        return inner.dictionary_encode().cast(type_)
    if isinstance(type_, pa.RunEndEncodedType):
        return pa.compute.run_end_encode(array, run_end_type=type_.run_end_type)
    return array.cast(type_)
