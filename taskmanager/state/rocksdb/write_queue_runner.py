"""In which order frozen changes get into the database, and when its files are a snapshot's.

A *freeze* is what all tables had changed up to a point. Freezes are written in their order, whoever asks
for one: its entries, then the ranges that were dropped before it, then the hard links where it belongs to
a snapshot. Nothing younger gets in before the links are made: so they show exactly the state at the
freeze, and what must go out in between (a cache that is full) goes through the queue like the rest.

A freeze that is discarded, or fails, leaves its changes to the next one: a table's changes count as
written only when all of them are in the database.

``write_next`` is one step; ``write_until`` runs steps on the caller's thread, under one lock. Everything
else is for the mailbox thread and never waits for a step.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from penstock.errors import StreamError
from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.entry_keys import partition_bounds
from taskmanager.state.rocksdb.entry_batches import EntryFiles


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """Changes of one table or column up to a freeze.

    Attributes:
        partition: where they belong.
        entries: makes what is to be written, in parts that are each sorted and that the next ones win over; called
            once, on any thread.
        written: the entries are in the database.
        release: nothing of it will be written (any more); repeatable, on any thread.
        dropped_range: entries that are removed before anything is written; None = none.
    """

    partition: int
    entries: Callable[[], Iterable[SstEntries]]
    written: Callable[[], None]
    release: Callable[[], None] = lambda: None
    dropped_range: tuple[bytes, bytes] | None = None


class EntryWriter(Protocol):
    """What a freeze is written to (``Database``)."""

    def ingest(self, entries: SstEntries) -> None:
        """Writes entries."""

    def drop_range(self, begin: bytes, end: bytes) -> None:
        """Removes a range."""

    def link(self, directory: Path) -> None:
        """Makes hard links of the files."""


class FreezeLostError(StreamError):
    """The changes of a freeze could not be written, or are not wanted: they join the next one."""


class Freeze:
    """Changes up to a point.

    Args:
        parts: by ascending partition.
        dropped: partitions that were dropped before it.
        link_to: where the files are to be linked; None = it belongs to no snapshot.
        frozen_at_ms: wall-clock time.
    """

    def __init__(
        self,
        parts: Sequence[FrozenPart],
        dropped: list[int],
        link_to: Path | None,
        frozen_at_ms: int,
    ) -> None:
        self.parts = parts
        self.dropped = dropped
        self.link_to = link_to
        self.frozen_at_ms = frozen_at_ms
        self.is_written = False
        self.is_lost = False

    def release(self) -> None:
        """Gives back what the parts hold."""
        for part in self.parts:
            part.release()
        self.parts = ()


class WriteQueue:
    """The freezes that are still to be written."""

    def __init__(self, writer: EntryWriter) -> None:
        self._writer = writer
        self._freezes: deque[Freeze] = deque()
        self._dropped: list[int] = []
        self._write_lock = Lock()
        self._lock = Lock()
        self._in_progress: Freeze | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._freezes)

    @property
    def frozen_at_ms(self) -> int:
        """Wall-clock time of the freeze that is being written; 0 = none is."""
        freeze = self._in_progress
        return 0 if freeze is None else freeze.frozen_at_ms

    def add(
        self, parts: Sequence[FrozenPart], link_to: Path | None, frozen_at_ms: int = 0
    ) -> Freeze:
        """Adds a freeze behind the others."""
        ordered = sorted(parts, key=lambda part: part.partition)
        with self._lock:
            freeze = Freeze(ordered, self._dropped, link_to, frozen_at_ms)
            self._dropped = []
            self._freezes.append(freeze)
        return freeze

    def drop(self, partition: int) -> None:
        """Removes a partition's entries as soon as no freeze needs them any more."""
        with self._lock:
            self._dropped.append(partition)

    def discard(self, freeze: Freeze) -> None:
        """A freeze is not wanted; its changes join the next one. Repeatable, on any thread."""
        with self._lock:
            if freeze.is_written or freeze.is_lost:
                return
            self._lose(freeze)
            if freeze is self._in_progress:
                return  # the step that is writing it goes on to its end
        freeze.release()

    def write_until(self, freeze: Freeze) -> None:
        """Writes all freezes up to this one.

        Raises:
            FreezeLostError: it was discarded, or the queue was closed.
            StoreTransient: it cannot be written (disk full); the freeze is lost.
        """
        while not freeze.is_written:
            if freeze.is_lost:
                raise FreezeLostError("the snapshot was discarded before it was written")
            self.write_next()

    def write_all(self) -> None:
        """Writes all freezes."""
        while self._freezes:
            self.write_next()

    def write_next(self) -> bool:
        """Writes the oldest freeze. False = there is none.

        Raises:
            FreezeLostError: the queue was closed.
            StoreTransient: it cannot be written (disk full); the freeze is lost.
        """
        with self._write_lock:
            with self._lock:
                if not self._freezes:
                    return False
                freeze = self._in_progress = self._freezes[0]
            try:
                self._write(freeze)
                for part in freeze.parts:
                    part.written()
                self._finish(freeze, is_written=True)
            finally:
                self._finish(freeze, is_written=False)
                freeze.release()
                if freeze.is_lost and freeze.link_to is not None:  # while it was being linked
                    shutil.rmtree(freeze.link_to, ignore_errors=True)
            return True

    def close(self) -> None:
        """Discards what is left, and waits for the step that is running."""
        with self._lock:
            self._is_closed = True
            freezes = list(self._freezes)
        for freeze in freezes:
            self.discard(freeze)
        with self._write_lock:
            pass

    def _finish(self, freeze: Freeze, *, is_written: bool) -> None:
        """Ends a step; does nothing the second time."""
        with self._lock:
            self._in_progress = None
            if freeze.is_lost or freeze.is_written:
                return
            if is_written:
                freeze.is_written = True
                self._freezes.popleft()
            else:
                self._lose(freeze)

    def _write(self, freeze: Freeze) -> None:
        parts = list(freeze.parts)
        for part in parts:
            dropped = part.dropped_range
            if dropped is not None:
                self._writer.drop_range(*dropped)
        self._write_entries(parts)
        for partition in freeze.dropped:
            self._writer.drop_range(*partition_bounds(partition))
        if freeze.link_to is not None and not freeze.is_lost:
            self._writer.link(freeze.link_to)

    def _write_entries(self, parts: Sequence[FrozenPart]) -> None:
        files = EntryFiles(self._ingest)
        for part in parts:
            for piece in part.entries():
                files.add(piece)
        self._check_open()
        files.flush()

    def _ingest(self, entries: SstEntries) -> None:
        self._check_open()
        self._writer.ingest(entries)

    def _check_open(self) -> None:
        if self._is_closed:
            raise FreezeLostError("the backend was closed while its snapshot was being written")

    def _lose(self, freeze: Freeze) -> None:
        """Takes a freeze out; what was dropped before it is dropped with the next (under the lock)."""
        freeze.is_lost = True
        place = self._freezes.index(freeze)
        del self._freezes[place]
        if place < len(self._freezes):
            following = self._freezes[place]
            following.dropped = freeze.dropped + following.dropped
        else:
            self._dropped = freeze.dropped + self._dropped
