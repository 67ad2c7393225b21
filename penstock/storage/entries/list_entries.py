"""Lists in a database, cut into entries so that an item that is added writes few of them (pure).

A list of up to ``CHUNK_ITEMS`` items is one entry, the *head*: its name is the entry key of the key, its value the items one after
the other, each with its length in front (4 bytes, little-endian). Of a longer list the head has the first items, and in front of
them a mark and how many *chunks* follow (4 bytes each, little-endian). Chunks have the next ``CHUNK_ITEMS`` items each; their
names are the head's with the number of the chunk behind (4 bytes, big-endian, from 1), their values begin with another mark. No
item is so long that its length could be taken for a mark.

A longer list in one entry was written before there were chunks.

Example: twenty items are a head of 16 and a chunk of four.
    >>> chunk_count(20), chunk_name(b"head", 1)
    (1, b'head\\x00\\x00\\x00\\x01')
    >>> value = head_value(1, [b"a", b"bc"])
    >>> chunks_behind(value), list(items_of(value)), is_chunk(value)
    (1, [b'a', b'bc'], False)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

LENGTH_BYTES: Final = 4
CHUNK_ITEMS: Final = 16

_HEAD_MARK: Final = b"\xff\xff\xff\xff"
_CHUNK_MARK: Final = b"\xfe\xff\xff\xff"


def chunk_count(items: int, chunk_items: int = CHUNK_ITEMS) -> int:
    """How many chunks stand behind the head of a list of so many items."""
    return max(0, -(-items // chunk_items) - 1)


def chunk_name(head: bytes, number: int) -> bytes:
    """The name of a chunk, from 1."""
    return head + number.to_bytes(LENGTH_BYTES, "big")


def head_of(name: bytes, value: bytes) -> bytes:
    """The name of the head of the list that an entry is part of."""
    return name[:-LENGTH_BYTES] if is_chunk(value) else name


def is_chunk(value: bytes) -> bool:
    """The entry with this value is no head."""
    return value.startswith(_CHUNK_MARK)


def chunks_behind(head: bytes) -> int:
    """How many chunks stand behind a head with this value."""
    if not head.startswith(_HEAD_MARK):
        return 0
    return int.from_bytes(head[LENGTH_BYTES : 2 * LENGTH_BYTES], "little")


def head_value(chunks: int, items: Iterable[bytes]) -> bytes:
    """The value of a head."""
    mark = _HEAD_MARK + chunks.to_bytes(LENGTH_BYTES, "little") if chunks else b""
    return mark + _joined(items)


def chunk_value(items: Iterable[bytes]) -> bytes:
    """The value of a chunk."""
    return _CHUNK_MARK + _joined(items)


def items_of(value: bytes) -> Iterator[bytes]:
    """The items in the value of an entry."""
    position = _mark_bytes(value)
    while position < len(value):
        start = position + LENGTH_BYTES
        position = start + int.from_bytes(value[position:start], "little")
        yield value[start:position]


def with_items(value: bytes, items: Iterable[bytes]) -> bytes:
    """The value of an entry with as many other items in it."""
    return value[: _mark_bytes(value)] + _joined(items)


def _mark_bytes(value: bytes) -> int:
    if value.startswith(_HEAD_MARK):
        return 2 * LENGTH_BYTES
    return LENGTH_BYTES if is_chunk(value) else 0


def _joined(items: Iterable[bytes]) -> bytes:
    return b"".join(
        part for item in items for part in (len(item).to_bytes(LENGTH_BYTES, "little"), item)
    )
