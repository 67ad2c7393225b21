"""One word for each different value of a type.

>>> words = ValueWords(pa.string())
>>> words.of(pa.array(["b", "a", "b"])).tolist()
[0, 1, 0]
>>> words.values(np.array([1, 0])).to_pylist()
['a', 'b']
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.storage.key_encoding import is_fixed_key
from penstock.storage.key_types import Int64Array, fixed_array
from taskmanager.kernels import RecordTable, encode_keys
from taskmanager.state.slot_arrays import grown
from taskmanager.state.value_log import ValueLog
from taskmanager.state.wide_columns import OFFSET_BYTES_MAX, concatenated_array


class ValueWords:
    """See the module: a value of fixed width is its own canonical word; others are numbered as they come.

    Args:
        type_: a plain type that keys may have.
        bytes_max: more than that at once have offsets of 64 bits.
    """

    def __init__(self, type_: pa.DataType, bytes_max: int = OFFSET_BYTES_MAX) -> None:
        self._type = type_
        self._bytes_max = bytes_max
        self._is_fixed = is_fixed_key([type_])
        self._numbers = RecordTable([type_], [], with_index=True)
        self._values = ValueLog(type_, bytes_max)
        self._sizes = np.empty(64, np.int64)

    def of(self, values: pa.Array) -> Int64Array:
        """The word of each of n values, none of which is null: int64[n]."""
        keys = encode_keys([values])
        if keys.fixed is not None:
            return keys.fixed
        known = len(self._numbers)
        words = self._numbers.lookup_or_insert(keys)
        is_new = words >= known
        if is_new.any():
            _, first = np.unique(words[is_new], return_index=True)
            rows = np.flatnonzero(is_new)[first]
            self._values.append(values.take(pa.array(rows)))
            assert keys.offsets is not None
            self._sizes = grown(self._sizes, len(self._values))
            self._sizes[known : len(self._values)] = keys.offsets[rows + 1] - keys.offsets[rows]
        return words

    def values(self, words: Int64Array) -> pa.Array:
        """The values of n words."""
        if self._is_fixed:
            return fixed_array(self._type, words)
        part = (np.cumsum(self._sizes[words]) - 1) // self._bytes_max
        cuts = np.flatnonzero(np.diff(part)) + 1
        if not len(cuts):
            return self._values.take(words)
        pieces = [self._values.take(piece) for piece in np.split(words, cuts)]
        return concatenated_array(pieces, self._bytes_max)

    def view(self) -> ValueWords:
        """What gives the values of all words there are now, on any thread."""
        view = ValueWords(self._type)
        view._values, view._sizes = self._values.view(), self._sizes
        return view

    @property
    def memory_bytes(self) -> int:
        """Bytes of the values that are numbered."""
        return self._numbers.memory_bytes() + self._values.memory_bytes + self._sizes.nbytes
