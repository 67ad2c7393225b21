"""How far the current count window of each key is filled, and what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.state.instances import InstanceState
from taskmanager.state.keyed_rows import MakeColumns, present_states
from taskmanager.state.keyed_table import KeyedTable

_FILLED = pa.field("filled", pa.int64())
_WINDOW_INDEX = pa.field("window_index", pa.int64())
_TOUCHED = pa.field("touched_ms", pa.int64())
_RESTORED = -1


class CountTable(KeyedTable):
    """Per key: rows in its open window, that window's index, and the number its contents go by.

    A key stays for good, since the index of its windows goes on counting; where nobody reads the index
    (``drop_empty_keys``) it goes when its window is empty, as soon as no snapshot needs to be told. With a TTL it
    goes when it has had no row for so long (``expired``, ``reset``). A snapshot has one row per key.

    Invariant: a key that has had rows since it came has rows in its window, or its window is not the first.

    Args:
        contents: what the open windows hold, by number; part of this table.
        ttl_ms: how long a key without rows is kept; 0 = always.

    Attributes:
        filled, window_index, instance: by index of the key; after an assignment ``changed`` is called.
        touched_ms: when the key had its last row, by index; kept with a TTL only.
    """

    kind = "counts"
    by_slot = MappingProxyType(
        {
            "filled": 0,
            "window_index": 0,
            "instance": -1,
            "touched_ms": 0,
            "_changed_in": 0,
            "_born_in": 0,
        }
    )
    filled: Int64Array
    window_index: Int64Array
    instance: Int64Array
    touched_ms: Int64Array
    _born_in: Int64Array
    """The version in which the key came, ``_RESTORED``, or 0 where the index is not in use."""

    def __init__(
        self, key_types: Sequence[pa.DataType], contents: InstanceState, ttl_ms: int = 0
    ) -> None:
        super().__init__(key_types, contents)
        self._ttl_ms = ttl_ms
        self._drops_empty = False

    def __len__(self) -> int:
        return len(self._keys)

    @override
    def _indices(self, keys: KeyBatch) -> Int64Array:
        indices, _ = self._keys.enter(keys)
        self._reserve(self._keys.bound)
        return indices

    def keys(self, indices: Int64Array) -> list[pa.Array]:
        """The keys, per key column n values."""
        return self._keys.key_columns(indices)

    def changed(self, indices: Int64Array) -> None:
        """The windows of these keys have changed, or what they hold."""
        self._born_in[indices[self._born_in[indices] == 0]] = self._version
        self._touch(indices)

    def expired(self, now_ms: int, indices: Int64Array | None = None) -> Int64Array:
        """Which keys have had no row for longer than the TTL.

        Args:
            now_ms: by the wall clock.
            indices: where to look, different; None = at all that are in memory.
        """
        if indices is None:
            indices = np.flatnonzero(self._born_in)
        is_due = self.touched_ms[indices] <= now_ms - self._ttl_ms
        return indices[is_due & (self._born_in[indices] != 0) & ~self._is_empty(indices)]

    def sweep(self, now_ms: int) -> tuple[Int64Array, bool]:
        """Looks for expired keys, between two batches: those found, and whether it has seen all keys.

        Where not, the next call goes on.
        """
        return self.expired(now_ms), True

    def reset(self, indices: Int64Array) -> None:
        """These (different) keys begin anew; what their windows held is the caller's to clear."""
        self.filled[indices] = self.window_index[indices] = 0
        self.instance[indices] = -1
        self.changed(indices)

    @property
    def _forgets(self) -> bool:
        return self._drops_empty or self._ttl_ms > 0

    def _is_empty(self, indices: Int64Array) -> BoolArray:
        """Which keys have nothing that anybody will ask for."""
        is_empty = self.filled[indices] == 0
        return is_empty if self._drops_empty else is_empty & (self.window_index[indices] == 0)

    def drop_empty_keys(self) -> None:
        """From now on a key whose window is empty leaves nothing behind."""
        if self._drops_empty:
            return
        self._drops_empty = True
        empty = np.flatnonzero((self._born_in != 0) & (self.filled == 0))
        if len(empty):
            self.changed(empty)

    def leave(self, indices: Int64Array) -> None:
        """A batch is done with these (different) keys: those of empty windows go that no snapshot knows."""
        if self._forgets:
            is_new = self._born_in[indices] == self._version
            self._remove(indices[is_new & self._is_empty(indices)])

    def _remove(self, indices: Int64Array) -> None:
        self._keys.remove(indices)
        for numbers in (self.window_index, self._changed_in, self._born_in):
            numbers[indices] = 0

    def forget(self, version: int) -> None:
        """Whatever was there up to that version has been told: empty keys may go."""
        if self._forgets:
            is_told = (self._born_in != 0) & (self._changed_in <= version) & (self._changed_in > 0)
            told = np.flatnonzero(is_told)
            self._remove(told[self._is_empty(told)])

    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        """Adds restored keys."""
        numbers_stop = len(self._fields())
        for indices, columns in self._restored_rows(batches):
            numbers = [column.to_numpy() for column in columns[:numbers_stop]]
            self._born_in[indices] = _RESTORED
            for held, restored in zip(self._numbers(), numbers, strict=True):
                held[indices] = restored
            rows = np.flatnonzero(self.filled[indices] > 0)
            instances = self.numbers.allocate(len(rows))
            self.instance[indices[rows]] = instances
            taken = pa.array(rows)
            self.contents.restore(instances, [c.take(taken) for c in columns[numbers_stop:]])

    def _numbers(self) -> list[Int64Array]:
        """What is exported of each key, beside its contents."""
        numbers = [self.filled, self.window_index]
        return [*numbers, self.touched_ms] if self._ttl_ms else numbers

    @override
    def _fields(self) -> Sequence[pa.Field]:
        return [_FILLED, _WINDOW_INDEX, *([_TOUCHED] if self._ttl_ms else [])]

    @override
    def _rows(self) -> Int64Array:
        return np.flatnonzero(self._born_in)

    @override
    def _identity(self, rows: Int64Array) -> list[pa.Array]:
        return self.keys(rows)

    @override
    def _without_removed(
        self, rows: Int64Array, since_version: int
    ) -> tuple[Int64Array, list[pa.Array] | None]:
        if not self._forgets:
            return rows, None
        is_empty = self._is_empty(rows)
        return rows[~is_empty], self._identity(rows[is_empty])

    @override
    def _content(self, rows: Int64Array) -> MakeColumns:
        numbers = [held[rows] for held in self._numbers()]
        instances = self.instance[rows]
        is_open = instances >= 0
        states = present_states(self.contents.freeze(instances[is_open]), is_open)

        def columns(chosen: Int64Array) -> list[pa.Array]:
            return [*(pa.array(held[chosen]) for held in numbers), *states(chosen)]

        return columns
