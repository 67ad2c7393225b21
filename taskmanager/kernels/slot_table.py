"""Open-addressing tables from keys to slots, each slot one row of an int64 matrix.

``KeyRecords`` owns the matrix (key words, then whatever its owner keeps beside the key), grows it and
gives out slots; what lies in the other columns is the owner's. Slots are valid until the next
insertion, removal or ``clear``.

Each table orders its keys in a way of its own, by a multiplier that its first key gives. Keys often come
in the order of another table's slots; in the same order here they would all go to the first slots of a
table that grows, in quadratic time. Tables that only take in other whole tables, and have room for them
before (``make_room_in_order``), may have an order in common: keys then come along the memory.

Invariants: at most ``load_percent`` of the slots are used, so that probing always meets an empty
one; the records are aligned to cache lines; with an index column, the indices of the keys in the
table are distinct, and smaller than ``index_bound``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array
from taskmanager.kernels.layout import (
    EMPTY_WORD,
    STATE_COUNT,
    STATE_FREE_COUNT,
    STATE_MULTIPLIER,
    STATE_NEXT_INDEX,
    STATE_NULL_USED,
    STATE_SENTINEL_USED,
    STATE_WORDS,
)

if TYPE_CHECKING:
    from taskmanager.kernels.compiled import Kernels

LOAD_PERCENT: Final = 60
CROWDED_PERCENT: Final = 80
"""So many of the slots may be used where keys come in the order of the slots, until the others have come."""
FULL_PERCENT: Final = 85
"""So many of the slots are used of a table that cannot grow: a key is looked for in 4 of them, one that is not there in 23."""
MIN_CAPACITY: Final = 64
FAST_GROWTH_BELOW: Final = 1 << 16
"""Smaller tables grow fourfold, larger ones twofold."""
FILL_ROWS: Final = 2048

_WORD_MASK: Final = (1 << 64) - 1
_COMMON_ORDER: Final = 0x2545F4914F6CDD1D
"""A multiplier, odd, for tables with an order in common."""

NO_NULLS: BoolArray = np.empty(0, dtype=np.bool_)
CACHE_LINE_BYTES: Final = 64


class KeyRecords(ABC):
    """Maps keys to rows of ``records``."""

    key_words: int
    """Columns that the key takes at the start of a record."""

    def __init__(
        self,
        kernels: Kernels,
        types: Sequence[pa.DataType],
        template: Int64Array,
        *,
        index_column: int,
    ) -> None:
        self.kernels = kernels
        self.types = tuple(types)
        self.template = self._empty_key(template)
        self.index_column = index_column
        self.state: Int64Array = np.zeros(STATE_WORDS, dtype=np.int64)
        self._free: Int64Array = np.empty(0, dtype=np.int64)
        self.load_percent = LOAD_PERCENT
        self._initial_capacity = _capacity_for(0)
        self.records = self._empty_records(self._initial_capacity)
        self._occupied: Int64Array | None = None
        self._common_order = 0
        # Called before the records are replaced by others; True where somebody goes on reading the old
        # ones, and the arena as it is: then they must not change any more.
        self.before_replacement: Callable[[], bool] = _nobody

    def __len__(self) -> int:
        return int(self.state[STATE_COUNT])

    @property
    def capacity(self) -> int:
        """Slots of the table."""
        return len(self.records) - 2

    @property
    def arena(self) -> ByteArray | None:
        """Where byte keys lie: what is in use never changes in place, except by ``clear``."""
        return None

    def lend_arena(self) -> ByteArray | None:
        """The arena for a reader that outlives this call: ``clear`` leaves it alone, too."""
        return None

    @property
    def index_bound(self) -> int:
        """One more than the largest dense index given out since the last ``clear``."""
        return int(self.state[STATE_NEXT_INDEX])

    def upsert(self, keys: KeyBatch, version_column: int = -1, version: int = 0) -> Int64Array:
        """The slots of all keys, inserted where they are new: int64[n].

        Args:
            keys: n keys.
            version_column: column that is set to ``version`` in their records; -1 for none.
            version: what it is set to.
        """
        slots = np.empty(len(keys), dtype=np.int64)
        before = len(self)
        if before == 0 and len(keys):
            self.state[STATE_MULTIPLIER] = self._common_order or _multiplier(self._first_word(keys))
        while self._upsert_some(keys, version_column, version, slots) < len(keys):
            self._grow()
        if len(self) != before:
            self._occupied = None
        return slots

    @abstractmethod
    def find(self, keys: KeyBatch) -> Int64Array:
        """The slots of keys, -1 where a key is not in the table: int64[n]."""

    def remove(self, keys: KeyBatch) -> None:
        """Removes keys; those that are not in the table are ignored."""
        if self.index_column >= 0:
            needed = int(self.state[STATE_FREE_COUNT]) + len(keys)
            if needed > len(self._free):
                grown = np.empty(max(needed, 2 * len(self._free)), dtype=np.int64)
                grown[: len(self._free)] = self._free
                self._free = grown
        self._remove(keys)
        self._occupied = None

    def occupied(self) -> Int64Array:
        """The used slots: by dense index where there is one, else in no particular order."""
        if self._occupied is None:
            slots = np.flatnonzero(self._used(self.records[:-2]))
            special = [
                self.capacity + place
                for place, used in enumerate((STATE_SENTINEL_USED, STATE_NULL_USED))
                if self.state[used]
            ]
            if special:
                slots = np.append(slots, special)
            if self.index_column >= 0:
                slots = self._by_index(slots)
            self._occupied = slots
        return self._occupied

    def _by_index(self, slots: Int64Array) -> Int64Array:
        indices = self.records[slots, self.index_column]
        if self.index_bound != len(slots):
            return slots[np.argsort(indices, kind="stable")]
        ordered = np.empty_like(slots)  # no index is free, so that each says its place
        ordered[indices] = slots
        return ordered

    def keys_at(self, slots: Int64Array) -> KeyBatch:
        """The keys in the given slots."""
        return self.keys_of(slots, self.capacity, self.records.take(slots, axis=0), self.arena)

    @abstractmethod
    def keys_of(
        self, slots: Int64Array, capacity: int, matrix: Int64Array, arena: ByteArray | None
    ) -> KeyBatch:
        """The keys of copied records.

        Args:
            slots: int64[n], where they were in a table of ``capacity`` slots.
            matrix: int64[n, at least key_words], the records.
            arena: the table's arena at that time.
        """

    def reserve(self, keys: int) -> None:
        """Makes room for that many keys at once; an empty table gets little more than that: memory costs when it is
        touched first."""
        capacity = _capacity_for(keys)
        if not len(self) and not self._common_order:
            capacity = min(capacity, keys * 100 // LOAD_PERCENT * 17 // 16 + MIN_CAPACITY)
        if capacity > self.capacity:
            self._replace_records(capacity)

    def resize(self, capacity: int) -> None:
        """Gives the table so many slots, more than it has keys."""
        if capacity != self.capacity:
            self._replace_records(capacity)

    def use_common_order(self) -> None:
        """The keys of this empty table will be in the order of all tables of which this is said, until ``clear``."""
        assert not len(self), "the keys have an order"
        self._common_order = _COMMON_ORDER

    def make_room_in_order(self, other: KeyRecords) -> None:
        """Before all keys of ``other`` come, in the order of its slots: wherever they go, there is room."""
        if self._common_order:
            self.reserve((len(self) + len(other)) * LOAD_PERCENT // CROWDED_PERCENT)

    def widen(self, initial: Int64Array, fill: Int64Array) -> None:
        """Adds columns at the end of every record.

        Args:
            initial: int64[added columns], what new keys hold there.
            fill: int64[added columns], what the keys that are there already hold.
        """
        self.before_replacement()
        source = self.records
        used = self.occupied()
        self.template = np.append(self.template, initial)
        self.records = _aligned_matrix(len(source), len(self.template))
        self.records[:, : source.shape[1]] = source
        self.records[:, source.shape[1] :] = initial
        self.records[used, source.shape[1] :] = fill

    def clear(self) -> None:
        """Removes all keys; a table that was much too large becomes small again."""
        shrink = len(self) * 16 < self.capacity
        capacity = self._initial_capacity if shrink else self.capacity
        is_kept = self.before_replacement()
        if capacity == self.capacity and not is_kept:
            _fill(self.records, self.template)
        else:
            self.records = self._empty_records(capacity)
        self._clear_arena(is_kept)
        self.state[:] = 0  # the first key to come gives a new multiplier
        self._common_order = 0
        self._occupied = None

    def memory_bytes(self) -> int:
        """Memory held by the table."""
        return self.records.nbytes + self._free.nbytes

    def _grow(self) -> None:
        self._replace_records(self.capacity * (4 if self.capacity < FAST_GROWTH_BELOW else 2))

    def _clear_arena(self, is_kept: bool) -> None:
        """All keys are removed: the arena starts anew, or another one where it is kept."""

    def _replace_records(self, capacity: int) -> None:
        self.before_replacement()
        target = self._empty_records(capacity)
        self.kernels.rehash(self.records, target, self.state, self.key_words == 2)
        self.records = target
        self._occupied = None

    def must_grow_for(self, keys: int) -> bool:
        """Room is to be made where so many keys come and all are new."""
        return len(self) + keys > self._limit()

    def _limit(self) -> int:
        return self.capacity * self.load_percent // 100

    def _empty_records(self, capacity: int) -> Int64Array:
        records = _aligned_matrix(capacity + 2, len(self.template))
        _fill(records, self.template)
        return records

    @abstractmethod
    def _upsert_some(
        self, keys: KeyBatch, version_column: int, version: int, slots: Int64Array
    ) -> int: ...

    @abstractmethod
    def _remove(self, keys: KeyBatch) -> None: ...

    @abstractmethod
    def _first_word(self, keys: KeyBatch) -> int:
        """Something of the first of at least one key."""

    @abstractmethod
    def _empty_key(self, template: Int64Array) -> Int64Array:
        """The template with key words that say that a record is empty."""

    @abstractmethod
    def _used(self, records: Int64Array) -> BoolArray: ...


class FixedKeyRecords(KeyRecords):
    """Keys of one int64 word."""

    key_words = 1

    @override
    def find(self, keys: KeyBatch) -> Int64Array:
        slots = np.empty(len(keys), dtype=np.int64)
        words, nulls = _fixed_parts(keys)
        self.kernels.find_fixed(words, nulls, self.records, self.state, slots)
        return slots

    @override
    def keys_of(
        self, slots: Int64Array, capacity: int, matrix: Int64Array, arena: ByteArray | None
    ) -> KeyBatch:
        words = matrix[:, 0].copy()
        nulls = None
        if len(slots) and int(slots.max()) >= capacity:
            words[slots == capacity] = EMPTY_WORD
            nulls = slots == capacity + 1
            words[nulls] = 0
            nulls = nulls if nulls.any() else None
        return KeyBatch(self.types, words, nulls, None, None)

    @override
    def _upsert_some(
        self, keys: KeyBatch, version_column: int, version: int, slots: Int64Array
    ) -> int:
        words, nulls = _fixed_parts(keys)
        return self.kernels.upsert_fixed(
            words,
            nulls,
            self.records,
            self.state,
            self._free,
            self.index_column,
            self._limit(),
            version_column,
            version,
            slots,
        )

    @override
    def _remove(self, keys: KeyBatch) -> None:
        words, nulls = _fixed_parts(keys)
        self.kernels.remove_fixed(
            words, nulls, self.records, self.template, self.state, self._free, self.index_column
        )

    @override
    def _first_word(self, keys: KeyBatch) -> int:
        return int(_fixed_parts(keys)[0][0])

    @override
    def _empty_key(self, template: Int64Array) -> Int64Array:
        return np.append(np.int64(EMPTY_WORD), template[1:])

    @override
    def _used(self, records: Int64Array) -> BoolArray:
        used: BoolArray = records[:, 0] != EMPTY_WORD
        return used


def _multiplier(word: int) -> int:
    """An odd number, as int64, that has nothing in common with those of other words (splitmix64)."""
    mixed = (word + 0x9E3779B97F4A7C15) & _WORD_MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    mixed = (mixed ^ (mixed >> 31)) | 1
    return mixed - ((mixed >> 63) << 64)


def _nobody() -> bool:
    return False


def _fixed_parts(keys: KeyBatch) -> tuple[Int64Array, BoolArray]:
    if keys.fixed is None:
        raise TypeError(f"the table holds fixed-width keys, the batch has keys of {keys.types}")
    return keys.fixed, NO_NULLS if keys.nulls is None else keys.nulls


def _capacity_for(keys: int) -> int:
    slots = max(MIN_CAPACITY, keys * 100 // LOAD_PERCENT + 1)
    return 1 << (slots - 1).bit_length()


def _aligned_matrix(rows: int, columns: int) -> Int64Array:
    words = rows * columns
    raw = np.empty(words + CACHE_LINE_BYTES // 8, dtype=np.int64)
    start = (-raw.ctypes.data % CACHE_LINE_BYTES) // 8
    return raw[start : start + words].reshape(rows, columns)


def _fill(records: Int64Array, template: Int64Array) -> None:
    """Makes all records empty: one block by broadcast, the others as plain copies of it."""
    block = records[:FILL_ROWS]
    block[:] = template
    for start in range(FILL_ROWS, len(records), FILL_ROWS):
        rest = records[start : start + FILL_ROWS]
        rest[:] = block[: len(rest)]
