"""The keys of an operator that have objects, in the database, behind a cache.

A bundle brings all its keys that are not cached in with one sorted read per column of values or lists;
entries of maps are read when they are asked for. What is cached stays for the next bundles until the
cache is full: then everything is written, and the keys that were not used for longest are forgotten.

Invariant: what is cached of a key is right whatever the database says, and what is not cached is right in
the database.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.key_index import KeyIndex
from taskmanager.state.rocksdb.cache_host import CacheAccount, CacheHost, EntryReader
from taskmanager.state.rocksdb.cell_columns import ListCells, StoredColumn, ValueCells
from taskmanager.state.rocksdb.entry_keys import (
    PARTITION_BYTES,
    decoded_keys,
    entry_keys,
    entry_order,
    partition_bounds,
)
from taskmanager.state.rocksdb.map_cells import MapCells
from taskmanager.state.rocksdb.sst_file import ByteStrings
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart
from taskmanager.state.slot_arrays import grown

C = TypeVar("C", bound=StoredColumn)

KEYS_MAX: Final = 1 << 14
"""Keys in a part of ``keys``."""
_KEY_BYTES: Final = 120
"""What a cached key takes beside the index and its cells."""


class KeySpaceHost(CacheHost, Protocol):
    """What the key space needs of the backend."""

    def column_partition(
        self, descriptor: StateDescriptor, key_types: Sequence[pa.DataType]
    ) -> tuple[int, bool]:
        """The partition of a column, and whether the database holds something of it."""

    def pace(self, frozen_at_ms: int) -> None:
        """Called now and then while cells are encoded, on the thread that does so."""


class StoredKeySpace:
    """See ``taskmanager.state.backend.KeySpace``.

    Args:
        key_types: types of the key columns.
        max_parallelism: number of key-groups.
        reader: the database.
        host: the backend.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        max_parallelism: int,
        reader: EntryReader,
        host: KeySpaceHost,
    ) -> None:
        self.key_types = tuple(key_types)
        self._max_parallelism = max_parallelism
        self._reader = reader
        self._host = host
        self._cache_account = CacheAccount(host)
        self._columns: dict[str, StoredColumn] = {}
        self._keys = KeyIndex(key_types)
        self._rests: list[bytes] = []
        self._last_used = np.zeros(0, np.int64)
        self._bundle = 0
        self._is_entered = False
        # Where ``sweep`` goes on: a column and an entry of it, or a slot where all columns are done.
        self._sweep_column = 0
        self._sweep_from: bytes | None = None
        self._sweep_slot = 0

    def value_column(self, descriptor: StateDescriptor) -> ValueCells:
        """The column of a VALUE state; asked for before the first ``enter``.

        Raises:
            TaskFailure: it was restored with other types or codecs.
        """
        return self._column(descriptor, ValueCells)

    def list_column(self, descriptor: StateDescriptor) -> ListCells:
        """The column of a LIST state."""
        return self._column(descriptor, ListCells)

    def map_column(self, descriptor: StateDescriptor) -> MapCells:
        """The column of a MAP state."""
        return self._column(descriptor, MapCells)

    def enter(self, keys: KeyBatch) -> Int64Array:
        """The slots of n keys (equal keys, equal slots): int64[n]."""
        self._is_entered = True
        slots, new = self._keys.enter(keys)
        if len(new):
            self._load(slots[new], keys.take(new))
        self._last_used[slots] = self._bundle
        distinct_slots = slots.tolist()
        for column in self._columns.values():
            column.enter(distinct_slots)
        return slots

    def leave(self) -> None:
        """Ends the bundle."""
        for column in self._columns.values():
            column.leave()
        self._bundle += 1
        self._is_entered = False
        self._account()

    def keys(self) -> Iterator[KeyBatch]:
        """All keys with state, in parts of bounded size."""
        cached = set(self._rests)
        present = [
            rest
            for slot, rest in enumerate(self._rests)
            if any(column.is_present(slot) for column in self._columns.values())
        ]
        # The database is read as it is now, whatever is done with the first parts.
        stored = heapq.merge(*(self._stored_rests(column) for column in self._columns.values()))
        part: list[bytes] = []
        last = b""
        for rest in stored:
            if rest != last and rest not in cached:
                part.append(rest)
                if len(part) == KEYS_MAX:
                    yield self._decoded(part)
                    part = []
            last = rest
        if part:
            yield self._decoded(part)
        for start in range(0, len(present), KEYS_MAX):
            yield self._decoded(present[start : start + KEYS_MAX])

    def sweep(self, now_ms: int, entries_max: int) -> int:
        """Looks at the next entries of states with a TTL, and removes those that have expired."""
        columns = [column for column in self._columns.values() if column.descriptor.ttl_ms]
        removed, turns = 0, 0
        while columns and entries_max > 0 and turns <= len(columns) + 1:
            if self._sweep_column < len(columns):
                seen, gone = self._sweep_stored(columns[self._sweep_column], now_ms, entries_max)
            else:
                seen, gone = self._sweep_cached(columns, now_ms, entries_max)
            turns += int(seen == 0)
            entries_max -= seen
            removed += gone
        return removed

    def freeze(self, now_ms: int) -> list[FrozenPart]:
        """What the columns have changed."""
        parts = [column.freeze(now_ms) for column in self._columns.values()]
        return [part for part in parts if part is not None]

    def evict(self, keep_keys: int) -> None:
        """Keeps the keys that were used last; all changes have been written. Not in a bundle."""
        count = len(self._rests)
        if self._is_entered or count <= keep_keys:
            return
        if not all(column.changes.is_clean() for column in self._columns.values()):
            return
        used = self._last_used[:count]
        newest = np.empty(0, np.int64)
        if keep_keys:
            newest = np.sort(np.argpartition(used, count - keep_keys)[count - keep_keys :])
        keys = self._keys.keys(newest)
        kept = newest.tolist()
        for column in self._columns.values():
            column.keep(kept)
        self._rests[:] = [self._rests[slot] for slot in kept]
        self._keys = KeyIndex(self.key_types)
        if kept:
            self._keys.enter(keys)
        self._last_used[: len(kept)] = used[newest]
        self._sweep_slot = 0
        self._account()

    @property
    def cached_keys(self) -> int:
        """Keys in the cache."""
        return len(self._rests)

    def memory_bytes(self) -> int:
        """Approximate size of the cache."""
        columns = sum(column.memory_bytes() for column in self._columns.values())
        rests = len(self._rests) * _KEY_BYTES
        return self._keys.memory_bytes() + rests + self._last_used.nbytes + columns

    def _column(self, descriptor: StateDescriptor, kind: Callable[..., C]) -> C:
        found: Any = self._columns.get(descriptor.name)
        if found is None:
            assert not self._rests, "columns are asked for before the first bundle"
            partition, is_stored = self._host.column_partition(descriptor, self.key_types)
            found = self._columns[descriptor.name] = kind(
                descriptor,
                partition,
                self._reader,
                self._rests,
                self._host.pace,
                is_stored=is_stored,
            )
        return found

    def _load(self, slots: Int64Array, keys: KeyBatch) -> None:
        """Brings keys that are new in the cache into it; their slots are the next ones."""
        self._last_used = grown(self._last_used, self._keys.bound)
        for column in self._columns.values():
            column.grow(len(self._last_used))
        order = entry_order(keys, self._max_parallelism)
        names = entry_keys(0, keys.take(order), self._max_parallelism).to_list()
        ordered = slots[order].tolist()
        self._rests += [b""] * len(ordered)
        for slot, name in zip(ordered, names, strict=True):
            self._rests[slot] = name[PARTITION_BYTES:]
        for column in self._columns.values():
            column.load(ordered)

    def _account(self) -> None:
        self._cache_account.resize(self.memory_bytes())

    def _decoded(self, rests: list[bytes]) -> KeyBatch:
        names = ByteStrings.of([bytes(PARTITION_BYTES) + rest for rest in rests])
        return decoded_keys(self.key_types, names, process_kernels())

    def _stored_rests(self, column: StoredColumn) -> Iterator[bytes]:
        if column.changes.is_stored:
            for names, _ in self._reader.scan(*partition_bounds(column.changes.partition)):
                yield from map(column.rest_of, names)

    def _sweep_stored(self, column: StoredColumn, now_ms: int, count: int) -> tuple[int, int]:
        """Looks at entries of one column: how many, and how much was removed."""
        begin, end = partition_bounds(column.changes.partition)
        part = None
        if column.changes.is_stored:
            part = next(self._reader.scan(self._sweep_from or begin, end, count), None)
        if part is None:
            self._sweep_column += 1
            self._sweep_from = None
            return 0, 0
        names, values = part
        self._sweep_from = names[-1] + b"\0"
        expired = [
            name
            for name, data in zip(names, values, strict=True)
            if column.may_expire(data, now_ms)
        ]
        if not expired:
            return len(names), 0
        slots = self.enter(self._decoded([column.rest_of(name) for name in expired]))
        removed = sum(
            column.sweep(slot, name, now_ms)
            for slot, name in zip(slots.tolist(), expired, strict=True)
        )
        self.leave()
        return len(names), removed

    def _sweep_cached(
        self, columns: Sequence[StoredColumn], now_ms: int, count: int
    ) -> tuple[int, int]:
        """Looks at cached keys, which the database may not have yet."""
        start = self._sweep_slot
        stop = start + max(1, count // len(columns))
        slots = list(range(start, min(stop, len(self._rests))))
        self._sweep_slot += len(slots)
        if not slots:
            self._sweep_column, self._sweep_slot = 0, 0
            return 0, 0
        removed = 0
        for column in columns:
            column.enter(slots)
            removed += sum(column.sweep(slot, None, now_ms) for slot in slots)
            column.leave()
        return len(slots) * len(columns), removed
