"""The backend that keeps state in RocksDB, one database per operator and subtask.

Reads and changes go through write-back caches (``stored_tables``, ``key_space``), freezes through the
``WriteQueue``. When the caches are larger than their share of the slot's memory, all changes are written
on the mailbox thread and what was used least recently leaves the caches.

The caches, with RocksDB's block cache and write buffers, are one user of the slot's ledger.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Final
from uuid import uuid4

import pyarrow as pa

from penstock.errors import CheckpointAborted
from penstock.pb import checkpoint_pb2
from penstock.storage.entries.file_names import BACKEND, FORMAT_VERSION
from penstock.storage.entries.run_states import COLUMN_PREFIX
from penstock.storage.key_groups import key_group_range
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.state.backend import BackendEnvironment, BackendSnapshot
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.pacer_runner import Pacer
from taskmanager.state.pacing import SnapshotTimes
from taskmanager.state.rocksdb.cache_host import TableHome
from taskmanager.state.rocksdb.key_filter import KeyFilter
from taskmanager.state.rocksdb.key_space import StoredKeySpace
from taskmanager.state.rocksdb.migrated_entries import MigratedEntries
from taskmanager.state.rocksdb.partitions import column_schema
from taskmanager.state.rocksdb.restore_store import open_state
from taskmanager.state.rocksdb.run_snapshot_store import RunSnapshot
from taskmanager.state.rocksdb.slot_memory_store import slot_memory
from taskmanager.state.rocksdb.snapshot_store import RocksDBSnapshot
from taskmanager.state.rocksdb.stored_tables import WHOLE, StoredTables
from taskmanager.state.rocksdb.write_queue_runner import Freeze, FrozenPart, WriteQueue
from taskmanager.state.state_sizes import StateSizes

FREEZES_MAX: Final = 3
"""Snapshots that may wait to be written."""


class RocksDBStateBackend(StoredTables):
    """State of one operator in one subtask.

    Raises:
        StreamError: what is to be restored cannot be.
    """

    def __init__(self, environment: BackendEnvironment) -> None:
        self._environment = environment
        self._key_groups = key_group_range(
            environment.subtask_index, environment.parallelism, environment.max_parallelism
        )
        owner = f"{environment.operator_name} (uid {environment.operator_uid})"
        self._slot_memory = slot_memory(environment.memory)
        opened = open_state(environment, self._key_groups, self._slot_memory, process_kernels())
        self._database, self._ledger = opened.database, opened.ledger
        self._queue = WriteQueue(self._database)
        self._snapshots: dict[int, BackendSnapshot] = {}
        self._link_numbers = count(1)
        self._stored_keys = KeyFilter(self._slot_memory.filter_bytes)
        home = TableHome(
            self._database,
            self,
            self._stored_keys,
            self._key_groups,
            environment.max_parallelism,
        )
        migrated = MigratedEntries(opened.catalog, self._database)
        super().__init__(opened.catalog, home, owner, migrated)
        self._slot_memory.join()
        self._memory_user = environment.memory.register(f"{owner} (rocksdb)", self.memory_bytes)
        self._cache_bytes = 0
        self._key_space: StoredKeySpace | None = None
        self._pacer = Pacer(environment.clock)
        self._snapshot_times = SnapshotTimes(environment.clock.now_ms())
        self._database.pace = lambda: self._pacer.pause(self._queue.frozen_at_ms)
        self._is_closed = False

    @property
    def max_parallelism(self) -> int:
        """Number of key-groups of the operator."""
        return self._environment.max_parallelism

    @property
    def key_groups(self) -> range:
        """The key-groups of this subtask."""
        return self._key_groups

    def key_space(self, key_types: Sequence[pa.DataType]) -> StoredKeySpace:
        """The objects of all keys; one per operator."""
        if self._key_space is None:
            self._key_space = StoredKeySpace(
                key_types, self.max_parallelism, self._database, self, Lock(), self._stored_keys
            )
        assert self._key_space.key_types == tuple(key_types), "one key space per operator"
        return self._key_space

    def namespaces(self, name: str) -> list[int]:
        """Namespaces of a state that exist, ascending; restored ones included."""
        state = self._catalog.states.get(name)
        return [] if state is None else sorted(state.partitions)

    def drop(self, name: str, namespace: int) -> None:
        """Removes a namespace with all in it; nothing happens where it does not exist."""
        state = self._catalog.states.get(name)
        partition = None if state is None else state.partitions.pop(namespace, None)
        if partition is None:
            return
        unused = [partition.number] if partition.is_stored else []
        if partition.table is not None:
            unused = partition.table.close()
        for number in unused:
            self._queue.drop(number)

    def memory_bytes(self) -> int:
        """Approximate size of all states in memory."""
        known_keys = self._stored_keys.memory_bytes()
        return self._cache_bytes + known_keys + self._slot_memory.database_bytes

    def sizes(self) -> StateSizes:
        """What all states take together: one database has them."""
        uid, memory_bytes = self._environment.operator_uid, self.memory_bytes()
        return StateSizes(uid, {"": memory_bytes}, self._database.sizes())

    def snapshot(
        self, checkpoint_id: int, *, is_full: bool = False, in_runs: bool = False
    ) -> BackendSnapshot:
        """See ``KeyedStateBackend``.

        Raises:
            CheckpointAborted: too many snapshots are still being written, or the backend is closed.
            StoreTransient: a file of the database is damaged.
        """
        self._database.check()
        if self._is_closed:
            raise CheckpointAborted(checkpoint_id, f"{self._owner} has ended")
        if len(self._queue) >= FREEZES_MAX:
            raise CheckpointAborted(
                checkpoint_id,
                f"{len(self._queue)} snapshots of {self._owner} are still being written: raise "
                "execution.checkpointing.interval or execution.checkpointing.min-pause",
            )
        tables, segments = self._catalog.describe()
        header = checkpoint_pb2.KeyedStateSnapshot(
            backend=BACKEND,
            format_version=FORMAT_VERSION,
            instance=self._ledger.instance,
            first_key_group=self._key_groups.start,
            last_key_group=self._key_groups.stop - 1,
            max_parallelism=self.max_parallelism,
            tables=tables,
            segments=segments,
        )
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

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """See ``KeyedStateBackend``."""
        self._snapshots.pop(checkpoint_id, None)
        self._ledger.completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """See ``KeyedStateBackend``."""
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is not None:
            if len(self._queue):
                self._snapshot_times.cut_short()
            snapshot.discard()
        self._ledger.aborted(checkpoint_id)

    def close(self) -> None:
        """See ``KeyedStateBackend``."""
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
        partition = self._catalog.partition(name, WHOLE, kind, schema, self._owner)
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
