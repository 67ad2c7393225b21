"""Parses a text file block by block: whole blocks fast, malformed rows one by one.

A block is a stretch of whole rows. It is parsed at once; when that fails, a smaller block is halved until
the malformed rows stand alone, these are listed in their order, and the others are kept. One call
parses one block, on an I/O thread; the calls come one after the other.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import TaskFailure
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_identity import CHUNK_BYTES, FileMark, OpenedFile
from taskmanager.connectors.file_splits import FileSplit
from taskmanager.connectors.text_bytes import TextBytes
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

HEAD_BYTES = 1 << 20
_POSITION = struct.Struct("<qqqqq")

BadRow = tuple[str, str, str]
"""(where, text, error)"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block starts: byte offset, line number, number of the row, checksum of the text before."""

    offset: int
    line: int
    row: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ParsedBlock:
    """The rows of a block.

    Attributes:
        start: where it starts.
        end: the offset behind it.
        end_checksum: of the text up to there.
        next: where the next one starts.
        bad: its malformed rows, and what is wrong behind it.
        given: rows that were handed out before.
        text: starts with the block's.
        good: stretches of its text without malformed rows, in their order; () = all of it.
    """

    start: Place
    end: int
    end_checksum: int
    next: Place
    batch: pa.RecordBatch
    bad: tuple[BadRow, ...] = ()
    given: int = 0
    text: bytes = b""
    good: tuple[tuple[int, int], ...] = ()

    def position(self, given: int) -> tuple[bytes, int]:
        """The place behind so many of its rows, and the checksum of what was read up to there."""
        if given < self.batch.num_rows:
            start = self.start
            packed = _POSITION.pack(start.offset, self.end, given, start.line, start.row)
            return packed, self.end_checksum
        return place_position(self.next)


def place_position(place: Place) -> tuple[bytes, int]:
    """A place between two blocks, and the checksum of what comes before it."""
    packed = _POSITION.pack(place.offset, place.offset, 0, place.line, place.row)
    return packed, place.checksum


def cut_block(
    text: TextBytes, format: TextFormat, offset: int, length: int, where: str
) -> tuple[bytes, Block, bool]:
    """The next block: what was read, how much of it is whole rows, and whether it is the text's end."""
    while True:
        data, at_end = text.read_on(offset, length)
        block = format.cut(data, at_end=at_end)
        if block.length or at_end:
            return data, block, at_end
        if length >= ROW_BYTES_MAX:
            line_end = data.rfind(b"\n")
            if line_end < 0 or format.must_close:
                raise TaskFailure(
                    f"{where}: a row is longer than {ROW_BYTES_MAX} bytes, or a quote or brace in it is "
                    "never closed"
                )
            return data, Block(line_end + 1), at_end
        length *= 4


