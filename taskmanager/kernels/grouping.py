"""Keys of one batch: hashing, encoding and grouping them with this process's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from penstock.storage import hashing, key_encoding
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array, UInt64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.slot_table import NO_NULLS

if TYPE_CHECKING:
    from taskmanager.kernels.compiled import Kernels


def hash_columns(columns: Sequence[pa.Array]) -> UInt64Array:
    """Same as ``penstock.storage.hashing.hash_columns``, fast.

    Raises:
        JobRejected: a column's type cannot be a key.
    """
    return hashing.hash_columns(columns, process_kernels())


def encode_keys(columns: Sequence[pa.Array]) -> KeyBatch:
    """Same as ``penstock.storage.key_encoding.encode_keys``, fast.

    Raises:
        JobRejected: a column's type cannot be a key.
    """
    return key_encoding.encode_keys(columns, process_kernels())


def distinct(keys: KeyBatch, kernels: Kernels | None = None) -> tuple[Int64Array, Int64Array]:
    """Groups the rows of a batch by key, groups in order of first appearance.

    Args:
        kernels: implementation, for tests.

    Returns:
        The first row of each group, int64[m], and the group of each row, int64[n].
    """
    implementation = kernels or process_kernels()
    rows = len(keys)
    first = np.empty(rows, dtype=np.int64)
    inverse = np.empty(rows, dtype=np.int64)
    scratch = np.full(1 << max(4, (2 * rows - 1).bit_length()), -1, dtype=np.int64)
    if keys.fixed is not None:
        nulls = NO_NULLS if keys.nulls is None else keys.nulls
        count = implementation.distinct_fixed(keys.fixed, nulls, scratch, first, inverse)
    else:
        assert keys.data is not None
        assert keys.offsets is not None
        count = implementation.distinct_bytes(
            keys.data, keys.offsets, keys.hashes, scratch, first, inverse
        )
    return first[:count], inverse
