"""Timers as entries of the database.

An entry's key is

    partition (8 bytes) | time (8 bytes) | hash (8 bytes) | key

with the time such that its bytes have the order of its values, and the key as ``KeyBatch.to_bytes`` gives
it. So the order of entries is that in which timers are due (``timer_order``), and the timers that are due
next are one range. Key-groups are no ranges: the hash tells them.

The value says nothing: it is one byte, because files of values of one size are made faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import PARTITION_BYTES
from penstock.storage.entries.firing_order import Place, firing_order
from penstock.storage.key_encoding import KeyBatch, bounds_of, is_fixed_key
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_loops import LOOPS
from penstock.storage.key_types import BoolArray, Int64Array

_WORD_BYTES: Final = 8
_HASH_AT: Final = PARTITION_BYTES + _WORD_BYTES
_KEY_AT: Final = _HASH_AT + _WORD_BYTES
_SIGN: Final = np.uint64(1 << 63)


def timer_entries(
    partition: int, keys: KeyBatch, times: Int64Array, deleted: BoolArray | None = None
) -> SstEntries:
    """The entries of n (different) timers, in their order.

    Args:
        deleted: bool[n], True = the entry is removed; None = none is.
    """
    order = firing_order(times, keys)
    keys, times = keys.take(order), times[order]
    count = len(order)
    heads = np.empty((count, _KEY_AT), np.uint8)
    heads[:, :PARTITION_BYTES] = np.frombuffer(partition.to_bytes(PARTITION_BYTES, "big"), np.uint8)
    ordered_times = times.view(np.uint64) ^ _SIGN
    heads[:, PARTITION_BYTES:_HASH_AT] = _big_endian(ordered_times)
    heads[:, _HASH_AT:] = _big_endian(keys.hashes)
    tails = _key_strings(keys)
    lengths = tails.lengths()
    offsets = bounds_of(lengths + _KEY_AT)
    data = np.empty(int(offsets[-1]), np.uint8)
    copy = LOOPS.copy_ranges
    head_starts = np.arange(count, dtype=np.int64) * _KEY_AT
    copy(heads.reshape(-1), head_starts, data, offsets[:-1], np.full(count, _KEY_AT, np.int64))
    copy(tails.data, tails.offsets[:-1], data, offsets[:-1] + _KEY_AT, lengths)
    values = ByteStrings(np.ones(count, np.uint8), np.arange(count + 1, dtype=np.int64))
    is_gone = None if deleted is None or not deleted.any() else deleted[order]
    return SstEntries(ByteStrings(data, offsets), values, is_gone)


def decoded_timers(
    key_types: Sequence[pa.DataType], names: list[bytes]
) -> tuple[KeyBatch, Int64Array]:
    """The timers of at least one entry."""
    entries = ByteStrings.of(names)
    starts = entries.offsets[:-1]
    times = (_words_at(entries, PARTITION_BYTES) ^ _SIGN).view(np.int64)
    types, sizes = tuple(key_types), entries.lengths() - _KEY_AT
    if is_fixed_key(types):
        present = entries.data[starts + _KEY_AT] == 1
        words = np.zeros(len(names), np.int64)
        targets = np.arange(len(names), dtype=np.int64) * _WORD_BYTES
        copied = np.where(present, _WORD_BYTES, 0)
        LOOPS.copy_ranges(entries.data, starts + _KEY_AT + 1, words.view(np.uint8), targets, copied)
        nulls = None if present.all() else ~present
        return KeyBatch(types, words, nulls, None, None), times
    offsets = bounds_of(sizes)
    data = np.empty(int(offsets[-1]), np.uint8)
    LOOPS.copy_ranges(entries.data, starts + _KEY_AT, data, offsets[:-1], sizes)
    hashes = _words_at(entries, _HASH_AT)
    return KeyBatch(types, None, None, data, offsets, hashes), times


def timer_groups(names: list[bytes], max_parallelism: int) -> Int64Array:
    """int64[n]: the key-groups of entries."""
    hashes = _words_at(ByteStrings.of(names), _HASH_AT)
    return key_group_of(hashes, max_parallelism).astype(np.int64)


def timer_place(name: bytes) -> Place:
    """Where the timer of an entry stands in the order."""
    time_bits = int.from_bytes(name[PARTITION_BYTES:_HASH_AT], "big") - (1 << 63)
    return time_bits, int.from_bytes(name[_HASH_AT:_KEY_AT], "big")


def _key_strings(keys: KeyBatch) -> ByteStrings:
    """``KeyBatch.to_bytes`` of all keys."""
    if keys.fixed is None:
        assert keys.data is not None
        assert keys.offsets is not None
        return ByteStrings(keys.data, keys.offsets)
    width = 1 + _WORD_BYTES
    matrix = np.ones((len(keys), width), np.uint8)
    words = np.ascontiguousarray(keys.fixed, "<i8").view(np.uint8)
    matrix[:, 1:] = words.reshape(len(keys), _WORD_BYTES)
    if keys.nulls is None or not keys.nulls.any():
        return ByteStrings(matrix.reshape(-1), np.arange(len(keys) + 1, dtype=np.int64) * width)
    matrix[keys.nulls, 0] = 0
    lengths = np.where(keys.nulls, 1, width)
    return ByteStrings(matrix[np.arange(width) < lengths[:, None]], bounds_of(lengths))


def _big_endian(words: np.ndarray) -> np.ndarray:
    return words.astype(">u8").view(np.uint8).reshape(len(words), _WORD_BYTES)


def _words_at(entries: ByteStrings, start: int) -> np.ndarray:
    """uint64[n]: the big-endian numbers at a place of every string."""
    count = len(entries)
    found = np.empty(count * _WORD_BYTES, np.uint8)
    targets = np.arange(count, dtype=np.int64) * _WORD_BYTES
    widths = np.full(count, _WORD_BYTES, np.int64)
    LOOPS.copy_ranges(entries.data, entries.offsets[:-1] + start, found, targets, widths)
    return found.view(">u8").astype(np.uint64)
