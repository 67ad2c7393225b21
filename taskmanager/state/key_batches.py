"""Putting batches of keys together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch


def concatenated_keys(batches: Sequence[KeyBatch]) -> KeyBatch:
    """One batch of at least one batch, with the types of the first."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if first.fixed is not None:
        fixed = np.concatenate([batch.fixed for batch in batches if batch.fixed is not None])
        nulls = None
        if any(batch.nulls is not None for batch in batches):
            nulls = np.concatenate(
                [
                    np.zeros(len(batch), np.bool_) if batch.nulls is None else batch.nulls
                    for batch in batches
                ]
            )
        return KeyBatch(first.types, fixed, nulls, None, None)
    parts = []
    bounds = [np.zeros(1, np.int64)]
    size = 0
    for batch in batches:
        assert batch.data is not None
        assert batch.offsets is not None
        start = int(batch.offsets[0])
        parts.append(batch.data[start : int(batch.offsets[-1])])
        bounds.append(batch.offsets[1:] - start + size)
        size += len(parts[-1])
    offsets = np.concatenate(bounds)
    hashes = np.concatenate([batch.hashes for batch in batches])
    return KeyBatch(first.types, None, None, np.concatenate(parts), offsets, hashes)


def retyped(keys: KeyBatch, types: Sequence[pa.DataType]) -> KeyBatch:
    """The same keys, whose arrays have other types with the same values (dictionaries, plain ones)."""
    if keys.types == tuple(types):
        return keys
    return KeyBatch(tuple(types), keys.fixed, keys.nulls, keys.data, keys.offsets, keys.hashes)
