"""A table in memory before its entries in the database: what all such tables do the same way.

What is in memory of a key is right whatever the database says; what is not is right in the database
(``is_complete``: the database holds nothing that memory has not). Changes after ``_written_version`` may
be missing in the database: a freeze seals them, and what is frozen is forgotten only when it is written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.batch_parts import PART_BYTES, in_parts
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import (
    decoded_keys,
    entry_keys,
    entry_order,
)
from penstock.storage.entries.keyed_values import keyed_batch, split_numbers
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array, value_type
from taskmanager.kernels import RecordTable
from taskmanager.state.instances import InstanceState
from taskmanager.state.keyed_table import KeyedTable
from taskmanager.state.rocksdb.cache_host import CacheAccount, TableHome
from taskmanager.state.rocksdb.database_store import parts_of_values
from taskmanager.state.rocksdb.key_filter import NO_ERA
from taskmanager.state.rocksdb.partitions import Partition
from taskmanager.state.rocksdb.run_entries import run_entries
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart
from taskmanager.state.snapshot_table import SnapshotTable

LOADED_VERSION: Final = 1
"""What came from the database is not newer than that."""

Entries = tuple[list[bytes], list[bytes]]
"""Names and values."""
Sealed = tuple[int, Callable[[], Iterable[SstEntries]], Callable[[], None]]
"""The version, what makes the entries (see ``FrozenPart``), and what gives back what is kept for them."""


class RemovedKeys:
    """Keys that are no more, and that the database may still have."""

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self._types = types
        self._by_version: dict[int, RecordTable] = {}

    def add(self, version: int, keys: KeyBatch) -> None:
        """Keys were removed in a version of their table."""
        if version not in self._by_version:
            self._by_version[version] = RecordTable(self._types, [], with_versions=True)
        self._by_version[version].accumulate(keys, [], [])

    def others(self, keys: KeyBatch, written_version: int) -> Int64Array:
        """Which of n keys were not removed after a version.

        Args:
            written_version: the database has the changes up to it: what was removed before is gone.
        """
        rows = np.arange(len(keys))
        for version, removed in list(self._by_version.items()):
            if version <= written_version:
                del self._by_version[version]
            elif len(rows):
                rows = rows[~removed.contains(keys.take(rows))]
        return rows

    def memory_bytes(self) -> int:
        """Size."""
        return sum(keys.memory_bytes() for keys in self._by_version.values())


class Spilled(SnapshotTable):
    """Something whose changes are frozen in memory, and written into the database after that.

    Stands behind what it is in memory among the bases.

    Args:
        is_stored: the database holds something of it.

    Attributes:
        is_stored: the database holds something of it, or will.
    """

    def __init__(self, partition: int, *, is_stored: bool) -> None:
        self.partition = partition
        self.is_stored = is_stored
        self._written_version = LOADED_VERSION

    @abstractmethod
    def _sealed(self) -> Sealed:
        """Ends the version: what has changed since what is written."""

    def freeze(self) -> FrozenPart | None:
        """What the database must be given; None = nothing."""
        self.forget(self._written_version)
        if self.is_clean():
            return None
        self.is_stored = True
        version, entries, release = self._sealed()
        return FrozenPart(self.partition, entries, lambda: self.written(version), release)

    def is_clean(self) -> bool:
        """Everything is in the database."""
        return not self.is_changed(self._written_version)

    def written(self, version: int) -> None:
        """The database has the changes up to the version; on any thread."""
        self._written_version = max(self._written_version, version)


class SpilledTable(Spilled):
    """A table whose content is in the database, and what was used lately in memory."""

    def __init__(self, found: Partition, home: TableHome) -> None:
        Spilled.__init__(self, found.number, is_stored=found.is_stored)
        self._home = home
        self._is_complete = not found.is_stored
        self._cache_account = CacheAccount(home.host)

    def close(self) -> list[int]:
        """The table is not used any more; the partitions whose entries may go."""
        self._cache_account.resize(0)
        return [self.partition] if self.is_stored else []

    def _account(self) -> None:
        self._cache_account.resize(self.memory_bytes())


class KeyedSpill(SpilledTable):
    """A spilled table whose rows are known by key (and a number), as ``keyed_schema`` has them."""

    kind: ClassVar[str]
    with_numbers: ClassVar[bool] = False
    """A key has several rows, told apart by a number."""

    def __init__(
        self,
        found: Partition,
        home: TableHome,
        key_types: Sequence[pa.DataType],
        schema: pa.Schema,
    ) -> None:
        SpilledTable.__init__(self, found, home)
        self._run_entries = run_entries(self.kind, schema, home.max_parallelism)
        self._plain_types = tuple(value_type(kind) for kind in key_types)
        self._needs_room = False
        self._era = home.stored_keys.era if self._is_complete else NO_ERA

    # What the table in memory does.

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _missing(self, keys: KeyBatch) -> KeyBatch:
        """The different keys that are to be looked for in the database."""

    @abstractmethod
    def _cached_keys(self) -> KeyBatch:
        """All keys in memory."""

    @abstractmethod
    def _forget(self) -> None:
        """Nothing is in memory."""

    # What comes of it.

    @property
    def identity_count(self) -> int:
        """How many columns of the schema rows are known by."""
        return len(self._plain_types) + self.with_numbers

    @property
    def known_row_count(self) -> int | None:
        """Number of rows where it is known without reading."""
        return len(self) if self._is_complete else None

    def evict(self, *, everything: bool) -> None:
        """Forgets what is in memory as soon as nobody holds numbers of it."""
        self._needs_room = True

    @override
    def _sealed(self) -> Sealed:
        sealed = self.seal(self._written_version, self._home.max_parallelism)

        def entries() -> list[SstEntries]:
            parts = map(self._entries, in_parts(sealed.batches(), PART_BYTES))
            return list(chain.from_iterable(parts))

        return sealed.version, entries, sealed.release

    def _entries(self, batches: list[pa.RecordBatch]) -> list[SstEntries]:
        """What is written of sealed rows; on any thread."""
        return [self._run_entries.entries(self.partition, batches)]

    def _make_room(self) -> None:
        """Forgets what is in memory where that was asked for, and all of it has been written."""
        self._account()
        if self._needs_room and self.is_clean():
            self._needs_room = False
            self._note_stored(self._cached_keys())
            self._forget()
            self._account()

    def _load(self, keys: KeyBatch) -> None:
        """Brings what the database has of the keys into memory."""
        if self._is_complete or not len(keys):
            return
        missing = self._missing(keys)
        stored = self._home.stored_keys.may_have(self.partition, missing.hashes, self._era)
        if stored.any():
            self._put(list(self._stored(missing.take(np.flatnonzero(stored)))))

    def _note_stored(self, keys: KeyBatch) -> None:
        """What these keys have will be in the database alone."""
        if len(keys):
            self._is_complete = False
            self._home.stored_keys.add(self.partition, keys.hashes, self._era)

    def _put(self, parts: list[Entries]) -> None:
        if parts:
            self.load(*self._restored(parts))

    def _restored(self, parts: list[Entries]) -> tuple[Iterator[pa.RecordBatch], int]:
        """Entries as ``load`` takes them."""
        return map(self._rows_of, parts), sum(len(names) for names, _ in parts)

    def _stored(self, keys: KeyBatch) -> Iterator[Entries]:
        """The entries of (different) keys, in parts."""
        limit = self._home.max_parallelism
        names = entry_keys(self.partition, keys.take(entry_order(keys, limit)), limit).to_list()
        if self.with_numbers:
            yield from self._home.reader.scan_prefixes(names)
            return
        values = self._home.reader.get_many(names)
        found = [(n, v) for n, v in zip(names, values, strict=True) if v is not None]
        if found:
            yield from parts_of_values([name for name, _ in found], [value for _, value in found])

    def _keys_of(self, names: list[bytes]) -> KeyBatch:
        if self.with_numbers:
            names, _ = split_numbers(names)
        return decoded_keys(self._plain_types, ByteStrings.of(names))

    def _rows_of(self, part: Entries) -> pa.RecordBatch:
        return keyed_batch(self.schema(), self._plain_types, *part, with_numbers=self.with_numbers)


class SpilledKeyedTable(KeyedTable, KeyedSpill):
    """A ``KeyedTable`` before its entries.

    A batch first brings the keys that it has and memory has not in; when memory is short, all is written
    and everything is forgotten. Both happen before a batch looks at its keys (``key_indices``): between
    that and the batch's end, operators hold numbers of the table.

    A subclass names it before the table in memory among its bases, and calls ``_spill``.
    """

    def _spill(
        self, found: Partition, home: TableHome, new_contents: Callable[[], InstanceState]
    ) -> None:
        """To be called when the table in memory has been made.

        Args:
            new_contents: makes the contents of a table without rows.
        """
        KeyedSpill.__init__(self, found, home, self._types, self.schema())
        self._new_contents = new_contents
        self._version = LOADED_VERSION + 1

    @override
    def key_indices(self, keys: KeyBatch) -> Int64Array:
        self._make_room()
        self._load(keys)
        return super().key_indices(keys)

    @override
    def _missing(self, keys: KeyBatch) -> KeyBatch:
        return self._keys.missing(keys)

    @override
    def _cached_keys(self) -> KeyBatch:
        slots = np.arange(self._keys.bound)
        return self._keys.keys(slots[self._keys.is_used(slots)])

    @override
    def _forget(self) -> None:
        self._begin(self._new_contents())
