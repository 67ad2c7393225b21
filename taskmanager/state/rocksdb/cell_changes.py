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

    def freeze(self, now_ms: int) -> FrozenCells | None:
        """Ends the interval: what the database must be given; None = nothing."""
        self._frozen = self.unwritten()
        if self.live.changes:
            self._frozen.append(self.live)
            self.live = Interval()
        if not self._frozen:
            return None
        self.is_stored = True
        return FrozenCells(self, list(self._frozen), now_ms)

    def unwritten(self) -> list[Interval]:
        """The intervals that were frozen and are not in the database."""
        return [interval for interval in self._frozen if not interval.is_written]

    def is_clean(self) -> bool:
        """Everything is in the database."""
        return not self.live.changes and not self.unwritten()


class FrozenCells:
    """The unwritten intervals of a column up to a freeze (``FrozenPart``).

    Args:
        now_ms: wall-clock time of the freeze: what has expired then is not written.
    """

    dropped_range = None

    def __init__(self, column: CellChanges, intervals: list[Interval], now_ms: int) -> None:
        self.partition = column.partition
        self._column = column
        self._intervals = intervals
        self._now_ms = now_ms

    def entries(self) -> list[SstEntries]:
        """What is to be written, in parts that are each sorted."""
        changes: dict[bytes, Any] = {}
        for interval in self._intervals:
            if not interval.is_written:
                changes.update(interval.changes)
        if not changes:
            return []
        column, now_ms = self._column, self._now_ms
        names = [column.head + rest for rest in changes]
        values: list[bytes] = []
        gone = np.zeros(len(names), np.bool_)
        for row, stored in enumerate(changes.values()):
            encoded = None if stored is ABSENT else column.encode(stored, now_ms)
            if encoded is None:
                gone[row] = True
                encoded = b""
            values.append(encoded)
            if row % PACE_CELLS == PACE_CELLS - 1:
                column.pace(now_ms)
        order = string_order(names)
        kept = len(names) - int(gone.sum())
        if kept:
            column.average_bytes = sum(map(len, values)) / kept
        return [
            SstEntries(
                ByteStrings.of([names[row] for row in order]),
                ByteStrings.of([values[row] for row in order]),
                gone[order] if gone.any() else None,
            )
        ]

    def written(self) -> None:
        """The entries are in the database."""
        for interval in self._intervals:
            interval.is_written = True

    def release(self) -> None:
        """Nothing is held but the intervals, which go on to the next freeze if they were not written."""
