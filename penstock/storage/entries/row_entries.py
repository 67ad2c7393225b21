"""Rows of windows and joins as entries of the database.

An entry's key is

    partition (8 bytes) | key-group (2 bytes) | hash of the key (8 bytes) | sequence (8 bytes)

so that the rows of a key lie together, in the order in which they arrived; the value is the row
(``row_values``). A row is known by hash and sequence: no two rows of a key-group have the same sequence.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import (
    GROUP_BYTES,
    PARTITION_BYTES,
    WORD_BYTES,
    big_endian,
    heads,
)
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import Int64Array, UInt64Array

_HASH_AT: Final = PARTITION_BYTES + GROUP_BYTES
_SEQUENCE_AT: Final = _HASH_AT + WORD_BYTES
_ENTRY_BYTES: Final = _SEQUENCE_AT + WORD_BYTES


def row_entries(
    partition: int,
    hashes: UInt64Array,
    sequence: Int64Array,
    rows: ByteStrings,
    max_parallelism: int,
) -> SstEntries:
    """The entries of n rows, sorted."""
    groups = key_group_of(hashes, max_parallelism)
    order = np.lexsort((sequence, hashes, groups))
    columns: list[np.ndarray] = [groups[order], hashes[order], sequence[order].view(np.uint64)]
    matrix = heads(partition, [big_endian(column) for column in columns])
    return SstEntries(ByteStrings.rows_of(matrix), rows.take(order), None)


def key_prefixes(partition: int, hashes: UInt64Array, max_parallelism: int) -> list[bytes]:
    """What the entries of all rows of a key begin with, ascending, for n different hashes."""
    groups = key_group_of(hashes, max_parallelism)
    order = np.lexsort((hashes, groups))
    matrix = heads(partition, [big_endian(groups[order]), big_endian(hashes[order])])
    found: list[bytes] = matrix.reshape(-1).view(f"V{_SEQUENCE_AT}").tolist()
    return found


def row_sequences(names: list[bytes]) -> Int64Array:
    """int64[n]: the sequences of the rows of entries."""
    matrix = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), _ENTRY_BYTES)
    words = np.ascontiguousarray(matrix[:, _SEQUENCE_AT:]).view(">i8")
    return words.reshape(-1).astype(np.int64)
