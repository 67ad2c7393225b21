"""Columns of stored values as people and engines read them, and back.

Values of plain Arrow types are what they are. Those of nested types, which are stored encoded, become arrays of
their type; those in msgpack become JSON text (``plain_text``); pickled ones stay bytes, which nothing here unpickles.

Invariant: what was read of state and is written again is stored as the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import StoreCorrupt
from penstock.rows.column_values import short_repr
from penstock.state_tables.plain_text import from_text, to_text
from penstock.storage.codec import Stamped, StateCodec, StateError, codec_of
from penstock.storage.plain_codecs import MsgpackCodec


class ReadableValues:
    """The values of one codec.

    Args:
        codec: its name, as it is stored; of values with a time stamp that of the values.

    Raises:
        StoreCorrupt: this version knows no such codec.

    Attributes:
        type: of the readable column.
    """

    def __init__(self, codec: str) -> None:
        self._codec: StateCodec = codec_of(codec)
        assert not isinstance(self._codec, Stamped), "stamps are columns of their own"
        self._is_text = codec == MsgpackCodec.name
        self._is_nested = not self._codec.is_immutable and self._codec.value_type is not None
        self.type: pa.DataType = self._codec.column_type
        if self._is_text:
            self.type = pa.string()
        elif self._is_nested:
            self.type = self._codec.value_type

    @property
    def stored_type(self) -> pa.DataType:
        """Of the column in files."""
        return self._codec.column_type

    def shown(self, stored: pa.Array) -> pa.Array:
        """The readable values.

        Raises:
            StoreCorrupt: one cannot be read.
        """
        if self._is_text:
            return pa.array(map_present(to_text, stored), pa.string())
        if self._is_nested:
            return pa.array(map_present(self._arrow_value, stored), self.type)
        return stored

    def stored(self, shown: pa.Array, where: str) -> pa.Array:
        """The values as state keeps them.

        Args:
            where: state and column, for the message.

        Raises:
            StateError: one does not fit.
        """
        if self._is_text:
            if not (pt.is_string(shown.type) or pt.is_large_string(shown.type)):
                raise StateError(
                    f"{where} is msgpack, which is written as JSON text, got {shown.type}"
                )
            return self._encoded(shown, from_text, where)
        if self._is_nested:
            shown = self._cast(shown, where)
            return self._encoded(shown, self._codec.to_stored, where)
        return self._cast(shown, where)

    def decoded(self, items: list[bytes]) -> pa.Array:
        """The stored values of what a database, or a list without a key, holds as bytes.

        Raises:
            StoreCorrupt: one cannot be read.
        """
        try:
            return self._codec.column([self._codec.decode(item) for item in items])
        except (ValueError, TypeError, LookupError, ArithmeticError, struct.error) as error:
            raise StoreCorrupt(
                f"a stored {self._codec.expected} cannot be read: {error}"
            ) from error

    def encoded(self, shown: pa.Array, where: str) -> list[bytes]:
        """Inverse of ``shown`` of ``decoded``.

        Raises:
            StateError: one does not fit.
        """
        return [self._codec.encode(one) for one in self._codec.stored(self.stored(shown, where))]

    def _arrow_value(self, stored: bytes) -> Any:
        return _pairs(self._codec.to_value(stored), self.type)

    def _cast(self, shown: pa.Array, where: str) -> pa.Array:
        if shown.type == self.type:
            return shown
        is_loose = pt.is_floating(shown.type) and pt.is_integer(self.type)
        if is_loose or not _is_alike(shown.type, self.type):
            raise StateError(f"{where} is {self.type}, got {shown.type}: cast it to {self.type}")
        try:
            return shown.cast(self.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise StateError(
                f"{where} is {self.type}, got {shown.type} that does not fit: {error}"
            ) from error

    def _encoded(self, shown: pa.Array, encode: Callable[[Any], bytes], where: str) -> pa.Array:
        encoded: list[bytes | None] = []
        for value in shown.to_pylist(maps_as_pydicts=None):
            try:
                encoded.append(None if value is None else encode(value))
            except (ValueError, TypeError, KeyError) as error:
                raise StateError(
                    f"{where} is {self._codec.expected}, got {short_repr(value)}: {error}"
                ) from error
        return pa.array(encoded, self.stored_type)


def map_present(convert: Callable[[Any], Any], column: pa.Array) -> list[Any]:
    """What becomes of the values of a column that are not null."""
    return [None if value is None else convert(value) for value in column.to_pylist()]


def _is_alike(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of the one are those of the other, as far as they fit."""
    if pt.is_null(given):
        return True
    kinds = (
        pt.is_integer,
        lambda one: pt.is_floating(one) or pt.is_integer(one),
        _is_text,
        _is_binary,
        lambda one: pt.is_decimal(one) or pt.is_integer(one),
        pt.is_timestamp,
        pt.is_time,
        pt.is_duration,
        pt.is_date,
        pt.is_boolean,
        pt.is_nested,
    )
    return any(kind(given) and kind(wanted) for kind in kinds)


def _is_text(kind: pa.DataType) -> bool:
    is_encoded = pt.is_dictionary(kind) and _is_text(kind.value_type)
    return pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind) or is_encoded


def _is_binary(kind: pa.DataType) -> bool:
    return (
        pt.is_binary(kind)
        or pt.is_large_binary(kind)
        or pt.is_fixed_size_binary(kind)
        or pt.is_binary_view(kind)
    )


def _pairs(value: Any, kind: pa.DataType) -> Any:
    """The value with its maps as Arrow takes them."""
    if value is None:
        return None
    if pt.is_map(kind):
        return [(key, _pairs(item, kind.item_type)) for key, item in value.items()]
    if pt.is_struct(kind):
        return {field.name: _pairs(value.get(field.name), field.type) for field in kind}
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return [_pairs(item, kind.value_type) for item in value]
    return value
