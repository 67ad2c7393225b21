"""Tables that keep one row per key, or several known by key and a number, as entries of the database (``keyed_values``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import big_endian, entry_keys, entry_order
from penstock.storage.entries.keyed_values import SIGN
from penstock.storage.entries.row_values import encoded_values
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import distinct, encode_keys
from taskmanager.state.rocksdb.entry_batches import concat_strings


def keyed_entries(
    partition: int,
    keys: KeyBatch,
    numbers: Int64Array | None,
    values: ByteStrings,
    deleted: BoolArray,
    max_parallelism: int,
) -> SstEntries:
    """The entries of n rows, sorted; of several rows of one identity the last one counts."""
    count = len(keys)
    first, key_of = distinct(keys)
    different = keys.take(first)
    rank = np.empty(len(first), np.int64)
    rank[entry_order(different, max_parallelism)] = np.arange(len(first))
    place = rank[key_of]
    within = np.zeros(count, np.int64) if numbers is None else numbers
    order = np.lexsort((np.arange(count), within, place))
    is_last = np.ones(count, np.bool_)
    is_last[:-1] = (np.diff(place[order]) != 0) | (np.diff(within[order]) != 0)
    order = order[is_last]
    names = entry_keys(partition, keys.take(order), max_parallelism)
    if numbers is not None:
        behind = big_endian(numbers[order].view(np.uint64) ^ SIGN)
        names = names.followed_by(ByteStrings.rows_of(behind))
    gone = deleted[order]
    return SstEntries(names, values.take(order), gone if gone.any() else None)


def batch_entries(
    partition: int,
    batches: list[pa.RecordBatch],
    key_count: int,
    max_parallelism: int,
    *,
    with_numbers: bool,
) -> SstEntries:
    """The entries of at least one batch of a ``keyed_schema``, sorted.

    Args:
        key_count: how many columns the key has.
    """
    content_start = 2 + key_count + int(with_numbers)
    columns = [joined_column(batches, place) for place in range(2, content_start)]
    keys = encode_keys(columns[:key_count])
    numbers = columns[-1].to_numpy() if with_numbers else None
    content = [encoded_values(batch.columns[content_start:]) for batch in batches]
    deleted = joined_column(batches, 1).to_numpy(zero_copy_only=False)
    values = concat_strings(content)
    return keyed_entries(partition, keys, numbers, values, deleted, max_parallelism)


def joined_column(batches: list[pa.RecordBatch], place: int) -> Any:
    """One column of all batches."""
    return pa.concat_arrays([batch.column(place) for batch in batches])
