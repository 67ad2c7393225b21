"""Opens the database of a subtask: empty, as one snapshot has it, or put together from several.

The same key-groups from one snapshot: its files become the database. Other key-groups: the files of the
largest snapshot that have some of them become the database, what is foreign is dropped, and the entries of the others are
copied range by range. What was written in the run format is written into an empty database. Entries that no partition of a snapshot owns (they were dropped after it) go too.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from dataclasses import dataclass
from threading import Lock
from typing import Final
from uuid import uuid4

import numpy as np

from penstock.errors import StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.database_reader_store import (
    ReadOnlyDatabase,
    Scope,
    download,
)
from penstock.storage.entries.entry_keys import group_bounds, moved_to, partition_bounds
from penstock.storage.entries.file_names import BACKEND, FORMATS_READ
from penstock.storage.run_columns import BACKEND as RUN_BACKEND
from penstock.storage.run_columns import TIMER_KIND
from taskmanager.state.backend import BackendEnvironment
from taskmanager.state.hashmap.restored_rows import check_format
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.file_ledger import FileLedger
from taskmanager.state.rocksdb.partitions import PartitionCatalog, stored_segments
from taskmanager.state.rocksdb.run_restore_store import load_runs
from taskmanager.state.rocksdb.slot_memory_store import SlotMemory

_COPY_ROWS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class OpenedState:
    """A database with what is known about it."""

    database: Database
    catalog: PartitionCatalog
    ledger: FileLedger


def open_state(
    environment: BackendEnvironment, key_groups: range, memory: SlotMemory
) -> OpenedState:
    """The database of a subtask, with what is to be restored in it.

    Args:
        environment: its work directory is emptied first, and is gone where this fails.

    Raises:
        Unrecoverable: a snapshot is of another backend, or of another format.
        StoreNotFound: a file is gone.
        StoreCorrupt: a file is not what was written.
        StoreTransient: a file cannot be read now, or the database cannot be opened.
    """
    while True:
        try:
            with ExitStack() as undo:
                opened = _open(environment, key_groups, memory, undo)
                undo.pop_all()
        except StoreTransient:
            if environment.reader is None or not environment.reader.remove_damaged():
                raise
        else:
            if environment.reader is not None:
                opened.database.on_damage = environment.reader.remove_damaged
            return opened


def _open(
    environment: BackendEnvironment,
    key_groups: range,
    memory: SlotMemory,
    undo: ExitStack,
) -> OpenedState:
    directory = environment.work_directory
    if directory.exists():  # of a killed process
        shutil.rmtree(directory)
    for snapshot in environment.restored:
        if snapshot.backend != RUN_BACKEND:  # whoever reads runs checks their format
            operator = environment.operator_name or environment.operator_uid
            check_format(snapshot, operator, BACKEND, FORMATS_READ)
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    directory.mkdir(parents=True)
    opening = uuid4().hex
    catalog = PartitionCatalog()
    path, files_in = directory / "db", directory / "incoming"
    snapshots = sorted(environment.restored, key=_size_bytes, reverse=True)
    if not snapshots or snapshots[0].backend == RUN_BACKEND:
        database = Database(path, files_in, memory)
        undo.callback(database.close)
        if snapshots:
            load_runs(environment, database, catalog, key_groups)
        ledger = FileLedger(opening, opening, Lock(), is_incremental=environment.is_incremental)
        return OpenedState(database, catalog, ledger)
    assert environment.reader is not None, "a snapshot without a reader"
    base, others = snapshots[0], snapshots[1:]
    scope = Scope(key_groups, environment.max_parallelism)
    is_whole = not others and _key_groups(base) == key_groups
    reader = environment.reader
    download(base, reader, path, None if is_whole else scope)
    database = Database(path, files_in, memory)
    undo.callback(database.close)
    catalog.restore(base)
    _drop_unowned(database, catalog)
    if is_whole:
        ledger = FileLedger(
            opening,
            base.instance,
            Lock(),
            base.files,
            is_incremental=environment.is_incremental,
        )
        return OpenedState(database, catalog, ledger)
    _drop_foreign(database, catalog, scope)
    for index, other in enumerate(others):
        source = directory / f"restored-{index}"
        download(other, reader, source, scope)
        with closing(ReadOnlyDatabase(source)) as incoming:
            _copy(incoming, other, database, catalog, scope)
        shutil.rmtree(source)
    ledger = FileLedger(opening, opening, Lock(), is_incremental=environment.is_incremental)
    return OpenedState(database, catalog, ledger)


def _size_bytes(snapshot: checkpoint_pb2.KeyedStateSnapshot) -> int:
    return sum(file.handle.size_bytes for file in snapshot.files)


def _key_groups(snapshot: checkpoint_pb2.KeyedStateSnapshot) -> range:
    return range(snapshot.first_key_group, snapshot.last_key_group + 1)


def _drop_unowned(database: Database, catalog: PartitionCatalog) -> None:
    """Drops the entries of all partitions that are not in the catalog."""
    begin = partition_bounds(0)[0]
    for number in sorted(partition.number for partition in catalog.all_partitions()):
        first, behind = partition_bounds(number)
        _drop_range(database, begin, first)
        begin = behind
    _drop_range(database, begin, b"\xff" * 9)


def _drop_foreign(database: Database, catalog: PartitionCatalog, scope: Scope) -> None:
    """Drops the entries of other subtasks' key-groups."""
    for state in catalog.states.values():
        for partition in state.partitions.values():
            partition.row_count = 0
            if state.kind == TIMER_KIND:
                _drop_foreign_timers(database, partition.number, scope)
                continue
            begin, end = partition_bounds(partition.number)
            first, behind = group_bounds(partition.number, scope.key_groups)
            _drop_range(database, begin, first)
            _drop_range(database, behind, end)


