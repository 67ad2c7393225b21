"""Timers in the database, of which those that are due next are in memory.

Memory holds a *head*, all timers before a place in their order, and besides what has been set lately,
wherever it stands. When the head is used up, the next part of the database is read. So timers that are far
away cost nothing but disk.

Invariants: all timers before ``bound`` are in memory (None = all there are); a timer that is not in memory,
is not before ``bound`` and is in the database is one, unless it is among ``_removed``.

Source: Flink's RocksDBCachingPriorityQueueSet, which keeps a head per key-group; here entries lie in the
order of time, so that one head and one range are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.entry_keys import partition_bounds
from penstock.storage.entries.firing_order import Place
from penstock.storage.entries.timer_entries import decoded_timers, timer_entries, timer_place
from penstock.storage.key_encoding import KeyBatch, concatenated_keys
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import RecordTable, Rows, distinct, encode_keys
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.state.hashmap.timer_table import HashMapTimerTable
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.partitions import Partition
from taskmanager.state.rocksdb.spilled_table import (
    LOADED_VERSION,
    RemovedKeys,
    Sealed,
    SpilledTable,
)

PART_ROWS: Final = 1 << 13
"""Entries that are read at once."""
_LATEST_MS: Final = (1 << 63) - 1


class StoredTimerTable(HashMapTimerTable, SpilledTable):
    """See ``taskmanager.state.backend.TimerTable``."""

    def __init__(self, found: Partition, home: TableHome, key_types: Sequence[pa.DataType]) -> None:
        SpilledTable.__init__(self, found, home)
        HashMapTimerTable.__init__(self, key_types)
        self._begin(LOADED_VERSION + 1)
        self._read_from, self._end = partition_bounds(self.partition)
        self._bound: Place | None = None if self._is_complete else (-_LATEST_MS - 1, 0)
        self._removed = RemovedKeys([*self._plain_types, pa.int64()])
        """Timers beyond the bound."""

    @override
    def __len__(self) -> int:
        count = len(self._timers)
        if self._bound is None:
            return count
        written_version = self._written_version
        parts = (self._encoded(keys, times) for keys, times, _ in self._scan())
        return count + sum(len(self._unread(timers, written_version)) for timers in parts)

    @property
    def known_row_count(self) -> int | None:
        """Number of timers where it is known without reading."""
        return len(self._timers) if self._bound is None else None

    @override
    def register(self, keys: KeyBatch, times: Int64Array) -> None:
        super().register(keys, times)
        self._account()

    @override
    def delete(self, keys: KeyBatch, times: Int64Array) -> None:
        far = np.flatnonzero(self._is_far(keys, times))
        if len(far):
            timers = self._encoded(keys, times).take(far)
            self._removed.add(self._timers.versions.current, timers)
            self._timers.remove(timers, may_be_exported=True)
        super().delete(keys, times)
        self._account()

    @override
    def next_time(self) -> int | None:
        while not len(self._timers) and self._bound is not None:
            self._load_part()
        self._account()
        places = [super().next_time(), None if self._bound is None else self._bound[0]]
        return min((place for place in places if place is not None), default=None)

    @override
    def take_due(self, up_to_ms: int, limit: int) -> tuple[KeyBatch, Int64Array] | None:
        while True:
            while self._bound is not None and self._bound[0] <= up_to_ms:
                if self._order.count(up_to_ms, self._bound) >= limit:
                    break
                self._load_part()
            found = self._take(up_to_ms, limit, self._bound)
            if found is not None or self._bound is None or self._bound[0] > up_to_ms:
                self._account()
                return found

    @override
    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._removed.memory_bytes()

    @override
    def _sealed(self) -> Sealed:
        timers, export = self._timers, self._timers.seal(self._written_version)
        return export.version, lambda: self._entries(timers, export), export.release

    def evict(self, *, everything: bool) -> None:
        """Keeps the earlier half of what is in memory, or nothing; all changes have been written."""
        assert self.is_clean(), "unwritten changes"
        self._order.keep(self._is_live)
        kept = None if everything else self._order.take(_LATEST_MS, len(self._timers) // 2)
        dropped = self._order.take(_LATEST_MS, 1)
        if dropped is not None:
            times, keys = dropped
            place = int(times[0]), int(keys.hashes[0])
            if self._bound is None or place <= self._bound:
                (self._read_from,) = timer_entries(self.partition, keys, times).keys.to_list()
                self._bound = place
        self._begin(self._timers.versions.current)
        if kept is not None:
            times, keys = kept
            self._timers.put(Rows(self._encoded(keys, times), [], []))
            self._order.add(times, keys)
        self._account()

    @override
    def _begin(self, version: int) -> None:
        super()._begin(version)
        self._timers.versions.gives_up_tombstones = False

    def _is_far(self, keys: KeyBatch, times: Int64Array) -> BoolArray:
        """bool[n]: timers that may be in the database, and not in memory."""
        if self._bound is None:
            return np.zeros(len(times), np.bool_)
        time_ms, hash_ = self._bound
        is_far: BoolArray = times > time_ms
        return is_far | ((times == time_ms) & (keys.hashes >= np.uint64(hash_)))

    def _load_part(self) -> None:
        """Brings the next part into memory."""
        written_version = self._written_version
        part = next(self._scan(), None)
        if part is None:
            self._bound = None
            return
        keys, times, last = part
        timers = self._encoded(keys, times)
        new = self._unread(timers, written_version)
        # Those that are in memory already, but were not removed, are known to be in the database from now on.
        self._timers.put(Rows(timers.take(self._removed.others(timers, written_version)), [], []))
        if len(new):
            self._order.add(times[new], keys.take(new))
        self._read_from, self._bound = last + b"\0", timer_place(last)

    def _unread(self, timers: KeyBatch, written_version: int) -> Int64Array:
        """Which timers of the database are not in memory.

        Args:
            written_version: of what had been written when it was read.
        """
        others = self._removed.others(timers, written_version)
        return others[~self._timers.contains(timers.take(others))]

    def _scan(self) -> Iterator[tuple[KeyBatch, Int64Array, bytes]]:
        """The timers of the database behind the head, in parts, each with its last entry."""
        for names, _ in self._home.reader.scan(self._read_from, self._end, PART_ROWS):
            keys, times = decoded_timers(self._plain_types, names)
            yield keys, times, names[-1]

    def _entries(self, timers: RecordTable, export: RecordExport) -> list[SstEntries]:
        """What is written of timers that were set and removed; on any thread."""
        parts = [rows.keys for rows in timers.exported(export) if len(rows.keys)]
        set_count = sum(map(len, parts))
        parts += export.tombstones
        if not parts:
            return []
        both = concatenated_keys(parts)
        chosen, _ = distinct(both)  # one that is back is set
        *columns, times = both.take(chosen).to_arrays()
        is_removed = chosen >= set_count
        return [timer_entries(self.partition, encode_keys(columns), times.to_numpy(), is_removed)]
