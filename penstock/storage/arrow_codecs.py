"""Codecs of plain Arrow types: what a function may put into a state declared with one.

Values are stored as they are and checked where they come in: nothing is cut, rounded or wrapped around
silently (only floats are rounded to the width of their type). None fits every type.
"""

from __future__ import annotations

import decimal
import math
import struct
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.rows.column_values import decode, short_repr, without_scalars
from penstock.storage.codec import (
    ARROW_PREFIX,
    ARROW_SUFFIX,
    StateCodec,
    StateError,
)
from penstock.storage.type_names import type_name


def arrow_codec(type_: pa.DataType) -> StateCodec:
    """The codec of the values of a type.

    Raises:
        StateError: state cannot hold them.
    """
    name = type_name(type_)
    if name is None:
        raise StateError(
            f"a state cannot hold values of type {type_}: use a boolean, number, string, binary, decimal, "
            "date, time, timestamp, duration, or a list, struct or map of these; or 'msgpack' for plain "
            "Python values"
        )
    return _codec(type_, f"{ARROW_PREFIX}{name}{ARROW_SUFFIX}")


def _codec(type_: pa.DataType, name: str) -> StateCodec:
    if pt.is_nested(type_):
        from penstock.storage.nested_codec import NestedCodec

        return NestedCodec(type_, name)
    return plain_codec(type_, name)


def plain_codec(type_: pa.DataType, name: str = "") -> PlainCodec:
    """The codec of a type that is not nested; without a name it stands within a nested one."""
    if pt.is_boolean(type_):
        return BoolCodec(type_, name)
    if pt.is_integer(type_):
        return IntegerCodec(type_, name)
    if pt.is_floating(type_):
        return FloatCodec(type_, name)
    if pt.is_string(type_) or pt.is_large_string(type_):
        return StringCodec(type_, name)
    if pt.is_binary(type_) or pt.is_large_binary(type_) or pt.is_fixed_size_binary(type_):
        return BinaryCodec(type_, name)
    if pt.is_decimal(type_):
        return DecimalCodec(type_, name)
    from penstock.storage.time_codecs import TimeCodec

    return TimeCodec(type_, name)


def exact_array(values: Iterable[object], type_: pa.DataType) -> pa.Array:
    """Python values as an array of a type that is not nested: none is cut, as Arrow would.

    Raises:
        ValueError: one is no value of the type.

    Example: 1.5 is not 1.
        >>> exact_array([1, None], pa.int8()).to_pylist()
        [1, None]
        >>> exact_array([1.5], pa.int8())
        Traceback (most recent call last):
        ValueError: 1.5 is no int8
    """
    if pt.is_null(type_):
        return pa.array(list(values), type_)
    codec, stored = plain_codec(type_), []
    for value in without_scalars(values):
        try:
            stored.append(codec.to_stored(value))
        except ValueError as error:
            reason = f", {error}" if str(error) else ""
            raise ValueError(f"{short_repr(value)} is no {type_}{reason}") from error
    return codec.column(stored)


class PlainCodec(StateCodec):
    """Base of codecs whose values are immutable."""

    is_immutable = True

    def __init__(self, type_: pa.DataType, name: str) -> None:
        self.type = self.column_type = self.value_type = type_
        self.name = name
        self.expected = str(type_)

    @override
    def to_stored(self, value: Any) -> Any:
        return None if value is None else self.check(value)

    @abstractmethod
    def check(self, value: Any) -> Any:
        """The value in its canonical form.

        Raises:
            ValueError: it does not fit.
        """

    @override
    def to_value(self, stored: Any) -> Any:
        return stored

    @override
    def for_keys(self) -> PlainCodec:
        return self

    def wire(self, stored: Any) -> Any:
        """A value that is not None as msgpack knows it, within a nested one."""
        return stored

    def unwire(self, wire: Any) -> Any:
        """Inverse of ``wire``."""
        return wire

    @override
    def column(self, stored: list[Any]) -> pa.Array:
        return pa.array(stored, self.type)

    @override
    def stored(self, column: pa.Array) -> list[Any]:
        return decode(column)


class _FixedWidthCodec(PlainCodec):
    """Values of fixed width; None is no bytes at all."""

    _struct: struct.Struct

    @override
    def encode(self, stored: Any) -> bytes:
        return b"" if stored is None else self._struct.pack(self.wire(stored))

    @override
    def decode(self, data: bytes) -> Any:
        return self.unwire(self._struct.unpack(data)[0]) if data else None


class BoolCodec(_FixedWidthCodec):
    """True and False."""

    _struct = struct.Struct("?")

    exact_type = bool

    @override
    def check(self, value: Any) -> bool:
        if type(value) is bool:
            return value
        return bool(_item(value, bool))


class IntegerCodec(_FixedWidthCodec):
    """Integers within the range of their type."""

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        signed = pt.is_signed_integer(type_)
        bits = type_.bit_width
        self._low = -(1 << (bits - 1)) if signed else 0
        self._high = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
        self._struct = struct.Struct("<q" if signed else "<Q")

    @override
    def to_stored(self, value: Any) -> Any:
        if type(value) is int and self._low <= value <= self._high:
            return value
        return None if value is None else self.check(value)

    @override
    def check(self, value: Any) -> int:
        number = value if type(value) is int else int(_item(value, int))
        if not self._low <= number <= self._high:
            raise ValueError(f"which is not within {self._low} .. {self._high}")
        return number


