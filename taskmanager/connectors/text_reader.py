"""Reads one split of CSV or JSON: a block is parsed on an I/O thread while the rows of the one before go out.

The position is the block's byte range and the rows handed out of it: another reader parses the same block
again, and does not report again what was reported before its first row went out. The checksum of a
position is of all text up to its block, which is part of it once rows of it went out. What is held is
one block whose rows go out and one that is parsed, or waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.source import END, EndOfSplit, Reader, SourceContext
from taskmanager.connectors.recut import BatchCutter
from taskmanager.connectors.text_blocks import ParsedBlock, TextBlocks, place_position


class TextReader(Reader):
    """Hands out the rows of blocks and reports what is malformed in them."""

    row_noun = "line"

    def __init__(self, blocks: TextBlocks, context: SourceContext, position: bytes | None) -> None:
        self._blocks = blocks
        self._context = context
        self._cutter = BatchCutter()
        self._block: ParsedBlock | None = None
        self._given = self._last_rows = 0
        self._position = position or blocks.mark(place_position(blocks.place))
        self._next = self._submit(
            blocks.begin if position is None else lambda: blocks.resume(position)
        )

    def _submit(self, parse: Callable[[], ParsedBlock | None]) -> Future[ParsedBlock | None]:
        future: Future[ParsedBlock | None] = self._context.submit(parse)
        future.add_done_callback(lambda _: self._context.wake())
        return future

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        if not self._cutter.remaining_rows:
            if not self._next.done():
                return None
            block = self._next.result()
            if block is None:
                return END
            self._next = self._submit(self._blocks.next)
            self._take(block)
            if not self._cutter.remaining_rows:
                return None
        piece = self._cutter.take(max_rows)
        self._last_rows = piece.num_rows
        self._given += piece.num_rows
        return piece

    @override
    def row_number(self, index: int) -> int | None:
        if self._block is None:
            return None
        return self._blocks.line_of(self._block, self._given - self._last_rows + index)

    def _take(self, block: ParsedBlock) -> None:
        self._block, self._given = block, block.given
        self._cutter.fill(block.batch, block.given)
        for where, text, error in block.bad:
            self._context.bad_record(where, text, error)

    @override
    def is_reading(self) -> bool:
        return not self._next.done()

    @override
    def next_read_at_ms(self) -> int | None:
        # A whole block held no good row, and the next one is there; otherwise the I/O thread wakes us.
        return 0 if self._next.done() else None

    @override
    def position(self) -> bytes:
        if self._block is None:
            return self._position
        return self._blocks.mark(self._block.position(self._given))

    @override
    def close(self) -> None:
        if not self._next.cancel():
            self._next.add_done_callback(lambda _: self._blocks.close())
        else:
            self._blocks.close()
