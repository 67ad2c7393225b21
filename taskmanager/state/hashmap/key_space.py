"""The keys of an operator that have objects, in memory.

A key has a slot as long as one of the columns holds something for it. While a column is being exported
no slot is given to another key: keys that have nothing left are forgotten afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.hashmap.cell_columns import ValueColumn
from taskmanager.state.hashmap.list_column import ListColumn
from taskmanager.state.hashmap.map_column import MapColumn
from taskmanager.state.hashmap.number_column import NumberColumn
from taskmanager.state.hashmap.object_column import ObjectColumn
from taskmanager.state.key_index import KeyIndex

C = TypeVar("C", bound=ObjectColumn)

_KEYS_MAX: Final = 1 << 16
"""Keys in a part of ``keys``."""


class OpenColumn(Protocol):
    """Makes a column a state of the backend, with what was restored."""

    def __call__(self, name: str, create: Callable[[], C]) -> C:
        """The column of that name."""


class KeySpace:
    """The keys of an operator that have objects, and the columns with these objects.

    A bundle of rows is handled between ``enter`` and ``leave``, in which each key has a *slot*: the same
    small integer in all columns. ``enter`` brings what the columns hold of the keys into reach at once;
    ``leave`` makes the changes part of the state, forgets keys that have nothing left, and may move
    others out of memory.

    Args:
        open_column: see ``OpenColumn``.
        now_ms: wall-clock time.
        check_memory: called for every bundle.
        lock: not held by anyone; for what bundles and exports share.

    Attributes:
        room: slots that all columns have room for.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        *,
        open_column: OpenColumn,
        now_ms: Callable[[], int],
        check_memory: Callable[[], None],
        lock: AbstractContextManager[object],
    ) -> None:
        self.key_types = tuple(key_types)
        self.room = 64
        self.lock = lock
        self.now_ms = now_ms
        self._open_column = open_column
        self._check_memory = check_memory
        self._keys = KeyIndex(key_types)
        self._columns: dict[str, ObjectColumn] = {}
        # Slots whose key may have nothing left.
        self._candidates: list[Int64Array] = []
        self._swept = 0

    def value_column(self, descriptor: StateDescriptor) -> ValueColumn:
        """The column of a VALUE state; asked for before the first ``enter``."""
        if descriptor.number_kind:
            return self._column(descriptor, NumberColumn)
        return self._column(descriptor, ValueColumn)

    def list_column(self, descriptor: StateDescriptor) -> ListColumn:
        """The column of a LIST state."""
        return self._column(descriptor, ListColumn)

    def map_column(self, descriptor: StateDescriptor) -> MapColumn:
        """The column of a MAP state."""
        return self._column(descriptor, MapColumn)

    def enter(self, keys: KeyBatch) -> Int64Array:
        """The slots of n keys (equal keys, equal slots): int64[n]."""
        slots = self._slots_of(keys)
        for column in self._columns.values():
            if column.exports:
                with self.lock:
                    column.save(slots)
        return slots

    def leave(self) -> None:
        """Ends the bundle."""
        is_exported = False
        for column in self._columns.values():
            if column.has_changed:
                gone = column.leave()
                if len(gone):
                    self._candidates.append(gone)
            is_exported = is_exported or bool(column.exports)
        if self._candidates and not is_exported:
            self._forget_unused()
        self._check_memory()

    def keys(self) -> Iterator[KeyBatch]:
        """All keys with state, in parts of bounded size (for functions that visit every key)."""
        slots = np.flatnonzero(self._has_content(np.arange(self.room)))
        for start in range(0, len(slots), _KEYS_MAX):
            part = slots[start : start + _KEYS_MAX]
            yield self._keys.keys(part[self._has_content(part)])

    def sweep(self, now_ms: int, entries_max: int) -> int:
        """Looks at some entries of states with a TTL, the next ones at each call, and removes those that
        have expired; returns how many. Not between ``enter`` and ``leave``."""
        columns = [column for column in self._columns.values() if column.descriptor.ttl_ms]
        bound = self._keys.bound
        if not columns or not bound:
            return 0
        start = self._swept if self._swept < bound else 0
        stop = min(start + max(1, entries_max // len(columns)), bound)
        self._swept = stop
        return self._sweep_slots(columns, np.arange(start, stop), now_ms)

    def keys_of(self, slots: Int64Array) -> KeyBatch:
        """The keys of slots in use."""
        return self._keys.keys(slots)

    def restored_slots(self, keys: KeyBatch) -> Int64Array:
        """The slots of restored keys."""
        return self._slots_of(keys)

    def key_bytes(self) -> int:
        """Approximate size without the columns."""
        return self._keys.memory_bytes()

    def _column(self, descriptor: StateDescriptor, kind: Callable[..., C]) -> C:
        found = self._columns.get(descriptor.name)
        if found is not None:
            return cast("C", found)

        def create() -> C:
            # Known before anything is restored into it: it grows with the others.
            column = kind(self, descriptor)
            self._columns[descriptor.name] = column
            return column

        return self._open_column(descriptor.name, create)

    def _slots_of(self, keys: KeyBatch) -> Int64Array:
        slots, new = self._keys.enter(keys)
        if len(new):
            if self._keys.bound > self.room:
                self._grow(max(self._keys.bound, 2 * self.room))
            self._begin(slots[new], keys.take(new))
        return slots

    def _begin(self, slots: Int64Array, keys: KeyBatch) -> None:
        """New keys have got these slots."""
        self._candidates.append(slots)

    def _sweep_slots(self, columns: Sequence[ObjectColumn], slots: Int64Array, now_ms: int) -> int:
        removed = 0
        for column in columns:
            if column.exports:
                with self.lock:
                    column.save(slots)
            removed += column.sweep(slots, now_ms)
        self.leave()
        return removed

    def _grow(self, room: int) -> None:
        with self.lock:
            for column in self._columns.values():
                column.grow(room)
        self.room = room

    def _has_content(self, slots: Int64Array) -> BoolArray:
        found = np.zeros(len(slots), np.bool_)
        for column in self._columns.values():
            found |= column.present[slots]
        return found

    def _forget_unused(self) -> None:
        slots = np.unique(np.concatenate(self._candidates))
        self._candidates = []
        slots = slots[~self._has_content(slots) & self._keys.is_used(slots)]
        if not len(slots):
            return
        for column in self._columns.values():
            column.forget_slots(slots)
        self._keys.remove(slots)
