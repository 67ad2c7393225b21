"""Aggregates per key in the database, behind a write-back cache.

The cache is a record table with versions. A key that is in it has its value there, whatever the database
says; a key that is not has it in the database, or no value. So reads ask the cache, then the database;
what a snapshot freezes is the cache's changes (``RecordTable.seal``), and nothing else needs to be
looked at while they are being written. A table whose keys are all in the cache (``is_complete``) never
reads the database.

Invariants: records changed after ``written_version`` may be missing in the database; a record leaves the
cache only when it is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import RecordTable, Rows, distinct
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_table import GroupTable, TableInputs, TableRows
from taskmanager.state.key_batches import concatenated_keys
from taskmanager.state.rocksdb.cache_host import CacheHost, EntryReader
from taskmanager.state.rocksdb.entry_batches import (
    concat_rows,
    slice_rows,
    take_rows,
)
from taskmanager.state.rocksdb.entry_keys import (
    decoded_keys,
    entry_keys,
    entry_order,
    partition_bounds,
)
from taskmanager.state.rocksdb.entry_values import decoded_rows
from taskmanager.state.rocksdb.frozen_rows import FrozenRows, RowTarget
from taskmanager.state.rocksdb.sst_file import ByteStrings

_TICK_UPDATES = 64
"""Updates between two of the cache's ages."""
_LOADED_VERSION = 1
"""Records that came from the database are not newer than that."""


@dataclass(slots=True)
class _Emission:
    """How much of a table has been handed out by ``chunks``.

    Attributes:
        cached: the records of the cache when it began, handed out last.
        cached_count: how many of them have been.
        scanned_to: the entries up to this key that were not in the cache have been; None = none yet.
    """

    cached: Rows
    cached_count: int = 0
    scanned_to: bytes | None = None