class FloatCodec(_FixedWidthCodec):
    """Floats, rounded to the width of their type; integers that it can hold exactly."""

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        self._struct = struct.Struct({16: "<e", 32: "<f", 64: "<d"}[type_.bit_width])
        self._is_double = type_.bit_width == 64
        self.exact_type = float if self._is_double else None

    @override
    def check(self, value: Any) -> float:
        if type(value) is not float:
            number = _item(value, (float, int))
            try:
                value = float(number)
            except OverflowError as error:
                raise ValueError("which is too large") from error
            if type(number) is int and value != number:
                raise ValueError("which a float cannot hold exactly")
        if self._is_double:
            return float(value)
        try:
            return float(self._struct.unpack(self._struct.pack(value))[0])
        except OverflowError as error:
            raise ValueError("which is too large") from error

    @override
    def for_keys(self) -> PlainCodec:
        return FloatKeyCodec(self.type, self.name)

    @override
    def column(self, stored: list[Any]) -> pa.Array:
        if pt.is_float16(self.type):
            return pa.array(stored, pa.float32()).cast(self.type)
        return super().column(stored)


class FloatKeyCodec(FloatCodec):
    """Floats as keys of a map: -0.0 is 0.0, and every NaN is one object, which a dict finds again."""

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        self.exact_type = None

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return FloatKeyCodec, (self.type, self.name)

    @override
    def check(self, value: Any) -> float:
        return _one_of_equals(super().check(value))

    @override
    def unwire(self, wire: Any) -> float:
        return _one_of_equals(wire)

    @override
    def stored(self, column: pa.Array) -> list[Any]:
        return [None if key is None else _one_of_equals(key) for key in super().stored(column)]


class StringCodec(PlainCodec):
    """Text; None is a byte that is in no UTF-8. (A lone surrogate is a str that no column can hold.)"""

    _NONE = b"\xff"

    @override
    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("")  # noqa: TRY004 - every misfit is one error here
        text = value if type(value) is str else str(value)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError("which is not valid Unicode") from error
        return text

    @override
    def encode(self, stored: Any) -> bytes:
        return self._NONE if stored is None else bytes(stored.encode())

    @override
    def decode(self, data: bytes) -> Any:
        return None if data == self._NONE else data.decode()


class BinaryCodec(PlainCodec):
    """Bytes; the first encoded byte tells None from a value."""

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        self._width = type_.byte_width if pt.is_fixed_size_binary(type_) else -1
        self.exact_type = bytes if self._width < 0 else None

    @override
    def check(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise ValueError("")  # noqa: TRY004 - as above
        data = value if type(value) is bytes else bytes(value)
        if self._width >= 0 and len(data) != self._width:
            raise ValueError(f"which has {len(data)} bytes, not {self._width}")
        return data

    @override
    def encode(self, stored: Any) -> bytes:
        return b"\0" if stored is None else b"\1" + stored

    @override
    def decode(self, data: bytes) -> Any:
        return data[1:] if data[0] else None


class DecimalCodec(PlainCodec):
    """Decimals with the scale of their type; encoded as text."""

    def __init__(self, type_: pa.DataType, name: str) -> None:
        super().__init__(type_, name)
        self._step = decimal.Decimal(1).scaleb(-type_.scale)
        self._context = decimal.Context(prec=max(type_.precision, 1), traps=[])

    @override
    def check(self, value: Any) -> decimal.Decimal:
        if not isinstance(value, decimal.Decimal):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError("")  # noqa: TRY004 - as above
            value = decimal.Decimal(value)
        fitted = value.quantize(self._step, context=self._context) if value.is_finite() else value
        if not fitted.is_finite() or fitted != value:
            raise ValueError(
                f"which is no number of {self.type.precision} digits, {self.type.scale} of them behind the "
                "point: round it first"
            )
        return fitted or fitted.copy_abs()  # Arrow has no -0 either

    @override
    def wire(self, stored: Any) -> str:
        return str(stored)

    @override
    def unwire(self, wire: Any) -> decimal.Decimal:
        return decimal.Decimal(wire)

    @override
    def encode(self, stored: Any) -> bytes:
        return b"" if stored is None else str(stored).encode()

    @override
    def decode(self, data: bytes) -> Any:
        return decimal.Decimal(data.decode()) if data else None


def _one_of_equals(value: float) -> float:
    return math.nan if math.isnan(value) else value + 0.0  # -0.0 + 0.0 is 0.0


def _item(value: Any, kinds: type | tuple[type, ...]) -> Any:
    """The value, or that of a numpy scalar; True is no number, and a number no truth."""
    plain = value.item() if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0 else value
    if not isinstance(plain, kinds) or (isinstance(plain, bool) and kinds is not bool):
        raise ValueError("")
    return plain
