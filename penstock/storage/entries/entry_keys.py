"""Keys of the database's entries.

An entry's key is

    partition (8 bytes) | key-group (2 bytes) | hash (8 bytes) | key

with the numbers big-endian and the key as ``KeyBatch.to_bytes`` gives it; keys of one fixed-width column
leave out the hash. A *partition* is one namespace of one state. Its number is given out once and never
again, so that a namespace is dropped with one range deletion, is renamed without touching an entry, and
can be made anew while the old one's entries are still there.

Invariants: different keys have different entry keys, and none is a prefix of another's; the entries of
one partition and range of key-groups are one range; the order of entries is that of ``entry_order``,
found by sorting numbers instead of byte strings (that is what the hash is there for).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.key_encoding import KeyBatch, bounds_of, is_fixed_key
from penstock.storage.key_groups import UInt16Array, key_group_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import Int64Array, UInt64Array

PARTITION_BYTES: Final = 8
GROUP_BYTES: Final = 2
_HASH_BYTES: Final = 8
_WORD_BYTES: Final = 8
_HEAD_BYTES: Final = PARTITION_BYTES + GROUP_BYTES
_FIXED_BYTES: Final = _HEAD_BYTES + 1 + _WORD_BYTES


def partition_bounds(partition: int) -> tuple[bytes, bytes]:
    """First key of a partition, and the first one behind it."""
    return (
        partition.to_bytes(PARTITION_BYTES, "big"),
        (partition + 1).to_bytes(PARTITION_BYTES, "big"),
    )


def group_bounds(partition: int, key_groups: range) -> tuple[bytes, bytes]:
    """First key of some key-groups of a partition, and the first one behind them."""
    head = partition.to_bytes(PARTITION_BYTES, "big")
    return (
        head + key_groups.start.to_bytes(GROUP_BYTES, "big"),
        head + key_groups.stop.to_bytes(GROUP_BYTES, "big"),
    )


def moved_to(partition: int, keys: ByteStrings) -> ByteStrings:
    """The keys as they are in another partition; each has at least ``PARTITION_BYTES``."""
    data = keys.data.copy()
    head = partition.to_bytes(PARTITION_BYTES, "big")
    for index, byte in enumerate(head):
        data[keys.offsets[:-1] + index] = byte
    return ByteStrings(data, keys.offsets)


def entry_order(keys: KeyBatch, max_parallelism: int) -> Int64Array:
    """int64[n]: the rows in the order of their entry keys."""
    groups = key_group_of(keys.hashes, max_parallelism)
    if keys.fixed is not None:
        order = _order_in_groups(groups, keys.fixed.byteswap().view(np.uint64))
        if keys.nulls is not None:  # the null key's entry is the shortest of its group
            order = order[np.lexsort((~keys.nulls[order], groups[order]))]
        return order
    order = _order_in_groups(groups, keys.hashes)
    return _untie(order, keys.hashes[order], keys)


def _order_in_groups(groups: UInt16Array, words: UInt64Array) -> Int64Array:
    """The rows by group, those of one by their words: each group is sorted by itself, in the caches."""
    order = np.argsort(groups, kind="stable")
    words = words[order]
    bounds = [0, *(np.flatnonzero(np.diff(groups[order])) + 1).tolist(), len(order)]
    for start, stop in pairwise(bounds):
        part = order[start:stop]
        part[:] = part[np.argsort(words[start:stop])]
    return order


def _untie(order: Int64Array, hashes: np.ndarray, keys: KeyBatch) -> Int64Array:
    """Sorts the rare keys with equal hashes by their bytes."""
    equal = hashes[1:] == hashes[:-1]
    if not equal.any():
        return order
    rows = order.tolist()
    start = 0
    for place in np.append(np.flatnonzero(~equal) + 1, len(rows)).tolist():
        if place - start > 1:
            rows[start:place] = sorted(rows[start:place], key=keys.to_bytes)
        start = place
    return np.array(rows, np.int64)


def entry_keys(partition: int, keys: KeyBatch, max_parallelism: int) -> ByteStrings:
    """The entry keys of n keys, in the order of the keys."""
    groups = key_group_of(keys.hashes, max_parallelism)
    head = np.frombuffer(partition.to_bytes(PARTITION_BYTES, "big"), np.uint8)
    group_bytes = groups.astype(">u2").view(np.uint8).reshape(len(keys), GROUP_BYTES)
    if keys.fixed is not None:
        return _fixed_entry_keys(keys, head, group_bytes)
    assert keys.data is not None
    assert keys.offsets is not None
    lengths = np.diff(keys.offsets)
    start = _HEAD_BYTES + _HASH_BYTES
    offsets = bounds_of(lengths + start)
    data = np.empty(int(offsets[-1]), np.uint8)
    hash_bytes = keys.hashes.astype(">u8").view(np.uint8).reshape(len(keys), _HASH_BYTES)
    for index in range(PARTITION_BYTES):
        data[offsets[:-1] + index] = head[index]
    for index in range(GROUP_BYTES):
        data[offsets[:-1] + PARTITION_BYTES + index] = group_bytes[:, index]
    for index in range(_HASH_BYTES):
        data[offsets[:-1] + _HEAD_BYTES + index] = hash_bytes[:, index]
    LOOPS.copy_ranges(keys.data, keys.offsets[:-1], data, offsets[:-1] + start, lengths)
    return ByteStrings(data, offsets)


def _fixed_entry_keys(keys: KeyBatch, head: np.ndarray, group_bytes: np.ndarray) -> ByteStrings:
    assert keys.fixed is not None
    matrix = np.empty((len(keys), _FIXED_BYTES), np.uint8)
    matrix[:, :PARTITION_BYTES] = head
    matrix[:, PARTITION_BYTES:_HEAD_BYTES] = group_bytes
    matrix[:, _HEAD_BYTES] = 1
    words = np.ascontiguousarray(keys.fixed, "<i8").view(np.uint8)
    matrix[:, _HEAD_BYTES + 1 :] = words.reshape(len(keys), _WORD_BYTES)
    lengths = np.full(len(keys), _FIXED_BYTES, np.int64)
    data = matrix.reshape(-1)
    if keys.nulls is not None and keys.nulls.any():
        matrix[keys.nulls, _HEAD_BYTES] = 0
        lengths[keys.nulls] = _HEAD_BYTES + 1
        data = matrix[np.arange(_FIXED_BYTES) < lengths[:, None]]
    return ByteStrings(data, bounds_of(lengths))


def decoded_keys(key_types: Sequence[pa.DataType], entries: ByteStrings) -> KeyBatch:
    """Inverse of ``entry_keys``, whatever the partition."""
    starts = entries.offsets[:-1]
    types = tuple(key_types)
    if is_fixed_key(types):
        present = entries.data[starts + _HEAD_BYTES] == 1
        matrix = np.zeros((len(entries), _WORD_BYTES), np.uint8)
        lengths = np.where(present, _WORD_BYTES, 0)
        targets = np.arange(len(entries), dtype=np.int64) * _WORD_BYTES
        flat = matrix.reshape(-1)
        LOOPS.copy_ranges(entries.data, starts + _HEAD_BYTES + 1, flat, targets, lengths)
        nulls = None if present.all() else ~present
        return KeyBatch(types, flat.view("<i8"), nulls, None, None)
    hash_bytes = np.empty(len(entries) * _HASH_BYTES, np.uint8)
    targets = np.arange(len(entries), dtype=np.int64) * _HASH_BYTES
    widths = np.full(len(entries), _HASH_BYTES, np.int64)
    LOOPS.copy_ranges(entries.data, starts + _HEAD_BYTES, hash_bytes, targets, widths)
    hashes = hash_bytes.view(">u8").astype(np.uint64)
    start = _HEAD_BYTES + _HASH_BYTES
    sizes = entries.lengths() - start
    offsets = bounds_of(sizes)
    data = np.empty(int(offsets[-1]), np.uint8)
    LOOPS.copy_ranges(entries.data, starts + start, data, offsets[:-1], sizes)
    return KeyBatch(types, None, None, data, offsets, hashes)


def entries_by_key(keys: list[bytes], values: list[bytes | None]) -> SstEntries:
    """Values of different keys, in any order, as entries; None = the key is removed."""
    order = string_order(keys)
    ordered = [values[row] for row in order]
    gone = None
    if None in values:
        gone = np.array([value is None for value in ordered], np.bool_)
    present = [value or b"" for value in ordered]
    return SstEntries(ByteStrings.of([keys[row] for row in order]), ByteStrings.of(present), gone)


def string_order(strings: list[bytes]) -> list[int]:
    """The rows of byte strings in ascending order; mostly by sorting numbers.

    Args:
        strings: n different strings.
    """
    width = PARTITION_BYTES + GROUP_BYTES + _HASH_BYTES
    heads = np.frombuffer(
        b"".join([text[:width].ljust(width, b"\0") for text in strings]), np.uint8
    )
    matrix = heads.reshape(len(strings), width)
    first, group, last = (
        np.ascontiguousarray(matrix[:, low:high]).view(kind).reshape(-1)
        for low, high, kind in ((0, 8, ">u8"), (8, 10, ">u2"), (10, 18, ">u8"))
    )
    order = np.lexsort((last, group, first))
    tied = (np.diff(matrix[order], axis=0) == 0).all(axis=1)
    rows: list[int] = order.tolist()
    if not tied.any():
        return rows
    start = 0
    for place in np.append(np.flatnonzero(~tied) + 1, len(rows)).tolist():
        if place - start > 1:
            rows[start:place] = sorted(rows[start:place], key=strings.__getitem__)
        start = place
    return rows
