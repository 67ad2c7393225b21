"""Times in JSON text: pyarrow's inference reads them as UTC but does not say whether they had a zone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.json_structure import is_nested_deeper
from penstock.connectors.text_parsing import parse_json

NESTED_MAX = 250
"""Levels of values in values: inference recurses, and its stack overflows at some thousands."""

_ZONE = r"[ T]\d{2}[\d:.]*(?:Z|[+-]\d{2}(?::?\d{2})?)$"


def infer_json_schema(text: bytes, value_starts: npt.NDArray[np.int64] | None = None) -> pa.Schema:
    """The types of a stream of JSON objects; times with a zone are UTC, as they are in CSV.

    Args:
        text: whole objects, separated by line ends.
        value_starts: see ``parse_json``.

    Raises:
        pa.ArrowInvalid: malformed, or no object.
    """
    if is_nested_deeper(text, NESTED_MAX):
        raise pa.ArrowInvalid(f"a value is nested deeper than {NESTED_MAX} levels")
    schema = parse_json(text, None, value_starts).schema
    timed = pa.schema([field for field in schema if _has_times(field.type)])
    if not timed.names:
        return schema
    as_text = pa.schema([field.with_type(_as_text(field.type)) for field in timed])
    texts = parse_json(text, as_text, value_starts)
    for field in timed:
        values = texts[field.name].combine_chunks()
        zoned = field.with_type(_with_zone(field.type, values))
        schema = schema.set(schema.get_field_index(field.name), zoned)
    return schema


def _has_times(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_times(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind))


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type with text in place of times."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _with_zone(kind: pa.DataType, texts: pa.Array) -> pa.DataType:
    """The type with a zone where all times have one, text where only some do."""
    if pa.types.is_struct(kind):
        parts = zip(kind, texts.flatten(), strict=True)
        return pa.struct([field.with_type(_with_zone(field.type, part)) for field, part in parts])
    if pa.types.is_list(kind):
        return pa.list_(_with_zone(kind.value_type, texts.flatten()))
    if not pa.types.is_timestamp(kind):
        return kind
    has_zone = pc.match_substring_regex(texts, _ZONE)
    if pc.all(has_zone).as_py():
        return pa.timestamp(kind.unit, "UTC")
    return pa.string() if pc.any(has_zone).as_py() else kind
