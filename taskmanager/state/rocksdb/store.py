"""The backend that keeps state in RocksDB, one database per operator and subtask.

Reads and changes go through write-back caches (the tables, ``key_space``), freezes through the
``WriteQueue``. When the caches are larger than their share of the slot's memory, all changes are written
on the mailbox thread and what was used least recently leaves the caches.

The caches, with RocksDB's block cache and write buffers, are one user of the slot's ledger.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from typing_extensions import override

from penstock.storage.entries.file_names import BACKEND, FORMAT_VERSION
from penstock.storage.entries.run_states import COLUMN_PREFIX, ENDS
from penstock.storage.run_columns import TIMER_KIND
from taskmanager.state.backend import (
    NO_NAMESPACE,
    BackendEnvironment,
    BackendSnapshot,
    KeyedStateBackend,
    TimerTable,
)
from taskmanager.state.count_table import CountTable
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.group_table import GroupTable
from taskmanager.state.instances import InstanceState
from taskmanager.state.pacer_runner import Pacer
from taskmanager.state.pacing import SnapshotTimes
from taskmanager.state.rocksdb.cache_host import StoredTable, TableHome
from taskmanager.state.rocksdb.count_rows import StoredCountTable
from taskmanager.state.rocksdb.group_rows import StoredGroupTable
from taskmanager.state.rocksdb.key_filter import KeyFilter
from taskmanager.state.rocksdb.key_space import StoredKeySpace
from taskmanager.state.rocksdb.migrated_entries import MigratedEntries
from taskmanager.state.rocksdb.partitions import Partition, column_schema
from taskmanager.state.rocksdb.restore_store import open_state
from taskmanager.state.rocksdb.run_snapshot_store import RunSnapshot
from taskmanager.state.rocksdb.session_rows import StoredSessionTable
from taskmanager.state.rocksdb.slot_memory_store import slot_memory
from taskmanager.state.rocksdb.snapshot_store import RocksDBSnapshot
from taskmanager.state.rocksdb.spilled_table import KeyedSpill
from taskmanager.state.rocksdb.timer_rows import StoredTimerTable
from taskmanager.state.rocksdb.window_rows import StoredRowTable
from taskmanager.state.rocksdb.write_queue_runner import Freeze, FrozenPart, WriteQueue
from taskmanager.state.row_table import RowTable
from taskmanager.state.session_table import SessionTable
from taskmanager.state.state_sizes import StateSizes
from taskmanager.state.timer_order import timer_schema

FREEZES_MAX: Final = 3
"""Snapshots that may wait to be written."""


_TABLES: Final[Mapping[type, Callable[..., StoredTable]]] = {
    GroupTable: StoredGroupTable,
    RowTable: StoredRowTable,
    CountTable: StoredCountTable,
    TimerTable: StoredTimerTable,
}


class RocksDBStateBackend(KeyedStateBackend):
    """State of one operator in one subtask.

    Raises:
        StreamError: what is to be restored cannot be.
    """

    def __init__(self, environment: BackendEnvironment) -> None:
        owner = f"{environment.operator_name} (uid {environment.operator_uid})"
        super().__init__(environment, owner)
        self._slot_memory = slot_memory(environment.memory)
        opened = open_state(environment, self._key_groups, self._slot_memory)
        self._database, self._ledger = opened.database, opened.ledger
        self._queue = WriteQueue(self._database)
        self._snapshots: dict[int, BackendSnapshot] = {}
        self._link_numbers = count(1)
        self._stored_keys = KeyFilter(self._slot_memory.filter_bytes)
        self._catalog = opened.catalog
        self._home = TableHome(
            self._database,
            self,
            self._stored_keys,
            self._key_groups,
            environment.max_parallelism,
        )
        self._migrated = MigratedEntries(opened.catalog, self._database)
        self._slot_memory.join()
        self._memory_user = environment.memory.register(f"{owner} (rocksdb)", self.memory_bytes)
        self._cache_bytes = 0
        self._key_space: StoredKeySpace | None = None
        self._pacer = Pacer(environment.clock)
        self._snapshot_times = SnapshotTimes(environment.clock.now_ms())
        self._database.pace = lambda: self._pacer.pause(self._queue.frozen_at_ms)

    @override
    def _table(self, kind: type, name: str, namespace: int, *about: Any) -> Any:
        make: Any = partial(self._sessions, name) if kind is SessionTable else _TABLES[kind]
        partition = self._catalog.found(name, namespace) or self._catalog.unused_partition()
        table: Any = partition.table
        if table is None:
            table = make(partition, self._home, *about)
            schema = table.schema()
            if isinstance(table, KeyedSpill) and self._migrated.aggregates(
                name, table.kind, schema, table.identity_count
            ):
                table = make(partition, self._home, *about)  # it lies elsewhere now
            self._catalog.keep(partition, name, namespace, table.kind, schema, self._owner)
            partition.table = table
        return table

    def _sessions(
        self,
        name: str,
        found: Partition,
        home: TableHome,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> StoredSessionTable:
        ends = self._catalog.partition(
            name + ENDS, NO_NAMESPACE, TIMER_KIND, timer_schema(key_types), self._owner
        )
        return StoredSessionTable(found, home, ends.number, key_types, gap_ms, new_contents)

    def _opened(self) -> list[StoredTable]:
        """Tables that were asked for."""
        partitions = self._catalog.all_partitions()
        return [partition.table for partition in partitions if partition.table is not None]

    @override
    def key_space(self, key_types: Sequence[pa.DataType]) -> StoredKeySpace:
        if self._key_space is None:
            self._key_space = StoredKeySpace(
                key_types, self.max_parallelism, self._database, self, Lock(), self._stored_keys
            )
        assert self._key_space.key_types == tuple(key_types), "one key space per operator"
        return self._key_space

    @override
    def namespaces(self, name: str) -> list[int]:
        state = self._catalog.states.get(name)
        return [] if state is None else sorted(state.partitions)

    @override
    def drop(self, name: str, namespace: int) -> None:
        state = self._catalog.states.get(name)
        partition = None if state is None else state.partitions.pop(namespace, None)
        if partition is None:
            return
        unused = [partition.number] if partition.is_stored else []
        if partition.table is not None:
            unused = partition.table.close()
        for number in unused:
            self._queue.drop(number)

    @override
    def memory_bytes(self) -> int:
        known_keys = self._stored_keys.memory_bytes()
        return self._cache_bytes + known_keys + self._slot_memory.database_bytes

    @override
    def sizes(self) -> StateSizes:
        uid, memory_bytes = self._environment.operator_uid, self.memory_bytes()
        return StateSizes(uid, {"": memory_bytes}, self._database.sizes())

    @override
    def snapshot(
        self, checkpoint_id: int, *, is_full: bool = False, in_runs: bool = False
    ) -> BackendSnapshot:
        self._database.check()
        self._check_open(checkpoint_id, len(self._queue), FREEZES_MAX)
        header = self._header(BACKEND, FORMAT_VERSION, self._ledger.instance)
        tables, segments = self._catalog.describe()
        header.tables.extend(tables)
        header.segments.extend(segments)
        directory = self._environment.work_directory / f"links-{next(self._link_numbers)}"
        now_ms = self._environment.clock.now_ms()
        self._pacer.span_seconds = self._snapshot_times.next_span_seconds(now_ms)
        freeze = self._freeze(directory)
        snapshot: BackendSnapshot = (
            RunSnapshot(checkpoint_id, header, self._queue, freeze, uuid4().hex)
            if in_runs
            else RocksDBSnapshot(
                checkpoint_id, header, self._queue, freeze, self._ledger, is_full=is_full
            )
        )
        self._snapshots[checkpoint_id] = snapshot
        return snapshot

    @override
    def checkpoint_completed(self, checkpoint_id: int) -> None:
        self._snapshots.pop(checkpoint_id, None)
        self._ledger.completed(checkpoint_id)

    @override
    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is not None:
            if len(self._queue):
                self._snapshot_times.cut_short()
            snapshot.discard()
        self._ledger.aborted(checkpoint_id)

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._pacer.hurry()
        self._queue.close()
        self._snapshots = {}
        self._database.close()
        self._environment.memory.unregister(self._memory_user)
        self._slot_memory.leave()
        shutil.rmtree(self._environment.work_directory, ignore_errors=True)

    def cache_resized(self, difference_bytes: int) -> None:
        """Keeps the caches within their budget (``CacheHost``).

        Raises:
            StoreFull: the disk is full.
        """
        self._cache_bytes += difference_bytes
        if difference_bytes > 0 and self._cache_bytes > self._slot_memory.cache_bytes:
            self._shrink()

    @property
    def cache_room_bytes(self) -> int:
        """See ``CacheHost``."""
        return self._slot_memory.cache_bytes - self._cache_bytes

    def column_partition(
        self, descriptor: StateDescriptor, key_types: Sequence[pa.DataType]
    ) -> tuple[int, bool]:
        """The partition of a column, and whether the database holds something of it (``KeySpaceHost``).

        Raises:
            TaskFailure: it was restored with other types or codecs.
        """
        name = COLUMN_PREFIX + descriptor.name
        schema = column_schema(key_types, descriptor)
        self._migrated.values(name, schema, descriptor, self._environment.clock.now_ms())
        kind = descriptor.kind.value
        partition = self._catalog.partition(name, NO_NAMESPACE, kind, schema, self._owner)
        return partition.number, partition.is_stored

    def pace(self, frozen_at_ms: int) -> None:
        """Pauses the thread that encodes cells (``KeySpaceHost``)."""
        self._pacer.pause(frozen_at_ms)

    def now_ms(self) -> int:
        """Wall-clock time (``KeySpaceHost``)."""
        return self._environment.clock.now_ms()

    def _freeze(self, link_to: Path | None) -> Freeze:
        parts: list[FrozenPart] = []
        for table in self._opened():
            part = table.freeze()
            if part is not None:
                parts.append(part)
        if self._key_space is not None:
            parts += self._key_space.freeze()
        return self._queue.add(parts, link_to, self._environment.clock.now_ms())

    def _shrink(self, *, everything: bool = False) -> None:
        """Writes all changes, then shrinks the caches: largest tables first."""
        self._freeze(None)
        self._pacer.hurry()
        try:
            self._queue.write_all()
        finally:
            self._pacer.relax()
        goal = -1 if everything else self._slot_memory.cache_bytes // 2
        for table in sorted(self._opened(), key=lambda table: -table.memory_bytes()):
            if self._cache_bytes <= goal:
                return
            table.evict(everything=everything)
        if self._key_space is not None:
            self._key_space.evict(0 if everything else self._key_space.cached_keys // 2)
