"""Compiled loops over the records of a key table: find, insert, remove, move.

See ``layout`` for the layout of records, arena and state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.loops.prefetch import prefetch
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array, UInt64Array
from taskmanager.kernels import layout
from taskmanager.kernels.compiled_words import copy_bytes, equal_bytes, load_word, store_word
from taskmanager.kernels.jit import (
    BOOL,
    BOOLS_IN,
    BYTES,
    BYTES_IN,
    INT64,
    INT64S,
    INT64S_IN,
    RECORDS,
    RECORDS_IN,
    UINT64S_IN,
    VOID,
    inlined,
    kernel,
)

_EMPTY = layout.EMPTY_WORD
_MULTIPLIER = np.uint64(layout.HOME_MULTIPLIER)
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_COUNT = layout.STATE_COUNT
_NEXT_INDEX = layout.STATE_NEXT_INDEX
_FREE_COUNT = layout.STATE_FREE_COUNT
_SENTINEL_USED = layout.STATE_SENTINEL_USED
_NULL_USED = layout.STATE_NULL_USED
_ARENA_USED = layout.STATE_ARENA_USED
_ARENA_DEAD = layout.STATE_ARENA_DEAD
_OWN_MULTIPLIER = layout.STATE_MULTIPLIER
_HEADER = layout.ARENA_HEADER_BYTES
_AHEAD = 16
"""So many rows before it is its turn the memory of a record is asked for."""
_CACHED_WORDS = 1 << 14
"""Records of so many words in all are near the processor anyway."""


@inlined
def _byte_home(key_hash: Any, multiplier: Any, capacity: Any) -> Any:
    """The slot where probing for a key of that hash starts: by the order of products, as far as 32 bits tell."""
    return (((np.uint64(key_hash) * multiplier) >> _HALF) * capacity) >> _HALF


@inlined
def _home(key: Any, multiplier: Any, capacity: Any) -> Any:
    """The slot where probing for a key word starts."""
    mixed = np.uint64(key) * _MULTIPLIER
    mixed ^= mixed >> _HALF
    return _byte_home(mixed, multiplier, capacity)


@inlined
def _ask_for_word(row: Any, keys: Any, records: Any, multiplier: Any, slot_count: Any) -> Any:
    """Asks for the memory where probing for the key word of a row ahead starts."""
    if records.size > _CACHED_WORDS and row + _AHEAD < len(keys):
        slot = _home(keys[row + _AHEAD], multiplier, slot_count)
        prefetch(records, np.int64(slot) * records.shape[1])


@inlined
def _behind(slot: Any, capacity: Any) -> Any:
    """The next slot."""
    behind = slot + _ONE
    return behind if behind < capacity else np.uint64(0)


@inlined
def _distance(slot: Any, start: Any, capacity: Any) -> Any:
    """How many steps a slot is from where probing starts."""
    return slot - start if slot >= start else slot + capacity - start


@inlined
def _give_index(records: Any, slot: Any, state: Any, free: Any, index_column: Any) -> Any:
    """Gives a new record its dense index."""
    if state[_FREE_COUNT] > 0:
        state[_FREE_COUNT] -= 1
        records[slot, index_column] = free[state[_FREE_COUNT]]
    else:
        records[slot, index_column] = state[_NEXT_INDEX]
        state[_NEXT_INDEX] += 1


@inlined
def _use_special(
    records: Any, slot: Any, used: Any, state: Any, free: Any, index_column: Any
) -> Any:
    """Takes one of the two records behind the last slot; 1 when it was free."""
    new = 0
    if state[used] == 0:
        state[used] = 1
        new = 1
        if index_column >= 0:
            _give_index(records, slot, state, free, index_column)
    return new


@inlined
def _release(records: Any, slot: Any, state: Any, free: Any, index_column: Any) -> Any:
    """Uncounts a record and puts its dense index on the stack."""
    state[_COUNT] -= 1
    if index_column >= 0:
        free[state[_FREE_COUNT]] = records[slot, index_column]
        state[_FREE_COUNT] += 1


@inlined
def _reset(records: Any, slot: Any, template: Any) -> Any:
    """Makes a record empty."""
    for column in range(len(template)):
        records[slot, column] = template[column]


@kernel(
    INT64(
        INT64S_IN, BOOLS_IN, RECORDS, INT64S, INT64S, INT64, INT64, INT64, INT64, INT64S,
    ),
    nogil=True,
)  # fmt: skip
def upsert_fixed(
    keys: Int64Array,
    nulls: BoolArray,
    records: Int64Array,
    state: Int64Array,
    free: Int64Array,
    index_column: int,
    limit: int,
    version_column: int,
    version: int,
    slots: Int64Array,
) -> int:
    """Finds or inserts keys, fills ``slots``; the rows done: fewer than n when full.

    Args:
        keys: int64[n] key words.
        nulls: bool[n] or empty.
        free: stack of dense indices.
        index_column: column of the dense index, -1 for none.
        limit: keys the table may hold before it must grow.
        version_column: column that is set to ``version`` in all records; -1 for none.
        version: what it is set to.
        slots: int64[n], filled with each key's record.
    """
    capacity = records.shape[0] - 2
    slot_count = np.uint64(capacity)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    count = state[_COUNT]
    for row in range(len(keys)):
        _ask_for_word(row, keys, records, multiplier, slot_count)
        key = keys[row]
        if len(nulls) > 0 and nulls[row]:
            slot = np.uint64(capacity + 1)
            count += _use_special(records, slot, _NULL_USED, state, free, index_column)
        elif key == _EMPTY:
            slot = np.uint64(capacity)
            count += _use_special(records, slot, _SENTINEL_USED, state, free, index_column)
        else:
            slot = _home(key, multiplier, slot_count)
            while True:
                found = records[slot, 0]
                if found == key:
                    break
                if found == _EMPTY:
                    if count >= limit:
                        state[_COUNT] = count
                        return row
                    records[slot, 0] = key
                    count += 1
                    if index_column >= 0:
                        _give_index(records, slot, state, free, index_column)
                    break
                slot = _behind(slot, slot_count)
        if version_column >= 0:
            records[slot, version_column] = version
        slots[row] = np.int64(slot)
    state[_COUNT] = count
    return len(keys)


@inlined
def _find_word(key: Any, records: Any, multiplier: Any, slot_count: Any) -> Any:
    """The slot of a key word, -1 where it is not in the table."""
    slot = _home(key, multiplier, slot_count)
    result = np.int64(-1)
    while True:
        found = records[slot, 0]
        if found == key:
            result = np.int64(slot)
            break
        if found == _EMPTY:
            break
        slot = _behind(slot, slot_count)
    return result


@kernel(VOID(INT64S_IN, BOOLS_IN, RECORDS_IN, INT64S_IN, INT64S), nogil=True)
def find_fixed(
    keys: Int64Array, nulls: BoolArray, records: Int64Array, state: Int64Array, slots: Int64Array
) -> None:
    """Fills ``slots`` with each key's record, -1 where it is not in the table."""
    capacity = records.shape[0] - 2
    slot_count = np.uint64(capacity)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    for row in range(len(keys)):
        _ask_for_word(row, keys, records, multiplier, slot_count)
        if len(nulls) > 0 and nulls[row]:
            slots[row] = capacity + 1 if state[_NULL_USED] else -1
        elif keys[row] == _EMPTY:
            slots[row] = capacity if state[_SENTINEL_USED] else -1
        else:
            slots[row] = _find_word(keys[row], records, multiplier, slot_count)


