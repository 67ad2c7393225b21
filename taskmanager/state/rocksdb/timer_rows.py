"""Timers in the database, of which those that are due next are in memory.

Memory holds a *head*, all timers before a place in their order, and besides what has changed and is not
written yet, wherever it stands. When the head is used up, the next part of the database is read. So
timers that are far away cost nothing but disk.

What is in memory is a record table of timers with versions; its one number says whether the timer is set,
whether the database may have it, and counts changes, so that of several the last one stays. A timer that
is in the table is as the table says, whatever the database has.

Invariants: all timers before ``bound`` are in memory (None = all there are); records changed after
``written_version`` may be missing in the database; a record leaves memory only when it is not among
them, or when it is not set and the database cannot have it.

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
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array, value_type
from penstock.storage.run_columns import TIMER_KIND
from taskmanager.kernels import AccumulatorKind, RecordTable, Rows, distinct, encode_keys
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.state.key_batches import retyped
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.entry_batches import concat_rows, take_rows
from taskmanager.state.rocksdb.spilled_table import LOADED_VERSION, SpilledTable
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart
from taskmanager.state.timer_order import TimerOrder, timer_schema

PART_ROWS: Final = 1 << 13
"""Entries that are read at once."""
_TICK_UPDATES: Final = 64
_LATEST_MS: Final = (1 << 63) - 1
_SLACK: Final = 1 << 12
"""That many timers that are none any more may stay in any case."""
_IS_SET: Final = 1
_MAY_BE_STORED: Final = 2
_COUNT_SHIFT: Final = 2
_KINDS: Final = (AccumulatorKind.MAX_INT64,)


class StoredTimerTable(SpilledTable):
    """See ``taskmanager.state.backend.TimerTable``.

    Args:
        partition: of the database.
        key_types: types of the key columns.
        home: where the table is.
        is_complete: the database holds nothing of it.
    """

    kind = TIMER_KIND

    def __init__(
        self,
        partition: int,
        key_types: Sequence[pa.DataType],
        home: TableHome,
        *,
        is_complete: bool,
    ) -> None:
        super().__init__(partition, home, is_complete=is_complete)
        self.key_types = tuple(key_types)
        self._plain_types = tuple(value_type(kind) for kind in key_types)
        self._begin, self._end = partition_bounds(partition)
        self._order = TimerOrder()
        self._bound: Place | None = None if is_complete else (-_LATEST_MS - 1, 0)
        self._read_from = self._begin
        self._set_count = 0
        self._row_count: int | None = 0 if is_complete else None
        self._changes = 0
        self._frozen_changes = -1
        self._updates = 0
        self._tidy_above = 0
        self._cache = self._new_cache(LOADED_VERSION + 1)

    def __len__(self) -> int:
        if self._bound is None:
            return self._set_count
        if self._row_count is None:
            self._row_count = self._set_count + sum(
                int((~self._cache.contains(self._encoded(keys, times))).sum())
                for keys, times, _ in self._scan(self._begin)
            )
        return self._row_count

    @property
    def known_row_count(self) -> int:
        """Number of timers where it is known without reading, else 0."""
        return self._set_count if self._bound is None else self._row_count or 0

    def schema(self) -> pa.Schema:
        """Schema of the timers."""
        return timer_schema(self.key_types)

    def register(self, keys: KeyBatch, times: Int64Array) -> None:
        """Adds n timers; one that is there already stays one."""
        timers = self._encoded(keys, times)
        known, words = self._words(timers)
        new = np.flatnonzero(words & _IS_SET == 0)
        if not len(new):
            return
        first, _ = distinct(timers.take(new))
        new = new[first]
        stored = self._may_be_stored(keys.take(new), times[new], known[new], words[new])
        self._set_count += len(new)
        if (stored & ~known[new]).any() or self._row_count is None:
            self._row_count = None
        else:
            self._row_count += len(new)
        self._change(timers.take(new), stored, _IS_SET)
        self._order.add(times[new], keys.take(new))
        self._account()

    def delete(self, keys: KeyBatch, times: Int64Array) -> None:
        """Removes timers; those that are not there are ignored."""
        timers = self._encoded(keys, times)
        first, _ = distinct(timers)
        timers, keys, times = timers.take(first), keys.take(first), times[first]
        known, words = self._words(timers)
        is_set = known & (words & _IS_SET == 1)
        stored = self._may_be_stored(keys, times, known, words)
        wanted = np.flatnonzero(is_set | (stored & ~known))
        if not len(wanted):
            return
        self._removed(int(is_set.sum()), is_exact=not (stored & ~known).any())
        self._change(timers.take(wanted), stored[wanted], 0)
        self._tidy()
        self._account()

    def next_time(self) -> int | None:
        """A lower bound of the smallest time, None = no timers."""
        while not self._set_count and self._bound is not None:
            self._load_part()
        self._account()
        if not self._set_count and self._bound is None:
            self._order.clear()
            return None
        places = [self._order.first_time(), None if self._bound is None else self._bound[0]]
        return min(place for place in places if place is not None)

    def take_due(self, up_to_ms: int, limit: int) -> tuple[KeyBatch, Int64Array] | None:
        """Removes and returns the earliest timers with time <= ``up_to_ms``, at most ``limit``."""
        while True:
            while self._bound is not None and self._bound[0] <= up_to_ms:
                if self._order.count(up_to_ms, self._bound) >= limit:
                    break
                self._load_part()
            found = self._order.take(up_to_ms, limit, self._bound)
            if found is None:
                self._account()
                return None
            times, keys = found
            timers = self._encoded(keys, times)
            known, words = self._words(timers)
            live = np.flatnonzero(known & (words & _IS_SET == 1))
            if not len(live):
                continue
            first, _ = distinct(timers.take(live))
            live = live[first]
            keys, times = keys.take(live), times[live]
            stored = self._may_be_stored(keys, times, known[live], words[live])
            self._removed(len(live), is_exact=True)
            self._change(timers.take(live), stored, 0)
            self._tidy()
            self._account()
            return retyped(keys, self.key_types), times

    @override
    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._cache.memory_bytes() + self._order.memory_bytes()

    def freeze(self) -> FrozenPart | None:
        """Ends the version: what the database must be given; None = nothing."""
        if not self._cache.versions.is_changed(self._written_version):
            return None
        self.is_stored = True
        self._frozen_changes = self._changes
        cache, export = self._cache, self._cache.seal(self._written_version)
        return FrozenPart(
            self.partition,
            lambda: self._entries(cache, export),
            lambda: self.written(export.version),
            export.release,
        )

    def evict(self, *, everything: bool) -> None:
        """Keeps the earlier half of what is in memory, or nothing; all changes have been written."""
        assert not self._cache.versions.is_changed(self._written_version), "unwritten changes"
        count = self._set_count
        if self._row_count is None and self._bound is None:
            self._row_count = count
        kept = None if everything else self._order_of_set(count // 2)
        self._order.keep(self._is_set)
        dropped = self._order.take(_LATEST_MS, 1)
        if dropped is not None:
            place = int(dropped[0][0]), int(dropped[1].hashes[0])
            if self._bound is None or place <= self._bound:
                (self._read_from,) = timer_entries(
                    self.partition, dropped[1], dropped[0]
                ).keys.to_list()
                self._bound = place
        self._order.clear()
        self._cache = self._new_cache(self._cache.versions.current)
        self._set_count = 0
        if kept is not None:
            self._put(*kept)
        self._account()

    # -- what is in memory

    def _new_cache(self, version: int) -> RecordTable:
        cache = RecordTable([*self._plain_types, pa.int64()], _KINDS, with_versions=True)
        cache.versions.current = version
        return cache

    def _encoded(self, keys: KeyBatch, times: Int64Array) -> KeyBatch:
        columns = retyped(keys, self._plain_types).to_arrays()
        return encode_keys([*columns, pa.array(times, pa.int64())])

    def _words(self, timers: KeyBatch) -> tuple[BoolArray, Int64Array]:
        """Which timers are in memory, and what it says of them (0 where they are not)."""
        gathered = self._cache.gather(timers)
        return gathered.present, np.where(gathered.present, gathered.accumulators[0], 0)

    def _is_set(self, keys: KeyBatch, times: Int64Array) -> BoolArray:
        known, words = self._words(self._encoded(keys, times))
        return known & (words & _IS_SET == 1)

    def _may_be_stored(
        self, keys: KeyBatch, times: Int64Array, known: BoolArray, words: Int64Array
    ) -> BoolArray:
        """bool[n]: the database may have the timers, or will have by what has been frozen."""
        stored = known & (words & _MAY_BE_STORED != 0)
        stored |= known & (words & _IS_SET == 1) & (words >> _COUNT_SHIFT <= self._frozen_changes)
        if self._bound is not None:
            time_ms, hash_ = self._bound
            is_far = (times > time_ms) | ((times == time_ms) & (keys.hashes >= np.uint64(hash_)))
            stored |= is_far & ~known
        return stored

    def _change(self, timers: KeyBatch, stored: BoolArray, is_set: int) -> None:
        self._changes += 1
        word = self._changes << _COUNT_SHIFT | is_set
        self._cache.accumulate(timers, [np.where(stored, word | _MAY_BE_STORED, word)], [None])
        self._updates += 1
        if self._updates % _TICK_UPDATES == 0:
            self._cache.versions.current += 1

    def _removed(self, count: int, *, is_exact: bool) -> None:
        self._set_count -= count
        if not is_exact or self._row_count is None:
            self._row_count = None
        else:
            self._row_count -= count

    def _put(self, keys: KeyBatch, times: Int64Array) -> None:
        """Timers that the database has."""
        if not len(times):
            return
        words = np.full(len(times), _IS_SET | _MAY_BE_STORED)
        self._cache.put(Rows(self._encoded(keys, times), [words], [None]))
        self._order.add(times, keys)
        self._set_count += len(times)

    def _order_of_set(self, count: int) -> tuple[KeyBatch, Int64Array] | None:
        """Takes the first timers that are set out of the order."""
        self._order.keep(self._is_set)
        found = self._order.take(_LATEST_MS, count) if count else None
        if found is None:
            return None
        times, keys = found
        first, _ = distinct(self._encoded(keys, times))
        first = np.sort(first)
        return keys.take(first), times[first]

    def _tidy(self) -> None:
        """Forgets timers that are none any more, where they are many."""
        limit = 2 * self._set_count + _SLACK
        if len(self._order) > limit:
            self._order.keep(self._is_set)
        if len(self._cache) <= max(limit, self._tidy_above):
            return
        self._tidy_above = 2 * len(self._cache)
        rows, versions = self._cache.rows(), self._cache.row_versions()
        words = rows.accumulators[0]
        is_set, is_written = words & _IS_SET == 1, versions <= self._written_version
        clean = np.flatnonzero(is_set & is_written)
        changed = np.flatnonzero(~is_written & (words & (_IS_SET | _MAY_BE_STORED) != 0))
        if len(clean) + len(changed) > limit:
            return
        self._tidy_above = 0
        self._cache = self._new_cache(self._cache.versions.current)
        self._cache.put(take_rows(rows, clean))
        if len(changed):
            left = take_rows(rows, changed)
            self._cache.accumulate(left.keys, left.accumulators, left.validity)

    # -- what is in the database

    def _load_part(self) -> None:
        """Brings the next part into memory."""
        part = next(self._scan(self._read_from), None)
        if part is None:
            self._bound = None
            self._row_count = self._set_count
            return
        keys, times, last = part
        new = np.flatnonzero(~self._cache.contains(self._encoded(keys, times)))
        self._read_from, self._bound = last + b"\0", timer_place(last)
        self._put(keys.take(new), times[new])

    def _scan(self, begin: bytes) -> Iterator[tuple[KeyBatch, Int64Array, bytes]]:
        """The timers from an entry on, in parts, each with its last entry."""
        loops = process_kernels()
        for names, _ in self._home.reader.scan(begin, self._end, PART_ROWS):
            keys, times = decoded_timers(self._plain_types, names, loops)
            yield keys, times, names[-1]

    def _entries(self, cache: RecordTable, export: RecordExport) -> list[SstEntries]:
        """What is written of timers that were set and removed; on any thread."""
        parts = [rows for rows in cache.exported(export) if len(rows.keys)]
        if not parts:
            return []
        rows = concat_rows(parts)
        words = rows.accumulators[0]
        wanted = np.flatnonzero(words & (_IS_SET | _MAY_BE_STORED) != 0)
        first, _ = distinct(rows.keys.take(wanted))
        wanted = wanted[first]
        if not len(wanted):
            return []
        *columns, times = rows.keys.take(wanted).to_arrays()
        deleted = words[wanted] & _IS_SET == 0
        return [timer_entries(self.partition, encode_keys(columns), times.to_numpy(), deleted)]
