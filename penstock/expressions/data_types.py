"""Names of data types as a user writes them: ``"int64"``, ``"timestamp[ms, tz=UTC]"``."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from penstock.errors import ExpressionError
from penstock.naming import nearest_hint

_NAMED: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "int": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "halffloat": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "float": pa.float64(),
    "double": pa.float64(),
    "string": pa.string(),
    "str": pa.string(),
    "utf8": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "bytes": pa.binary(),
    "large_binary": pa.large_binary(),
    "date": pa.date32(),
    "date32": pa.date32(),
    "date32[day]": pa.date32(),
    "date64": pa.date64(),
    "date64[ms]": pa.date64(),
    "time32[s]": pa.time32("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[us]": pa.time64("us"),
    "time64[ns]": pa.time64("ns"),
    "timestamp": pa.timestamp("us"),
    "duration": pa.duration("us"),
    "null": pa.null(),
}
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*(?:tz=)?([^\]]+))?\]")
_DURATION = re.compile(r"duration\[(s|ms|us|ns)\]")
_DECIMAL = re.compile(r"decimal(128|256)?\((\d+)(?:,\s*(-?\d+))?\)")
_LIST = re.compile(r"(large_)?list<(?:\w+:\s*)?(.+)>")


def data_type(type_: Any) -> pa.DataType:
    """The Arrow type that a user means.

    Args:
        type_: an Arrow type, or its name: ``"int64"``, ``"string"``, ``"timestamp[ms, tz=UTC]"``,
            ``"decimal128(10, 2)"``, ``"list<int64>"``.

    Raises:
        ExpressionError: no such type; names the nearest.
    """
    if isinstance(type_, pa.DataType):
        return type_
    if not isinstance(type_, str):
        raise ExpressionError(f"a type is a name such as 'int64' or a pyarrow type, got {type_!r}")
    name = type_.strip()
    if name.lower() in _NAMED:
        return _NAMED[name.lower()]
    try:
        found = _parametric(name)
    except (ValueError, pa.ArrowException) as e:
        raise ExpressionError(f"the type {name!r} is not valid: {e}") from e
    if found is None:
        raise ExpressionError(
            f"there is no type {name!r}{nearest_hint(name, _NAMED)}; types are written as pyarrow "
            "prints them: int64, float64, string, bool, date32, timestamp[ms, tz=UTC], "
            "decimal128(10, 2), list<int64>, or given as a pyarrow type"
        )
    return found


def _parametric(name: str) -> pa.DataType | None:
    if match := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], match[2].strip() if match[2] else None)
    if match := _DURATION.fullmatch(name):
        return pa.duration(match[1])
    if match := _DECIMAL.fullmatch(name):
        make = pa.decimal256 if match[1] == "256" else pa.decimal128
        return make(int(match[2]), int(match[3] or 0))
    if match := _LIST.fullmatch(name):
        inner = data_type(match[2])
        return pa.large_list(inner) if match[1] else pa.list_(inner)
    return None