@kernel(VOID(RECORDS, INT64S_IN, INT64S_IN, INT64, BOOL))
def _close_gap(
    records: Int64Array, template: Int64Array, state: Int64Array, removed: int, byte_keys: bool
) -> None:
    """Empties a slot and moves back the records that were displaced beyond it."""
    capacity = records.shape[0] - 2
    slot_count = np.uint64(capacity)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    gap = np.uint64(removed)
    slot = gap
    while True:
        slot = _behind(slot, slot_count)
        if byte_keys:
            if records[slot, 1] < 0:
                break
            home = _byte_home(records[slot, 0], multiplier, slot_count)
        else:
            if records[slot, 0] == _EMPTY:
                break
            home = _home(records[slot, 0], multiplier, slot_count)
        # A record may move to the gap unless its home lies behind the gap.
        if _distance(slot, home, slot_count) >= _distance(slot, gap, slot_count):
            for column in range(records.shape[1]):
                records[gap, column] = records[slot, column]
            gap = slot
    _reset(records, gap, template)


@kernel(VOID(INT64S_IN, BOOLS_IN, RECORDS, INT64S_IN, INT64S, INT64S, INT64), nogil=True)
def remove_fixed(
    keys: Int64Array,
    nulls: BoolArray,
    records: Int64Array,
    template: Int64Array,
    state: Int64Array,
    free: Int64Array,
    index_column: int,
) -> None:
    """Removes keys; those that are not there are ignored. ``free`` has room for all of them."""
    capacity = records.shape[0] - 2
    slot_count = np.uint64(capacity)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    for row in range(len(keys)):
        if len(nulls) > 0 and nulls[row]:
            if state[_NULL_USED]:
                state[_NULL_USED] = 0
                _release(records, capacity + 1, state, free, index_column)
                _reset(records, capacity + 1, template)
        elif keys[row] == _EMPTY:
            if state[_SENTINEL_USED]:
                state[_SENTINEL_USED] = 0
                _release(records, capacity, state, free, index_column)
                _reset(records, capacity, template)
        else:
            slot = _find_word(keys[row], records, multiplier, slot_count)
            if slot >= 0:
                _release(records, slot, state, free, index_column)
                _close_gap(records, template, state, slot, False)


