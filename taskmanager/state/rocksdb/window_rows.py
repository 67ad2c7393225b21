"""Rows of windows and joins in the database, of which the latest are in memory.

Rows are only added. What has come since memory was given up last is in memory, whether it is written or
not; everything before is in the database alone. So of the database's rows those count whose sequence is
before the first one in memory, and a table that never gave up anything does not read at all.

A window that fires takes the rows of its slices over: what they have in memory is shared, and their
entries stay until nobody uses them. A window that fires is in no snapshot.

Invariants: sequences rise from one ``add`` to the next; batches behind the first ``written_count`` may be
missing in the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import group_bounds, partition_bounds
from penstock.storage.entries.row_entries import key_prefixes, row_entries, row_sequences
from penstock.storage.entries.row_values import check_storable, decoded_values, encoded_values
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import Int64Array, UInt64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.batch_parts import PART_BYTES, in_parts_with
from taskmanager.state.rocksdb.cache_host import CacheAccount, TableHome
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart
from taskmanager.state.row_table import KeyedRows, RowDescriptor, RowPiece, RowTable

PART_ROWS: Final = 1 << 13
"""About so many rows are handed out at once."""
_WRITTEN_ROWS: Final = 1 << 17
"""So many are sorted at once when they are written, or as many as ``PART_BYTES`` allows."""


@dataclass(slots=True)
class _Entries:
    """The entries of a partition, and how many tables use them."""

    partition: int
    is_stored: bool
    users: int = 1


@dataclass(slots=True)
class _Source:
    """Rows of a table: its entries, and what is in memory of it.

    Attributes:
        has_more: the entries hold rows that are not in memory.
        stored_count: how many; None = not known.
        batches, sequences: in memory.
        groups: the key-groups of the rows in memory, by batch; made when they are asked for.
    """

    entries: _Entries
    has_more: bool
    stored_count: int | None
    batches: list[pa.RecordBatch]
    sequences: list[Int64Array]
    groups: list[Int64Array] = field(default_factory=list)

    @property
    def end(self) -> int | None:
        """Entries with this sequence and later ones are in memory; None = none are."""
        return int(self.sequences[0][0]) if self.sequences else None


class StoredRowTable(RowTable):
    """See ``RowTable``.

    Args:
        partition: of the database.
        is_complete: the database holds nothing of it.
        row_count: rows in the database; 0 = not known, where it is not complete.
    """

    def __init__(
        self,
        partition: int,
        descriptor: RowDescriptor,
        home: TableHome,
        *,
        is_complete: bool,
        row_count: int = 0,
    ) -> None:
        super().__init__(descriptor)
        for column in descriptor.schema:
            check_storable(column.type)
        self.partition = partition
        self._home = home
        self._cache_account = CacheAccount(home.host)
        self._keyed = KeyedRows(descriptor)
        self._entries = _Entries(partition, not is_complete)
        self._has_more = not is_complete
        # Rows that are not in memory.
        self._stored_count: int | None = row_count if is_complete or row_count else None
        self._taken: list[_Source] = []
        self._written_count = 0
        self._lent_bytes = 0

    @override
    def __len__(self) -> int:
        if self._stored_count is None:
            self._stored_count = self._count_stored(self._own())
        return sum(
            self._count_stored(source) + sum(map(len, source.sequences))
            for source in self._sources()
        )

    @property
    def known_row_count(self) -> int:
        """Number of rows where it is known without reading, else 0."""
        return 0 if self._stored_count is None else self._row_count + self._stored_count

    @property
    def is_stored(self) -> bool:
        """The database holds something of it, or will."""
        return self._entries.is_stored

    @property
    @override
    def is_in_memory(self) -> bool:
        return not self._has_more

    @override
    def memory_bytes(self) -> int:
        return self._bytes + self._lent_bytes

    @override
    def add(self, batch: pa.RecordBatch, sequence: Int64Array) -> None:
        if batch.num_rows:
            super().add(batch, sequence)
            self._account()

    @override
    def extend(self, tables: Sequence[RowTable]) -> None:
        for table in tables:
            assert isinstance(table, StoredRowTable), "tables of one backend"
            for source in table._sources():
                source.entries.users += 1
                self._taken.append(source)

    @property
    @override
    def part_count(self) -> int:
        if not any(source.has_more for source in self._sources()):
            return 1
        return min(max(len(self) // PART_ROWS, 1), len(self._home.key_groups))

    @override
    def part(self, index: int, count: int) -> RowPiece:
        own = self._home.key_groups
        first, stop = (len(own) * place // count for place in (index, index + 1))
        groups = range(own.start + first, own.start + stop)
        found = RowPiece([], [])
        for source in self._sources():
            for batch, sequence in self._scan(source, groups):
                found.add(batch, sequence)
            self._add_from_memory(found, source, groups if count > 1 else None)
        return found

    @override
    def find(self, hashes: UInt64Array) -> RowPiece:
        own = self._own()
        found = RowPiece([], [])
        if own.has_more and len(hashes):
            prefixes = key_prefixes(self.partition, hashes, self._home.max_parallelism)
            parts = self._home.reader.scan_prefixes(prefixes)
            for batch, sequence in self._decoded(own, parts):
                found.add(batch, sequence)
                self._lent_bytes += batch.nbytes + sequence.nbytes
            self._lent_bytes += hashes.nbytes
            self._account()
        return found

    def freeze(self) -> FrozenPart | None:
        """What the database must be given; None = nothing. Nothing is copied."""
        if self._written_count == len(self._batches):
            return None
        self._entries.is_stored = True
        epoch, count = self.epoch, len(self._batches)
        unwritten = slice(self._written_count, count)
        batches, sequences = self._batches[unwritten], self._sequences[unwritten]
        return FrozenPart(
            self.partition,
            lambda: self._entries_in_parts(batches, sequences),
            lambda: self.written(epoch, count),
        )

    def written(self, epoch: int, count: int) -> None:
        """The database has the first ``count`` batches of those in memory; on any thread."""
        if epoch == self.epoch:
            self._written_count = max(self._written_count, count)

    def evict(self, *, everything: bool) -> None:
        """Forgets what is in memory; all of it has been written."""
        assert self._written_count == len(self._batches), "unwritten rows"
        if self._batches:
            self._has_more = True
            if self._stored_count is not None:
                self._stored_count += self._row_count
        self._batches, self._sequences, self._versions = [], [], []
        self._row_count = self._bytes = self._lent_bytes = self._written_count = 0
        self.epoch += 1
        self._account()

    def close(self) -> list[int]:
        """The table is not used any more; which partitions nobody uses."""
        self._cache_account.resize(0)
        unused = []
        for entries in (self._entries, *(source.entries for source in self._taken)):
            entries.users -= 1
            if not entries.users and entries.is_stored:
                unused.append(entries.partition)
        return unused

    def _entries_in_parts(
        self, batches: list[pa.RecordBatch], sequences: list[Int64Array]
    ) -> list[SstEntries]:
        """Rows as entries, in parts that are each sorted; on any thread."""
        parts = in_parts_with(batches, sequences, PART_BYTES, _WRITTEN_ROWS)
        return list(starmap(self.entries_of, parts))

    def entries_of(self, batches: list[pa.RecordBatch], sequences: list[Int64Array]) -> SstEntries:
        """Rows as entries; on any thread."""
        loops = process_kernels()
        hashes = np.concatenate([self._keyed.hashes(batch) for batch in batches])
        columns = [
            pa.concat_arrays([batch.column(index) for batch in batches])
            for index in range(batches[0].num_columns)
        ]
        return row_entries(
            self.partition,
            hashes,
            np.concatenate(sequences),
            encoded_values(columns, loops),
            self._home.max_parallelism,
            loops,
        )

    def _own(self) -> _Source:
        return _Source(
            self._entries,
            self._has_more,
            self._stored_count,
            list(self._batches),
            list(self._sequences),
        )

    def _sources(self) -> list[_Source]:
        return [self._own(), *self._taken]

    def _count_stored(self, source: _Source) -> int:
        if source.stored_count is None:
            end, count = source.end, 0
            bounds = partition_bounds(source.entries.partition)
            for names, _ in self._home.reader.scan(*bounds):
                count += len(names) if end is None else int((row_sequences(names) < end).sum())
            source.stored_count = count
        return source.stored_count

    def _add_from_memory(self, found: RowPiece, source: _Source, groups: range | None) -> None:
        if groups is None:
            for batch, sequence in zip(source.batches, source.sequences, strict=True):
                found.add(batch, sequence)
            return
        if not source.groups:
            limit = self._home.max_parallelism
            source.groups = [
                key_group_of(self._keyed.hashes(batch), limit).astype(np.int64)
                for batch in source.batches
            ]
        rows = zip(source.batches, source.sequences, source.groups, strict=True)
        for batch, sequence, of_row in rows:
            chosen = np.flatnonzero((of_row >= groups.start) & (of_row < groups.stop))
            if len(chosen):
                found.add(batch.take(pa.array(chosen)), sequence[chosen])

    def _scan(self, source: _Source, groups: range) -> Iterator[tuple[pa.RecordBatch, Int64Array]]:
        """The rows of key-groups that are not in memory."""
        if not source.has_more or not groups:
            return
        begin, end = group_bounds(source.entries.partition, groups)
        end = min(end, partition_bounds(source.entries.partition)[1])
        yield from self._decoded(source, self._home.reader.scan(begin, end))

    def _decoded(
        self, source: _Source, parts: Iterator[tuple[list[bytes], list[bytes]]]
    ) -> Iterator[tuple[pa.RecordBatch, Int64Array]]:
        schema, loops, end = self._descriptor.schema, process_kernels(), source.end
        for names, values in parts:
            if not names:
                continue
            sequence = row_sequences(names)
            if end is not None:
                rows = np.flatnonzero(sequence < end)
                if len(rows) < len(names):
                    sequence = sequence[rows]
                    values = [values[row] for row in rows.tolist()]
            if len(sequence):
                columns = decoded_values(schema.types, ByteStrings.of(values), loops)
                yield pa.RecordBatch.from_arrays(columns, schema=schema), sequence

    def _account(self) -> None:
        self._cache_account.resize(self.memory_bytes())
