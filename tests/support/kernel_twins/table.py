"""The numpy twins of ``compiled_table`` and of grouping: same keys, same dense indices.

The slots that records get may differ from those of the compiled kernels where several new keys
compete for one; the keys, their order of insertion and everything kept for them do not.
"""

from __future__ import annotations

import numpy as np

from penstock.storage.key_encoding import bounds_of
from penstock.storage.key_loops import copy_ranges
from penstock.storage.key_types import BoolArray, ByteArray, Int64Array, UInt64Array
from taskmanager.kernels.layout import (
    ARENA_HEADER_BYTES,
    EMPTY_WORD,
    HOME_MULTIPLIER,
    STATE_ARENA_DEAD,
    STATE_ARENA_USED,
    STATE_COUNT,
    STATE_FREE_COUNT,
    STATE_MULTIPLIER,
    STATE_NEXT_INDEX,
    STATE_NULL_USED,
    STATE_SENTINEL_USED,
)


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
    """See ``compiled_table.upsert_fixed``."""
    capacity = len(records) - 2
    find_fixed(keys, nulls, records, state, slots)
    missing = np.flatnonzero(slots < 0)
    if len(missing) == 0:
        _stamp(slots, records, version_column, version)
        return len(keys)
    null_rows = nulls[missing] if len(nulls) else np.zeros(len(missing), dtype=np.bool_)
    first, group = _groups(keys[missing], null_rows)
    new_rows = missing[first]
    new_keys = keys[new_rows]
    new_nulls = null_rows[first]
    plain = ~new_nulls & (new_keys != EMPTY_WORD)
    if plain.any() and int(state[STATE_COUNT]) + int(plain.sum()) > limit:
        return int(new_rows[plain][0])
    new_slots = np.full(len(new_rows), capacity, dtype=np.int64)  # of the key EMPTY_WORD
    new_slots[new_nulls] = capacity + 1
    state[STATE_NULL_USED] |= int(new_nulls.any())
    state[STATE_SENTINEL_USED] |= int((~new_nulls & (new_keys == EMPTY_WORD)).any())
    occupied = records[:capacity, 0] != EMPTY_WORD
    new_slots[plain] = _place(_homes(new_keys[plain], state, capacity), occupied)
    _start_records(records, new_slots, state, free, index_column)
    records[new_slots[plain], 0] = new_keys[plain]
    slots[missing] = new_slots[group]
    _stamp(slots, records, version_column, version)
    return len(keys)


def find_fixed(
    keys: Int64Array, nulls: BoolArray, records: Int64Array, state: Int64Array, slots: Int64Array
) -> None:
    """See ``compiled_table.find_fixed``."""
    capacity = len(records) - 2
    slots[:] = -1
    words = records[:, 0]
    special = keys == EMPTY_WORD
    if state[STATE_SENTINEL_USED]:
        slots[special] = capacity
    if len(nulls):
        slots[nulls] = capacity + 1 if state[STATE_NULL_USED] else -1
        special = special | nulls
    rows = np.flatnonzero(~special)
    at = _homes(keys[rows], state, capacity)
    while len(rows):
        found = words[at]
        hit = found == keys[rows]
        slots[rows[hit]] = at[hit]
        going_on = ~hit & (found != EMPTY_WORD)
        rows, at = rows[going_on], (at[going_on] + 1) % capacity


def remove_fixed(
    keys: Int64Array,
    nulls: BoolArray,
    records: Int64Array,
    template: Int64Array,
    state: Int64Array,
    free: Int64Array,
    index_column: int,
) -> None:
    """See ``compiled_table.remove_fixed``."""
    capacity = len(records) - 2
    slots = np.empty(len(keys), dtype=np.int64)
    find_fixed(keys, nulls, records, state, slots)
    removed = _first_appearances(slots)
    _release_records(records, removed, state, free, index_column)
    state[STATE_SENTINEL_USED] &= int(capacity not in removed)
    state[STATE_NULL_USED] &= int(capacity + 1 not in removed)
    records[removed[removed >= capacity]] = template
    removed = removed[removed < capacity]
    if len(removed):
        kept = np.flatnonzero(records[:capacity, 0] != EMPTY_WORD)
        kept = np.setdiff1d(kept, removed, assume_unique=True)
        survivors = records[kept]
        records[:capacity] = template
        homes = _homes(survivors[:, 0], state, capacity)
        records[_place(homes, np.zeros(capacity, dtype=np.bool_))] = survivors


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
    """See ``compiled_table.upsert_bytes``."""
    capacity = len(records) - 2
    find_bytes(data, offsets, hashes, records, state, arena, slots)
    missing = np.flatnonzero(slots < 0)
    if len(missing) == 0:
        _stamp(slots, records, version_column, version)
        return len(hashes)
    ordinals: dict[bytes, int] = {}
    first: list[int] = []
    group = np.empty(len(missing), dtype=np.int64)
    for position, row in enumerate(missing.tolist()):
        key = data[offsets[row] : offsets[row + 1]].tobytes()
        ordinal = ordinals.setdefault(key, len(ordinals))
        if ordinal == len(first):
            first.append(row)
        group[position] = ordinal
    new_rows = np.array(first, dtype=np.int64)
    if int(state[STATE_COUNT]) + len(new_rows) > limit:
        return int(new_rows[0])
    homes = _byte_homes(hashes[new_rows].view(np.int64), state, capacity)
    new_slots = _place(homes, records[:capacity, 1] >= 0)
    _start_records(records, new_slots, state, free, index_column)
    lengths = offsets[new_rows + 1] - offsets[new_rows]
    bounds = bounds_of(lengths + ARENA_HEADER_BYTES) + state[STATE_ARENA_USED]
    state[STATE_ARENA_USED] = bounds[-1]
    records[new_slots, 0] = hashes[new_rows].view(np.int64)
    records[new_slots, 1] = bounds[:-1]
    headers = lengths.astype("<i8").view(np.uint8)
    widths = np.full(len(lengths), ARENA_HEADER_BYTES, dtype=np.int64)
    header_starts = np.arange(len(lengths), dtype=np.int64) * ARENA_HEADER_BYTES
    copy_ranges(headers, header_starts, arena, bounds[:-1], widths)
    targets = bounds[:-1] + ARENA_HEADER_BYTES
    copy_ranges(data, offsets[new_rows], arena, targets, lengths)
    slots[missing] = new_slots[group]
    _stamp(slots, records, version_column, version)
    return len(hashes)


