"""Slots for keys, and the keys of slots again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import RecordTable, distinct
from taskmanager.state.slot_arrays import grown
from taskmanager.state.slot_keys import SlotKeys


class KeyIndex:
    """Gives every key a slot, a small integer; the slot of a removed key is given out again.

    Another thread may read the keys of slots, but not while ``remove`` runs.
    """

    def __init__(self, key_types: Sequence[pa.DataType]) -> None:
        self._records = RecordTable(key_types, [], with_index=True)
        self._keys = SlotKeys(key_types)
        self._is_used = np.zeros(64, np.bool_)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bound(self) -> int:
        """One more than the largest slot in use."""
        return self._records.index_bound

    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._records.memory_bytes() + self._keys.memory_bytes() + self._is_used.nbytes

    def enter(self, keys: KeyBatch) -> tuple[Int64Array, Int64Array]:
        """Gives new keys a slot.

        Returns:
            The slots of n keys, int64[n]; and where each of the new ones comes first among them.
        """
        count = len(self._records)
        slots = self._records.lookup_or_insert(keys)
        if len(self._records) == count:
            return slots, np.empty(0, np.int64)
        self._is_used = grown(self._is_used, self.bound)
        new = np.flatnonzero(~self._is_used[slots])
        added, firsts = np.unique(slots[new], return_index=True)
        rows = new[firsts]
        self._keys.put(added, keys.take(rows))
        self._is_used[added] = True
        return slots, rows

    def missing(self, keys: KeyBatch) -> KeyBatch:
        """The different keys that have no slot."""
        absent = keys.take(np.flatnonzero(~self._records.contains(keys)))
        return absent.take(distinct(absent)[0]) if len(absent) else absent

    def keys(self, slots: Int64Array) -> KeyBatch:
        """The keys of slots in use."""
        return self._keys.take(slots)

    def key_columns(self, slots: Int64Array) -> list[pa.Array]:
        """The keys of slots in use, per key column n values."""
        return self._keys.columns(slots)

    def is_used(self, slots: Int64Array) -> BoolArray:
        """Which of the slots have a key."""
        used: BoolArray = self._is_used[slots]
        return used

    def remove(self, slots: Int64Array) -> None:
        """Forgets the keys of the (different) slots, which are in use."""
        if not len(slots):
            return
        assert self._is_used[slots].all(), "a slot that is not in use"
        self._records.remove(self._keys.take(slots))
        self._is_used[slots] = False
        self._keys.free(slots, self._is_used)
