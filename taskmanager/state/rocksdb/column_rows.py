"""Aggregates that are more than numbers in the database, with those of keys in use lately in memory.

The table in memory is that of every backend. What is done to keys first brings those that memory has not
in; when memory is short, all is written and everything is forgotten. What is done to all keys goes over
the rest of the database in parts, each a table of its own for the time being.

Invariants: what is in memory of a key is right whatever the database says; keys changed after
``_written_version`` may be missing in the database; a table that is being emitted forgets nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import value_type
from taskmanager.kernels import RecordTable, distinct
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_table import GroupTable, TableInputs, TableRows
from taskmanager.state.key_batches import concatenated_keys
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.database_store import parts_of_values
from taskmanager.state.rocksdb.entry_keys import (
    decoded_keys,
    entry_keys,
    entry_order,
    partition_bounds,
)
from taskmanager.state.rocksdb.keyed_entries import FrozenKeyedRows, keyed_batch
from taskmanager.state.rocksdb.row_values import check_storable
from taskmanager.state.rocksdb.sst_file import ByteStrings
from taskmanager.state.run_format import plain_keys
from taskmanager.state.snapshot_table import RestoredPart

_LOADED_VERSION = 1


class StoredColumnTable(GroupTable):
    """See ``GroupTable``.

    Args:
        partition: of the database.
        descriptor: has group columns, or no numbers.
        is_complete: the database holds nothing of it.
    """

    def __init__(
        self,
        partition: int,
        descriptor: AggregateDescriptor,
        home: TableHome,
        *,
        is_complete: bool,
    ) -> None:
        super().__init__(
            descriptor.key_types, descriptor.kinds, descriptor.new_columns(), with_versions=True
        )
        for column in self.schema():
            check_storable(column.type)
        self.partition = partition
        self.is_stored = not is_complete
        self._descriptor = descriptor
        self._plain_types = tuple(value_type(kind) for kind in descriptor.key_types)
        self._home = home
        self._is_complete = is_complete
        self._written_version = _LOADED_VERSION
        self._records.versions.current = _LOADED_VERSION + 1
        self._is_emitting = False
        # While it is being emitted: entries up to this key are out, then this many of those in memory.
        self._scanned_to: bytes | None = None
        self._emitted_cached = 0
        self._accounted_bytes = 0

    @override
    def __len__(self) -> int:
        return len(self._records) + sum(len(names) for names, _ in self._rest())

    @property
    def known_row_count(self) -> int:
        """Number of keys where it is known without reading, else 0."""
        return len(self._records) if self._is_complete else 0

    @override
    def update(self, keys: KeyBatch, inputs: TableInputs) -> None:
        self._load(keys)
        super().update(keys, inputs)
        self._account()

    @override
    def merge(self, other: GroupTable, only: KeyBatch | None = None) -> None:
        if only is not None:
            self._load(only)
            self._merge(other, only)
            self._account()
            return
        for part in other.tables():
            self._load(part._records.key_batch())
            self._merge(part, None)
            self._account()

    @override
    def tables(self) -> Iterator[GroupTable]:
        # Whatever is forgotten meanwhile: what was in memory is in the first one.
        rest = self._unloaded(self._records, is_complete=self._is_complete)
        yield self
        for names, values in rest:
            yield self._part(names, values)

    @override
    def keys(self, only: KeyBatch | None = None) -> KeyBatch:
        if only is not None:
            self._load(only)
            return super().keys(only)
        loops = process_kernels()
        found = [super().keys()]
        for names, _ in self._rest():
            found.append(decoded_keys(self._plain_types, ByteStrings.of(names), loops))
        return concatenated_keys(found)

    @override
    def rows(self, keys: KeyBatch) -> TableRows:
        self._load(keys)
        return super().rows(keys)

    @override
    def chunks(self, size: int) -> Iterator[TableRows]:
        self._is_emitting = True
        for names, values in self._rest():
            for start in range(0, len(names), size):
                some = slice(start, start + size)
                for rows in self._part(names[some], values[some]).chunks(size):
                    self._scanned_to = names[some][-1]
                    yield rows
        for rows in super().chunks(size):
            self._emitted_cached = self.emitted_rows
            yield rows

    @override
    def clear(self) -> None:
        raise AssertionError("a table of the database is dropped, not emptied")

    @override
    def is_reusable(self) -> bool:
        return False

    def freeze(self) -> FrozenKeyedRows | None:
        """What the database must be given; None = nothing."""
        records, since = self._records, self._written_version
        if not self._is_emitting and not records.versions.is_changed(since):
            return None
        gone = records.key_batch().slice(0, self._emitted_cached)
        if self._scanned_to is not None:
            since = 0  # the range that is dropped may hold what is also in memory
        was_stored, self.is_stored = self.is_stored, True
        sealed = self.seal_without(gone, since, self._home.max_parallelism, bury=was_stored)
        frozen = FrozenKeyedRows(
            self.partition,
            sealed,
            self._key_count,
            self._home.max_parallelism,
            lambda version: self._written(records, version),
            with_numbers=False,
        )
        if self._scanned_to is not None:
            begin = partition_bounds(self.partition)[0]
            frozen.dropped_range = begin, self._scanned_to + b"\0"
        return frozen

    def evict(self, *, everything: bool) -> None:
        """Forgets what is in memory; all changes have been written."""
        if self._is_emitting or self._records.versions.is_changed(self._written_version):
            return
        if len(self._records):
            self._is_complete = False
        descriptor = self._descriptor
        self._columns = descriptor.new_columns()
        self._records = RecordTable(
            descriptor.key_types,
            descriptor.kinds,
            with_index=bool(self._columns),
            with_versions=True,
        )
        self._records.versions.current = _LOADED_VERSION + 1
        self._written_version = _LOADED_VERSION
        self._account()

    def close(self) -> list[int]:
        """The table is not used any more; the partitions whose entries may go."""
        accounted, self._accounted_bytes = self._accounted_bytes, 0
        self._home.host.cache_resized(-accounted)
        return [self.partition] if self.is_stored else []

    def _written(self, records: RecordTable, version: int) -> None:
        if records is self._records:
            self._written_version = max(self._written_version, version)

    def _load(self, keys: KeyBatch) -> None:
        if self._is_complete or not len(keys):
            return
        missing = keys.take(np.flatnonzero(~self._records.contains(keys)))
        if not len(missing):
            return
        limit = self._home.max_parallelism
        missing = missing.take(distinct(missing)[0])
        missing = plain_keys(missing.take(entry_order(missing, limit)))
        names = entry_keys(self.partition, missing, limit).to_list()
        values = self._home.reader.get_many(names)
        found = [(n, v) for n, v in zip(names, values, strict=True) if v is not None]
        if found:
            self._put(self, [name for name, _ in found], [value for _, value in found])

    def _rest(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """The entries of keys that are not in memory, in parts."""
        return self._unloaded(self._records, is_complete=self._is_complete)

    def _unloaded(
        self, records: RecordTable, *, is_complete: bool
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        if is_complete:
            return
        loops = process_kernels()
        for names, values in self._home.reader.scan(*partition_bounds(self.partition)):
            keys = decoded_keys(self._plain_types, ByteStrings.of(names), loops)
            chosen = np.flatnonzero(~records.contains(keys)).tolist()
            if chosen:
                yield [names[row] for row in chosen], [values[row] for row in chosen]

    def _part(self, names: list[bytes], values: list[bytes]) -> GroupTable:
        descriptor = self._descriptor
        part = GroupTable(
            descriptor.key_types, descriptor.kinds, descriptor.new_columns(), with_versions=True
        )
        self._put(part, names, values)
        return part

    def _put(self, table: GroupTable, names: list[bytes], values: list[bytes]) -> None:
        batches = [
            keyed_batch(self.schema(), self._plain_types, *part, with_numbers=False)
            for part in parts_of_values(names, values)
        ]
        groups = range(self._home.max_parallelism)
        GroupTable.load(table, batches, RestoredPart(groups, 0, 1, len(names)))

    def _account(self) -> None:
        size = self.memory_bytes()
        difference = size - self._accounted_bytes
        if difference:
            self._accounted_bytes = size
            self._home.host.cache_resized(difference)
