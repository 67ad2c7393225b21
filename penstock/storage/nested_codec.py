"""The codec of nested Arrow types: lists, structs and maps.

Their values can be changed in place, so they are stored encoded: a msgpack value in the order of the type
(structs without their names, maps as pairs), with the plain values in it as ``PlainCodec.wire`` gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.types as pt
from typing_extensions import override

from penstock.errors import StoreCorrupt
from penstock.rows.column_values import record_as_dict, short_repr
from penstock.storage.arrow_codecs import PlainCodec, plain_codec
from penstock.storage.codec import EncodedCodec, StateError, codec_of


class NestedCodec(EncodedCodec):
    """Lists, structs (dicts of their fields) and maps (dicts; pairs, as Arrow gives them, can be put in)."""

    def __init__(self, type_: pa.DataType, name: str) -> None:
        self.type = self.value_type = type_
        self.name = name
        self.expected = str(type_)
        self._node = _node(type_)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # The name does not say what becomes of values that were stored as another type.
        return codec_of, (self.type,)

    @override
    def to_stored(self, value: Any) -> bytes:
        return bytes(msgpack.packb(self._node.to_wire(value), use_bin_type=True))

    @override
    def to_value(self, stored: Any) -> Any:
        try:
            wire = msgpack.unpackb(stored, raw=False, use_list=True, strict_map_key=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise StoreCorrupt(
                f"a stored value of type {self.type} cannot be read: {error}"
            ) from error
        return self._node.from_wire(wire)


class _Leaf:
    """A plain type within a nested one."""

    def __init__(self, codec: PlainCodec) -> None:
        self._codec = codec

    def to_wire(self, value: Any) -> Any:
        if value is None:
            return None
        try:
            return self._codec.wire(self._codec.check(value))
        except ValueError as error:
            raise ValueError(_inner(value, self._codec.expected, error)) from error

    def from_wire(self, wire: Any) -> Any:
        return None if wire is None else self._codec.unwire(wire)


class _List:
    def __init__(self, type_: pa.DataType) -> None:
        self._item = _node(type_.value_type)
        self._size = type_.list_size if pt.is_fixed_size_list(type_) else -1

    def to_wire(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping | set | frozenset) or not hasattr(
            value, "__iter__"
        ):
            raise ValueError(f"in which {short_repr(value)} is no list")
        items = [self._item.to_wire(item) for item in value]
        if self._size >= 0 and len(items) != self._size:
            raise ValueError(f"in which a list has {len(items)} items, not {self._size}")
        return items

    def from_wire(self, wire: Any) -> Any:
        return None if wire is None else [self._item.from_wire(item) for item in wire]


class _Struct:
    def __init__(self, type_: pa.DataType) -> None:
        self._fields = [(field.name, _node(field.type)) for field in type_]
        self._names = {name for name, _ in self._fields}

    def to_wire(self, value: Any) -> Any:
        if value is None:
            return None
        record = record_as_dict(value)
        if record is None:
            raise ValueError(f"in which {short_repr(value)} is no dict or record")
        if unknown := sorted(map(str, record.keys() - self._names)):
            raise ValueError(f"which has fields that the type does not have: {', '.join(unknown)}")
        return [node.to_wire(record.get(name)) for name, node in self._fields]

    def from_wire(self, wire: Any) -> Any:
        if wire is None:
            return None
        return {
            name: node.from_wire(item)
            for (name, node), item in zip(self._fields, wire, strict=True)
        }


class _Map:
    def __init__(self, type_: pa.DataType) -> None:
        if pt.is_nested(type_.key_type):
            raise StateError(f"a state cannot hold {type_}: keys of its map are not hashable")
        self._key = _Leaf(plain_codec(type_.key_type).for_keys())
        self._item = _node(type_.item_type)

    def to_wire(self, value: Any) -> Any:
        if value is None:
            return None
        entries = [
            [self._key.to_wire(key), self._item.to_wire(item)] for key, item in map_entries(value)
        ]
        keys = {key for key, _ in entries}
        if None in keys:
            raise ValueError("which has the key None")
        if len(keys) < len(entries):
            raise ValueError(f"in which {short_repr(value)} has a key more than once")
        return entries

    def from_wire(self, wire: Any) -> Any:
        if wire is None:
            return None
        return {self._key.from_wire(k): self._item.from_wire(v) for k, v in wire}


def map_entries(value: Any) -> Iterable[Sequence[Any]]:
    """The (key, item) of a map: a dict, or the pairs that Arrow gives.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping):
        return value.items()
    if not isinstance(value, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == _PAIR for pair in value
    ):
        raise ValueError(f"in which {short_repr(value)} is no dict or list of (key, value) pairs")
    return value


_PAIR = 2
_Node = _Leaf | _List | _Struct | _Map


def _node(type_: pa.DataType) -> _Node:
    if pt.is_struct(type_):
        return _Struct(type_)
    if pt.is_map(type_):
        return _Map(type_)
    if pt.is_nested(type_):
        return _List(type_)
    return _Leaf(plain_codec(type_))


def _inner(value: Any, expected: str, error: ValueError) -> str:
    reason = f" {error}" if str(error) else ""
    return f"in which {short_repr(value)} is no {expected}{reason}"
