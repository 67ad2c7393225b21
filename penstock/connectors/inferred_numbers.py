"""Integers that inference would make floats of, at the cost of their last digits: refused, since two of them may become one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_DIGITS = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")
"""Integers of fewer digits are floats without loss."""
_INTEGER = r"^\s*-?\d{16,}\s*$"


def may_lose_digits(text: bytes) -> bool:
    """Whether looking closer is worth it."""
    return _DIGITS.search(text) is not None


def loses_digits(text: str) -> bool:
    """Whether an integer is another one as a float64.

    >>> [loses_digits(text) for text in ("9007199254740993", "18446744073709551615", "100000000000000000000")]
    [True, True, False]
    """
    number = int(text)
    try:
        return int(float(number)) != number
    except OverflowError:
        return True


def lossy_text(texts: pa.ChunkedArray) -> str | None:
    """The first integer of a column of text that a float64 would change."""
    integers = texts.filter(pc.match_substring_regex(texts, _INTEGER))
    found = (text.strip() for text in integers.to_pylist())
    return next((text for text in found if loses_digits(text)), None)


def lossy_json(schema: pa.Schema, objects: Iterator[Any]) -> tuple[str, str] | None:
    """The first such integer in a float column of JSON objects: (column, text)."""
    floats = [field for field in schema if _has_floats(field.type)]
    if not floats:
        return None
    for value in objects:
        for field in floats:
            found = _lossy(field.type, value.get(field.name))
            if found is not None:
                return field.name, str(found)
    return None


def json_objects(text: bytes, starts: npt.NDArray[np.int64] | None) -> Iterator[Any]:
    """The objects that have a long number; malformed ones are left out, for ``on_error`` to decide.

    Args:
        text: objects, one per line; or with whatever lies between where they start.
        starts: where they do, if they go over several lines.
    """
    if starts is None:
        parts = text.split(b"\n")
    else:
        bounds = [*starts.tolist(), len(text)]
        parts = [text[start:end] for start, end in pairwise(bounds)]
    for line in parts:
        if may_lose_digits(line):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _lossy(kind: pa.DataType, value: Any) -> int | None:
    parts: list[tuple[pa.DataType, Any]] = []
    if pa.types.is_floating(kind):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return value if is_integer and loses_digits(str(value)) else None
    if pa.types.is_struct(kind) and isinstance(value, dict):
        parts = [(field.type, value.get(field.name)) for field in kind]
    elif pa.types.is_list(kind) and isinstance(value, list):
        parts = [(kind.value_type, item) for item in value]
    found = (_lossy(part, item) for part, item in parts)
    return next((number for number in found if number is not None), None)
