"""Aggregates per key in the database, with those of keys in use lately in memory.

The table in memory is that of every backend. What is done to keys first brings those that memory has not
in. What is done to all keys goes over the rest of the database in parts, each a table of its own for the
time being; what memory held when it began comes first, whatever is forgotten meanwhile.

Entries of numbers alone are written and read as they lie in the records, in the background; others as
rows (``keyed_entries``). When memory is short, numbers that were changed lately stay, all else goes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.entry_keys import partition_bounds
from penstock.storage.entries.entry_values import decoded_rows
from penstock.storage.key_encoding import KeyBatch, concatenated_keys
from taskmanager.kernels import RecordTable, Rows, distinct
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.kernels.slot_table import LOAD_PERCENT
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_table import GroupTable, TableInputs, TableRows
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.entry_batches import PART_ENTRIES, concat_rows, sorted_entries
from taskmanager.state.rocksdb.partitions import Partition
from taskmanager.state.rocksdb.spilled_table import LOADED_VERSION, Entries, KeyedSpill, Sealed
from taskmanager.state.run_format import plain_keys

_TICK_UPDATES = 64
"""Updates between two ages of what is in memory."""
_ROOM_SHARE = 31 / 32
"""Of the caches' room that one table takes: small ones begin without making all others leave."""


