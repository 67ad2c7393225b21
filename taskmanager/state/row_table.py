"""The rows of one namespace (a slice of a window), as the batches they came in.

Rows are only ever added, so a segment of a snapshot holds the batches that came since the one before.

Whoever reads all rows does so in *parts*, each with all rows of its keys: a table that is larger than
memory is never there as a whole. Tables with the same keys have the same parts where they are asked for
the same number of them.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from penstock.rows.whole_batches import no_rows
from penstock.storage.batch_parts import in_parts_with
from penstock.storage.key_encoding import encode_keys
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import Int64Array, UInt64Array, plain_array, value_type
from penstock.storage.run_columns import KEY_GROUP_FIELD, ROW_KEYS, SEQUENCE
from taskmanager.state.keyed_rows import SEGMENT_BATCH_ROWS, checked_rows
from taskmanager.state.snapshot_table import SealedTable
from taskmanager.state.wide_columns import OFFSET_BYTES_MAX, concatenated_array


@dataclass(frozen=True, slots=True)
class RowDescriptor:
    """What the rows of a table are.

    Attributes:
        keys: the key columns; none = all rows have one key.
    """

    schema: pa.Schema
    keys: tuple[str, ...]

    def stored_schema(self) -> pa.Schema:
        """The rows as they are exported: columns of plain types behind key-group and sequence."""
        plain = [field.with_type(value_type(field.type)) for field in self.schema]
        metadata = {ROW_KEYS: json.dumps(self.keys)}
        return pa.schema([KEY_GROUP_FIELD, SEQUENCE, *plain], metadata=metadata)


class KeyedRows:
    """Finds the keys of rows."""

    def __init__(self, descriptor: RowDescriptor) -> None:
        self._names = descriptor.keys

    def hashes(self, batch: pa.RecordBatch) -> UInt64Array:
        """uint64[n]: the hashes of the rows' keys."""
        keys = [plain_array(batch.column(name)) for name in self._names]
        keys = keys or [pa.array(np.zeros(batch.num_rows, np.int64))]
        return encode_keys(keys).hashes


@dataclass(slots=True)
class RowPiece:
    """Some rows of a table.

    Attributes:
        batches: in any order.
        sequences: per batch the rows' places in the order of arrival.
    """

    batches: list[pa.RecordBatch]
    sequences: list[Int64Array]

    def add(self, batch: pa.RecordBatch, sequence: Int64Array) -> None:
        """Adds n rows."""
        self.batches.append(batch)
        self.sequences.append(sequence)


class RowTable:
    """Batches in order of arrival, each row with its place in that order.

    Attributes:
        epoch: counts how often what was in memory has been given up.
    """

    kind = "rows"

    def __init__(self, descriptor: RowDescriptor) -> None:
        self.epoch = 0
        self._descriptor = descriptor
        self._batches: list[pa.RecordBatch] = []
        self._sequences: list[Int64Array] = []
        self._versions: list[int] = []
        self._version = 1
        self._row_count = 0
        self._bytes = 0

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

    @property
    def descriptor(self) -> RowDescriptor:
        """What the rows are."""
        return self._descriptor

    @property
    def is_in_memory(self) -> bool:
        """All rows are in memory, so that ``find`` finds none."""
        return True

    def part_count(self, rows: int) -> int:
        """In how many parts so many rows, of this table and others, are best read."""
        return 1

    def part(self, index: int, count: int) -> RowPiece:
        """One of ``count`` parts: all rows of the keys of some key-groups."""
        assert count == 1, "what is in memory is read at once"
        return RowPiece(self._batches, self._sequences)

    def find(self, hashes: UInt64Array) -> RowPiece:
        """The rows of keys with n different hashes, without those in memory."""
        return RowPiece([], [])

    def in_memory(self) -> RowPiece:
        """The rows that are in memory."""
        return RowPiece(list(self._batches), list(self._sequences))

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        return self._descriptor.stored_schema()

    def is_changed(self, since_version: int) -> bool:
        """Rows have been added."""
        return bool(self._versions and self._versions[-1] > since_version)

    def seal(self, since_version: int, max_parallelism: int) -> SealedTable:
        """Freezes the rows that came after ``since_version``; nothing is copied."""
        version = self._version
        self._version += 1
        first = bisect_right(self._versions, since_version) if since_version else 0
        batches, sequences = self._batches[first:], self._sequences[first:]
        read = partial(_sealed_rows, self._descriptor, batches, sequences, max_parallelism)
        return SealedTable(since_version, version, read)

    def forget(self, version: int) -> None:
        """There are no tombstones."""

    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
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


def _sealed_rows(
    descriptor: RowDescriptor,
    batches: list[pa.RecordBatch],
    sequences: list[Int64Array],
    max_parallelism: int,
) -> Iterator[pa.RecordBatch]:
    """Rows as they are exported, sorted by key-group in parts of bounded size."""
    keyed, schema = KeyedRows(descriptor), descriptor.stored_schema()

    def stored(batch: pa.RecordBatch, sequence: Int64Array) -> pa.RecordBatch:
        groups = key_group_of(keyed.hashes(batch), max_parallelism)
        arrays = [pa.array(groups), pa.array(sequence), *map(plain_array, batch.columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    for some, places in in_parts_with(batches, sequences):
        yield from _sorted_by_key_group(list(map(stored, some, places)))


def parts_of(tables: Sequence[RowTable]) -> Iterator[pa.RecordBatch]:
    """The rows of all tables, at least one, part by part; those of a part in order of arrival."""
    count = part_count(tables)
    for index in range(count):
        rows = part_rows(tables, index, count)
        if rows.num_rows:
            yield rows


def part_count(tables: Sequence[RowTable]) -> int:
    """In how many parts the rows of at least one table are best read together."""
    if all(table.is_in_memory for table in tables):
        return 1
    rows = sum(map(len, tables))
    return max(table.part_count(rows) for table in tables)


def part_rows(tables: Sequence[RowTable], index: int, count: int) -> pa.RecordBatch:
    """The rows of one of ``count`` parts of all tables, at least one, in order of arrival."""
    pieces = [table.part(index, count) for table in tables]
    batches = [batch for piece in pieces for batch in piece.batches]
    if not batches:
        return no_rows(tables[0].descriptor.schema)
    rows = concatenated(batches)
    sequence = np.concatenate([sequence for piece in pieces for sequence in piece.sequences])
    if (np.diff(sequence) > 0).all():
        return rows
    return rows.take(pa.array(np.argsort(sequence, kind="stable")))


def _sorted_by_key_group(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = concatenated(batches, OFFSET_BYTES_MAX)  # of the stored schema: never that large
    order = np.argsort(rows.column(0).to_numpy(), kind="stable")
    for start in range(0, len(order), SEGMENT_BATCH_ROWS):
        yield rows.take(pa.array(order[start : start + SEGMENT_BATCH_ROWS]))


def concatenated(
    batches: list[pa.RecordBatch], bytes_max: int = OFFSET_BYTES_MAX
) -> pa.RecordBatch:
    """One batch of at least one batch of one schema; columns that are too large for their offsets get wider ones."""
    if len(batches) == 1:
        return batches[0]
    arrays = [
        concatenated_array([batch.column(i) for batch in batches], bytes_max)
        for i in range(batches[0].num_columns)
    ]
    fields = [
        field.with_type(array.type) for field, array in zip(batches[0].schema, arrays, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