class StoredGroupTable(GroupTable):
    """Aggregates of one namespace.

    Args:
        partition: the number of the namespace.
        descriptor: has no group columns.
        max_parallelism: number of key-groups.
        reader: the database.
        host: owns the budget.
        is_complete: the database holds nothing of it.

    Attributes:
        is_stored: the database holds something of it, or will.
    """

    def __init__(
        self,
        partition: int,
        descriptor: AggregateDescriptor,
        max_parallelism: int,
        reader: EntryReader,
        host: CacheHost,
        *,
        is_complete: bool,
    ) -> None:
        # Nothing of the table in memory is used: only what operators see of it is the same.
        self.home = ""
        self.emitted_rows = 0
        self.partition = partition
        self.descriptor = descriptor
        self.is_stored = not is_complete
        self._max_parallelism = max_parallelism
        self._target = RowTarget(partition, max_parallelism, self._written)
        self._reader = reader
        self._host = host
        self._is_complete = is_complete
        self._row_count: int | None = 0 if is_complete else None
        self._written_version = _LOADED_VERSION
        self._updates = 0
        self._accounted_bytes = 0
        self._emission: _Emission | None = None
        self._cache = self._new_cache()

    @override
    def __len__(self) -> int:
        if self._is_complete:
            return len(self._cache)
        if self._row_count is None:
            self._row_count = sum(len(rows.keys) for rows in self.parts())
        return self._row_count

    @property
    def known_row_count(self) -> int:
        """Number of keys where it is known without reading, else 0."""
        return len(self._cache) if self._is_complete else self._row_count or 0

    @override
    def memory_bytes(self) -> int:
        return self._cache.memory_bytes()

    @override
    def update(self, keys: KeyBatch, inputs: TableInputs) -> None:
        self._load(keys)
        before = len(self._cache)
        self._cache.accumulate(keys, inputs.values, inputs.valid, merge=inputs.is_partial)
        self._count(len(self._cache) - before)
        self._changed()

    @override
    def merge(self, other: GroupTable, only: KeyBatch | None = None) -> None:
        for rows in _parts_of(other, only):
            self._load(rows.keys)
            before = len(self._cache)
            self._cache.merge_rows(rows)
            self._count(len(self._cache) - before)
            self._changed()

    @override
    def keys(self, only: KeyBatch | None = None) -> KeyBatch:
        if only is not None:
            self._load(only)
            return only.take(np.flatnonzero(self._cache.contains(only)))
        return concatenated_keys([rows.keys for rows in self.parts()])

    @override
    def rows(self, keys: KeyBatch) -> TableRows:
        self._load(keys)
        gathered = self._cache.gather(keys)
        return TableRows(keys.to_arrays(), gathered.accumulators, gathered.validity, [])

    @override
    def chunks(self, size: int) -> Iterator[TableRows]:
        cached = self._cache.rows()
        emission = self._emission = _Emission(cached)
        if not self._is_complete:
            for rows, entries in self._scan(self._cache):
                for start in range(0, len(rows.keys), size):
                    part = slice_rows(rows, start, min(start + size, len(rows.keys)))
                    emission.scanned_to = entries[start + len(part.keys) - 1]
                    self.emitted_rows += len(part.keys)
                    yield _table_rows(part)
        for start in range(0, len(cached.keys), size):
            part = slice_rows(cached, start, min(start + size, len(cached.keys)))
            emission.cached_count = start + len(part.keys)
            self.emitted_rows += len(part.keys)
            yield _table_rows(part)

    @override
    def clear(self) -> None:
        raise AssertionError("a table of the database is dropped, not emptied")

    @override
    def is_reusable(self) -> bool:
        return False

    def parts(self, only: KeyBatch | None = None) -> Iterator[Rows]:
        """All records, or those of the (different) keys of ``only``, in at least one part."""
        if only is not None:
            keys = self.keys(only)
            gathered = self._cache.gather(keys)
            yield Rows(keys, gathered.accumulators, gathered.validity)
            return
        cache = self._cache
        if not self._is_complete:
            for rows, _ in self._scan(cache):
                yield rows
        yield cache.rows()

    def freeze(self) -> FrozenRows | None:
        """Ends the version of the cache: what the database must be given; None = nothing."""
        versions, emission = self._cache.versions, self._emission
        if emission is None:
            if not versions.is_changed(self._written_version):
                return None
            self.is_stored = True
            return FrozenRows(self._target, self._cache, self._written_version)
        gone = emission.cached.keys.slice(0, emission.cached_count)
        was_stored, self.is_stored = self.is_stored, True
        # The range that is dropped may hold records that are also in the cache.
        since = 0 if emission.scanned_to is not None else self._written_version
        return FrozenRows(
            self._target,
            self._cache,
            since,
            scanned_to=emission.scanned_to,
            gone=gone if was_stored else gone.slice(0, 0),
            hidden=gone,
        )

    def _written(self, cache: RecordTable, version: int) -> None:
        """The database holds the changes of ``cache`` up to the version."""
        if cache is self._cache:
            self._written_version = max(self._written_version, version)

    def evict(self, *, everything: bool) -> None:
        """Keeps the half of the records that was changed last, or none; all changes have been written."""
        keep_rows = 0 if everything else len(self._cache) // 2
        assert not self._cache.versions.is_changed(self._written_version), "unwritten changes"
        rows, ages = self._cache.rows(), self._cache.row_versions()
        if len(ages) <= keep_rows:
            return
        if self._is_complete:
            self._row_count = len(ages)
            self._is_complete = False
        self._cache = self._new_cache()
        self._written_version = _LOADED_VERSION
        if keep_rows:
            newest = np.argpartition(ages, len(ages) - keep_rows)[len(ages) - keep_rows :]
            self._cache.put(take_rows(rows, newest))
        self._account()

    def close(self) -> list[int]:
        """The table is not used any more; the partitions whose entries may go."""
        accounted, self._accounted_bytes = self._accounted_bytes, 0
        self._host.cache_resized(-accounted)
        return [self.partition] if self.is_stored else []

    def _account(self) -> None:
        size = self._cache.memory_bytes()
        difference = size - self._accounted_bytes
        if difference:
            self._accounted_bytes = size
            self._host.cache_resized(difference)

    @property
    @override
    def _records(self) -> _PlainRecords:  # type: ignore[override]
        """What a table in memory that merges this one reads of it."""
        return _PlainRecords(self)

    def _new_cache(self) -> RecordTable:
        descriptor = self.descriptor
        cache = RecordTable(descriptor.key_types, descriptor.kinds, with_versions=True)
        cache.versions.current = _LOADED_VERSION + 1
        return cache

    def _changed(self) -> None:
        self._updates += 1
        if self._updates % _TICK_UPDATES == 0:
            self._cache.versions.current += 1
        self._account()

    def _count(self, new_rows: int) -> None:
        if not self._is_complete and self._row_count is not None:
            self._row_count += new_rows

    def _load(self, keys: KeyBatch) -> None:
        """Brings what the database has of the keys into the cache."""
        if self._is_complete:
            return
        absent = np.flatnonzero(~self._cache.contains(keys))
        if not len(absent):
            return
        missing = keys.take(absent)
        missing = missing.take(distinct(missing)[0])
        found = self._read(missing)
        self._cache.put(found)

    def _read(self, keys: KeyBatch) -> Rows:
        keys = keys.take(entry_order(keys, self._max_parallelism))
        entries = entry_keys(self.partition, keys, self._max_parallelism)
        values = self._reader.get_many(entries.to_list())
        present = [value for value in values if value is not None]
        accumulators, validity = decoded_rows(self.descriptor.kinds, present)
        if len(present) < len(values):
            keys = keys.take(np.flatnonzero([value is not None for value in values]))
        return Rows(keys, accumulators, validity)

    def _scan(self, cache: RecordTable) -> Iterator[tuple[Rows, list[bytes]]]:
        """The records that the cache does not have, and their entry keys, in the order of these."""
        begin, end = partition_bounds(self.partition)
        loops = process_kernels()
        for names, values in self._reader.scan(begin, end):
            keys = decoded_keys(self.descriptor.key_types, ByteStrings.of(names), loops)
            accumulators, validity = decoded_rows(self.descriptor.kinds, values)
            rows = Rows(keys, accumulators, validity)
            chosen = np.flatnonzero(~cache.contains(keys))
            if len(chosen) < len(names):
                rows = take_rows(rows, chosen)
                names = [names[row] for row in chosen.tolist()]
            if names:
                yield rows, names


class _PlainRecords:
    """A stored table as ``GroupTable.merge`` reads another one's records."""

    def __init__(self, table: StoredGroupTable) -> None:
        self._table = table

    def rows(self) -> Rows:
        return concat_rows(list(self._table.parts()))

    def gather(self, keys: KeyBatch) -> Rows:
        return next(iter(self._table.parts(keys)))


def _parts_of(other: GroupTable, only: KeyBatch | None) -> Iterator[Rows]:
    if isinstance(other, StoredGroupTable):
        yield from other.parts(only)
        return
    keys = other.keys(only)
    rows = other.rows(keys)
    yield Rows(keys, rows.accumulators, rows.validity)


def _table_rows(rows: Rows) -> TableRows:
    return TableRows(rows.keys.to_arrays(), rows.accumulators, rows.validity, [])
