"""What a table must be able to do so that a backend can snapshot and restore it without the operators.

Every table counts *versions*: a change carries the version that is being written, starting with 1, and
``seal`` ends it. A *segment* holds the changes of the interval (since_version, version]; read oldest
first, later rows winning, the segments of a chain that starts at 0 give the table. Content that was
restored belongs to version 0. (To go on from the chain it came from, a backend seals the table with
``since_version`` 1 after ``load`` and gives that away: what changes later is after version 1.)

Two ways to be snapshotted:
- by changes: rows changed in the interval, and a row with ``__deleted`` for every key that was removed
  in it (a table that never removes single keys needs no such column);
- whole: every segment holds all rows (``SealedTable.since_version`` is 0), and replaces the chain.

Layout of the batches: see ``taskmanager.state.run_format``. ``__key_group`` comes first; who
writes them sorts by it, and only the order of batches says which of two rows of a key is the later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa


@dataclass(eq=False)
class SealedTable:
    """Changes of a table that stay as they were when it was sealed, whatever happens to the table.

    Attributes:
        since_version: the changes are those after it; 0 = all content. A table may give more than it was
            asked for, and 0 always will do.
        version: the version that was sealed; the table goes on with the next.
        read: makes what ``batches`` gives; None = it has been given back.
        give_back: what was kept for it.
    """

    since_version: int
    version: int
    read: Callable[[], Iterator[pa.RecordBatch]] | None
    give_back: Callable[[], None] | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The changes, in batches of bounded size, in any order of key-groups; tombstones first.

        Called at most once, on an I/O thread, while the mailbox thread goes on changing the table: a
        simple table makes the batches in ``seal`` and only hands them out here.
        """
        return iter(()) if self.read is None else self.read()

    def release(self) -> None:
        """Gives back what was kept for it, read or not. Called on the mailbox thread; repeatable."""
        self.read = None
        if self.give_back is not None:
            self.give_back()


class SnapshotTable(Protocol):
    """A table of a backend. Everything is called on the mailbox thread.

    Attributes:
        kind: for the snapshot ("group", "rows", "sessions", ...); never changes its meaning.
    """

    @property
    def kind(self) -> str:
        """What kind of table it is."""

    def schema(self) -> pa.Schema:
        """Schema of all its batches; the metadata of its fields is part of it (names of codecs)."""

    def is_changed(self, since_version: int) -> bool:
        """Something has changed in a version above ``since_version``; cheap."""

    def seal(self, since_version: int, max_parallelism: int) -> SealedTable:
        """Freezes the changes after ``since_version`` up to now and begins the next version.

        No work per key, however many have changed; a table that is snapshotted whole may copy. At most
        two sealed tables of one table exist at a time.

        Args:
            since_version: 0 for all content. Never smaller than that of ``forget``.
        """

    def forget(self, version: int) -> None:
        """No ``seal`` will ask for changes after a version smaller than ``version`` any more, except for
        all content: tombstones up to it may go."""

    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        """Adds what a snapshot holds, oldest segment first; later rows of a key win. Called before
        anything else, once for each snapshot; does not count as a change. Batches have the schema of ``schema()`` (with
        other metadata, maybe), and only rows of the subtask's key-groups.

        Args:
            rows_max: upper bound of the rows in all batches (to make room at once).

        Raises:
            TaskFailure: the rows do not fit the table.
        """

    def memory_bytes(self) -> int:
        """Approximate size, what is kept for sealed tables included."""
