"""The rows of one namespace (a slice of a window), as the batches they came in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]


class RowTable:
    """Batches in order of arrival, each row with its place in that order.

    Attributes:
        emitted_rows: rows from the front that have been handed out: no longer part of the state.
    """

    def __init__(self) -> None:
        self.emitted_rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._sequences: list[Int64Array] = []

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def memory_bytes(self) -> int:
        """Approximate size."""
        return sum(batch.nbytes for batch in self._batches) + 8 * len(self)

    def add(self, batch: pa.RecordBatch, sequence: Int64Array) -> None:
        """Adds n rows with their places in the order of arrival."""
        self._batches.append(batch)
        self._sequences.append(sequence)

    def extend(self, tables: Sequence[RowTable]) -> None:
        """Adds the rows of other tables, without copying."""
        for table in tables:
            self._batches += table._batches
            self._sequences += table._sequences

    def all_rows(self) -> pa.RecordBatch:
        """The rows, at least one, in order of arrival."""
        rows = concatenated(self._batches)
        sequence = np.concatenate(self._sequences)
        if (np.diff(sequence) > 0).all():
            return rows
        return rows.take(pa.array(np.argsort(sequence, kind="stable")))

    def replace(self, rows: pa.RecordBatch) -> None:
        """Holds the same rows in another order, from which they are now emitted."""
        self._batches, self._sequences = [rows], [np.arange(rows.num_rows)]


def concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of at least one batch of one schema."""
    if len(batches) == 1:
        return batches[0]
    arrays = [
        pa.concat_arrays([batch.column(i) for batch in batches])
        for i in range(batches[0].num_columns)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batches[0].schema)
