"""An object that is read range by range, what comes next being fetched before it is asked for.

Reads that go on where the one before ended fetch blocks ahead of them; others fetch what they ask for, and
little more. What is held of an object is bounded, whatever its size.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Final

from penstock.storage.s3.bucket import S3Bucket
from penstock.storage.s3.listing import FoundObject

BLOCK_BYTES: Final = 4 << 20
"""What is fetched at once of an object that is read in order."""
_AHEAD_BYTES: Final = 2 * BLOCK_BYTES
_PART_BYTES: Final = 8 << 20
"""Longer ranges are fetched in parts, side by side."""
_LEAST_BYTES: Final = 64 << 10
_BLOCKS_MAX: Final = 8


class ObjectRanges:
    """Reads one object; one thread at a time.

    Args:
        bucket: has the object.
        found: the object; no byte of another one under its key is ever returned.
        in_order: what will be read in order, and is fetched ahead.
    """

    def __init__(self, bucket: S3Bucket, found: FoundObject, in_order: range = range(0)) -> None:
        self._bucket = bucket
        self._found = found
        self._in_order = range(in_order.start, min(in_order.stop, found.size_bytes))
        self._blocks: deque[_Block] = deque()
        self._last = range(in_order.start, in_order.start)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object.

        Raises:
            ObjectReplacedError: it is not there any more.
            StoreTransient: it cannot be read now.
        """
        end = min(offset + length, self._found.size_bytes)
        if offset >= end:
            return b""
        is_in_order = False
        if offset in self._in_order:
            is_in_order = self._last.start <= offset <= self._last.stop
            self._last = range(offset, end)
        if is_in_order:
            self._blocks = deque(one for one in self._blocks if one.end > offset)
        elif end - offset > _LEAST_BYTES:
            return self._read_at_once(offset, end)
        pieces: list[memoryview] = []
        while offset < end:
            block = self._block_at(offset) or self._begin(
                offset, offset + (BLOCK_BYTES if is_in_order else _LEAST_BYTES)
            )
            if is_in_order:
                self._fetch_ahead(block.end, end)
            pieces.append(block.piece(offset, end))
            offset += len(pieces[-1])
        return b"".join(pieces)

    def close(self) -> None:
        """What is being fetched is not waited for."""
        while self._blocks:
            self._blocks.pop().content.cancel()

    def _read_at_once(self, offset: int, end: int) -> bytes:
        parts = [
            self._bucket.begin_read(self._found, start, min(_PART_BYTES, end - start))
            for start in range(offset, end, _PART_BYTES)
        ]
        try:
            return b"".join([part.result() for part in parts])
        finally:
            for part in parts:
                part.cancel()

    def _block_at(self, place: int) -> _Block | None:
        return next((one for one in self._blocks if one.start <= place < one.end), None)

    def _fetch_ahead(self, covered: int, end: int) -> None:
        """Blocks behind those that are there."""
        goal = min(end + _AHEAD_BYTES, self._in_order.stop)
        while covered < goal:
            block = self._block_at(covered) or self._begin(
                covered, min(covered + BLOCK_BYTES, self._in_order.stop)
            )
            covered = block.end

    def _begin(self, start: int, end: int) -> _Block:
        while len(self._blocks) >= _BLOCKS_MAX:
            self._blocks.popleft().content.cancel()
        end = min(end, self._found.size_bytes)
        content = self._bucket.begin_read(self._found, start, end - start)
        self._blocks.append(_Block(start, end, content))
        return self._blocks[-1]


class _Block:
    """A range that is being fetched, or is there."""

    def __init__(self, start: int, end: int, content: Future[bytes]) -> None:
        self.start, self.end, self.content = start, end, content

    def piece(self, start: int, end: int) -> memoryview:
        """Its share of a range that begins in it."""
        return memoryview(self.content.result())[start - self.start : end - self.start]
