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
from penstock.storage.entries.entry_keys import (
    PARTITION_BYTES,
    WORD_BYTES,
    big_endian,
    keys_in,
    names_with_keys,
    words_at,
)
from penstock.storage.entries.firing_order import Place, firing_order
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import BoolArray, Int64Array

_HASH_AT: Final = PARTITION_BYTES + WORD_BYTES
_KEY_AT: Final = _HASH_AT + WORD_BYTES
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
    columns = [big_endian(times.view(np.uint64) ^ _SIGN), big_endian(keys.hashes)]
    names = names_with_keys(partition, columns, keys)
    values = ByteStrings.rows_of(np.ones((len(order), 1), np.uint8))
    is_gone = None if deleted is None or not deleted.any() else deleted[order]
    return SstEntries(names, values, is_gone)


def decoded_timers(
    key_types: Sequence[pa.DataType], names: list[bytes]
) -> tuple[KeyBatch, Int64Array]:
    """The timers of at least one entry."""
    entries = ByteStrings.of(names)
    times = (words_at(entries, PARTITION_BYTES) ^ _SIGN).view(np.int64)
    return keys_in(key_types, entries, _KEY_AT, _HASH_AT), times


def timer_groups(names: list[bytes], max_parallelism: int) -> Int64Array:
    """int64[n]: the key-groups of entries."""
    hashes = words_at(ByteStrings.of(names), _HASH_AT)
    return key_group_of(hashes, max_parallelism).astype(np.int64)


def timer_place(name: bytes) -> Place:
    """Where the timer of an entry stands in the order."""
    time_bits = int.from_bytes(name[PARTITION_BYTES:_HASH_AT], "big") - (1 << 63)
    return time_bits, int.from_bytes(name[_HASH_AT:_KEY_AT], "big")
