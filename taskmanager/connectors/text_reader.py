"""Reads a text file block by block: whole blocks fast, malformed rows one by one.

A block is a stretch of whole rows. It is parsed at once; when that fails, a smaller block is halved until
the malformed rows stand alone, these are reported in their order, and the others are kept. The position
is the block's byte range and the rows handed out of it: another reader parses the same block again, and
does not report again what was reported before its first row went out. One call parses one block. The
checksum of a position is of all text up to its block, which is part of it once rows of it went out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.source import END, EndOfSplit, Reader
from penstock.errors import TaskFailure, Unrecoverable
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_identity import FileMark, OpenedFile
from taskmanager.connectors.file_splits import FileSplit
from taskmanager.connectors.recut import BatchCutter
from taskmanager.connectors.text_format import (
    Block,
    OpenTextFormat,
    TextFormat,
    table_to_batch,
)

BLOCK_BYTES = 1 << 20
"""Parsed in a few milliseconds."""

SALVAGE_BYTES = 64 << 10
"""Size of a block whose rows are looked at one by one."""

ROW_BYTES_MAX = 16 << 20

_HEAD_BYTES = 1 << 20
_POSITION = struct.Struct("<qqqqq")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block starts: byte offset, line number, number of the row, checksum of the text before."""

    offset: int
    line: int
    row: int
    checksum: int


