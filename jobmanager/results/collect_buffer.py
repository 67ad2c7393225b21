"""The rows of one collect sink between its subtasks and the client.

Chunks come in order per subtask, possibly more than once (a push whose answer was lost is repeated);
they leave in order of arrival, once. Invariants: never more than ``capacity_bytes`` are held, except
for one chunk that is larger by itself; never more than ``limit`` rows are taken in all; a chunk is
taken at most once.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class Verdict(enum.Enum):
    """What became of a chunk."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    SATISFIED = "satisfied"
    """The limit is reached: this and every later row is superfluous."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one subtask; ``sequence`` counts its chunks from 0."""

    subtask_index: int
    sequence: int
    data: bytes
    rows: int


class CollectBuffer:
    """Bounded, ordered, without duplicates.

    Args:
        capacity_bytes: what may be held.
        limit: rows over all subtasks, 0 = no limit.
    """

    def __init__(self, capacity_bytes: int, limit: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._limit = limit
        self._chunks: deque[Chunk] = deque()
        self._next_sequence: dict[int, int] = {}
        self._rows_taken = 0
        self.held_bytes = 0

    @property
    def satisfied(self) -> bool:
        """True when the limit is reached."""
        return self._limit > 0 and self._rows_taken >= self._limit

    @property
    def rows_wanted(self) -> int | None:
        """How many rows may still come; None = any number."""
        return None if self._limit == 0 else max(0, self._limit - self._rows_taken)

    def verdict(self, subtask_index: int, sequence: int, size_bytes: int) -> Verdict:
        """What would become of a chunk now."""
        expected = self._next_sequence.get(subtask_index, 0)
        if sequence < expected:
            return Verdict.DUPLICATE
        if self.satisfied:
            return Verdict.SATISFIED
        if self._chunks and self.held_bytes + size_bytes > self._capacity_bytes:
            return Verdict.FULL
        return Verdict.TAKEN

    def take(self, chunk: Chunk) -> None:
        """Takes a chunk whose verdict is ``TAKEN`` and that holds no more rows than wanted."""
        wanted = self.rows_wanted
        assert wanted is None or chunk.rows <= wanted, "cut to the limit before"
        self._next_sequence[chunk.subtask_index] = chunk.sequence + 1
        self._rows_taken += chunk.rows
        self.held_bytes += len(chunk.data)
        self._chunks.append(chunk)

    def pop(self) -> Chunk | None:
        """The next chunk for the client; None = nothing is held."""
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        self.held_bytes -= len(chunk.data)
        return chunk

    def clear(self) -> None:
        """Drops what is held."""
        self._chunks.clear()
        self.held_bytes = 0
