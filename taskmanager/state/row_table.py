"""The rows of one namespace (a slice of a window), as the batches they came in.

Rows are only ever added, so a segment of a snapshot holds the batches that came since the one before;
when rows are put into another order to be handed out, it holds all that are left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.storage.key_encoding import encode_keys
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import plain_array, value_type
from taskmanager.state.keyed_rows import KEY_GROUP_FIELD, SEGMENT_BATCH_ROWS, checked_rows
from taskmanager.state.snapshot_table import RestoredPart

Int64Array = npt.NDArray[np.int64]

SEQUENCE = pa.field("__sequence", pa.int64(), nullable=False)
"""Place of a row in the order of arrival."""

_SORTED_BYTES_MAX = 256 << 20
"""How much is sorted by key-group at once when rows are exported."""


@dataclass(frozen=True, slots=True)
class RowDescriptor:
    """What the rows of a table are.

    Attributes:
        schema: of the rows.
        keys: the key columns; none = all rows have one key.
    """

    schema: pa.Schema
    keys: tuple[str, ...]

    def stored_schema(self) -> pa.Schema:
        """The rows as they are exported: columns of plain types behind key-group and sequence."""
        plain = [field.with_type(value_type(field.type)) for field in self.schema]
        return pa.schema([KEY_GROUP_FIELD, SEQUENCE, *plain])


class RowTable:
    """Batches in order of arrival, each row with its place in that order.

    Args:
        descriptor: what the rows are.

    Attributes:
        emitted_rows: rows from the front that have been handed out: no longer part of the state.
    """

    kind = "rows"

    def __init__(self, descriptor: RowDescriptor) -> None:
        self.emitted_rows = 0
        self._descriptor = descriptor
        self._batches: list[pa.RecordBatch] = []
        self._sequences: list[Int64Array] = []
        self._versions: list[int] = []
        self._version = 1
        self._row_count = 0
        self._bytes = 0
        self._is_reordered = False

    def __len__(self) -> int:
        return self._row_count

    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._bytes

    def add(self, batch: pa.RecordBatch, sequence: Int64Array) -> None:
        """Adds n rows with their places in the order of arrival."""
        self._append(batch, sequence, self._version)

    def _append(self, batch: pa.RecordBatch, sequence: Int64Array, version: int) -> None:
        self._batches.append(batch)
        self._sequences.append(sequence)
        self._versions.append(version)
        self._row_count += batch.num_rows
        self._bytes += batch.nbytes + sequence.nbytes

    def extend(self, tables: Sequence[RowTable]) -> None:
        """Adds the rows of other tables, without copying."""
        for table in tables:
            for batch, sequence in zip(table._batches, table._sequences, strict=True):
                self.add(batch, sequence)

    def all_rows(self) -> pa.RecordBatch:
        """The rows in order of arrival."""
        if not self._batches:
            empty = [pa.array([], field.type) for field in self._descriptor.schema]
            return pa.RecordBatch.from_arrays(empty, schema=self._descriptor.schema)
        rows = concatenated(self._batches)
        sequence = np.concatenate(self._sequences)
        if (np.diff(sequence) > 0).all():
            return rows
        return rows.take(pa.array(np.argsort(sequence, kind="stable")))

    def replace(self, rows: pa.RecordBatch) -> None:
        """Holds the same rows in another order, from which they are now emitted."""
        self._batches, self._sequences, self._versions = [], [], []
        self._row_count = self._bytes = 0
        self.add(rows, np.arange(rows.num_rows))
        self._is_reordered = True

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        return self._descriptor.stored_schema()

    def is_changed(self, since_version: int) -> bool:
        """Rows have been added, or are being handed out."""
        return self._is_reordered or bool(self._versions and self._versions[-1] > since_version)

    def seal(self, since_version: int, max_parallelism: int) -> SealedRows:
        """Freezes the rows that came after ``since_version``; nothing is copied."""
        version = self._version
        self._version += 1
        if self._is_reordered:
            left = self._batches[0].slice(self.emitted_rows)
            batches, sequences = [left], [self._sequences[0][self.emitted_rows :]]
            return SealedRows(0, version, self._descriptor, batches, sequences, max_parallelism)
        first = bisect_right(self._versions, since_version) if since_version else 0
        return SealedRows(
            since_version,
            version,
            self._descriptor,
            self._batches[first:],
            self._sequences[first:],
            max_parallelism,
        )

    def forget(self, version: int) -> None:
        """There are no tombstones."""

    def load(self, batches: Iterable[pa.RecordBatch], part: RestoredPart) -> None:
        """Adds restored rows."""
        stored, schema = self.schema(), self._descriptor.schema
        for batch in batches:
            rows = checked_rows(batch, stored)
            sequence: Int64Array = rows.column(1).to_numpy()
            arrays = [
                column if column.type == field.type else column.dictionary_encode().cast(field.type)
                for column, field in zip(rows.columns[2:], schema, strict=True)
            ]
            self._append(pa.RecordBatch.from_arrays(arrays, schema=schema), sequence, 0)


class SealedRows:
    """Rows as they were when their table was sealed.

    Attributes:
        since_version: the rows are those that came after it, 0 = all.
        version: what was sealed.
    """

    def __init__(
        self,
        since_version: int,
        version: int,
        descriptor: RowDescriptor,
        batches: list[pa.RecordBatch],
        sequences: list[Int64Array],
        max_parallelism: int,
    ) -> None:
        self.since_version = since_version
        self.version = version
        self._descriptor = descriptor
        self._batches = batches
        self._sequences = sequences
        self._max_parallelism = max_parallelism

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, sorted by key-group in parts of bounded size."""
        part: list[pa.RecordBatch] = []
        size_bytes = 0
        for batch, sequence in zip(self._batches, self._sequences, strict=True):
            part.append(self._stored(batch, sequence))
            size_bytes += batch.nbytes
            if size_bytes >= _SORTED_BYTES_MAX:
                yield from _sorted_by_key_group(part)
                part, size_bytes = [], 0
        if part:
            yield from _sorted_by_key_group(part)

    def release(self) -> None:
        """Gives the rows back."""
        self._batches, self._sequences = [], []

    def _stored(self, batch: pa.RecordBatch, sequence: Int64Array) -> pa.RecordBatch:
        names = self._descriptor.keys
        keys = [plain_array(batch.column(name)) for name in names]
        keys = keys or [pa.array(np.zeros(batch.num_rows, np.int64))]
        groups = key_group_of(encode_keys(keys).hashes, self._max_parallelism)
        arrays = [pa.array(groups), pa.array(sequence), *map(plain_array, batch.columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._descriptor.stored_schema())


def _sorted_by_key_group(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = concatenated(batches)
    order = np.argsort(rows.column(0).to_numpy(), kind="stable")
    for start in range(0, len(order), SEGMENT_BATCH_ROWS):
        yield rows.take(pa.array(order[start : start + SEGMENT_BATCH_ROWS]))


def concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of at least one batch of one schema."""
    if len(batches) == 1:
        return batches[0]
    arrays = [
        pa.concat_arrays([batch.column(i) for batch in batches])
        for i in range(batches[0].num_columns)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batches[0].schema)