class StoredGroupTable(GroupTable, KeyedSpill):
    """See ``GroupTable``."""

    def __init__(self, found: Partition, home: TableHome, descriptor: AggregateDescriptor) -> None:
        GroupTable.__init__(
            self,
            descriptor.key_types,
            descriptor.kinds,
            descriptor.new_columns(),
            uses=descriptor.uses,
            with_versions=True,
        )
        KeyedSpill.__init__(self, found, home, descriptor.key_types, self.schema())
        self._descriptor = descriptor
        self._is_plain = bool(descriptor.kinds) and not self._columns
        self._updates = 0
        self._wanted_capacity = 0
        self._records.versions.current = LOADED_VERSION + 1

    @override
    def __len__(self) -> int:
        return len(self._records) + sum(len(names) for names, _ in self._rest())

    @property
    @override
    def known_row_count(self) -> int | None:
        return len(self._records) if self._is_complete else None

    @override
    def update(self, keys: KeyBatch, inputs: TableInputs) -> None:
        self._make_room_for(keys)
        self._load(keys)
        super().update(keys, inputs)
        self._changed()

    @override
    def merge(self, other: GroupTable, only: KeyBatch | None = None) -> None:
        if only is not None:
            self._load(only)
            self._merge(other, only)
            self._changed()
            return
        for part in other.tables():
            self._load(part._records.key_batch())
            self._merge(part, None)
            self._changed()

    @override
    def tables(self) -> Iterator[GroupTable]:
        rest = self._rest()
        yield self
        for part in rest:
            yield self._part(part)

    @override
    def keys(self, only: KeyBatch | None = None) -> KeyBatch:
        if only is not None:
            self._load(only)
            return super().keys(only)
        found = [super().keys(), *(self._keys_of(names) for names, _ in self._rest())]
        return concatenated_keys(found)

    @override
    def rows(self, keys: KeyBatch) -> TableRows:
        self._load(keys)
        return super().rows(keys)

    @override
    def chunks(self, size: int) -> Iterator[TableRows]:
        rest = self._rest()
        yield from super().chunks(size)
        for names, values in rest:
            for start in range(0, len(names), size):
                some = slice(start, start + size)
                yield from self._part((names[some], values[some])).chunks(size)

    @override
    def clear(self) -> None:
        raise AssertionError("a table of the database is dropped, not emptied")

    @override
    def is_reusable(self) -> bool:
        return False

    @override
    def _sealed(self) -> Sealed:
        if not self._is_plain:
            return super()._sealed()
        records, export = self._records, self._records.seal(self._written_version)
        return export.version, lambda: self._record_entries(records, export), export.release

    def _record_entries(self, records: RecordTable, export: RecordExport) -> Iterator[SstEntries]:
        """What is written of numbers alone; on any thread."""
        parts = [rows for rows in records.exported(export) if len(rows.keys)]
        if parts:
            rows, limit = concat_rows(parts), self._home.max_parallelism
            del parts
            yield from sorted_entries(self.partition, rows, limit)

    @override
    def evict(self, *, everything: bool) -> None:
        if not self.is_clean():
            return
        kept = None
        if self._is_plain and not everything:
            ages = self._records.row_versions()
            by_age = np.argpartition(ages, len(ages) // 2)
            oldest, newest = np.split(by_age, [len(ages) - len(ages) // 2])
            for start in range(0, len(oldest), PART_ENTRIES):
                self._note_stored(self._records.key_batch(oldest[start : start + PART_ENTRIES]))
            kept = self._records.rows(newest)
        else:
            self._note_stored(self._cached_keys())
        self._forget()
        if kept is not None:
            used = 100 * len(kept.keys) // LOAD_PERCENT + 1
            self._records.resize(max(self._wanted_capacity, used))
            self._records.put(kept)
        self._account()

    @override
    def _cached_keys(self) -> KeyBatch:
        return self._records.key_batch()

    @override
    def _forget(self) -> None:
        descriptor, version = self._descriptor, self._records.versions.current
        self._columns = descriptor.new_columns()
        self._records = RecordTable(
            descriptor.key_types,
            descriptor.kinds,
            with_index=bool(self._columns),
            with_versions=True,
        )
        self._records.versions.current = version

    @override
    def _missing(self, keys: KeyBatch) -> KeyBatch:
        missing = keys.take(np.flatnonzero(~self._records.contains(keys)))
        return plain_keys(missing.take(distinct(missing)[0])) if len(missing) else missing

    @override
    def _put(self, parts: list[Entries]) -> None:
        self._put_into(self, parts)

    def _put_into(self, table: GroupTable, parts: list[Entries]) -> None:
        if not self._is_plain:
            table.load(*self._restored(parts))
            return
        for names, values in parts:
            accumulators, validity = decoded_rows([kind.dtype for kind in self._kinds], values)
            table._records.put(Rows(self._keys_of(names), accumulators, validity))

    def _part(self, entries: Entries) -> GroupTable:
        """A table of some entries."""
        descriptor = self._descriptor
        part = GroupTable(
            descriptor.key_types, descriptor.kinds, descriptor.new_columns(), with_versions=True
        )
        self._put_into(part, [entries])
        return part

    def _rest(self) -> Iterator[Entries]:
        """The entries of keys that are not in memory now, in parts."""
        return iter(()) if self._is_complete else self._unloaded(self._records)

    def _unloaded(self, records: RecordTable) -> Iterator[Entries]:
        for names, values in self._home.reader.scan(*partition_bounds(self.partition)):
            chosen = np.flatnonzero(~records.contains(self._keys_of(names))).tolist()
            if len(chosen) == len(names):
                yield names, values
            elif chosen:
                yield [names[row] for row in chosen], [values[row] for row in chosen]

    def _make_room_for(self, keys: KeyBatch) -> None:
        """A table whose next growth but one would not fit the caches takes what there is of them at once; one that cannot
        grow is filled, and then half of it leaves."""
        records = self._records
        if not records.must_grow_for(len(keys)):
            return
        room_bytes, size_bytes = self._home.host.cache_room_bytes, records.memory_bytes()
        if size_bytes <= room_bytes:
            if self._is_plain and 3 * size_bytes > room_bytes:
                records.resize(self._capacity_within(room_bytes))
            return
        records.crowd()
        if records.must_grow_for(len(keys)):
            self._wanted_capacity = self._capacity_within(room_bytes)  # it needs no room for others
            self._cache_account.resize(self.memory_bytes() + size_bytes)
            self._wanted_capacity = 0

    def _capacity_within(self, room_bytes: int) -> int:
        """How many records the table has memory for with so much more of it."""
        records = self._records
        size_bytes = records.memory_bytes()
        return int(records.capacity * _ROOM_SHARE * (size_bytes + room_bytes) / size_bytes)

    def _changed(self) -> None:
        self._updates += 1
        if self._updates % _TICK_UPDATES == 0:
            self._records.versions.current += 1
        self._account()
