"""The key columns of an operator: read from batches as table keys, written to results as columns.

An unkeyed operator has one key, a constant that is in no input and no output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from penstock.rows.column_values import shown_value
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import key_array, plain_array, value_type
from taskmanager.kernels import encode_keys


class KeyColumns:
    """Where the keys lie in the batches of one schema.

    Args:
        names: the key columns; none = one window for all rows.
    """

    def __init__(self, names: Sequence[str], schema: pa.Schema) -> None:
        self.names = tuple(names)
        self.fields = [schema.field(name) for name in names]
        self.types = [value_type(field.type) for field in self.fields] or [pa.int64()]

    def encode(self, batch: pa.RecordBatch) -> KeyBatch:
        """The keys of the rows of a batch (rows or partial rows)."""
        return encode_keys(self._columns(batch, plain_array))

    def arrays(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The keys of the rows of a batch as arrays of ``types``."""
        return self._columns(batch, key_array)

    def _columns(
        self, batch: pa.RecordBatch, form: Callable[[pa.Array], pa.Array]
    ) -> list[pa.Array]:
        if not self.names:
            return [pa.array(np.zeros(batch.num_rows, np.int64))]
        return [form(batch.column(name)) for name in self.names]

    def outputs(self, keys: Sequence[pa.Array]) -> list[pa.Array]:
        """Key arrays of a table as the output columns."""
        return [as_type(array, f.type) for array, f in zip(keys, self.fields, strict=False)]

    def describe(self, batch: KeyBatch, row: int) -> str:
        """One key for a person: "user=7", or "" on an unkeyed stream."""
        arrays = batch.slice(row, row + 1).to_arrays()
        named = zip(self.names, arrays, strict=False)
        return ", ".join(f"{name}={shown_value(array[0])!r}" for name, array in named)


def as_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array with the type of its output column: dictionary-encoded where that is."""
    if array.type == kind:
        return array
    if pa.types.is_dictionary(kind):
        return array.cast(kind.value_type).dictionary_encode().cast(kind)
    return array.cast(kind)
