"""Small integers for keys, and the keys of those integers again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import RecordTable, distinct, encode_keys
from taskmanager.state.key_batches import retyped
from taskmanager.state.value_log import ValueLog

Int64Array = npt.NDArray[np.int64]

_COMPACT_ABOVE = 1 << 15


class KeyIndex:
    """Gives every key an index; the index of a removed key is given out again.

    Args:
        key_types: types of the key columns.
    """

    def __init__(self, key_types: Sequence[pa.DataType]) -> None:
        self._types = tuple(key_types)
        self._records = RecordTable(key_types, [], with_index=True)
        self._logs = [ValueLog(kind) for kind in key_types]
        self._position = np.full(64, -1, np.int64)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bound(self) -> int:
        """One more than the largest index in use."""
        return self._records.index_bound

    def memory_bytes(self) -> int:
        """Approximate size."""
        logs = sum(log.memory_bytes for log in self._logs)
        return self._records.memory_bytes() + logs + self._position.nbytes

    def indices(self, keys: KeyBatch) -> Int64Array:
        """The indices of keys, int64[n]; new keys are added."""
        indices = self._records.lookup_or_insert(keys)
        missing = self.bound - len(self._position)
        if missing > 0:
            added = np.full(max(missing, len(self._position)), -1, np.int64)
            self._position = np.append(self._position, added)
        new = np.flatnonzero(self._position[indices] < 0)
        if len(new):
            added, rows = np.unique(indices[new], return_index=True)
            first = len(self._logs[0])
            # Restored keys have plain types: what is kept has one type.
            columns = retyped(keys.take(new[rows]), self._types).to_arrays()
            for log, values in zip(self._logs, columns, strict=True):
                log.append(values)
            self._position[added] = np.arange(first, first + len(added))
        return indices

    def missing(self, keys: KeyBatch) -> KeyBatch:
        """The different keys that have no index."""
        absent = keys.take(np.flatnonzero(self._records.lookup(keys) < 0))
        return absent.take(distinct(absent)[0]) if len(absent) else absent

    def keys(self, indices: Int64Array) -> list[pa.Array]:
        """The keys that have the indices, per key column n values."""
        positions = self._position[indices]
        # A position of -1 would stand for null: every index that is asked for is in use.
        assert not len(positions) or positions.min() >= 0, "an index that is not in use"
        return [log.take(positions) for log in self._logs]

    def remove(self, indices: Int64Array) -> None:
        """Forgets the keys that have the (different) indices."""
        if not len(indices):
            return
        self._records.remove(encode_keys(self.keys(indices)))
        self._position[indices] = -1
        if len(self._logs[0]) > max(2 * len(self._records), _COMPACT_ABOVE):
            used = np.flatnonzero(self._position >= 0)
            positions = self._position[used]
            for log in self._logs:
                log.keep(positions)
            self._position[used] = np.arange(len(used))
