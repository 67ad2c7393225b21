"""The order in which timers are due: by time, then by the hash of the key, then by its bytes."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_encoding import KeyBatch, untied
from penstock.storage.key_types import Int64Array

Place = tuple[int, int]
"""Time and hash of a key: a place in the order, that of keys with equal hashes included."""


def firing_order(times: Int64Array, keys: KeyBatch) -> Int64Array:
    """The rows of n timers in the order in which they are due: the same for the same timers."""
    order = np.lexsort((keys.hashes, times))
    hashes = keys.hashes[order]
    # The same timer twice (deleted and back), or keys whose hashes collide.
    tied = (np.diff(times[order]) == 0) & (hashes[1:] == hashes[:-1])
    return untied(order, tied, keys.to_bytes)
