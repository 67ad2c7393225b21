"""Arrow types as text that is part of stored names: ``int64``, ``map<string,list<float64>>``.

The text is ours, not pyarrow's (whose printing changes between versions and quotes no field names), and
``parse_type`` reads back exactly what ``type_name`` writes. Names of list items and whether nested fields
may be null are not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import StoreCorrupt

_PLAIN: dict[str, Callable[[], pa.DataType]] = {
    "bool": pa.bool_,
    "int8": pa.int8,
    "int16": pa.int16,
    "int32": pa.int32,
    "int64": pa.int64,
    "uint8": pa.uint8,
    "uint16": pa.uint16,
    "uint32": pa.uint32,
    "uint64": pa.uint64,
    "float16": pa.float16,
    "float32": pa.float32,
    "float64": pa.float64,
    "string": pa.string,
    "large_string": pa.large_string,
    "binary": pa.binary,
    "large_binary": pa.large_binary,
    "date32": pa.date32,
    "date64": pa.date64,
}
_PLAIN_NAMES = {make(): name for name, make in _PLAIN.items()}
_UNITS = frozenset({"s", "ms", "us", "ns"})
_OPEN = "(<["


def type_name(type_: pa.DataType) -> str | None:
    """The text of a type, None where state cannot hold it."""
    if type_ in _PLAIN_NAMES:
        return _PLAIN_NAMES[type_]
    if pt.is_time(type_):
        return f"time[{type_.unit}]"
    if pt.is_duration(type_):
        return f"duration[{type_.unit}]"
    if pt.is_timestamp(type_):
        zone = "" if type_.tz is None else f",{json.dumps(type_.tz)}"
        return f"timestamp[{type_.unit}{zone}]"
    if pt.is_decimal(type_):
        width = type_.bit_width
        return f"decimal{width}({type_.precision},{type_.scale})"
    if pt.is_fixed_size_binary(type_):
        return f"fixed_binary[{type_.byte_width}]"
    return _nested_name(type_)


def _nested_name(type_: pa.DataType) -> str | None:
    if pt.is_struct(type_):
        parts = [(json.dumps(field.name), type_name(field.type)) for field in type_]
        if any(inner is None for _, inner in parts):
            return None
        return f"struct<{','.join(f'{name}:{inner}' for name, inner in parts)}>"
    if pt.is_map(type_):
        key, item = type_name(type_.key_type), type_name(type_.item_type)
        return None if key is None or item is None else f"map<{key},{item}>"
    if pt.is_list(type_) or pt.is_large_list(type_) or pt.is_fixed_size_list(type_):
        item = type_name(type_.value_type)
        if item is None:
            return None
        if pt.is_fixed_size_list(type_):
            return f"fixed_list<{item},{type_.list_size}>"
        return f"large_list<{item}>" if pt.is_large_list(type_) else f"list<{item}>"
    return None


def parse_type(text: str) -> pa.DataType:
    """Inverse of ``type_name``.

    Raises:
        StoreCorrupt: it is no such text.
    """
    reader = _Reader(text)
    try:
        type_ = reader.type()
        reader.end()
    except (ValueError, KeyError, IndexError, pa.ArrowException) as error:
        raise StoreCorrupt(
            f"{text!r} is no type that this version of Penstock knows; read the state with the version "
            "that wrote it"
        ) from error
    return type_


class _Reader:
    """Recursive descent over the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def end(self) -> None:
        if self._at != len(self._text):
            raise ValueError(self._at)

    def type(self) -> pa.DataType:
        name = self._word()
        if name in _PLAIN:
            return _PLAIN[name]()
        reader: Callable[[], pa.DataType] = getattr(self, f"_{_FAMILIES[name]}")
        if name.startswith("decimal"):
            return self._decimal(name)
        if name == "large_list":
            return pa.large_list(self._bracketed(self.type))
        return reader()

    def _timestamp(self) -> pa.DataType:
        self._skip("[")
        unit = self._unit()
        zone = None
        if self._peek() == ",":
            self._skip(",")
            zone = self._string()
        self._skip("]")
        return pa.timestamp(unit, zone)

    def _duration(self) -> pa.DataType:
        return pa.duration(self._bracketed(self._unit))

    def _time(self) -> pa.DataType:
        unit = self._bracketed(self._unit)
        return pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)

    def _decimal(self, name: str) -> pa.DataType:
        self._skip("(")
        precision = self._number()
        self._skip(",")
        scale = self._number()
        self._skip(")")
        make: Callable[[int, int], pa.DataType] = getattr(pa, name)
        return make(precision, scale)

    def _fixed_binary(self) -> pa.DataType:
        return pa.binary(self._bracketed(self._number))

    def _list(self) -> pa.DataType:
        return pa.list_(self._bracketed(self.type))

    def _fixed_list(self) -> pa.DataType:
        self._skip("<")
        item = self.type()
        self._skip(",")
        size = self._number()
        self._skip(">")
        return pa.list_(item, size)

    def _map(self) -> pa.DataType:
        self._skip("<")
        key = self.type()
        self._skip(",")
        item = self.type()
        self._skip(">")
        return pa.map_(key, item)

    def _struct(self) -> pa.DataType:
        self._skip("<")
        fields: list[pa.Field] = []
        while self._peek() != ">":
            if fields:
                self._skip(",")
            name = self._string()
            self._skip(":")
            fields.append(pa.field(name, self.type()))
        self._skip(">")
        return pa.struct(fields)

    def _bracketed(self, inner: Callable[[], Any]) -> Any:
        if self._peek() not in _OPEN:
            raise ValueError(self._at)
        self._at += 1
        value = inner()
        if self._peek() not in ")>]":
            raise ValueError(self._at)
        self._at += 1
        return value

    def _unit(self) -> str:
        unit = self._word()
        if unit not in _UNITS:
            raise ValueError(unit)
        return unit

    def _number(self) -> int:
        start = self._at
        while self._peek().isdigit() or self._peek() == "-":
            self._at += 1
        return int(self._text[start : self._at])

    def _word(self) -> str:
        start = self._at
        while self._peek().isalnum() or self._peek() == "_":
            self._at += 1
        return self._text[start : self._at]

    def _string(self) -> str:
        value, end = _JSON.raw_decode(self._text, self._at)
        if not isinstance(value, str):
            raise ValueError(self._at)  # noqa: TRY004 - one error for every malformed text
        self._at = end
        return value

    def _skip(self, expected: str) -> None:
        if self._peek() != expected:
            raise ValueError(self._at)
        self._at += 1

    def _peek(self) -> str:
        """The next character, "" at the end."""
        return self._text[self._at : self._at + 1]


_JSON = json.JSONDecoder()
_FAMILIES = {
    "timestamp": "timestamp",
    "duration": "duration",
    "time": "time",
    "decimal32": "decimal",
    "decimal64": "decimal",
    "decimal128": "decimal",
    "decimal256": "decimal",
    "fixed_binary": "fixed_binary",
    "list": "list",
    "large_list": "list",
    "fixed_list": "fixed_list",
    "map": "map",
    "struct": "struct",
}
