"""Cuts a large text file into pieces at the ends of rows, so that several subtasks read it.

The file is gone through once, without parsing: where a row of CSV ends depends on all quotes before it. A piece
knows the number of its first line, and the checksum of its text. Compressed files and JSON arrays are
read whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from penstock.connectors.listing import ListedFile
from penstock.connectors.source import Split
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_splits import FileSplit, part_id, whole_file_split
from taskmanager.connectors.opened_object import open_file
from taskmanager.connectors.text_blocks import HEAD_BYTES, cut_block
from taskmanager.connectors.text_bytes import PlainText
from taskmanager.connectors.text_format import OpenTextFormat, TextFormat

SPLIT_OVER_BYTES = 64 << 20
"""Files up to this size are read whole."""

PIECE_BYTES = 16 << 20

_SCAN_BYTES = 1 << 20


def text_splits(file: ListedFile, plan: ColumnPlan, open_format: OpenTextFormat) -> list[Split]:
    """The file as pieces, or whole where it is small or cannot be cut.

    Raises:
        TaskFailure: it cannot be read, or is of another shape.
    """
    if file.size_bytes <= SPLIT_OVER_BYTES:
        return [whole_file_split(file)]
    opened = open_file(file.path, range(file.size_bytes))
    try:
        text = PlainText(opened, file.size_bytes)
        head = text.read(0, HEAD_BYTES)
        format = open_format(file.path, head, plan)
        if format.must_close:
            return [whole_file_split(file)]
        header = zlib.crc32(memoryview(head)[: format.data_offset])
        pieces = list(_pieces(file, text, format, opened.version, header))
    finally:
        opened.close()
    tag = f"{file.size_bytes}-{zlib.crc32(repr([p.piece_checksum for p in pieces]).encode()):08x}"
    return [
        Split(
            part_id(file.path, tag, str(index)),
            piece.encode(),
            piece.end_byte - piece.start_byte,
        )
        for index, piece in enumerate(pieces)
    ]


def _pieces(
    file: ListedFile, text: PlainText, format: TextFormat, version: str, header: int
) -> Iterator[FileSplit]:
    start = offset = format.data_offset
    first_line = line = format.first_line
    checksum = header
    while True:
        where = f"{file.path}:{line}"
        data, block, at_end = cut_block(text, format, offset, _SCAN_BYTES, where)
        is_done = at_end and block.length == len(data)
        offset += block.length
        line += data.count(b"\n", 0, block.length)
        checksum = zlib.crc32(memoryview(data)[: block.length], checksum)
        if offset - start >= PIECE_BYTES or (is_done and offset > start):
            yield FileSplit(
                file.path,
                file.size_bytes,
                version=version,
                start_byte=start,
                end_byte=offset,
                first_line=first_line,
                piece_checksum=checksum,
            )
            start, first_line, checksum = offset, line, header
        if is_done:
            return