def find_bytes(
    data: ByteArray,
    offsets: Int64Array,
    hashes: UInt64Array,
    records: Int64Array,
    state: Int64Array,
    arena: ByteArray,
    slots: Int64Array,
) -> None:
    """See ``compiled_table.find_bytes``."""
    capacity = len(records) - 2
    slots[:] = -1
    signed = hashes.view(np.int64)
    rows = np.arange(len(hashes), dtype=np.int64)
    at = _byte_homes(signed, state, capacity)
    while len(rows):
        used = records[at, 1] >= 0
        rows, at = rows[used], at[used]
        hit = records[at, 0] == signed[rows]
        candidates = np.flatnonzero(hit)
        equal = _equal_keys(data, offsets, rows[candidates], arena, records[at[candidates], 1])
        hit[candidates] = equal
        slots[rows[hit]] = at[hit]
        rows, at = rows[~hit], (at[~hit] + 1) % capacity


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
    """See ``compiled_table.remove_bytes``."""
    capacity = len(records) - 2
    slots = np.empty(len(hashes), dtype=np.int64)
    find_bytes(data, offsets, hashes, records, state, arena, slots)
    removed = _first_appearances(slots)
    if len(removed) == 0:
        return
    lengths = _arena_lengths(arena, records[removed, 1])
    state[STATE_ARENA_DEAD] += int(lengths.sum()) + ARENA_HEADER_BYTES * len(removed)
    _release_records(records, removed, state, free, index_column)
    kept = np.setdiff1d(np.flatnonzero(records[:capacity, 1] >= 0), removed, assume_unique=True)
    survivors = records[kept]
    records[:capacity] = template
    homes = _byte_homes(survivors[:, 0], state, capacity)
    records[_place(homes, np.zeros(capacity, dtype=np.bool_))] = survivors


def rehash(source: Int64Array, target: Int64Array, state: Int64Array, byte_keys: bool) -> None:
    """See ``compiled_table.rehash``."""
    capacity = len(target) - 2
    if byte_keys:
        moved = source[:-2][source[:-2, 1] >= 0]
        homes = _byte_homes(moved[:, 0], state, capacity)
    else:
        moved = source[:-2][source[:-2, 0] != EMPTY_WORD]
        homes = _homes(moved[:, 0], state, capacity)
    target[_place(homes, np.zeros(capacity, dtype=np.bool_))] = moved
    target[-2:] = source[-2:]


def distinct_fixed(
    keys: Int64Array,
    nulls: BoolArray,
    scratch: Int64Array,
    first: Int64Array,
    inverse: Int64Array,
) -> int:
    """See ``compiled_words.distinct_fixed``; ``scratch`` is not needed here."""
    null_rows = nulls if len(nulls) else np.zeros(len(keys), dtype=np.bool_)
    firsts, inverse[:] = _groups(keys, null_rows)
    first[: len(firsts)] = firsts
    return len(firsts)


def distinct_bytes(
    data: ByteArray,
    offsets: Int64Array,
    hashes: UInt64Array,
    scratch: Int64Array,
    first: Int64Array,
    inverse: Int64Array,
) -> int:
    """See ``compiled_words.distinct_bytes``; ``scratch`` is not needed here."""
    ordinals: dict[bytes, int] = {}
    for row in range(len(hashes)):
        key = data[offsets[row] : offsets[row + 1]].tobytes()
        ordinal = ordinals.get(key)
        if ordinal is None:
            ordinal = ordinals[key] = len(ordinals)
            first[ordinal] = row
        inverse[row] = ordinal
    return len(ordinals)


