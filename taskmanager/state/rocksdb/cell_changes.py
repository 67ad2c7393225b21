"""Changed cells of a column on their way into the database.

What is changed in the caches between two freezes is an *interval*: a dict from the rest of the entry key
to the stored value, or ``ABSENT``. A freeze only begins a new one. Values are encoded when they are
written, on another thread: stored values never change in place, and a list that a frozen interval refers
to is copied before it may be changed (``ListCells.enter``).

An interval whose freeze is lost stays among the unwritten ones, and is written with the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from taskmanager.state.descriptors import ABSENT
from taskmanager.state.rocksdb.entry_keys import PARTITION_BYTES, string_order
from taskmanager.state.rocksdb.sst_file import ByteStrings, SstEntries
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart

PACE_CELLS: Final = 2048
"""Cells that are encoded between two pauses."""


class Interval:
    """Changes between two freezes.

    Attributes:
        changes: by entry key without the partition.
        slots: slots whose lists are among the changes.
        is_written: the database has them.
    """

    __slots__ = ("changes", "is_written", "slots")

    def __init__(self) -> None:
        self.changes: dict[bytes, Any] = {}
        self.slots: set[int] = set()
        self.is_written = False


class CellChanges:
    """The changes of one column. Used on the mailbox thread.

    Args:
        partition: the column's.
        is_stored: the database holds something of it.
        encode: the bytes of a stored value at a time (wall clock, ms); None = it has expired.
        pace: called now and then while values are encoded, with the time of the freeze.

    Attributes:
        live: the changes since the last freeze.
        is_stored: the database holds something of it, or will.
        average_bytes: of an encoded value, roughly.
    """

    def __init__(
        self,
        partition: int,
        encode: Callable[[Any, int], bytes | None],
        pace: Callable[[int], None],
        *,
        is_stored: bool,
    ) -> None:
        self.partition = partition
        self.head = partition.to_bytes(PARTITION_BYTES, "big")
        self.is_stored = is_stored
        self.live = Interval()
        self.average_bytes = 64.0
        self.encode = encode
        self.pace = pace
        self._frozen: list[Interval] = []

    def freeze(self, now_ms: int) -> FrozenPart | None:
        """Ends the interval: what the database must be given; None = nothing.

        Args:
            now_ms: wall-clock time: what has expired then is not written.
        """
        self._frozen = self.unwritten()
        if self.live.changes:
            self._frozen.append(self.live)
            self.live = Interval()
        if not self._frozen:
            return None
        self.is_stored = True
        intervals = list(self._frozen)

        def written() -> None:
            for interval in intervals:
                interval.is_written = True

        return FrozenPart(self.partition, lambda: self._entries(intervals, now_ms), written)

    def unwritten(self) -> list[Interval]:
        """The intervals that were frozen and are not in the database."""
        return [interval for interval in self._frozen if not interval.is_written]

    def is_clean(self) -> bool:
        """Everything is in the database."""
        return not self.live.changes and not self.unwritten()

    def _entries(self, intervals: list[Interval], now_ms: int) -> list[SstEntries]:
        """What is written of intervals, sorted; on any thread."""
        changes: dict[bytes, Any] = {}
        for interval in intervals:
            if not interval.is_written:
                changes.update(interval.changes)
        if not changes:
            return []
        names = [self.head + rest for rest in changes]
        values: list[bytes] = []
        gone = np.zeros(len(names), np.bool_)
        for row, stored in enumerate(changes.values()):
            encoded = None if stored is ABSENT else self.encode(stored, now_ms)
            if encoded is None:
                gone[row] = True
                encoded = b""
            values.append(encoded)
            if row % PACE_CELLS == PACE_CELLS - 1:
                self.pace(now_ms)
        order = string_order(names)
        kept = len(names) - int(gone.sum())
        if kept:
            self.average_bytes = sum(map(len, values)) / kept
        return [
            SstEntries(
                ByteStrings.of([names[row] for row in order]),
                ByteStrings.of([values[row] for row in order]),
                gone[order] if gone.any() else None,
            )
        ]
