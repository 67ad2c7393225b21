"""How far the current count window of each key is filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from taskmanager.state.instances import NumberPool
from taskmanager.state.key_index import KeyIndex

Int64Array = npt.NDArray[np.int64]


class CountTable:
    """Per key: rows in its open window, that window's index, and the number its contents go by.

    A key stays for good, since the index of its windows goes on counting.

    Args:
        key_types: types of the key columns.
    """

    def __init__(self, key_types: Sequence[pa.DataType]) -> None:
        self._keys = KeyIndex(key_types)
        self.numbers = NumberPool()
        self.filled = np.zeros(64, np.int64)
        self.window_index = np.zeros(64, np.int64)
        self.instance = np.full(64, -1, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._keys.memory_bytes() + 3 * self.filled.nbytes

    def key_indices(self, keys: KeyBatch) -> Int64Array:
        """Where the keys are in ``filled``, ``window_index`` and ``instance``: int64[n]."""
        indices = self._keys.indices(keys)
        missing = self._keys.bound - len(self.filled)
        if missing > 0:
            zeros = np.zeros(max(missing, len(self.filled)), np.int64)
            self.filled = np.append(self.filled, zeros)
            self.window_index = np.append(self.window_index, zeros)
            self.instance = np.append(self.instance, zeros - 1)
        return indices

    def keys(self, indices: Int64Array) -> list[pa.Array]:
        """The keys, per key column n values."""
        return self._keys.keys(indices)