class TextBlocks:
    """The blocks of one split.

    Raises:
        TaskFailure: the file is of another shape, or cannot be read.
    """

    def __init__(
        self,
        file: OpenedFile,
        text: TextBytes,
        split: FileSplit,
        plan: ColumnPlan,
        open_format: OpenTextFormat,
    ) -> None:
        self._file = file
        self._text = text
        self._split = split
        self._path = split.path
        self._plan = plan
        head = text.read(0, HEAD_BYTES)
        self._format = open_format(split.path, head, plan)
        self._head_bytes = self._format.data_offset
        self._first = split.start_byte or self._head_bytes
        line = split.first_line or self._format.first_line
        checksum = zlib.crc32(memoryview(head)[: self._head_bytes])
        self._place = Place(self._first, line, 0, checksum)
        self._salvage_until = 0
        self._bad: list[BadRow] = []
        self._bad_until = 0
        """Where the last of them ends in the block."""
        self._good: list[tuple[int, int]] = []

    @property
    def place(self) -> Place:
        """Where the next block starts."""
        return self._place

    def mark(self, place: tuple[bytes, int]) -> bytes:
        """A position as the source keeps it."""
        return FileMark(self._file.version, place[1]).encode(place[0])

    # ------------------------------------------------------------ on an I/O thread

    def begin(self) -> ParsedBlock | None:
        """The first block of a split that was not read before."""
        self._check_piece()
        return self.next()

    def _check_piece(self) -> None:
        """A piece is compared as a whole, wherever it is read on: others are read of the same file."""
        if self._split.piece_checksum >= 0:
            found = FileMark(self._split.version, self._split.piece_checksum)
            self._file.check_resumed(found, lambda: self._checksum_to(self._split.end_byte))

    def resume(self, position: bytes) -> ParsedBlock | None:
        """The block that a position is in, or the next one where it is behind all rows of a block."""
        mark, packed = FileMark.decode(position, _POSITION.size)
        offset, end, given, line, row = _POSITION.unpack(packed)
        self._check_piece()
        self._file.check_resumed(mark, lambda: self._checksum_to(end))
        checksum = mark.checksum if mark is not None else self._checksum_to(end)
        self._place = Place(offset, line, row, checksum)
        if not given:
            return self.next()
        data = self._text.read(offset, end - offset)
        block = self._format.cut(data, at_end=True)
        assert block.length == len(data), "the position is behind a block"
        batch = self._try_parse(data, block)
        if batch is None:
            batch = self._salvage(data)
        parsed = self._parsed(data, block, batch, checksum, at_end=False, given=given)
        self._bad, self._bad_until = [], 0
        return replace(parsed, bad=())  # they were reported before the first of its rows went out

    def next(self) -> ParsedBlock | None:
        """The next block; None = there is none."""
        data, block, at_end = self._cut()
        if not data:
            self._file.check_read(
                lambda: self._place.checksum, lambda: self._checksum_to(self._place.offset)
            )
            return None
        cut_row = self._cut_row(data) if at_end else 0
        if cut_row:
            block = Block(len(data) - cut_row)
        batch = self._try_parse(data[: block.length], block) if block.length else self._no_rows()
        if batch is None and block.length > SALVAGE_BYTES:
            # Look at few rows at a time, so that what is held at once stays small.
            self._salvage_until = self._place.offset + block.length
            small = self._format.cut(data[:SALVAGE_BYTES], at_end=False)
            if small.length:
                block, at_end = small, False
                batch = self._try_parse(data[: block.length], block)
        if batch is None:
            batch = self._salvage(data[: block.length])
        checksum = zlib.crc32(memoryview(data)[: block.length], self._place.checksum)
        parsed = self._parsed(data, block, batch, checksum, at_end=at_end)
        self._bad, self._bad_until = [], 0
        return parsed

    def line_of(self, block: ParsedBlock, row: int) -> int | None:
        """The line that a row of the block's batch begins at; None where that cannot be told."""
        text = block.text[: block.end - block.start.offset]
        begins: list[int] = []
        for start, end in block.good or ((0, len(text)),):
            part = text[start:end]
            for begin, stop in self._format.rows(part):
                row_text = part[begin:stop]
                if row_text.strip():
                    begins.append(start + stop - len(row_text.lstrip()))
        if len(begins) != block.batch.num_rows:
            return None
        return block.start.line + text.count(b"\n", 0, begins[row])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _checksum_to(self, end: int) -> int:
        return self._text.checksum(self._first, end, self._text.checksum(0, self._head_bytes))

    def _cut(self) -> tuple[bytes, Block, bool]:
        place = self._place
        length = SALVAGE_BYTES if place.offset < self._salvage_until else BLOCK_BYTES
        where = f"{self._path}:{place.line}"
        return cut_block(self._text, self._format, place.offset, length, where)

    def _cut_row(self, data: bytes) -> int:
        """Bytes of a last row that was still being written when the file was found."""
        size = self._split.size_bytes
        if (
            self._format.must_close
            or data.endswith(b"\n")
            or self._split.end_byte not in (-1, size)
        ):
            return 0
        if self._plan.options.of_file(self._path) or self._file.size() <= size:
            return 0
        spans = self._format.rows(data)
        return len(data) - spans[-1][0] if spans else 0

    def _no_rows(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], schema=self._plan.output)

    def _parsed(
        self,
        data: bytes,
        block: Block,
        batch: pa.RecordBatch,
        checksum: int,
        *,
        at_end: bool,
        given: int = 0,
    ) -> ParsedBlock:
        """The block, to whose end the checksum goes, and what is wrong behind it."""
        start = self._place
        end, end_checksum = start.offset + block.length, checksum
        line = start.line + data.count(b"\n", 0, block.length)
        row = start.row + batch.num_rows + len(self._bad)
        offset = end
        where = f"{self._path}:{line}"
        if block.closed:
            offset, checksum, rest = self._behind(end, checksum)
            if rest:
                shown = rest[:1000].decode(errors="replace")
                self._bad.append((where, shown, "text behind the end of the array"))
        elif at_end and block.length < len(data):
            tail = data[block.length :]
            offset, checksum = start.offset + len(data), zlib.crc32(tail, checksum)
            reason = "the file was still being written when it was found: its last row is not whole"
            self._bad.append((where, tail.decode(errors="replace"), reason))
        elif self._format.must_close and at_end and self._bad_until < block.length:
            self._bad.append(
                (where, "", "the array is not closed: the file is cut off or malformed")
            )
        self._place = Place(offset, line, row, checksum)
        bad = tuple(self._bad)
        good, self._good = tuple(self._good), []
        return ParsedBlock(start, end, end_checksum, self._place, batch, bad, given, data, good)

    def _behind(self, offset: int, checksum: int) -> tuple[int, int, bytes]:
        """The end of the text behind its rows, the checksum up to there, and what is not blank in it."""
        rest = b""
        while data := self._text.read(offset, CHUNK_BYTES):
            rest = rest or data.strip()
            checksum = zlib.crc32(data, checksum)
            offset += len(data)
        return offset, checksum, rest

    # ------------------------------------------------------------ rows

    def _try_parse(self, text: bytes, block: Block) -> pa.RecordBatch | None:
        try:
            return self._plan.assemble(self._format.parse(text, block.structure))
        except pa.ArrowInvalid:
            return None

    def _salvage(self, text: bytes) -> pa.RecordBatch:
        """The good rows of a block with malformed ones, which are listed in their order."""
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
                self._good.append((start, end))
                good_rows += batch.num_rows
                continue
            if len(spans) > 1:
                middle = len(spans) // 2
                # With what separates rows: the comma behind an element makes it one, also where it is blank.
                pending.append((start + spans[middle][0], end))
                pending.append((start, start + spans[middle][0]))
                continue
            begin, stop = spans[0] if spans else (0, len(part))
            line_end = part.find(b"\n", begin) + 1
            if self._format.bad_rows_span_lines and 0 < line_end < stop:
                pending.append((start + line_end, start + stop))
                stop = line_end
            self._add_bad(text, start + begin, start + stop, good_rows)
        return table_to_batch(pa.Table.from_batches(good, schema=self._plan.output))

    def _add_bad(self, text: bytes, start: int, end: int, good_rows: int) -> None:
        self._bad_until = end
        row = text[start:end].strip()
        start += len(text[start:end]) - len(text[start:end].lstrip())
        line = self._place.line + text.count(b"\n", 0, start)
        number = self._place.row + good_rows + len(self._bad)
        noun = self._format.row_noun
        where = f"{self._path}:{line}" + (f" ({noun} {number})" if noun else "")
        self._bad.append((where, row.decode(errors="replace"), self._format.explain(row)))