@inlined
def _ask_for_bytes(
    row: Any, hashes: Any, records: Any, arena: Any, multiplier: Any, slot_count: Any
) -> Any:
    """Asks for the memory of the records of rows ahead, and of the bytes of those whose record has come."""
    if records.size > _CACHED_WORDS and row + 2 * _AHEAD < len(hashes):
        slot = _byte_home(hashes[row + 2 * _AHEAD], multiplier, slot_count)
        prefetch(records, np.int64(slot) * records.shape[1])
        position = records[_byte_home(hashes[row + _AHEAD], multiplier, slot_count), 1]
        if position >= 0:
            prefetch(arena, position)


@inlined
def _probe_bytes(
    data: Any,
    start: Any,
    length: Any,
    key_hash: Any,
    records: Any,
    arena: Any,
    multiplier: Any,
    slot_count: Any,
) -> Any:
    """The slot of a byte key; -1 - the empty slot where it belongs, when it is not there."""
    slot = _byte_home(key_hash, multiplier, slot_count)
    while True:
        position = records[slot, 1]
        if position < 0:
            return -1 - np.int64(slot)
        if (
            records[slot, 0] == key_hash
            and np.int64(load_word(arena, position)) == length
            and equal_bytes(data, start, arena, position + _HEADER, length)
        ):
            return np.int64(slot)
        slot = _behind(slot, slot_count)


@kernel(
    INT64(
        BYTES_IN, INT64S_IN, UINT64S_IN, RECORDS, INT64S, INT64S, BYTES, INT64, INT64, INT64, INT64,
        INT64S,
    ),
    nogil=True,
)  # fmt: skip
def upsert_bytes(
    data: ByteArray,
    offsets: Int64Array,
    hashes: UInt64Array,
    records: Int64Array,
    state: Int64Array,
    free: Int64Array,
    arena: ByteArray,
    index_column: int,
    limit: int,
    version_column: int,
    version: int,
    slots: Int64Array,
) -> int:
    """Like ``upsert_fixed`` for byte keys; the arena has room for all keys of the batch."""
    slot_count = np.uint64(records.shape[0] - 2)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    for row in range(len(hashes)):
        _ask_for_bytes(row, hashes, records, arena, multiplier, slot_count)
        start = offsets[row]
        length = offsets[row + 1] - start
        key_hash = np.int64(hashes[row])
        slot = _probe_bytes(data, start, length, key_hash, records, arena, multiplier, slot_count)
        if slot < 0:
            if state[_COUNT] >= limit:
                return row
            slot = -1 - slot
            state[_COUNT] += 1
            if index_column >= 0:
                _give_index(records, slot, state, free, index_column)
            position = state[_ARENA_USED]
            state[_ARENA_USED] += _HEADER + length
            records[slot, 0] = np.int64(hashes[row])
            records[slot, 1] = position
            store_word(arena, position, np.uint64(length))
            copy_bytes(data, start, arena, position + _HEADER, length)
        if version_column >= 0:
            records[slot, version_column] = version
        slots[row] = slot
    return len(hashes)


