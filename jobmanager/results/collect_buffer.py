"""The rows of one collect sink between its subtasks and the client.

Chunks come in order per subtask, possibly more than once (a push whose answer was lost is repeated);
they leave in order, once. Where the job takes checkpoints a chunk leaves only when a completed checkpoint
covers it; a restart takes back what none covers, and the sinks send it again.

Invariants: never more than ``capacity_bytes`` of what may leave are held in memory, except for one chunk
that is larger by itself and for what a checkpoint has just released; what no checkpoint covers yet never
makes a sink wait, since the next checkpoint may wait for the sink: beyond ``capacity_bytes`` it lies in
the spill, and beyond the spill's bound the job fails; never more than ``limit`` rows are taken in all; a
chunk is taken at most once.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Sequences = Mapping[str, Mapping[int, int]]
"""Collect id -> subtask index -> a number: that of the next chunk, or of an attempt."""


class Verdict(enum.Enum):
    """What became of a chunk."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    SATISFIED = "satisfied"
    """The limit is reached: this and every later row is superfluous."""
    FULL = "full"
    OVERFLOW = "overflow"
    """Too much waits for a checkpoint."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one subtask; ``sequence`` counts its chunks from 0."""

    subtask_index: int
    sequence: int
    data: bytes
    rows: int


class Spill(Protocol):
    """Keeps bytes outside the memory."""

    @property
    def size_bytes(self) -> int:
        """What it takes up."""

    def put(self, data: bytes) -> int:
        """Keeps bytes; returns where."""

    def take(self, where: int, size_bytes: int) -> bytes:
        """Bytes that were kept, for the last time."""

    def drop(self, where: int) -> None:
        """Bytes are not needed any more."""

    def clear(self) -> None:
        """Nothing is needed any more."""


class _NoSpill:
    """Where chunks leave at once, nothing is kept outside the memory."""

    size_bytes = 0

    def put(self, data: bytes) -> int:
        raise AssertionError("nothing waits for a checkpoint")

    def take(self, where: int, size_bytes: int) -> bytes:
        raise AssertionError("nothing was kept")

    def drop(self, where: int) -> None:
        raise AssertionError("nothing was kept")

    def clear(self) -> None:
        return


@dataclass(slots=True)
class _Held:
    """A chunk that is here; ``data`` is None where it lies in the spill."""

    subtask_index: int
    sequence: int
    rows: int
    size_bytes: int
    data: bytes | None
    where: int = 0


class CollectBuffer:
    """Bounded, ordered, without duplicates.

    Args:
        capacity_bytes: what may be held in memory, of what may leave and of what may not yet.
        limit: rows over all subtasks, 0 = no limit.
        spill: takes what waits for a checkpoint beyond that; None = chunks leave without checkpoints.
        spill_bytes_max: what it may hold.
    """

    def __init__(
        self,
        capacity_bytes: int,
        limit: int,
        spill: Spill | None = None,
        spill_bytes_max: int = 0,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._limit = limit
        self._waits_for_commits = spill is not None
        self._spill: Spill = spill or _NoSpill()
        self._spill_bytes_max = spill_bytes_max
        self._released: deque[_Held] = deque()
        self._uncommitted: dict[int, deque[_Held]] = {}
        self._committed: dict[int, int] = {}
        self._next_sequence: dict[int, int] = {}
        self._rows_taken = 0
        self._uncommitted_bytes = 0
        self.held_bytes = 0
        """In memory, of what may leave."""
        self.has_lost_rows = False
        """Rows that checkpoints cover were held by a JobManager that has ended."""

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
        if self._released and self.held_bytes + size_bytes > self._capacity_bytes:
            return Verdict.FULL
        if self._must_spill(size_bytes) and (
            self._spill.size_bytes + size_bytes > self._spill_bytes_max
        ):
            return Verdict.OVERFLOW
        return Verdict.TAKEN

    def _must_spill(self, size_bytes: int) -> bool:
        return (
            self._waits_for_commits and self._uncommitted_bytes + size_bytes > self._capacity_bytes
        )

    def take(self, chunk: Chunk) -> None:
        """Takes a chunk whose verdict is ``TAKEN`` and that holds no more rows than wanted."""
        wanted = self.rows_wanted
        assert wanted is None or chunk.rows <= wanted, "cut to the limit before"
        index, size_bytes = chunk.subtask_index, len(chunk.data)
        held = _Held(index, chunk.sequence, chunk.rows, size_bytes, chunk.data)
        if not self._waits_for_commits or chunk.sequence < self._committed.get(index, 0):
            self._release(held)
        else:
            if self._must_spill(size_bytes):
                held.data, held.where = None, self._spill.put(chunk.data)
            else:
                self._uncommitted_bytes += size_bytes
            self._uncommitted.setdefault(index, deque()).append(held)
        self._next_sequence[index] = chunk.sequence + 1
        self._rows_taken += chunk.rows

    def skip(self, subtask_index: int, sequence: int) -> None:
        """A chunk whose verdict is ``SATISFIED`` will not come again."""
        self._next_sequence[subtask_index] = sequence + 1

    @property
    def size_bytes(self) -> int:
        """Of all that is held, in memory and in the spill."""
        return self.held_bytes + self._uncommitted_bytes + self._spill.size_bytes

    def commit(self, subtask_index: int, next_sequence: int) -> None:
        """A completed checkpoint covers the chunks of a subtask below ``next_sequence``."""
        self._committed[subtask_index] = max(next_sequence, self._committed.get(subtask_index, 0))
        waiting = self._uncommitted.get(subtask_index, deque())
        while waiting and waiting[0].sequence < next_sequence:
            held = waiting.popleft()
            if held.data is not None:
                self._uncommitted_bytes -= held.size_bytes
            self._release(held)

    def commit_all(self) -> None:
        """The job has finished well: all rows count."""
        for index in self._uncommitted:
            self.commit(index, self._next_sequence[index])

    def begin_again(self, subtask_index: int, next_sequence: int) -> None:
        """A new attempt of a subtask sends from ``next_sequence`` on."""
        if self._waits_for_commits:
            self.commit(subtask_index, next_sequence)
            self.has_lost_rows |= next_sequence > self._next_sequence.get(subtask_index, 0)
        self._drop(subtask_index)
        self._next_sequence[subtask_index] = next_sequence

    def drop_uncommitted(self) -> None:
        """The job has ended otherwise: what no checkpoint covers does not count."""
        for index in self._uncommitted:
            self._drop(index)

    def _drop(self, subtask_index: int) -> None:
        waiting = self._uncommitted.get(subtask_index, deque())
        while waiting:
            held = waiting.popleft()
            self._rows_taken -= held.rows
            if held.data is None:
                self._spill.drop(held.where)
            else:
                self._uncommitted_bytes -= held.size_bytes

    def pop(self) -> Chunk | None:
        """The next chunk for the client; None = nothing may leave."""
        if not self._released:
            return None
        held = self._released.popleft()
        if held.data is not None:
            data = held.data
            self.held_bytes -= held.size_bytes
        else:
            data = self._spill.take(held.where, held.size_bytes)
        return Chunk(held.subtask_index, held.sequence, data, held.rows)

    def clear(self) -> None:
        """Drops what is held."""
        self._released.clear()
        self._uncommitted.clear()
        self._uncommitted_bytes = self.held_bytes = 0
        self._spill.clear()

    def _release(self, held: _Held) -> None:
        self._released.append(held)
        if held.data is not None:
            self.held_bytes += held.size_bytes
