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
from penstock.storage.key_encoding import KeyBatch, bounds_of, is_fixed_key, untied
from penstock.storage.key_groups import UInt16Array, key_group_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import Int64Array, UInt64Array

PARTITION_BYTES: Final = 8
GROUP_BYTES: Final = 2
WORD_BYTES: Final = 8
_LENGTH_BYTES: Final = 4
_HEAD_BYTES: Final = PARTITION_BYTES + GROUP_BYTES


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
    hashes = keys.hashes[order]
    return untied(order, hashes[1:] == hashes[:-1], keys.to_bytes)


def _order_in_groups(groups: UInt16Array, words: UInt64Array) -> Int64Array:
    """The rows by group, those of one by their words: each group is sorted by itself, in the caches."""
    order = np.argsort(groups, kind="stable")
    words = words[order]
    bounds = [0, *(np.flatnonzero(np.diff(groups[order])) + 1).tolist(), len(order)]
    for start, stop in pairwise(bounds):
        part = order[start:stop]
        part[:] = part[np.argsort(words[start:stop])]
    return order


def entry_keys(partition: int, keys: KeyBatch, max_parallelism: int) -> ByteStrings:
    """The entry keys of n keys, in the order of the keys."""
    groups = big_endian(key_group_of(keys.hashes, max_parallelism))
    columns = [groups] if keys.fixed is not None else [groups, big_endian(keys.hashes)]
    return names_with_keys(partition, columns, keys)


def decoded_keys(key_types: Sequence[pa.DataType], entries: ByteStrings) -> KeyBatch:
    """Inverse of ``entry_keys``, whatever the partition."""
    start = _HEAD_BYTES + (0 if is_fixed_key(key_types) else WORD_BYTES)
    return keys_in(key_types, entries, start, hash_at=_HEAD_BYTES)


def names_with_keys(partition: int, columns: Sequence[np.ndarray], keys: KeyBatch) -> ByteStrings:
    """Names of n entries: the partition, what is in the columns (see ``big_endian``), the key as ``KeyBatch.to_bytes``
    gives it."""
    if keys.fixed is not None:
        matrix = heads(partition, columns, room=1 + WORD_BYTES)
        width = matrix.shape[1]
        start = width - WORD_BYTES
        matrix[:, start - 1] = 1
        words = np.ascontiguousarray(keys.fixed, "<i8").view(np.uint8)
        matrix[:, start:] = words.reshape(len(keys), WORD_BYTES)
        lengths = np.full(len(keys), width, np.int64)
        data = matrix.reshape(-1)
        if keys.nulls is not None and keys.nulls.any():
            matrix[keys.nulls, start - 1] = 0
            lengths[keys.nulls] = start
            data = matrix[np.arange(width) < lengths[:, None]]
        return ByteStrings(data, bounds_of(lengths))
    assert keys.data is not None
    assert keys.offsets is not None
    behind = ByteStrings(keys.data, keys.offsets)
    return ByteStrings.rows_of(heads(partition, columns)).followed_by(behind)


def keys_in(
    key_types: Sequence[pa.DataType], entries: ByteStrings, start: int, hash_at: int
) -> KeyBatch:
    """The keys in names, which begin at a place of each; hashes are there where they are not computed."""
    types, starts = tuple(key_types), entries.offsets[:-1] + start
    if is_fixed_key(types):
        present = entries.data[starts] == 1
        words = np.zeros(len(entries), np.int64)
        targets = np.arange(len(entries), dtype=np.int64) * WORD_BYTES
        lengths = np.where(present, WORD_BYTES, 0)
        LOOPS.copy_ranges(entries.data, starts + 1, words.view(np.uint8), targets, lengths)
        return KeyBatch(types, words, None if present.all() else ~present, None, None)
    sizes = entries.lengths() - start
    offsets = bounds_of(sizes)
    data = np.empty(int(offsets[-1]), np.uint8)
    LOOPS.copy_ranges(entries.data, starts, data, offsets[:-1], sizes)
    return KeyBatch(types, None, None, data, offsets, words_at(entries, hash_at))


def heads(partition: int, columns: Sequence[np.ndarray], room: int = 0) -> np.ndarray:
    """uint8[n, ...]: what names begin with: the partition and the columns; and room for so many bytes behind that."""
    width = PARTITION_BYTES + sum(column.shape[1] for column in columns)
    matrix = np.empty((len(columns[0]), width + room), np.uint8)
    matrix[:, :PARTITION_BYTES] = np.frombuffer(
        partition.to_bytes(PARTITION_BYTES, "big"), np.uint8
    )
    place = PARTITION_BYTES
    for column in columns:
        matrix[:, place : place + column.shape[1]] = column
        place += column.shape[1]
    return matrix


def big_endian(numbers: np.ndarray) -> np.ndarray:
    """uint8[n, width]: n numbers such that their bytes have the order of unsigned values."""
    width = numbers.dtype.itemsize
    return numbers.astype(numbers.dtype.newbyteorder(">")).view(np.uint8).reshape(-1, width)


def words_at(entries: ByteStrings, start: int) -> UInt64Array:
    """uint64[n]: the big-endian numbers at a place of every string."""
    found = np.empty(len(entries) * WORD_BYTES, np.uint8)
    targets = np.arange(len(entries), dtype=np.int64) * WORD_BYTES
    widths = np.full(len(entries), WORD_BYTES, np.int64)
    LOOPS.copy_ranges(entries.data, entries.offsets[:-1] + start, found, targets, widths)
    return found.view(">u8").astype(np.uint64)


def map_name(head: bytes, key: bytes) -> bytes:
    """The name of an entry of a map: the entry key, the encoded key in the map, and its length, which tells where it begins."""
    return head + key + len(key).to_bytes(_LENGTH_BYTES, "big")


def map_parts(name: bytes) -> tuple[bytes, bytes]:
    """Inverse of ``map_name``."""
    end = len(name) - _LENGTH_BYTES
    start = end - int.from_bytes(name[end:], "big")
    return name[:start], name[start:end]


def entries_by_key(keys: list[bytes], values: list[bytes | None]) -> SstEntries:
    """Values of different keys, in any order, as entries; None = the key is removed."""
    order = string_order(keys).tolist()
    ordered = [values[row] for row in order]
    gone = None
    if None in values:
        gone = np.array([value is None for value in ordered], np.bool_)
    present = [value or b"" for value in ordered]
    return SstEntries(ByteStrings.of([keys[row] for row in order]), ByteStrings.of(present), gone)


def string_order(strings: list[bytes]) -> Int64Array:
    """The rows of byte strings in ascending order; mostly by sorting numbers.

    Args:
        strings: n different strings.
    """
    width = PARTITION_BYTES + GROUP_BYTES + WORD_BYTES
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
    return untied(order, tied, strings.__getitem__)
