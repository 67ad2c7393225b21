"""Opens the database of a subtask: empty, as one snapshot has it, or put together from several.

The same key-groups from one snapshot: its files become the database. Other key-groups: the files of the
largest snapshot become the database, what is foreign is dropped, and the entries of the others are
copied range by range. Entries that no partition of a snapshot owns (they were dropped after it) go too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from penstock.errors import Unrecoverable
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.key_encoding import KeyLoops
from taskmanager.state.backend import BackendEnvironment
from taskmanager.state.rocksdb.database_store import Database, ReadOnlyDatabase
from taskmanager.state.rocksdb.entry_keys import group_bounds, moved_to, partition_bounds
from taskmanager.state.rocksdb.file_ledger import SHARED_SUFFIX, FileLedger, local_name
from taskmanager.state.rocksdb.inner_state import is_inner_file
from taskmanager.state.rocksdb.partitions import PartitionCatalog, stored_segments
from taskmanager.state.rocksdb.slot_memory_store import SlotMemory
from taskmanager.state.rocksdb.sst_file import ByteStrings, SstEntries

BACKEND: Final = "rocksdb"
FORMAT_VERSION: Final = 1
_COPY_ROWS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class OpenedState:
    """A database with what is known about it."""

    database: Database
    catalog: PartitionCatalog
    ledger: FileLedger


def open_state(
    environment: BackendEnvironment, key_groups: range, memory: SlotMemory, loops: KeyLoops
) -> OpenedState:
    """The database of a subtask, with what is to be restored in it.

    Args:
        environment: its work directory is emptied first.

    Raises:
        Unrecoverable: a snapshot is of another backend, or of a newer format.
        StoreNotFound: a file is gone.
        StoreCorrupt: a file is not what was written.
        StoreTransient: a file cannot be read now, or the database cannot be opened.
    """
    directory = environment.work_directory
    if directory.exists():  # of a killed process
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    for snapshot in environment.restored:
        _check(snapshot, environment)
    opening = uuid4().hex
    catalog = PartitionCatalog()
    path, files_in = directory / "db", directory / "incoming"
    snapshots = sorted(environment.restored, key=_size_bytes, reverse=True)
    if not snapshots:
        database = Database(path, files_in, memory, loops)
        ledger = FileLedger(opening, opening, is_incremental=environment.is_incremental)
        return OpenedState(database, catalog, ledger)
    assert environment.reader is not None, "a snapshot without a reader"
    base, others = snapshots[0], snapshots[1:]
    _download(base, environment.reader, path)
    database = Database(path, files_in, memory, loops)
    catalog.restore(base)
    _drop_unowned(database, catalog)
    if not others and _key_groups(base) == key_groups:
        ledger = FileLedger(
            opening, base.instance, base.files, is_incremental=environment.is_incremental
        )
        return OpenedState(database, catalog, ledger)
    _drop_foreign(database, catalog, key_groups)
    for index, other in enumerate(others):
        source = directory / f"restored-{index}"
        _download(other, environment.reader, source)
        _copy(ReadOnlyDatabase(source), other, database, catalog, key_groups)
        shutil.rmtree(source)
    ledger = FileLedger(opening, opening, is_incremental=environment.is_incremental)
    return OpenedState(database, catalog, ledger)


def _check(snapshot: checkpoint_pb2.KeyedStateSnapshot, environment: BackendEnvironment) -> None:
    where = f"the restored state of {environment.operator_name} (uid {environment.operator_uid})"
    if snapshot.backend != BACKEND:
        raise Unrecoverable(
            f"{where} was written by the {snapshot.backend} backend: restore it with "
            f"state.backend.type: {snapshot.backend}"
        )
    if snapshot.format_version > FORMAT_VERSION:
        raise Unrecoverable(
            f"{where} has format {snapshot.format_version}, this version reads up to "
            f"{FORMAT_VERSION}: use the version of Penstock that wrote it, or a later one"
        )


def _size_bytes(snapshot: checkpoint_pb2.KeyedStateSnapshot) -> int:
    return sum(file.handle.size_bytes for file in snapshot.files if not is_inner_file(file))


def _key_groups(snapshot: checkpoint_pb2.KeyedStateSnapshot) -> range:
    return range(snapshot.first_key_group, snapshot.last_key_group + 1)


def _download(
    snapshot: checkpoint_pb2.KeyedStateSnapshot, reader: SnapshotReader, directory: Path
) -> None:
    directory.mkdir()
    for file in snapshot.files:
        if not is_inner_file(file):
            target = directory / local_name(file)
            if file.name.endswith(SHARED_SUFFIX):
                reader.fetch(file.handle, target)
            else:  # the database writes on in it
                target.write_bytes(reader.read(file.handle))


def _drop_unowned(database: Database, catalog: PartitionCatalog) -> None:
    """Drops the entries of all partitions that are not in the catalog."""
    begin = partition_bounds(0)[0]
    for number in sorted(partition.number for partition in catalog.all_partitions()):
        first, behind = partition_bounds(number)
        _drop_range(database, begin, first)
        begin = behind
    _drop_range(database, begin, b"\xff" * 9)


def _drop_foreign(database: Database, catalog: PartitionCatalog, key_groups: range) -> None:
    """Drops the entries of other subtasks' key-groups."""
    for partition in catalog.all_partitions():
        begin, end = partition_bounds(partition.number)
        first, behind = group_bounds(partition.number, key_groups)
        _drop_range(database, begin, first)
        _drop_range(database, behind, end)
        partition.row_count = 0


def _drop_range(database: Database, begin: bytes, end: bytes) -> None:
    """Leaves no range deletion where there is nothing to delete."""
    if begin < end and next(database.scan(begin, end, 1), None) is not None:
        database.drop_range(begin, end)


def _copy(
    source: ReadOnlyDatabase,
    snapshot: checkpoint_pb2.KeyedStateSnapshot,
    database: Database,
    catalog: PartitionCatalog,
    key_groups: range,
) -> None:
    """Copies what a snapshot has of the key-groups."""
    theirs = _key_groups(snapshot)
    shared = range(max(theirs.start, key_groups.start), min(theirs.stop, key_groups.stop))
    for _, segment in stored_segments(snapshot):
        target = catalog.partition_for(snapshot.tables[segment.table], segment.namespace)
        if shared:
            parts = source.scan(*group_bounds(segment.offset, shared))
            for keys, values in _batched(parts):
                moved = moved_to(target.number, ByteStrings.of(keys))
                database.ingest(SstEntries(moved, ByteStrings.of(values), None))
    source.close()


def _batched(
    parts: Iterator[tuple[list[bytes], list[bytes]]],
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    keys: list[bytes] = []
    values: list[bytes] = []
    for part_keys, part_values in parts:
        keys += part_keys
        values += part_values
        if len(keys) >= _COPY_ROWS:
            yield keys, values
            keys, values = [], []
    if keys:
        yield keys, values
