"""Records of keys that are not of one length: their bytes lie in an arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch, bounds_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array
from taskmanager.kernels.layout import (
    ARENA_HEADER_BYTES,
    STATE_ARENA_DEAD,
    STATE_ARENA_USED,
)
from taskmanager.kernels.slot_table import KeyRecords

if TYPE_CHECKING:
    from taskmanager.kernels.compiled import Kernels

ARENA_COMPACTION_MIN_BYTES: Final = 1 << 16


class ByteKeyRecords(KeyRecords):
    """Keys of bytes: a record holds the key's hash and where the key lies in the arena."""

    key_words = 2

    def __init__(
        self,
        kernels: Kernels,
        types: Sequence[pa.DataType],
        template: Int64Array,
        *,
        index_column: int,
    ) -> None:
        self._arena: ByteArray = np.empty(0, dtype=np.uint8)
        self._is_arena_lent = False
        super().__init__(kernels, types, template, index_column=index_column)

    @override
    def find(self, keys: KeyBatch) -> Int64Array:
        slots = np.empty(len(keys), dtype=np.int64)
        data, offsets = _byte_parts(keys)
        self.kernels.find_bytes(
            data, offsets, keys.hashes, self.records, self.state, self._arena, slots
        )
        return slots

    @override
    def upsert(self, keys: KeyBatch, version_column: int = -1, version: int = 0) -> Int64Array:
        self._reserve(keys)
        return super().upsert(keys, version_column, version)

    @property
    @override
    def arena(self) -> ByteArray | None:
        return self._arena

    @override
    def lend_arena(self) -> ByteArray | None:
        self._is_arena_lent = True
        return self._arena

    @override
    def keys_of(
        self, slots: Int64Array, capacity: int, matrix: Int64Array, arena: ByteArray | None
    ) -> KeyBatch:
        assert arena is not None
        starts = matrix[:, 1].copy()
        lengths = self._lengths(starts, arena)
        offsets = bounds_of(lengths)
        data = np.empty(int(offsets[-1]), dtype=np.uint8)
        starts += ARENA_HEADER_BYTES
        LOOPS.copy_ranges(arena, starts, data, offsets[:-1], lengths)
        hashes = matrix[:, 0].copy().view(np.uint64)
        return KeyBatch(self.types, None, None, data, offsets, hashes)

    @override
    def _clear_arena(self, is_kept: bool) -> None:
        if (is_kept or self._is_arena_lent) or (
            len(self._arena) > ARENA_COMPACTION_MIN_BYTES
            and self.capacity == self._initial_capacity
        ):
            self._arena = np.empty(0, dtype=np.uint8)
            self._is_arena_lent = False

    @override
    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._arena.nbytes

    def _reserve(self, keys: KeyBatch) -> None:
        """Makes room in the arena for the keys of a batch, as if all were new."""
        _, offsets = _byte_parts(keys)
        used = int(self.state[STATE_ARENA_USED])
        added = int(offsets[-1] - offsets[0]) + ARENA_HEADER_BYTES * len(keys)
        if used + added > len(self._arena):
            arena = np.empty(max(used + added, 2 * len(self._arena)), dtype=np.uint8)
            arena[:used] = self._arena[:used]
            self._arena = arena

    @override
    def _upsert_some(
        self, keys: KeyBatch, version_column: int, version: int, slots: Int64Array
    ) -> int:
        data, offsets = _byte_parts(keys)
        return self.kernels.upsert_bytes(
            data,
            offsets,
            keys.hashes,
            self.records,
            self.state,
            self._free,
            self._arena,
            self.index_column,
            self._limit(),
            version_column,
            version,
            slots,
        )

    @override
    def _remove(self, keys: KeyBatch) -> None:
        data, offsets = _byte_parts(keys)
        self.kernels.remove_bytes(
            data,
            offsets,
            keys.hashes,
            self.records,
            self.template,
            self.state,
            self._free,
            self._arena,
            self.index_column,
        )
        dead = int(self.state[STATE_ARENA_DEAD])
        if dead > max(ARENA_COMPACTION_MIN_BYTES, int(self.state[STATE_ARENA_USED]) // 2):
            self._compact()

    def _compact(self) -> None:
        """Rewrites the arena without the keys that were removed."""
        slots = np.flatnonzero(self._used(self.records[:-2]))
        starts = self.records[slots, 1]
        sizes = self._lengths(starts, self._arena) + ARENA_HEADER_BYTES
        bounds = bounds_of(sizes)
        arena = np.empty(int(bounds[-1]), dtype=np.uint8)
        LOOPS.copy_ranges(self._arena, starts, arena, bounds[:-1], sizes)
        self._arena = arena
        self.records[slots, 1] = bounds[:-1]
        self.state[STATE_ARENA_USED] = bounds[-1]
        self.state[STATE_ARENA_DEAD] = 0

    def _lengths(self, starts: Int64Array, arena: ByteArray) -> Int64Array:
        header = np.empty((len(starts), ARENA_HEADER_BYTES), dtype=np.uint8)
        targets = np.arange(len(starts), dtype=np.int64) * ARENA_HEADER_BYTES
        widths = np.full(len(starts), ARENA_HEADER_BYTES, dtype=np.int64)
        LOOPS.copy_ranges(arena, starts, header.reshape(-1), targets, widths)
        lengths: Int64Array = header.view("<i8").reshape(len(starts))
        return lengths

    @override
    def _first_word(self, keys: KeyBatch) -> int:
        return int(keys.hashes[0])

    @override
    def _empty_key(self, template: Int64Array) -> Int64Array:
        return np.concatenate([np.array([0, -1], dtype=np.int64), template[2:]])

    @override
    def _used(self, records: Int64Array) -> BoolArray:
        used: BoolArray = records[:, 1] >= 0
        return used


def _byte_parts(keys: KeyBatch) -> tuple[ByteArray, Int64Array]:
    if keys.data is None or keys.offsets is None:
        raise TypeError(f"the table holds byte keys, the batch has keys of {keys.types}")
    return keys.data, keys.offsets
