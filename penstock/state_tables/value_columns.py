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
from penstock.rows.casting import cast_kernel
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

    def stored(self, shown: pa.Array, where: str, *, has_none: bool = False) -> pa.Array:
        """The values as state keeps them.

        Args:
            where: state and column, for the message.
            has_none: null is None, which is a value, and stored as one; else it is that there is nothing.

        Raises:
            StateError: one does not fit.
        """
        stored = self._stored(shown, where)
        if has_none and stored.null_count and not self._codec.is_immutable:
            return stored.fill_null(self._codec.to_stored(None))
        return stored

    def _stored(self, shown: pa.Array, where: str) -> pa.Array:
        if self._is_text:
            if not (pt.is_string(shown.type) or pt.is_large_string(shown.type)):
                raise StateError(
                    f"{where} is msgpack, which is written as JSON text, got {shown.type}"
                )
            return self._encoded(shown, from_text, where)
        if self._is_nested:
            shown = fitted(shown, self.type, where)
            return self._encoded(shown, self._codec.to_stored, where)
        return fitted(shown, self.type, where)

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
        stored = self.stored(shown, where, has_none=True)
        return [self._codec.encode(one) for one in self._codec.stored(stored)]

    def _arrow_value(self, stored: bytes) -> Any:
        return _pairs(self._codec.to_value(stored), self.type)

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


def fitted(column: pa.Array, wanted: pa.DataType, where: str) -> pa.Array:
    """A column that was given, as one of the type: the same values, or none at all.

    Args:
        where: state and column, for the message.

    Raises:
        StateError: it has other values than the type has.
    """
    given = column.type
    if given == wanted:
        return column
    if not _is_alike(given, wanted):
        raise StateError(f"{where} is {wanted}, got {given}: cast it to {wanted}")
    try:
        return cast_kernel(given, wanted, safe=True)(column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise StateError(f"{where} is {wanted}, got {given} that does not fit: {error}") from error


def _is_alike(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of the one are those of the other, as far as they fit: Arrow would cut, or take, some of another kind."""
    if pt.is_null(given):
        return True
    if pt.is_struct(wanted):
        return pt.is_struct(given) and all(
            one.name in wanted.names and _is_alike_within(one.type, wanted.field(one.name).type)
            for one in given
        )
    if pt.is_map(wanted):
        return (
            pt.is_map(given)
            and _is_alike_within(given.key_type, wanted.key_type)
            and _is_alike_within(given.item_type, wanted.item_type)
        )
    if pt.is_nested(wanted):
        return _is_list(given) and _is_alike_within(given.value_type, wanted.value_type)
    if pt.is_floating(given):
        return bool(pt.is_floating(wanted))
    kinds = (
        lambda one: pt.is_integer(one) or pt.is_decimal(one) or pt.is_floating(one),
        _is_text,
        _is_binary,
        pt.is_timestamp,
        pt.is_time,
        pt.is_duration,
        pt.is_date,
        pt.is_boolean,
    )
    return any(kind(given) and kind(wanted) for kind in kinds)


def _is_alike_within(given: pa.DataType, wanted: pa.DataType) -> bool:
    """The same within a value: durations and times of day are numbers where Spark has had them."""
    is_number = pt.is_integer(given) and (pt.is_duration(wanted) or pt.is_time(wanted))
    return is_number or _is_alike(given, wanted)


def _is_list(kind: pa.DataType) -> bool:
    return pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)


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
    if _is_list(kind):
        return [_pairs(item, kind.value_type) for item in value]
    return value