def _drop_foreign_timers(database: Database, number: int, scope: Scope) -> None:
    for names, _ in database.scan(*partition_bounds(number), _COPY_ROWS):
        foreign = [names[row] for row in np.flatnonzero(~scope.has_timers(names)).tolist()]
        if foreign:
            nothing = ByteStrings.of([b""] * len(foreign))
            gone = np.ones(len(foreign), np.bool_)
            database.ingest(SstEntries(ByteStrings.of(foreign), nothing, gone))


def _drop_range(database: Database, begin: bytes, end: bytes) -> None:
    """Leaves no range deletion where there is nothing to delete."""
    if begin < end and next(database.scan(begin, end, 1), None) is not None:
        database.drop_range(begin, end)


def _copy(
    source: ReadOnlyDatabase,
    snapshot: checkpoint_pb2.KeyedStateSnapshot,
    database: Database,
    catalog: PartitionCatalog,
    scope: Scope,
) -> None:
    """Copies what a snapshot has of the key-groups."""
    theirs, mine = _key_groups(snapshot), scope.key_groups
    scope = scope.within(range(max(theirs.start, mine.start), min(theirs.stop, mine.stop)))
    for _, segment in stored_segments(snapshot):
        table = snapshot.tables[segment.table]
        target = catalog.partition_for(table, segment.namespace)
        if not scope.key_groups:
            continue
        is_timers = table.kind == TIMER_KIND
        bounds = group_bounds(segment.offset, scope.key_groups)
        if is_timers:
            bounds = partition_bounds(segment.offset)
        for keys, values in source.scan(*bounds, _COPY_ROWS):
            if is_timers:
                rows = np.flatnonzero(scope.has_timers(keys)).tolist()
                keys, values = [keys[row] for row in rows], [values[row] for row in rows]
            if keys:
                moved = moved_to(target.number, ByteStrings.of(keys))
                database.ingest(SstEntries(moved, ByteStrings.of(values), None))
