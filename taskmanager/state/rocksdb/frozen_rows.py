"""What a table of aggregates had changed when it was frozen, on its way into the database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import RecordTable, Rows
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.rocksdb.entry_batches import (
    concat_rows,
    deleting_entries,
    sorted_entries,
    take_rows,
)
from taskmanager.state.rocksdb.entry_keys import partition_bounds
from taskmanager.state.rocksdb.sst_file import SstEntries


@dataclass(frozen=True, slots=True)
class RowTarget:
    """Where the rows of a table go.

    Attributes:
        partition: of the database.
        max_parallelism: number of key-groups.
        written: told when the database holds the changes of a cache up to a version.
    """

    partition: int
    max_parallelism: int
    written: Callable[[RecordTable, int], None]


class FrozenRows:
    """The changes of one table that a freeze has to write (``FrozenPart``).

    Args:
        target: where they go.
        cache: the table's, whose version ends here.
        since_version: what was written already.
        scanned_to: entries up to this key are dropped first; None = none.
        gone: keys whose entries are removed.
        hidden: keys that are not written.
    """

    def __init__(
        self,
        target: RowTarget,
        cache: RecordTable,
        since_version: int,
        *,
        scanned_to: bytes | None = None,
        gone: KeyBatch | None = None,
        hidden: KeyBatch | None = None,
    ) -> None:
        self.partition = target.partition
        self._target = target
        self._cache = cache
        self._export = cache.seal(since_version)
        self._scanned_to = scanned_to
        self._gone = gone
        self._hidden = hidden

    @property
    def dropped_range(self) -> tuple[bytes, bytes] | None:
        """Entries that are removed before anything is written; None = none."""
        if self._scanned_to is None:
            return None
        return partition_bounds(self.partition)[0], self._scanned_to + b"\0"

    def entries(self) -> list[SstEntries]:
        """What is to be written, in parts that are each sorted."""
        max_parallelism = self._target.max_parallelism
        parts: list[Rows] = []
        hidden = _key_set(self._hidden)
        for rows in self._cache.exported(self._export):
            if hidden is not None:
                rows = take_rows(rows, np.flatnonzero(~hidden.contains(rows.keys)))
            if len(rows.keys):
                parts.append(rows)
        entries: list[SstEntries] = []
        if self._gone is not None and len(self._gone):
            entries.append(deleting_entries(self.partition, self._gone, max_parallelism))
        if parts:
            loops = process_kernels()
            rows = concat_rows(parts)
            entries.append(sorted_entries(self.partition, rows, max_parallelism, loops))
        return entries

    def written(self) -> None:
        """The entries are in the database."""
        self._target.written(self._cache, self._export.version)

    def release(self) -> None:
        """Nothing of it will be written (any more); repeatable."""
        self._export.release()


def _key_set(keys: KeyBatch | None) -> RecordTable | None:
    if keys is None or not len(keys):
        return None
    found = RecordTable(keys.types, [], with_index=True)
    found.lookup_or_insert(keys)
    return found