@kernel(VOID(BYTES_IN, INT64S_IN, UINT64S_IN, RECORDS_IN, INT64S_IN, BYTES_IN, INT64S), nogil=True)
def find_bytes(
    data: ByteArray,
    offsets: Int64Array,
    hashes: UInt64Array,
    records: Int64Array,
    state: Int64Array,
    arena: ByteArray,
    slots: Int64Array,
) -> None:
    """Like ``find_fixed`` for byte keys."""
    slot_count = np.uint64(records.shape[0] - 2)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    for row in range(len(hashes)):
        _ask_for_bytes(row, hashes, records, arena, multiplier, slot_count)
        start = offsets[row]
        length = offsets[row + 1] - start
        key_hash = np.int64(hashes[row])
        slot = _probe_bytes(data, start, length, key_hash, records, arena, multiplier, slot_count)
        slots[row] = max(slot, -1)


@kernel(
    VOID(BYTES_IN, INT64S_IN, UINT64S_IN, RECORDS, INT64S_IN, INT64S, INT64S, BYTES_IN, INT64),
    nogil=True,
)
def remove_bytes(
    data: ByteArray,
    offsets: Int64Array,
    hashes: UInt64Array,
    records: Int64Array,
    template: Int64Array,
    state: Int64Array,
    free: Int64Array,
    arena: ByteArray,
    index_column: int,
) -> None:
    """Like ``remove_fixed`` for byte keys; their bytes in the arena become dead."""
    slot_count = np.uint64(records.shape[0] - 2)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    for row in range(len(hashes)):
        _ask_for_bytes(row, hashes, records, arena, multiplier, slot_count)
        start = offsets[row]
        length = offsets[row + 1] - start
        key_hash = np.int64(hashes[row])
        slot = _probe_bytes(data, start, length, key_hash, records, arena, multiplier, slot_count)
        if slot >= 0:
            state[_ARENA_DEAD] += _HEADER + length
            _release(records, slot, state, free, index_column)
            _close_gap(records, template, state, slot, True)


@kernel(VOID(RECORDS_IN, RECORDS, INT64S_IN, BOOL), nogil=True)
def rehash(source: Int64Array, target: Int64Array, state: Int64Array, byte_keys: bool) -> None:
    """Moves all records of one table into an empty, larger one of the same width."""
    old_capacity = source.shape[0] - 2
    capacity = target.shape[0] - 2
    width = source.shape[1]
    slot_count = np.uint64(capacity)
    multiplier = np.uint64(state[_OWN_MULTIPLIER])
    for old in range(old_capacity):
        if byte_keys:
            if source[old, 1] < 0:
                continue
            slot = _byte_home(source[old, 0], multiplier, slot_count)
            while target[slot, 1] >= 0:
                slot = _behind(slot, slot_count)
        else:
            key = source[old, 0]
            if key == _EMPTY:
                continue
            slot = _home(key, multiplier, slot_count)
            while target[slot, 0] != _EMPTY:
                slot = _behind(slot, slot_count)
        for column in range(width):
            target[slot, column] = source[old, column]
    for extra in range(2):
        for column in range(width):
            target[capacity + extra, column] = source[old_capacity + extra, column]
