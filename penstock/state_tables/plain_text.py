"""Plain Python values, as state keeps them, as JSON text and back.

What JSON has stands for itself. Everything else is an object with one field whose name begins with ``$`` and says
what it is: ``{"$tuple": [1, 2]}``, ``{"$bytes": "AAE="}``, ``{"$datetime": ["2026-01-01T00:00:00", null, 0]}``,
``{"$float": "nan"}``. A dict whose keys are not all texts, or begin with ``$``, is ``{"$map": [[key, value], ...]}``.

Invariant: text that was made of a value gives the bytes again that the value is stored as; every NaN is one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from penstock.errors import StoreCorrupt
from penstock.storage.plain_codecs import DEPTH_MAX, EXTENSIONS, TUPLES, MsgpackCodec, as_msgpack

_CODEC: Final = MsgpackCodec()
_TAG: Final = "$"
_BYTES: Final = "$bytes"
_FLOAT: Final = "$float"
_MAP: Final = "$map"
_TUPLE: Final = "$tuple"
_CODES: Final[Mapping[str, int]] = {f"{_TAG}{name}": code for code, name in EXTENSIONS.items()}


@dataclass(frozen=True, slots=True)
class _Extension:
    code: int
    content: bytes


def to_text(stored: bytes) -> str:
    """The JSON text of a value.

    Raises:
        StoreCorrupt: it is none.

    Example: a tuple, and what JSON knows.
        >>> to_text(msgpack.packb([1, "a", None]))
        '[1,"a",null]'
        >>> to_text(msgpack.packb(msgpack.ExtType(1, msgpack.packb([1, 2]))))
        '{"$tuple":[1,2]}'
    """
    try:
        shown = _shown(_unpacked(as_msgpack(stored)))
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, LookupError, TypeError, msgpack.UnpackException) as error:
        raise StoreCorrupt(f"a stored msgpack value cannot be read: {error}") from error


def from_text(text: str) -> bytes:
    """The value that JSON text stands for, as state keeps it.

    Raises:
        ValueError: it is no such text; the message says why.
    """
    try:
        packed = _packed(json.loads(text, object_pairs_hook=_object))
        return _CODEC.to_stored(_CODEC.to_value(packed))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except StoreCorrupt as error:
        raise ValueError(str(error.__cause__ or error)) from error


def _unpacked(packed: bytes) -> Any:
    return msgpack.unpackb(
        packed, ext_hook=_Extension, raw=False, strict_map_key=False, use_list=True
    )


def _shown(value: Any) -> Any:
    if isinstance(value, _Extension) and value.code == TUPLES:
        return [{_TUPLE: _shown(row)} for row in _unpacked(value.content)]
    if isinstance(value, _Extension):
        return {f"{_TAG}{EXTENSIONS[value.code]}": _shown(_unpacked(value.content))}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {key: _shown(item) for key, item in value.items()}
        return {_MAP: [[_shown(key), _shown(item)] for key, item in value.items()]}
    return value


def _packed(shown: Any, depth: int = 0) -> bytes:
    if depth > DEPTH_MAX:
        raise ValueError(f"more than {DEPTH_MAX} values are nested within each other")
    packer = msgpack.Packer(use_bin_type=True, strict_types=True)
    try:
        if isinstance(shown, list) and shown and all(map(_is_tuple, shown)):
            rows = packer.pack([_value(row[_TUPLE], depth) for row in shown])
            return bytes(packer.pack(msgpack.ExtType(TUPLES, rows)))
        return bytes(packer.pack(_value(shown, depth)))
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"msgpack cannot hold it: {error}") from error


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return _once(fields, dict(fields))


def _once(given: Sequence[Any], found: dict[Any, Any]) -> dict[Any, Any]:
    if len(found) < len(given):
        keys = [key for key, _ in given]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"{twice!r} is there twice")
    return found


def _is_tuple(shown: Any) -> bool:
    return isinstance(shown, dict) and list(shown) == [_TUPLE] and isinstance(shown[_TUPLE], list)


def _value(shown: Any, depth: int) -> Any:
    """What msgpack packs."""
    if isinstance(shown, list):
        return [_value(item, depth) for item in shown]
    if not isinstance(shown, dict):
        return shown
    tag = next(iter(shown), "") if len(shown) == 1 else ""
    if tag == _BYTES:
        return base64.b64decode(shown[tag], validate=True)
    if tag == _FLOAT:
        return float(shown[tag])
    if tag == _MAP:
        pairs = [(_key(key, depth), _value(item, depth)) for key, item in shown[tag]]
        return _once(pairs, dict(pairs))
    if tag in _CODES:
        return msgpack.ExtType(_CODES[tag], _packed(shown[tag], depth + 1))
    unknown = next((key for key in shown if key.startswith(_TAG)), None)
    if unknown is not None:
        known = ", ".join([*_CODES, _BYTES, _FLOAT, _MAP])
        raise ValueError(
            f"{unknown!r} is none of {known}; an object with such a field is written as {_MAP}"
        )
    return {key: _value(item, depth) for key, item in shown.items()}


def _key(shown: Any, depth: int) -> Any:
    value = _value(shown, depth)
    if type(value) in (list, dict):
        raise ValueError(f"{shown!r} is no key of a dict")
    return value
