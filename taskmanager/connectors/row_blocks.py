"""Sources whose rows are numbered: blocks of rows dealt out to splits in turn, and pacing.

Split i of S has the blocks i, i + S, i + 2 S, ...: event time advances evenly in all subtasks. A rate is
shared by the splits; a split that could not be read for a while catches up, so that the position keeps
up with the clock.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from penstock.connectors.source import Split

_PAYLOAD = struct.Struct("<qqq")
_POSITION = struct.Struct("<q")

_PACE_MS_MIN = 2
"""A paced split is read at most this often: rows of fast streams leave in small batches."""
_PACE_MS_MAX = 40
_PACE_ROWS = 64
"""Slow streams are read when so many rows are due, or after ``_PACE_MS_MAX``: a batch of one row costs every
operator behind the source about as much as one of many."""

_PACED_BLOCK_SECONDS = 0.04
"""So many seconds of a slow stream are one split's before it is the next one's turn."""


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """The blocks of one split: every ``split_count``-th block of ``block_rows`` rows from the ``index``-th."""

    index: int
    split_count: int
    block_rows: int

    def encode(self) -> bytes:
        """As bytes for ``Split.payload``."""
        return _PAYLOAD.pack(self.index, self.split_count, self.block_rows)

    @staticmethod
    def decode(payload: bytes) -> BlockSplit:
        """Inverse of ``encode``."""
        return BlockSplit(*_PAYLOAD.unpack(payload))

    def run_at(self, rows_done: int, total_rows: int) -> tuple[int, int]:
        """The next rows without a gap: number of the first, and how many (0 = the split is done).

        Args:
            rows_done: rows of this split handed out so far.
            total_rows: rows of all splits, -1 = endless.
        """
        block, offset = divmod(rows_done, self.block_rows)
        start = (block * self.split_count + self.index) * self.block_rows + offset
        count = self.block_rows - offset
        return start, count if total_rows < 0 else max(min(count, total_rows - start), 0)

    def rows(self, total_rows: int) -> int:
        """Rows of this split; 0 where it is endless."""
        if total_rows < 0:
            return 0
        cycle = self.block_rows * self.split_count
        cycles, rest = divmod(total_rows, cycle)
        mine = min(max(rest - self.index * self.block_rows, 0), self.block_rows)
        return cycles * self.block_rows + mine


def block_splits(total_rows: int, rate: float, parallelism: int, batch_rows: int) -> list[Split]:
    """One split per subtask; none that would be empty."""
    block_rows = batch_rows
    if rate > 0:
        block_rows = max(min(int(rate * _PACED_BLOCK_SECONDS / parallelism), batch_rows), 1)
    splits: list[Split] = []
    for index in range(parallelism):
        part = BlockSplit(index, parallelism, block_rows)
        if total_rows >= 0 and not part.rows(total_rows):
            break
        splits.append(
            Split(
                id=f"blocks-{index}-of-{parallelism}",
                payload=part.encode(),
                size=part.rows(total_rows),
            )
        )
    return splits


class RowCursor:
    """Where a reader of one block split stands, and how many rows it may hand out now.

    Args:
        split: the blocks.
        total_rows: rows of all splits, -1 = endless.
        rate: rows per second over all splits, 0 = no limit.
        position: rows handed out, as ``position`` gave them; None = none.
    """

    def __init__(
        self, split: BlockSplit, total_rows: int, rate: float, position: bytes | None
    ) -> None:
        self._split = split
        self._total_rows = total_rows
        self._rate_per_ms = rate / split.split_count / 1000
        self._pace_ms = _PACE_MS_MIN
        if rate > 0:
            pace_ms = int(_PACE_ROWS / self._rate_per_ms)
            self._pace_ms = min(max(pace_ms, _PACE_MS_MIN), _PACE_MS_MAX)
        self._by_block = rate > 0 and self._pace_ms * self._rate_per_ms >= split.block_rows
        """Whole blocks go, each in one batch: no two runs of rows where the clock's pace cuts one."""
        self._end = split.rows(total_rows) if total_rows >= 0 else None
        self._done = 0 if position is None else int(_POSITION.unpack(position)[0])
        self._started_ms = -1
        self._done_at_start = self._done
        self._counted_ms = -1
        """When the rows that are due were counted last; -1 = never."""

    def next_run(self, max_rows: int, now_ms: int) -> tuple[int, int] | None:
        """Number of the next row and how many may go; a count of 0 = not yet; None = done."""
        start, count = self._split.run_at(self._done, self._total_rows)
        if count == 0:
            return None
        if self._rate_per_ms > 0:
            count = min(count, self._due(now_ms))
        return start, min(count, max_rows)

    def _due(self, now_ms: int) -> int:
        if self._counted_ms < 0:
            self._started_ms = self._counted_ms = now_ms
        if now_ms < self._counted_ms:  # the clock was set back: it is counted on from there
            self._started_ms -= self._counted_ms - now_ms
            self._counted_ms = now_ms
        if now_ms >= self._counted_ms + self._pace_ms:
            self._counted_ms = now_ms
        due = int((self._counted_ms - self._started_ms) * self._rate_per_ms)
        target = self._done_at_start + due
        if self._by_block and (self._end is None or target < self._end):
            target -= target % self._split.block_rows
        return max(target - self._done, 0)

    def advance(self, rows: int) -> None:
        """The rows have been handed out."""
        self._done += rows

    def next_due_ms(self) -> int:
        """When the next row may go."""
        target = self._done + 1
        if self._by_block:
            target = self._done + self._split.block_rows - self._done % self._split.block_rows
            target = target if self._end is None else min(target, self._end)
        rows = target - self._done_at_start
        due_ms = self._started_ms + int(rows / self._rate_per_ms)
        if int((due_ms - self._started_ms) * self._rate_per_ms) < rows:
            due_ms += 1
        return max(due_ms, self._counted_ms + self._pace_ms)

    def position(self) -> bytes:
        """Rows handed out."""
        return _POSITION.pack(self._done)
