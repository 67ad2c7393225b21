"""Which of JSON's shapes a file has: lines, one array, or something a table cannot be read from."""

from __future__ import annotations

import enum
import re

_FEATURE_COLLECTION = re.compile(rb'\s*\{\s*"type"\s*:\s*"FeatureCollection"')
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonShape(enum.Enum):
    """What the first character of a JSON file says."""

    EMPTY = "empty"
    LINES = "lines"
    ARRAY = "array"


class NotTabularJsonError(ValueError):
    """The file is JSON of a shape that has no rows; the message says which and what to do."""


def detect_shape(head: bytes) -> tuple[JsonShape, int]:
    """The shape, and the offset of the first byte of the first value.

    Args:
        head: the first bytes of the file, at least as far as its first character that is no space.

    Raises:
        NotTabularJsonError: the file is a GeoJSON FeatureCollection or does not start like JSON.
    """
    start = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    text = head[start:].lstrip()
    offset = len(head) - len(text)
    if not text:
        return JsonShape.EMPTY, offset
    if text.startswith(b"["):
        return JsonShape.ARRAY, offset + 1
    if _FEATURE_COLLECTION.match(text):
        raise NotTabularJsonError(
            "it is a GeoJSON FeatureCollection: one object, not rows; write its features as JSON "
            "lines first, for example with: jq -c '.features[]'"
        )
    if not text.startswith(b"{"):
        raise NotTabularJsonError(
            f"it starts with {text[:20].decode(errors='replace')!r}; expected JSON lines (one object "
            "per line) or one array of objects"
        )
    first_line = text.split(b"\n", 1)[0].strip()
    if first_line in (b"{", b"{ ") and b"\n" in text:
        raise NotTabularJsonError(
            "its first object goes over several lines; expected JSON lines (one object per line) or "
            "one array of objects; convert it first, for example with: jq -c ."
        )
    return JsonShape.LINES, offset
