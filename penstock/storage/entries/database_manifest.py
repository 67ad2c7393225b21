"""Which files a database consists of, and how it is told that some are gone (pure).

A database's manifest is a log of edits. A subtask that restores a range of key-groups needs only the files that hold some
of them; that the others are gone is one more edit behind those that are there, and the database opens without them.

The log is RocksDB's: blocks of 32 KB, in them fragments of records: CRC-32C of type and content (masked), length, type.

Source: RocksDB, db/log_format.h, db/version_edit.h (tags) and db/version_edit_handler.cc.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.storage.entries.byte_strings import varint

_BLOCK_BYTES: Final = 32 << 10
_HEADER_BYTES: Final = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEQUENCE_BYTES: Final = 8
"""Behind the key in the bounds of a file."""

_DELETED_FILE: Final = 6
_NEW_FILE: Final = 103
_END_OF_FILE_FIELDS: Final = 1
_NUMBERS: Final = frozenset({2, 3, 4, 9, 10, 200, 203, 300})
"""Tags with one number behind them."""
_TEXTS: Final = frozenset({1, 201})
_CURSOR: Final = 5
_IGNORABLE: Final = 1 << 13
"""Tags with this bit are followed by a text, whatever they mean."""


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """A file of a database.

    Attributes:
        number: its name is made of it.
        first_key, last_key: of its entries and of the ranges that it removes, both inclusive.
    """

    number: int
    level: int
    first_key: bytes
    last_key: bytes

    def has_some_of(self, ranges: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether it may hold entries of any of the ranges, whose ends are exclusive."""
        return any(first <= self.last_key and self.first_key < behind for first, behind in ranges)


def database_files(manifest: bytes) -> list[DatabaseFile] | None:
    """The files that a manifest names; None = it says something that is not understood here."""
    files: dict[int, DatabaseFile] = {}
    try:
        for record in _records(manifest):
            _apply(_Fields(record), files)
    except (_UnknownError, IndexError):
        return None
    return list(files.values())


def without_files(manifest: bytes, gone: Sequence[DatabaseFile]) -> bytes:
    """The manifest of the database without some of its files."""
    edit = b"".join(
        varint(_DELETED_FILE) + varint(file.level) + varint(file.number) for file in gone
    )
    found = bytearray(manifest)
    is_first = True
    while is_first or edit:
        room = _BLOCK_BYTES - len(found) % _BLOCK_BYTES
        if room < _HEADER_BYTES:
            found += bytes(room)
            room = _BLOCK_BYTES
        content, edit = edit[: room - _HEADER_BYTES], edit[room - _HEADER_BYTES :]
        kind = (_FIRST if edit else _FULL) if is_first else (_MIDDLE if edit else _LAST)
        found += _masked(_crc32c(bytes([kind]) + content)).to_bytes(4, "little")
        found += len(content).to_bytes(2, "little") + bytes([kind]) + content
        is_first = False
    return bytes(found)


class _UnknownError(Exception):
    """Something that is not understood here."""


class _Fields:
    """Reads an edit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._data)

    def number(self) -> int:
        found = shift = 0
        while True:
            byte = self._data[self._position]
            self._position += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
            shift += 7

    def text(self) -> bytes:
        size = self.number()
        start = self._position
        self._position += size
        if self._position > len(self._data):
            raise _UnknownError
        return self._data[start : self._position]


def _apply(fields: _Fields, files: dict[int, DatabaseFile]) -> None:
    while fields:
        tag = fields.number()
        if tag == _NEW_FILE:
            level, number, _size = fields.number(), fields.number(), fields.number()
            first, last = fields.text(), fields.text()
            fields.number(), fields.number()  # the sequence numbers that it has
            while fields.number() != _END_OF_FILE_FIELDS:
                fields.text()
            first, last = first[:-_SEQUENCE_BYTES], last[:-_SEQUENCE_BYTES]
            files[number] = DatabaseFile(number, level, first, last)
        elif tag == _DELETED_FILE:
            level, number = fields.number(), fields.number()
            if number in files and files[number].level == level:
                del files[number]
        elif tag in _NUMBERS:
            fields.number()
        elif tag in _TEXTS or tag & _IGNORABLE:
            fields.text()
        elif tag == _CURSOR:
            fields.number()
            fields.text()
        else:
            raise _UnknownError


def _records(log: bytes) -> Iterator[bytes]:
    position = 0
    parts: list[bytes] = []
    while position < len(log):
        room = _BLOCK_BYTES - position % _BLOCK_BYTES
        if room < _HEADER_BYTES:
            position += room
            continue
        length = int.from_bytes(log[position + 4 : position + 6], "little")
        kind = log[position + 6]
        start = position + _HEADER_BYTES
        content = log[start : start + length]
        if len(content) < length or not _FULL <= kind <= _LAST:
            raise _UnknownError
        position = start + length
        parts = [content] if kind in (_FULL, _FIRST) else [*parts, content]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


def _masked(checksum: int) -> int:
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        word = byte
        for _ in range(8):
            word = word >> 1 ^ (0x82F63B78 if word & 1 else 0)
        table.append(word)
    return table


_CRC_TABLE: Final = _crc_table()


def _crc32c(data: bytes) -> int:
    word = 0xFFFFFFFF
    for byte in data:
        word = _CRC_TABLE[(word ^ byte) & 0xFF] ^ word >> 8
    return word ^ 0xFFFFFFFF
