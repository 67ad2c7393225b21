"""Reads the rows of keyed states out of a checkpoint or savepoint, whatever backend has written them.

Runs are read part by part and merged some key-groups at a time. A database is downloaded into a scratch directory, the files
that have something of the wanted key-groups, and RocksDB reads it.

Example: all rows of a state, as batches.
    with StateRows(reader) as rows:
        for piece in state.pieces:
            for namespace, batches in rows.batches_of(state, piece):
                ...
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.entries.database_reader_store import ReadOnlyDatabase, Scope, download
from penstock.storage.entries.entry_keys import group_bounds, partition_bounds
from penstock.storage.entries.entry_rows import entry_rows
from penstock.storage.entries.file_names import BACKEND
from penstock.storage.keyed_state import StatePieces, StoredKeyedState, shown_rows
from penstock.storage.run_columns import TIMER_KIND, within
from penstock.storage.run_lists import marked
from penstock.storage.run_merge import identity_of, merged_rows, whole_lists
from penstock.storage.run_reader import SegmentPlace


@dataclass(frozen=True, slots=True)
class _Opened:
    """The database of a snapshot, with what it has of some key-groups."""

    snapshot: checkpoint_pb2.KeyedStateSnapshot
    key_groups: range
    path: Path
    database: ReadOnlyDatabase


class StateRows:
    """Reads rows of keyed states; used on one thread, as a context that removes what was downloaded.

    Of one snapshot after the other a database is downloaded once: ask for all states of one before the next.

    Args:
        reader: of the files that the manifest names.
    """

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self._scratch: Path | None = None
        self._numbers = count()
        self._opened: _Opened | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes what was downloaded."""
        self._close_database()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def batches_of(
        self, state: StoredKeyedState, piece: StatePieces, key_groups: range | None = None
    ) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """What one subtask has of a state: namespaces with the rows that count, each once, in batches of ``state.schema``.

        Rows are read before the next namespace is asked for. They come in no order; ``rows`` of windows have theirs in
        ``__sequence``.

        Args:
            key_groups: those that are wanted; None = all.

        Raises:
            StoreNotFound, StoreCorrupt, StoreTransient: a file cannot be read.
        """
        for namespace, rows in self.stored_of(state, piece, key_groups):
            yield namespace, shown_rows(state, rows, namespace)

    def stored_of(
        self, state: StoredKeyedState, piece: StatePieces, key_groups: range | None = None
    ) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """The same as rows of runs, none of them a tombstone: batches of ``piece.schema``."""
        theirs = piece.key_groups
        wanted = theirs if key_groups is None else _common(theirs, key_groups)
        if not wanted:
            return
        if piece.snapshot.backend != BACKEND:
            for namespace, segments in piece.by_namespace().items():
                yield namespace, self._merged(state, piece, segments, wanted)
            return
        partitions = piece.by_namespace()
        if not partitions:
            return
        database = self._database(state, piece, wanted)
        for namespace, segments in partitions.items():
            yield (
                namespace,
                chain.from_iterable(
                    _of_partition(database, state, piece, one.offset, wanted) for one in segments
                ),
            )

    def _database(
        self, state: StoredKeyedState, piece: StatePieces, wanted: range
    ) -> ReadOnlyDatabase:
        """The database of a snapshot; the one before is closed and removed."""
        opened = self._opened
        if opened and opened.snapshot is piece.snapshot and opened.key_groups == wanted:
            return opened.database
        self._close_database()
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="penstock-state-"))
        path = self._scratch / str(next(self._numbers))
        scope = Scope(wanted, state.max_parallelism)
        is_whole = wanted == piece.key_groups
        download(piece.snapshot, self._reader, path, None if is_whole else scope)
        database = ReadOnlyDatabase(path)
        self._opened = _Opened(piece.snapshot, wanted, path, database)
        return database

    def _close_database(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.database.close()
            shutil.rmtree(opened.path, ignore_errors=True)

    def _merged(
        self,
        state: StoredKeyedState,
        piece: StatePieces,
        segments: Sequence[checkpoint_pb2.StateSegment],
        wanted: range,
    ) -> Iterator[pa.RecordBatch]:
        places = [_place(state, piece, one) for one in segments]
        identity = identity_of(state.kind, piece.schema)
        return merged_rows(self._reader, places, identity, wanted)


def _of_partition(
    database: ReadOnlyDatabase,
    state: StoredKeyedState,
    piece: StatePieces,
    number: int,
    wanted: range,
) -> Iterator[pa.RecordBatch]:
    schema, is_of_lists = marked(state.kind, piece.schema), state.kind == "list"
    entries = entry_rows(state.kind, schema, piece.snapshot.max_parallelism)
    # Timers lie in the order of time, over all key-groups.
    is_by_time = state.kind == TIMER_KIND
    bounds = partition_bounds(number) if is_by_time else group_bounds(number, wanted)
    found = (within(entries.batch(*one), wanted) for one in database.scan(*bounds))
    rows = (batch for batch in found if batch.num_rows)
    yield from whole_lists(rows, identity_of(state.kind, schema)) if is_of_lists else rows


def _place(
    state: StoredKeyedState, piece: StatePieces, segment: checkpoint_pb2.StateSegment
) -> SegmentPlace:
    handles = {file.name: file.handle for file in piece.snapshot.files}
    where = f"state {state.name!r} of operator {state.uid!r}, file {segment.file}"
    if segment.file not in handles:
        raise StoreCorrupt(f"{where}: the manifest names no such file")
    return SegmentPlace(
        handles[segment.file], segment.offset, segment.size_bytes, segment.parts, where
    )


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