def _groups(keys: Int64Array, null_rows: BoolArray) -> tuple[Int64Array, Int64Array]:
    """First row of each group in order of first appearance, and each row's group."""
    identities = np.rec.fromarrays([keys, null_rows]) if null_rows.any() else keys
    _, first, inverse = np.unique(identities, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first, kind="stable")
    ordinals = np.empty(len(first), dtype=np.int64)
    ordinals[by_appearance] = np.arange(len(first))
    return first[by_appearance], ordinals[inverse]


def _homes(keys: Int64Array, state: Int64Array, capacity: int) -> Int64Array:
    mixed = keys.astype(np.uint64) * np.uint64(HOME_MULTIPLIER)
    mixed ^= mixed >> np.uint64(32)
    return _byte_homes(mixed.view(np.int64), state, capacity)


def _byte_homes(hashes: Int64Array, state: Int64Array, capacity: int) -> Int64Array:
    multiplier = state.view(np.uint64)[STATE_MULTIPLIER]
    half = np.uint64(32)
    products = hashes.astype(np.uint64) * multiplier
    return ((products >> half) * np.uint64(capacity) >> half).view(np.int64)


def _place(homes: Int64Array, occupied: BoolArray) -> Int64Array:
    """Free slots for new keys by linear probing; marks them occupied."""
    slots = np.empty(len(homes), dtype=np.int64)
    waiting, at = np.arange(len(homes)), homes
    while len(waiting):
        open_rows = np.flatnonzero(~occupied[at])
        winners = open_rows[np.unique(at[open_rows], return_index=True)[1]]
        slots[waiting[winners]] = at[winners]
        occupied[at[winners]] = True
        losers = np.ones(len(waiting), dtype=np.bool_)
        losers[winners] = False
        waiting, at = waiting[losers], (at[losers] + 1) % len(occupied)
    return slots


def _start_records(
    records: Int64Array,
    slots: Int64Array,
    state: Int64Array,
    free: Int64Array,
    index_column: int,
) -> None:
    state[STATE_COUNT] += len(slots)
    if index_column < 0:
        return
    free_count = int(state[STATE_FREE_COUNT])
    reused = min(len(slots), free_count)
    records[slots[:reused], index_column] = free[free_count - reused : free_count][::-1]
    fresh = len(slots) - reused
    start = int(state[STATE_NEXT_INDEX])
    records[slots[reused:], index_column] = np.arange(start, start + fresh)
    state[STATE_FREE_COUNT] -= reused
    state[STATE_NEXT_INDEX] += fresh


def _release_records(
    records: Int64Array, slots: Int64Array, state: Int64Array, free: Int64Array, index_column: int
) -> None:
    state[STATE_COUNT] -= len(slots)
    if index_column >= 0:
        free_count = int(state[STATE_FREE_COUNT])
        free[free_count : free_count + len(slots)] = records[slots, index_column]
        state[STATE_FREE_COUNT] += len(slots)


def _first_appearances(slots: Int64Array) -> Int64Array:
    """The distinct slots that are not -1, in order of first appearance."""
    present = slots[slots >= 0]
    return present[np.sort(np.unique(present, return_index=True)[1])]


def _arena_lengths(arena: ByteArray, positions: Int64Array) -> Int64Array:
    lengths = np.empty(len(positions) * ARENA_HEADER_BYTES, dtype=np.uint8)
    targets = np.arange(len(positions), dtype=np.int64) * ARENA_HEADER_BYTES
    widths = np.full(len(positions), ARENA_HEADER_BYTES, dtype=np.int64)
    copy_ranges(arena, positions, lengths, targets, widths)
    return lengths.view("<i8").astype(np.int64)


def _equal_keys(
    data: ByteArray,
    offsets: Int64Array,
    rows: Int64Array,
    arena: ByteArray,
    positions: Int64Array,
) -> BoolArray:
    """Whether the keys of ``rows`` equal the keys at ``positions`` of the arena."""
    lengths = offsets[rows + 1] - offsets[rows]
    equal: BoolArray = _arena_lengths(arena, positions) == lengths
    pairs = np.flatnonzero(equal)
    if len(pairs) == 0:
        return equal
    lengths = lengths[pairs]
    bounds = bounds_of(lengths)
    left = np.empty(int(bounds[-1]), dtype=np.uint8)
    right = np.empty(int(bounds[-1]), dtype=np.uint8)
    copy_ranges(data, offsets[rows[pairs]], left, bounds[:-1], lengths)
    starts = positions[pairs] + ARENA_HEADER_BYTES
    copy_ranges(arena, starts, right, bounds[:-1], lengths)
    # Encoded keys are never empty, so every segment has a byte.
    equal[pairs] = np.logical_and.reduceat(left == right, bounds[:-1])
    return equal


def _stamp(slots: Int64Array, records: Int64Array, version_column: int, version: int) -> None:
    if version_column >= 0:
        records[slots, version_column] = version
