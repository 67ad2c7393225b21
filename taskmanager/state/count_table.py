"""How far the current count window of each key is filled, and what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import encode_keys
from taskmanager.state.instances import InstanceState, NumberPool
from taskmanager.state.key_index import KeyIndex
from taskmanager.state.keyed_rows import (
    SealedKeyedRows,
    keyed_schema,
    latest_rows,
    present_states,
)
from taskmanager.state.run_format import key_fields
from taskmanager.state.slot_arrays import SlotArrays
from taskmanager.state.snapshot_table import RestoredPart

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_FILLED = pa.field("filled", pa.int64())
_WINDOW_INDEX = pa.field("window_index", pa.int64())
_TOUCHED = pa.field("touched_ms", pa.int64())
_RESTORED = -1


def count_fields(ttl_ms: int) -> tuple[pa.Field, ...]:
    """Columns of the exported rows between the key and what the windows hold."""
    return (_FILLED, _WINDOW_INDEX, _TOUCHED) if ttl_ms else (_FILLED, _WINDOW_INDEX)


class CountTable(SlotArrays):
    """Per key: rows in its open window, that window's index, and the number its contents go by.

    A key stays for good, since the index of its windows goes on counting; where nobody reads the index
    (``drop_empty_keys``) it goes when its window is empty, as soon as no snapshot needs to be told. With a TTL it
    goes when it has had no row for so long (``expired``, ``reset``). A snapshot has one row per key.

    Invariant: a key that has had rows since it came has rows in its window, or its window is not the first.

    Args:
        key_types: types of the key columns.
        contents: what the open windows hold, by number; part of this table.
        ttl_ms: how long a key without rows is kept; 0 = always.

    Attributes:
        filled, window_index, instance: by index of the key; after an assignment ``changed`` is called.
        touched_ms: when the key had its last row, by index; kept with a TTL only.
        numbers: gives out the numbers of contents.
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
    _changed_in: Int64Array
    _born_in: Int64Array
    """The version in which the key came, ``_RESTORED``, or 0 where the index is not in use."""

    def __init__(
        self, key_types: Sequence[pa.DataType], contents: InstanceState, ttl_ms: int = 0
    ) -> None:
        self._types = tuple(key_types)
        self._ttl_ms = ttl_ms
        self._version = 1
        self._last_change = 0
        self._drops_empty = False
        self._begin(contents)

    def _begin(self, contents: InstanceState) -> None:
        """No key is in memory."""
        self.contents = contents
        self.numbers = NumberPool()
        self._keys = KeyIndex(self._types)
        self._make_arrays()

    def __len__(self) -> int:
        return len(self._keys)

    def memory_bytes(self) -> int:
        """Approximate size, what the windows hold included."""
        return self._keys.memory_bytes() + self._array_bytes() + self.contents.memory_bytes()

    def key_indices(self, keys: KeyBatch) -> Int64Array:
        """Where the keys are in ``filled``, ``window_index`` and ``instance``: int64[n]."""
        return self._indices(keys)

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
        self._changed_in[indices] = self._version
        self._last_change = self._version

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

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        content = [*count_fields(self._ttl_ms), *self.contents.state_fields()]
        return keyed_schema(key_fields(self._types), content)

    def is_changed(self, since_version: int) -> bool:
        """A key has had rows after that version."""
        return self._last_change > since_version

    def seal(self, since_version: int, max_parallelism: int) -> SealedKeyedRows:
        """Freezes the keys that changed after ``since_version``: copies their numbers, but no values."""
        version = self._version
        self._version += 1
        is_wanted = self._born_in != 0
        if since_version:
            is_wanted &= self._changed_in > since_version
        indices = np.flatnonzero(is_wanted)
        dead: list[pa.Array] | None = None
        if self._forgets:
            is_empty = self._is_empty(indices)
            if since_version:
                dead = self._keys.key_columns(indices[is_empty])
            indices = indices[~is_empty]
        numbers = [self.filled[indices], self.window_index[indices]]
        if self._ttl_ms:
            numbers.append(self.touched_ms[indices])
        instances = self.instance[indices]
        is_open = instances >= 0
        states = present_states(self.contents.freeze(instances[is_open]), is_open)

        def content(rows: Int64Array) -> list[pa.Array]:
            return [*(pa.array(column[rows]) for column in numbers), *states(rows)]

        return SealedKeyedRows(
            since_version,
            version,
            self.schema(),
            len(self._types),
            max_parallelism,
            self._keys.key_columns(indices),
            content,
            dead,
        )

    def forget(self, version: int) -> None:
        """Whatever was there up to that version has been told: empty keys may go."""
        if self._forgets:
            is_told = (self._born_in != 0) & (self._changed_in <= version) & (self._changed_in > 0)
            told = np.flatnonzero(is_told)
            self._remove(told[self._is_empty(told)])

    def load(self, batches: Iterable[pa.RecordBatch], part: RestoredPart) -> None:
        """Adds restored keys."""
        key_count = len(self._types)
        for batch in latest_rows(batches, self.schema(), key_count):
            columns = batch.columns[2:]
            indices = self._indices(encode_keys(columns[:key_count]))
            self._born_in[indices] = _RESTORED
            filled = columns[key_count].to_numpy()
            self.filled[indices] = filled
            self.window_index[indices] = columns[key_count + 1].to_numpy()
            if self._ttl_ms:
                self.touched_ms[indices] = columns[key_count + 2].to_numpy()
            rows = np.flatnonzero(filled > 0)
            instances = self.numbers.allocate(len(rows))
            self.instance[indices[rows]] = instances
            taken = pa.array(rows)
            first = key_count + len(count_fields(self._ttl_ms))
            self.contents.restore(instances, [c.take(taken) for c in columns[first:]])
