"""Rows of windows and joins in the database, of which the latest are in memory.

Rows are only added. What has come since memory was given up last is in memory, whether it is written or
not; everything before is in the database alone. So of the database's rows those count whose sequence is
before the first one in memory, and a table that never gave up anything does not read at all.

Invariant: sequences rise from one ``add`` to the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import starmap
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.batch_parts import in_parts_with
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import group_bounds, partition_bounds
from penstock.storage.entries.row_entries import key_prefixes, row_entries, row_sequences
from penstock.storage.entries.row_values import check_storable, decoded_values, encoded_values
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import Int64Array, UInt64Array
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.partitions import Partition
from taskmanager.state.rocksdb.spilled_table import LOADED_VERSION, Sealed, SpilledTable
from taskmanager.state.row_table import KeyedRows, RowDescriptor, RowPiece, RowTable

PART_ROWS: Final = 1 << 13
"""About so many rows are handed out at once."""
_WRITTEN_ROWS: Final = 1 << 17
"""So many are sorted at once when they are written, or as many as ``PART_BYTES`` allows."""
_NEVER: Final = 2**63 - 1


class StoredRowTable(RowTable, SpilledTable):
    """See ``RowTable``.

    Args:
        found: where they lie; a count of 0 = not known, where the database has some.
    """

    def __init__(self, found: Partition, home: TableHome, descriptor: RowDescriptor) -> None:
        RowTable.__init__(self, descriptor)
        SpilledTable.__init__(self, found, home)
        self._version = LOADED_VERSION + 1
        for column in descriptor.schema:
            check_storable(column.type)
        self._keyed = KeyedRows(descriptor)
        # Rows that are not in memory; None = not known.
        is_known = self._is_complete or found.row_count
        self._stored_count: int | None = found.row_count if is_known else None
        # Key-groups of the rows in memory, by batch; made when they are asked for.
        self._groups: list[Int64Array] = []
        self._lent_bytes = 0

    @override
    def __len__(self) -> int:
        if self._stored_count is None:
            names = (
                found for found, _ in self._home.reader.scan(*partition_bounds(self.partition))
            )
            self._stored_count = sum(int((row_sequences(one) < self._end).sum()) for one in names)
        return self._row_count + self._stored_count

    @property
    def known_row_count(self) -> int | None:
        """Number of rows where it is known without reading."""
        return None if self._stored_count is None else self._row_count + self._stored_count

    @property
    @override
    def is_in_memory(self) -> bool:
        return self._is_complete

    @override
    def memory_bytes(self) -> int:
        return self._bytes + self._lent_bytes

    @override
    def add(self, batch: pa.RecordBatch, sequence: Int64Array) -> None:
        if batch.num_rows:
            super().add(batch, sequence)
            self._account()

    @override
    def part_count(self, rows: int) -> int:
        return min(max(rows // PART_ROWS, 1), len(self._home.key_groups))

    @override
    def part(self, index: int, count: int) -> RowPiece:
        own = self._home.key_groups
        first, stop = (len(own) * place // count for place in (index, index + 1))
        groups = range(own.start + first, own.start + stop)
        found = RowPiece([], [])
        if not self._is_complete and groups:
            begin, end = group_bounds(self.partition, groups)
            end = min(end, partition_bounds(self.partition)[1])
            for batch, sequence in self._decoded(self._home.reader.scan(begin, end)):
                found.add(batch, sequence)
        self._add_from_memory(found, groups if count > 1 else None)
        return found

    @override
    def find(self, hashes: UInt64Array) -> RowPiece:
        found = RowPiece([], [])
        if not self._is_complete and len(hashes):
            prefixes = key_prefixes(self.partition, hashes, self._home.max_parallelism)
            for batch, sequence in self._decoded(self._home.reader.scan_prefixes(prefixes)):
                found.add(batch, sequence)
                self._lent_bytes += batch.nbytes + sequence.nbytes
            self._lent_bytes += hashes.nbytes
            self._account()
        return found

    @override
    def _sealed(self) -> Sealed:
        sealed = self.seal(self._written_version, self._home.max_parallelism)
        first = bisect_right(self._versions, self._written_version)
        batches, sequences = self._batches[first:], self._sequences[first:]
        entries = partial(self._entries_in_parts, batches, sequences)
        return sealed.version, entries, sealed.release

    def evict(self, *, everything: bool) -> None:
        """Forgets what is in memory; all of it has been written."""
        assert self.is_clean(), "unwritten rows"
        if self._batches:
            self._is_complete = False
            if self._stored_count is not None:
                self._stored_count += self._row_count
        self._batches, self._sequences, self._versions, self._groups = [], [], [], []
        self._row_count = self._bytes = self._lent_bytes = 0
        self.epoch += 1
        self._account()

    def _entries_in_parts(
        self, batches: list[pa.RecordBatch], sequences: list[Int64Array]
    ) -> list[SstEntries]:
        """Rows as entries, in parts that are each sorted; on any thread."""
        parts = in_parts_with(batches, sequences, _WRITTEN_ROWS)
        return list(starmap(self.entries_of, parts))

    def entries_of(self, batches: list[pa.RecordBatch], sequences: list[Int64Array]) -> SstEntries:
        """Rows as entries; on any thread."""
        hashes = np.concatenate([self._keyed.hashes(batch) for batch in batches])
        columns = [
            pa.concat_arrays([batch.column(index) for batch in batches])
            for index in range(batches[0].num_columns)
        ]
        return row_entries(
            self.partition,
            hashes,
            np.concatenate(sequences),
            encoded_values(columns),
            self._home.max_parallelism,
        )

    @property
    def _end(self) -> int:
        """Entries with this sequence and later ones are in memory."""
        return int(self._sequences[0][0]) if self._sequences else _NEVER

    def _add_from_memory(self, found: RowPiece, groups: range | None) -> None:
        limit = self._home.max_parallelism
        for place, (batch, sequence) in enumerate(zip(self._batches, self._sequences, strict=True)):
            if groups is None:
                found.add(batch, sequence)
                continue
            if place == len(self._groups):
                hashes = self._keyed.hashes(batch)
                self._groups.append(key_group_of(hashes, limit).astype(np.int64))
            of_row = self._groups[place]
            chosen = np.flatnonzero((of_row >= groups.start) & (of_row < groups.stop))
            if len(chosen):
                found.add(batch.take(pa.array(chosen)), sequence[chosen])

    def _decoded(
        self, parts: Iterator[tuple[list[bytes], list[bytes]]]
    ) -> Iterator[tuple[pa.RecordBatch, Int64Array]]:
        """The rows of entries that are not in memory."""
        schema, end = self._descriptor.schema, self._end
        for names, values in parts:
            if not names:
                continue
            sequence = row_sequences(names)
            rows = np.flatnonzero(sequence < end)
            if len(rows) < len(names):
                sequence = sequence[rows]
                values = [values[row] for row in rows.tolist()]
            if len(sequence):
                columns = decoded_values(schema.types, ByteStrings.of(values))
                yield pa.RecordBatch.from_arrays(columns, schema=schema), sequence
