"""The keys of slots: the way back from the small integers that a ``KeyIndex`` gives out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch, bounds_of, is_fixed_key
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import encode_keys
from taskmanager.state.slot_arrays import grown

_COMPACT_ABOVE: Final = 1 << 16


class SlotKeys:
    """Keys by slot, in columns of numpy arrays.

    What is stored of a slot stays as it is until the slot is freed, so that another thread may read it,
    but not while ``free`` runs.
    """

    def __init__(self, key_types: Sequence[pa.DataType]) -> None:
        self._types = tuple(key_types)
        self._is_fixed = is_fixed_key(key_types)
        # Fixed keys: their words; keys of bytes: where they lie in the arena.
        self._words = np.zeros(64, np.int64)
        # Fixed keys: 1 for null; keys of bytes: their lengths.
        self._extra = np.zeros(64, np.int64)
        self._arena = np.empty(0, np.uint8)
        self._used_bytes = 0
        self._dead_bytes = 0

    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._words.nbytes + self._extra.nbytes + self._arena.nbytes

    def put(self, slots: Int64Array, keys: KeyBatch) -> None:
        """Stores the keys of n different slots that are free."""
        bound = int(slots.max(initial=-1)) + 1
        self._words, self._extra = grown(self._words, bound), grown(self._extra, bound)
        if keys.fixed is not None:
            self._words[slots] = keys.fixed
            self._extra[slots] = 0 if keys.nulls is None else keys.nulls
            return
        assert keys.data is not None
        assert keys.offsets is not None
        lengths = np.diff(keys.offsets)
        needed = int(lengths.sum())
        if self._used_bytes + needed > len(self._arena):
            arena = np.empty(max(self._used_bytes + needed, 2 * len(self._arena)), np.uint8)
            arena[: self._used_bytes] = self._arena[: self._used_bytes]
            self._arena = arena
        starts = bounds_of(lengths)[:-1] + self._used_bytes
        LOOPS.copy_ranges(keys.data, keys.offsets[:-1], self._arena, starts, lengths)
        self._used_bytes += needed
        self._words[slots] = starts
        self._extra[slots] = lengths

    def take(self, slots: Int64Array) -> KeyBatch:
        """The keys of n slots that are in use."""
        keys = self._stored(slots)
        # The hashes of keys of bytes are computed from the columns when they are encoded anew.
        return keys if self._is_fixed else encode_keys(keys.to_arrays())

    def columns(self, slots: Int64Array) -> list[pa.Array]:
        """The keys of n slots that are in use, per key column n values."""
        return self._stored(slots).to_arrays()

    def _stored(self, slots: Int64Array) -> KeyBatch:
        """The keys of slots, without hashes."""
        words, extra = self._words[slots], self._extra[slots]
        if self._is_fixed:
            nulls = extra == 1
            return KeyBatch(self._types, words, nulls if nulls.any() else None, None, None)
        offsets = bounds_of(extra)
        data = np.empty(int(offsets[-1]), np.uint8)
        LOOPS.copy_ranges(self._arena, words, data, offsets[:-1], extra)
        return KeyBatch(self._types, None, None, data, offsets)

    def free(self, slots: Int64Array, is_used: BoolArray) -> None:
        """Forgets the keys of n slots.

        Args:
            is_used: by slot, which stay in use.
        """
        if self._is_fixed:
            return
        self._dead_bytes += int(self._extra[slots].sum())
        if self._dead_bytes <= max(_COMPACT_ABOVE, self._used_bytes // 2):
            return
        used = np.flatnonzero(is_used)
        lengths = self._extra[used]
        offsets = bounds_of(lengths)
        arena = np.empty(int(offsets[-1]), np.uint8)
        LOOPS.copy_ranges(self._arena, self._words[used], arena, offsets[:-1], lengths)
        self._arena = arena
        self._words[used] = offsets[:-1]
        self._used_bytes, self._dead_bytes = int(offsets[-1]), 0