class TextReader(Reader):
    """One CSV or JSON file."""

    def __init__(
        self,
        file: OpenedFile,
        split: FileSplit,
        plan: ColumnPlan,
        open_format: OpenTextFormat,
        bad_record: Callable[[str, str, str], None],
        position: bytes | None,
    ) -> None:
        self._path = split.path
        self._size = split.size_bytes
        self._plan = plan
        self._report = bad_record
        self._cutter = BatchCutter()
        self._salvage_until = 0
        self._bad_rows = 0
        self._file = file
        head = self._read_bytes(0, min(_HEAD_BYTES, self._size))
        self._format: TextFormat = open_format(split.path, head, plan)
        start = self._format.data_offset
        self._start = self._next = _Place(
            start, self._format.first_line, 0, zlib.crc32(head[:start])
        )
        if position is not None:
            self._resume(position)

    def _resume(self, position: bytes) -> None:
        mark, place = FileMark.decode(position, _POSITION.size)
        start, end, given, line, row = _POSITION.unpack(place)
        self._file.check_resumed(mark, lambda: self._file.checksum(0, end))
        checksum = mark.checksum if mark is not None else self._file.checksum(0, end)
        self._start = self._next = _Place(start, line, row, checksum)
        if given:
            text = self._read_bytes(start, end - start)
            block = self._format.cut(text, at_end=True)
            assert block.length == len(text), "the position is behind a block"
            batch = self._parse(text, block, lambda _where, _text, _error: None)
            self._advance(block, text, batch, checksum)
            self._cutter.fill(batch, given)
            self._given = given

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        if not self._cutter.remaining_rows:
            if self._next.offset >= self._size:
                self._file.check_read(
                    lambda: self._next.checksum, lambda: self._file.checksum(0, self._size)
                )
                return END
            self._load()
            if not self._cutter.remaining_rows:
                return None
        piece = self._cutter.take(max_rows)
        self._given += piece.num_rows
        return piece

    @override
    def next_read_at_ms(self) -> int | None:
        # None was returned because a whole block held no good row: go on at once.
        return 0

    @override
    def position(self) -> bytes:
        place, end, given, checksum = self._next, self._next.offset, 0, self._next.checksum
        if self._cutter.remaining_rows:
            place, end, given, checksum = self._start, self._end, self._given, self._end_checksum
        packed = _POSITION.pack(place.offset, end, given, place.line, place.row)
        return FileMark(self._file.version, checksum).encode(packed)

    @override
    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------ blocks

    def _load(self) -> None:
        text, block = self._next_block()
        self._start = self._next
        batch = self._try_parse(text[: block.length], block)
        if batch is None and block.length > SALVAGE_BYTES:
            # Look at few rows at a time, so that a call stays short.
            self._salvage_until = self._start.offset + block.length
            small = self._format.cut(text[:SALVAGE_BYTES], at_end=False)
            if small.length:
                block = small
                batch = self._try_parse(text[: block.length], block)
        self._bad_rows = 0
        if batch is None:
            batch = self._salvage(text[: block.length], self._report)
        checksum = zlib.crc32(memoryview(text)[: block.length], self._start.checksum)
        self._advance(block, text, batch, checksum)
        self._check_end(block, text)
        self._given = 0
        self._cutter.fill(batch)

    def _next_block(self) -> tuple[bytes, Block]:
        offset = self._next.offset
        length = SALVAGE_BYTES if offset < self._salvage_until else BLOCK_BYTES
        while True:
            text = self._read_bytes(offset, min(length, self._size - offset))
            at_end = offset + len(text) >= self._size
            block = self._format.cut(text, at_end=at_end)
            if block.length:
                return text, block
            if length >= ROW_BYTES_MAX:
                return text, self._forced_cut(text)
            length *= 4

    def _forced_cut(self, text: bytes) -> Block:
        line_end = text.rfind(b"\n")
        if line_end < 0 or self._format.must_close:
            raise TaskFailure(
                f"{self._path}:{self._next.line}: a row is longer than {ROW_BYTES_MAX} bytes, or a "
                "quote or brace in it is never closed"
            )
        return Block(line_end + 1)

    def _read_bytes(self, offset: int, length: int) -> bytes:
        data = self._file.read(offset, length)
        if len(data) < length:
            raise Unrecoverable(
                f"{self._path}: ends at byte {offset + len(data)}, but had {self._size} bytes when it "
                "was found: it was cut off while the job ran"
            )
        return data

    def _advance(self, block: Block, text: bytes, batch: pa.RecordBatch, checksum: int) -> None:
        """Behind the block, to whose end the checksum goes, and behind all text where no rows follow."""
        end = self._end = self._start.offset + block.length
        self._end_checksum = checksum
        if block.closed:
            checksum = self._file.checksum(end, self._size, checksum)
            end = self._size
        lines = text.count(b"\n", 0, block.length)
        rows = batch.num_rows + self._bad_rows
        self._next = _Place(end, self._start.line + lines, self._start.row + rows, checksum)

    def _check_end(self, block: Block, text: bytes) -> None:
        """Reports what stands behind the rows, and rows that do not end."""
        end = self._start.offset + block.length
        where = f"{self._path}:{self._next.line}"
        if block.closed:
            rest = text[block.length :].strip()
            position = self._start.offset + len(text)
            while not rest and position < self._size:
                rest = self._read_bytes(position, min(BLOCK_BYTES, self._size - position)).strip()
                position += BLOCK_BYTES
            if rest:
                self._report(
                    where, rest[:1000].decode(errors="replace"), "text behind the end of the array"
                )
        elif self._format.must_close and end >= self._size and not self._bad_rows:
            self._report(where, "", "the array is not closed: the file is cut off or malformed")

    # ------------------------------------------------------------ rows

    def _try_parse(self, text: bytes, block: Block) -> pa.RecordBatch | None:
        try:
            return self._plan.assemble(self._format.parse(text, block.structure))
        except pa.ArrowInvalid:
            return None

    def _parse(
        self, text: bytes, block: Block, report: Callable[[str, str, str], None]
    ) -> pa.RecordBatch:
        self._bad_rows = 0
        batch = self._try_parse(text, block)
        return self._salvage(text, report) if batch is None else batch

    def _salvage(self, text: bytes, report: Callable[[str, str, str], None]) -> pa.RecordBatch:
        """The good rows of a block with malformed ones, which are reported in their order."""
        good: list[pa.RecordBatch] = []
        good_rows = 0
        pending = [(0, len(text))]
        while pending:
            start, end = pending.pop()
            part = text[start:end]
            try:
                batch = self._format.parse(part)
            except pa.ArrowInvalid:
                spans = self._format.rows(part)
            else:
                good.append(self._plan.assemble(batch))
                good_rows += batch.num_rows
                continue
            if len(spans) > 1:
                middle = len(spans) // 2
                pending.append((start + spans[middle][0], start + spans[-1][1]))
                pending.append((start + spans[0][0], start + spans[middle - 1][1]))
                continue
            begin, stop = spans[0] if spans else (0, len(part))
            line_end = part.find(b"\n", begin) + 1
            if self._format.bad_rows_span_lines and 0 < line_end < stop:
                pending.append((start + line_end, start + stop))
                stop = line_end
            self._report_row(text, start + begin, start + stop, good_rows, report)
        return table_to_batch(pa.Table.from_batches(good, schema=self._plan.output))

    def _report_row(
        self,
        text: bytes,
        start: int,
        end: int,
        good_rows: int,
        report: Callable[[str, str, str], None],
    ) -> None:
        row = text[start:end].strip()
        start += len(text[start:end]) - len(text[start:end].lstrip())
        line = self._start.line + text.count(b"\n", 0, start)
        number = self._start.row + good_rows + self._bad_rows
        self._bad_rows += 1
        noun = self._format.row_noun
        where = f"{self._path}:{line}" + (f" ({noun} {number})" if noun else "")
        report(where, row.decode(errors="replace"), self._format.explain(row))
