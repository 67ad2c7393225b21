"""Keys of one batch: grouping them with this process's kernels."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.slot_table import NO_NULLS


def distinct(keys: KeyBatch) -> tuple[Int64Array, Int64Array]:
    """Groups the rows of a batch by key, groups in order of first appearance.

    Returns:
        The first row of each group, int64[m], and the group of each row, int64[n].
    """
    rows = len(keys)
    first = np.empty(rows, dtype=np.int64)
    inverse = np.empty(rows, dtype=np.int64)
    scratch = np.full(1 << max(4, (2 * rows - 1).bit_length()), -1, dtype=np.int64)
    if keys.fixed is not None:
        nulls = NO_NULLS if keys.nulls is None else keys.nulls
        count = process_kernels().distinct_fixed(keys.fixed, nulls, scratch, first, inverse)
    else:
        assert keys.data is not None
        assert keys.offsets is not None
        count = process_kernels().distinct_bytes(
            keys.data, keys.offsets, keys.hashes, scratch, first, inverse
        )
    return first[:count], inverse
