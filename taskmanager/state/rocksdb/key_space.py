"""The keys of an operator that have objects, in the database, behind those in memory.

A bundle brings all its keys that memory has not, and the database may have, in with one sorted read per column of values or lists;
entries of maps are read when they are asked for. What is in memory stays for the next bundles until there
is too much of it: then everything is written, and the keys that were not used for longest are forgotten.

Invariant: what is in memory of a key is right whatever the database says, and what is not is right in the
database.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.byte_strings import ByteStrings
from penstock.storage.entries.entry_keys import (
    PARTITION_BYTES,
    decoded_keys,
    entry_keys,
    entry_order,
    partition_bounds,
)
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.hashmap.key_space import KeySpace
from taskmanager.state.key_index import KeyIndex
from taskmanager.state.rocksdb.cache_host import CacheAccount, CacheHost
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.key_filter import NO_ERA, KeyFilter
from taskmanager.state.rocksdb.spilled_columns import (
    SpilledColumn,
    SpilledMaps,
    SpilledValues,
)
from taskmanager.state.rocksdb.spilled_lists import SpilledLists
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart
from taskmanager.state.slot_arrays import grown

C = TypeVar("C", bound=SpilledColumn)

KEYS_MAX: Final = 1 << 14
"""Keys in a part of ``keys``."""
_OBJECTS: Final = -1
"""Stands for the partitions of all columns in the filter of stored keys."""
_KEY_BYTES: Final = 120
"""What a key in memory takes beside the index and its cells."""


class KeySpaceHost(CacheHost, Protocol):
    """What the key space needs of the backend."""

    def column_partition(
        self, descriptor: StateDescriptor, key_types: Sequence[pa.DataType]
    ) -> tuple[int, bool]:
        """The partition of a column, and whether the database holds something of it."""

    def pace(self, frozen_at_ms: int) -> None:
        """Called now and then while cells are encoded, on the thread that does so."""

    def now_ms(self) -> int:
        """Wall-clock time."""


class StoredKeySpace(KeySpace):
    """See ``KeySpace``.

    Args:
        host: the backend.
        lock: not held by anyone; for what bundles and exports share.
        stored_keys: those that are not in memory alone.

    Attributes:
        rests: by slot the entry key without the partition.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        max_parallelism: int,
        reader: Database,
        host: KeySpaceHost,
        lock: AbstractContextManager[object],
        stored_keys: KeyFilter,
    ) -> None:
        super().__init__(
            key_types,
            open_column=lambda _, create: create(),
            now_ms=host.now_ms,
            check_memory=self._account,
            lock=lock,
        )
        self.rests: list[bytes] = []
        self.max_parallelism = max_parallelism
        self.reader = reader
        self.pace = host.pace
        self._host = host
        self._stored_keys = stored_keys
        self._era = stored_keys.era
        self._cache_account = CacheAccount(host)
        self._stored: dict[str, SpilledColumn] = {}
        self._last_used = np.zeros(0, np.int64)
        self._bundle = 0
        self._is_entered = False
        # Where ``sweep`` goes on: a column and an entry of it, or a slot where all columns are done.
        self._sweep_column = 0
        self._sweep_from: bytes | None = None
        self._sweep_slot = 0

    @override
    def value_column(self, descriptor: StateDescriptor) -> SpilledValues:
        """The column of a VALUE state; asked for before the first ``enter``.

        Raises:
            TaskFailure: it was restored with other types or codecs.
        """
        return self._spilled(descriptor, SpilledValues)

    @override
    def list_column(self, descriptor: StateDescriptor) -> SpilledLists:
        """The column of a LIST state."""
        return self._spilled(descriptor, SpilledLists)

    @override
    def map_column(self, descriptor: StateDescriptor) -> SpilledMaps:
        """The column of a MAP state."""
        return self._spilled(descriptor, SpilledMaps)

    @override
    def enter(self, keys: KeyBatch) -> Int64Array:
        self._is_entered = True
        slots = super().enter(keys)
        self._last_used[slots] = self._bundle
        return slots

    @override
    def leave(self) -> None:
        for column in self._stored.values():
            if column.changed:
                column.leave()
        self._bundle += 1
        self._is_entered = False
        self._account()

    @override
    def keys(self) -> Iterator[KeyBatch]:
        """All keys with state, in parts of bounded size."""
        slots = np.arange(len(self.rests))
        has_content = np.zeros(len(slots), np.bool_)
        for column in self._stored.values():
            has_content[~has_content] = column.found(slots[~has_content])
        cached = set(self.rests)
        present = [self.rests[slot] for slot in np.flatnonzero(has_content).tolist()]
        # The database is read as it is now, whatever is done with the first parts.
        stored = heapq.merge(*(self._stored_rests(column) for column in self._stored.values()))
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

    @override
    def sweep(self, now_ms: int, entries_max: int) -> int:
        """Looks at the next entries of states with a TTL, and removes those that have expired."""
        columns = [column for column in self._stored.values() if column.descriptor.ttl_ms]
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

    def freeze(self) -> list[FrozenPart]:
        """What the columns have changed."""
        parts = [column.freeze() for column in self._stored.values()]
        return [part for part in parts if part is not None]

    def evict(self, keep_keys: int) -> None:
        """Keeps the keys that were used last; all changes have been written. Not in a bundle."""
        count = len(self.rests)
        columns = self._stored.values()
        if self._is_entered or count <= keep_keys:
            return
        if any(column.exports or not column.is_clean() for column in columns):
            return
        used = self._last_used[:count]
        by_age = np.argpartition(used, count - keep_keys) if keep_keys else np.arange(count)
        oldest, newest = np.split(by_age, [count - keep_keys])
        newest.sort()
        self._stored_keys.add(_OBJECTS, self._keys.keys(oldest).hashes, self._era)
        keys = self._keys.keys(newest)
        kept = newest.tolist()
        for column in columns:
            column.keep(kept)
        self.rests[:] = [self.rests[slot] for slot in kept]
        self._keys = KeyIndex(self.key_types)
        if kept:
            self._keys.enter(keys)
        self._last_used[: len(kept)] = used[newest]
        self._sweep_slot = 0
        self._account()

    @property
    def cached_keys(self) -> int:
        """Keys in memory."""
        return len(self.rests)

    def memory_bytes(self) -> int:
        """Approximate size of what is in memory."""
        columns = sum(column.memory_bytes() for column in self._stored.values())
        rests = len(self.rests) * _KEY_BYTES
        return self._keys.memory_bytes() + rests + self._last_used.nbytes + columns

    def _spilled(self, descriptor: StateDescriptor, kind: Callable[..., C]) -> C:
        found: Any = self._stored.get(descriptor.name)
        if found is None:
            assert not self.rests, "columns are asked for before the first bundle"
            partition, is_stored = self._host.column_partition(descriptor, self.key_types)
            if is_stored:
                self._era = NO_ERA
            create = partial(kind, partition=partition, is_stored=is_stored)
            found = self._stored[descriptor.name] = self._column(descriptor, create)
        return found

    @override
    def _begin(self, slots: Int64Array, keys: KeyBatch) -> None:
        """Brings keys that are new in memory into it; their slots are the next ones."""
        self._last_used = grown(self._last_used, self._keys.bound)
        order = entry_order(keys, self.max_parallelism)
        names = entry_keys(0, keys.take(order), self.max_parallelism).to_list()
        ordered = slots[order].tolist()
        self.rests += [b""] * len(ordered)
        for slot, name in zip(ordered, names, strict=True):
            self.rests[slot] = name[PARTITION_BYTES:]
        may_be_stored = self._stored_keys.may_have(_OBJECTS, keys.hashes, self._era)
        brought = slots[order[may_be_stored[order]]].tolist()
        if brought:
            for column in self._stored.values():
                column.bring_keys(brought)

    def _account(self) -> None:
        self._cache_account.resize(self.memory_bytes())

    def _decoded(self, rests: list[bytes]) -> KeyBatch:
        names = ByteStrings.of([bytes(PARTITION_BYTES) + rest for rest in rests])
        return decoded_keys(self.key_types, names)

    def _stored_rests(self, column: SpilledColumn) -> Iterator[bytes]:
        if column.is_stored:
            for names, values in self.reader.scan(*partition_bounds(column.partition)):
                yield from map(column.rest_of, names, values)

    def _sweep_stored(self, column: SpilledColumn, now_ms: int, count: int) -> tuple[int, int]:
        """Looks at entries of one column: how many, and how much was removed."""
        begin, end = partition_bounds(column.partition)
        part = None
        if column.is_stored:
            part = next(self.reader.scan(self._sweep_from or begin, end, count), None)
        if part is None:
            self._sweep_column += 1
            self._sweep_from = None
            return 0, 0
        names, values = part
        self._sweep_from = names[-1] + b"\0"
        expired = [
            (name, column.rest_of(name, data))
            for name, data in zip(names, values, strict=True)
            if column.may_expire(data, now_ms)
        ]
        if not expired:
            return len(names), 0
        slots = self.enter(self._decoded([rest for _, rest in expired]))
        for slot, (name, _) in zip(slots.tolist(), expired, strict=True):
            column.bring_entry(slot, name)
        removed = column.sweep(np.unique(slots), now_ms)
        self.leave()
        return len(names), removed

    def _sweep_cached(
        self, columns: Sequence[SpilledColumn], now_ms: int, count: int
    ) -> tuple[int, int]:
        """Looks at cached keys, which the database may not have yet."""
        start = self._sweep_slot
        stop = start + max(1, count // len(columns))
        slots = np.arange(start, min(stop, len(self.rests)))
        self._sweep_slot += len(slots)
        if not len(slots):
            self._sweep_column, self._sweep_slot = 0, 0
            return 0, 0
        removed = self._sweep_slots(columns, slots, now_ms)
        return len(slots) * len(columns), removed
