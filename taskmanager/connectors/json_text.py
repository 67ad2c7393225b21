"""Rows as JSON text, a column at a time.

Times are ISO 8601 in UTC where they have a zone, numbers that JSON does not know (NaN, infinity) are null,
decimals are strings so that no digit is lost, bytes are base64, durations numbers of their column's unit. Nested values go
through ``json.dumps``.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NEEDS_ESCAPE = r'["\\\x00-\x1f]'
_NULL = "null"


def json_rows(batch: pa.RecordBatch, *, before: str = "", space: str = "") -> bytes:
    """Every row as one JSON object, on a line of its own.

    Args:
        batch: n rows.
        before: text in front of each object.
        space: text behind each colon and comma.

    Returns:
        The texts of all rows, one behind the other, in UTF-8.
    """
    pieces: list[Any] = []
    glue = before + "{"
    for index, name in enumerate(batch.schema.names):
        pieces.append(f"{glue}{json.dumps(name, ensure_ascii=False)}:{space}")
        pieces.append(_column_text(batch.column(index)))
        glue = "," + space
    pieces.append("}\n")
    return _concatenated(pc.binary_join_element_wise(*pieces, ""))


def _concatenated(texts: pa.Array) -> bytes:
    """The bytes of all texts: they lie one behind the other in the array's data."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return bytes(memoryview(data)[ends[0] : ends[-1]])


def _column_text(array: pa.Array) -> pa.Array:
    """Each value as JSON text, without nulls."""
    text = _value_text(array)
    return text.fill_null(_NULL) if text.null_count else text


def _value_text(array: pa.Array) -> pa.Array:
    type_ = array.type
    types = pa.types
    if types.is_dictionary(type_):
        return _value_text(array.dictionary_decode())
    if types.is_integer(type_) or types.is_boolean(type_):
        return array.cast(pa.string())
    if types.is_floating(type_):
        wide = array.cast(pa.float32()) if types.is_float16(type_) else array
        return pc.if_else(pc.is_finite(wide), wide.cast(pa.string()), None)
    if types.is_string(type_) or types.is_large_string(type_):
        return _quoted(array.cast(pa.string()))
    if types.is_timestamp(type_):
        zoned = array if type_.tz is None else array.cast(pa.timestamp(type_.unit, "UTC"))
        iso = pc.replace_substring(zoned.cast(pa.string()), " ", "T", max_replacements=1)
        return _in_quotes(iso)
    if types.is_date(type_) or types.is_time(type_) or types.is_decimal(type_):
        return _in_quotes(array.cast(pa.string()))
    if types.is_duration(type_):
        return array.cast(pa.int64()).cast(pa.string())
    if types.is_null(type_):
        return pa.nulls(len(array), pa.string())
    return pa.array([_dumps(value) for value in _python_values(array)], pa.string())


def _in_quotes(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _quoted(texts: pa.Array) -> pa.Array:
    escape = pc.match_substring_regex(texts, _NEEDS_ESCAPE)
    quoted = _in_quotes(texts)
    if not pc.any(escape).as_py():
        return quoted
    mask = escape.fill_null(False)
    escaped = [_dumps(value) for value in texts.filter(mask).to_pylist()]
    return pc.replace_with_mask(quoted, mask, pa.array(escaped, pa.string()))


def _python_values(array: pa.Array) -> list[Any]:
    if "[ns" in str(array.type) or "duration[" in str(array.type):
        return [_exact(value) for value in array]
    if pa.types.is_nested(array.type):
        values: list[Any] = array.to_pylist(maps_as_pydicts="lossy")
        return values
    return list(array.to_pylist())


def _exact(value: pa.Scalar) -> Any:
    """A Python value of one that may hold nanoseconds, which those of Python have not: they are text by then.

    A duration is a number of its unit, which those of Python have not either.
    """
    if not value.is_valid:
        return None
    if isinstance(value, pa.MapScalar):
        return {_exact(entry["key"]): _exact(entry["value"]) for entry in value.values}
    if isinstance(value, pa.ListScalar):
        return [_exact(item) for item in value.values]
    if isinstance(value, pa.StructScalar):
        return {name: _exact(item) for name, item in value.items()}
    if isinstance(value, pa.DictionaryScalar | pa.ExtensionScalar):
        return _exact(value.value)
    if isinstance(value, pa.DurationScalar):
        return value.value
    if getattr(value.type, "unit", "") != "ns":
        return value.as_py()
    micros, nanos = divmod(value.value, 1000)
    is_time = isinstance(value, pa.Time64Scalar)
    whole = pa.scalar(micros, pa.time64("us") if is_time else pa.timestamp("us")).as_py()
    text = whole.isoformat(timespec="microseconds") + f"{nanos:03}" if nanos else whole.isoformat()
    return text + "Z" if not is_time and value.type.tz is not None else text


def _dumps(value: Any) -> str | None:
    if value is None:
        return None
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """The value in types that JSON knows."""
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | UUID) else value


def _key(key: Any) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain)
