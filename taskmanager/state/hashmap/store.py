"""The backend that keeps everything in memory, table by table.

Each table of a state and namespace has a chain of segments in the newest confirmed checkpoint (see
``chains``). A snapshot seals the tables that have changed since then and lists the chains of the others
again. Restored tables are read when an operator asks for them; until then their chain stays as it is,
or, where it holds rows of other subtasks too, their rows are copied into the next snapshot.

A snapshot refers to no older segment that one before it, on its way still, has replaced: when that one is
confirmed, the segment's file may go.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Final, TypeVar, cast

import pyarrow as pa
from typing_extensions import override

from penstock.errors import StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.storage.run_columns import BACKEND, RUN_VERSION
from taskmanager.state.backend import (
    NO_NAMESPACE,
    BackendEnvironment,
    KeyedStateBackend,
    TimerTable,
)
from taskmanager.state.count_table import CountTable
from taskmanager.state.group_table import GroupTable
from taskmanager.state.hashmap.chains import (
    WHOLE,
    Chain,
    Export,
    base_length,
    next_export,
    sparse_file,
)
from taskmanager.state.hashmap.key_space import KeySpace
from taskmanager.state.hashmap.list_column import ListColumn
from taskmanager.state.hashmap.object_column import ObjectColumn
from taskmanager.state.hashmap.restored_rows import (
    RESTORED_TO,
    RestoredRows,
    restored_change,
    restored_rows,
)
from taskmanager.state.hashmap.snapshot import HashMapSnapshot, SnapshotItem, TableSlot
from taskmanager.state.hashmap.timer_table import HashMapTimerTable
from taskmanager.state.memory_check import MemoryCheck
from taskmanager.state.migrated_values import migration_of
from taskmanager.state.pacer_runner import Pacer
from taskmanager.state.pacing import SnapshotTimes
from taskmanager.state.row_table import RowTable
from taskmanager.state.session_table import SessionTable
from taskmanager.state.snapshot_table import SnapshotTable
from taskmanager.state.state_sizes import StateSizes

T = TypeVar("T", bound=SnapshotTable)

OPEN_SNAPSHOTS_MAX: Final = 2

_TABLES: Final[Mapping[type, Callable[..., Any]]] = {
    GroupTable: lambda descriptor: GroupTable(
        descriptor.key_types,
        descriptor.kinds,
        descriptor.new_columns(),
        uses=descriptor.uses,
        with_versions=True,
    ),
    RowTable: RowTable,
    SessionTable: lambda key_types, gap_ms, new: SessionTable(key_types, gap_ms, new()),
    CountTable: lambda key_types, new, ttl_ms: CountTable(key_types, new(), ttl_ms),
    TimerTable: HashMapTimerTable,
}


class HashMapStateBackend(KeyedStateBackend):
    """State of one operator in one subtask, in memory. Used on the mailbox thread.

    Args:
        environment: whose state it is, and what was restored.

    Raises:
        Unrecoverable: what was restored was written by another backend, or by a newer version.
    """

    def __init__(self, environment: BackendEnvironment) -> None:
        self._operator = environment.operator_name or environment.operator_uid
        super().__init__(environment, f"operator {self._operator!r}")
        self._instance = uuid.uuid4().hex
        self._file_count = 0
        self._states: dict[str, dict[int, TableSlot]] = {}
        self._migrated: set[str] = set()
        """States whose restored values were stored with another codec, or for other aggregates."""
        self._files: dict[str, checkpoint_pb2.StateFile] = {}
        self._snapshots: dict[int, HashMapSnapshot] = {}
        self._snapshot_times = SnapshotTimes(environment.clock.now_ms())
        # Per state one emptied table, so that the next namespace need not grow anew.
        self._spare: dict[str, GroupTable] = {}
        self._key_space: KeySpace | None = None
        self._memory = MemoryCheck(environment.memory, environment.clock)
        self._restore()

    @override
    def _table(self, kind: type, name: str, namespace: int, *about: Any) -> Any:
        def create() -> Any:
            spare = self._spare.pop(name, None) if kind is GroupTable else None
            return _TABLES[kind](*about) if spare is None else spare

        return self._get(name, namespace, create)

    @override
    def key_space(self, key_types: Sequence[pa.DataType]) -> KeySpace:
        if self._key_space is None:
            self._key_space = KeySpace(
                key_types,
                open_column=lambda name, create: self._get(name, NO_NAMESPACE, create),
                now_ms=self._environment.clock.now_ms,
                check_memory=self._memory.check,
                lock=Lock(),
            )
            space = self._key_space
            self._memory.register(f"{self._operator}: keys", space.key_bytes)
        return self._key_space

    @override
    def namespaces(self, name: str) -> list[int]:
        return sorted(self._states.get(name, ()))

    @override
    def drop(self, name: str, namespace: int) -> None:
        slot = self._states.get(name, {}).pop(namespace, None)
        table = None if slot is None else slot.table
        if isinstance(table, GroupTable) and table.is_reusable():
            table.clear()
            self._spare[name] = table

    @override
    def memory_bytes(self) -> int:
        keys = 0 if self._key_space is None else self._key_space.key_bytes()
        spare = sum(table.memory_bytes() for table in self._spare.values())
        return keys + spare + sum(self._state_bytes(name) for name in self._states)

    @override
    def sizes(self) -> StateSizes:
        by_name = {name: self._state_bytes(name) for name in self._states}
        return StateSizes(self._environment.operator_uid, by_name)

    @override
    def snapshot(
        self, checkpoint_id: int, *, is_full: bool = False, in_runs: bool = False
    ) -> HashMapSnapshot:
        open_count = sum(snapshot.is_open for snapshot in self._snapshots.values())
        self._check_open(checkpoint_id, open_count, OPEN_SNAPSHOTS_MAX)
        chains = [slot.chain for _, _, slot in self._slots()]
        sizes = {name: _size_bytes(file.handle) for name, file in self._files.items()}
        sparse = sparse_file(sizes, chains)
        rewritten = set() if sparse is None else {sparse}
        replaced = self._replaced()
        refers = self._environment.is_incremental and not (is_full or in_runs)
        items = [
            self._item(name, namespace, slot, rewritten, replaced.get(id(slot)), refers=refers)
            for name, namespace, slot in self._slots()
        ]
        file_name = f"{self._instance}-{self._file_count}"
        self._file_count += 1
        now_ms = self._environment.clock.now_ms()
        snapshot = HashMapSnapshot(
            checkpoint_id,
            self._header(BACKEND, RUN_VERSION, self._instance),
            file_name,
            f"{self._environment.operator_uid}/{file_name}",
            [item for item in items if item is not None],
            dict(self._files),
            Pacer(self._environment.clock, self._snapshot_times.next_span_seconds(now_ms)),
            now_ms,
            is_shared=self._environment.is_incremental,
        )
        self._snapshots[checkpoint_id] = snapshot
        return snapshot

    @override
    def checkpoint_completed(self, checkpoint_id: int) -> None:
        snapshot = self._snapshots.pop(checkpoint_id, None)
        for older in [older for older in self._snapshots if older < checkpoint_id]:
            self._snapshots.pop(older).discard()
        if snapshot is None:
            return
        self._files |= snapshot.written_files
        for item in snapshot.items:
            self._confirm(item)
        used = {segment.file for _, _, slot in self._slots() for segment in slot.chain}
        self._files = {name: file for name, file in self._files.items() if name in used}

    @override
    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        snapshot = self._snapshots.pop(checkpoint_id, None)
        if snapshot is not None:
            if snapshot.is_open:
                self._snapshot_times.cut_short()
            snapshot.discard()

    @override
    def close(self) -> None:
        self._is_closed = True
        for snapshot in self._snapshots.values():
            snapshot.discard()
        self._snapshots = {}
        self._memory.close()
        self._states = {}
        self._spare = {}
        self._key_space = None

    def _get(self, name: str, namespace: int, create: Callable[[], T]) -> T:
        self._memory.check()
        state = self._states.get(name)
        if state is None:
            state = self._state(name)
        slot = state.get(namespace)
        if slot is None:
            slot = state[namespace] = TableSlot(create())
        elif slot.table is None:
            slot.table = self._load(name, slot, create)
        return cast("T", slot.table)

    def _state(self, name: str) -> dict[int, TableSlot]:
        if name not in self._states:
            self._states[name] = {}
            self._memory.register(
                f"{self._operator}: state {name}", lambda: self._state_bytes(name)
            )
        return self._states[name]

    def _state_bytes(self, name: str) -> int:
        slots = self._states.get(name, {}).values()
        return sum(slot.table.memory_bytes() for slot in slots if slot.table is not None)

    def _slots(self) -> Iterator[tuple[str, int, TableSlot]]:
        for name, state in self._states.items():
            for namespace, slot in state.items():
                yield name, namespace, slot

    # -- restore

    def _restore(self) -> None:
        environment = self._environment
        if not environment.restored:
            return
        assert environment.reader is not None, "restored snapshots need a reader"
        found = restored_rows(
            environment.restored, environment.reader, self._key_groups, self._operator
        )
        for (name, namespace), parts in found.items():
            self._state(name)[namespace] = TableSlot(None, parts, self._shared_chain(parts))
        for _, _, slot in self._slots():
            for segment in slot.chain:
                self._files[segment.file] = slot.restored[0].files[segment.file]

    def _shared_chain(self, parts: list[RestoredRows]) -> Chain:
        """The restored chain, where new snapshots may refer to it."""
        if not self._environment.is_incremental or len(parts) > 1 or not parts[0].is_shareable:
            return ()
        [rows] = parts
        # What was written without increments is its checkpoint's alone.
        is_shared = all(rows.files[segment.file].shared for segment in rows.chain)
        return rows.chain if is_shared else ()

    def _load(self, name: str, slot: TableSlot, create: Callable[[], T]) -> T:
        missing: StoreNotFound | None = None
        for parts in self._sources(slot):
            try:
                table = self._loaded(name, parts, create())
                break
            except StoreNotFound as error:
                missing = missing or error
        else:
            assert missing is not None, "there is at least one source"
            raise missing
        # What changes from now on comes after the restored chain.
        table.seal(RESTORED_TO, self.max_parallelism).release()
        slot.restored = []
        if name in self._migrated:
            slot.chain = ()  # new snapshots hold nothing of what was stored otherwise
        slot.is_unwritten = not slot.chain
        return table

    def _sources(self, slot: TableSlot) -> Iterator[list[RestoredRows]]:
        """Where the rows of a table can be read that nobody has asked for yet: where they were restored
        from; and what snapshots have copied them to that nobody here knows to be complete: then the
        files of the former may be gone."""
        yield slot.restored
        for snapshot in reversed(self._snapshots.values()):
            files = snapshot.written_files
            for item in snapshot.items:
                if item.slot is slot and item.copied and _are_in(item.chain, files):
                    yield [self._copied_rows(item, files)]

    def _copied_rows(
        self, item: SnapshotItem, files: Mapping[str, checkpoint_pb2.StateFile]
    ) -> RestoredRows:
        assert self._environment.reader is not None, "restored snapshots need a reader"
        return RestoredRows(
            item.kind,
            item.schema,
            item.chain,
            files,
            self._environment.reader,
            self._key_groups,
            is_shareable=True,
            operator=self._operator,
        )

    def _loaded(self, name: str, parts: list[RestoredRows], table: T) -> T:
        state = f"state {name!r} of {self._owner}"
        for rows in parts:
            if isinstance(table, ObjectColumn) and self._load_migrated(table, rows):
                self._migrated.add(name)
                continue
            change = restored_change(rows, table.kind, table.schema(), state)
            if change is not None and change.changes(rows.schema):
                self._migrated.add(name)
                table.load(change.batches(rows.batches()), rows.rows_max)
            else:
                table.load(rows.batches(), rows.rows_max)
        return table

    def _load_migrated(self, column: ObjectColumn, rows: RestoredRows) -> bool:
        """Loads values that were stored with another codec; False = they were not."""
        now_ms, schema = self._environment.clock.now_ms(), column.schema()
        migration = migration_of(rows.kind, rows.schema, schema, column.descriptor, now_ms)
        if migration is None:
            return False
        column.load(migration.batches(rows.batches(), schema), rows.rows_max)
        return True

    # -- snapshot

    def _replaced(self) -> dict[int, Export]:
        """By identity of a slot: the earliest export of it that is on its way."""
        found: dict[int, Export] = {}
        for snapshot in self._snapshots.values():
            for item in snapshot.items:
                export = item.export
                if export is not None:
                    earlier = found.get(id(item.slot))
                    found[id(item.slot)] = export if earlier is None else min(export, earlier)
        return found

    def _item(
        self,
        name: str,
        namespace: int,
        slot: TableSlot,
        rewritten: set[str],
        replaced: Export | None,
        *,
        refers: bool,
    ) -> SnapshotItem | None:
        """What a table adds to a snapshot; None = it has never held anything.

        Args:
            refers: to what was written before.
            rewritten: files that it is not to refer to.
            replaced: what a snapshot on its way exports of it, so that nothing newer stays of the chain.
        """
        table, chain = slot.table, slot.chain
        if table is None:
            first = slot.restored[0]
            is_kept = bool(chain) and all(segment.file not in rewritten for segment in chain)
            is_kept = is_kept and replaced is None
            copied = () if is_kept and refers else tuple(slot.restored)
            return SnapshotItem(
                name, namespace, slot, first.kind, first.schema, chain, copied=copied
            )
        schema = table.schema()
        is_of_lists = table.kind == ListColumn.kind
        export = next_export(chain, rewritten, by_bytes=is_of_lists) if refers else WHOLE
        if replaced is not None:
            export = min(export, replaced)
        is_rewritten = any(segment.file in rewritten for segment in chain)
        must_seal = is_rewritten or replaced is not None or slot.is_unwritten or not refers
        is_changed = table.is_changed(chain[-1].to_version if chain else 0)
        if not (chain or is_changed or slot.is_unwritten):
            return None
        item = SnapshotItem(name, namespace, slot, table.kind, schema, chain)
        if is_changed or must_seal:
            item.sealed = table.seal(export.since_version, self.max_parallelism)
            item.tier = export.tier
        return item

    def _confirm(self, item: SnapshotItem) -> None:
        slot = item.slot
        slot.chain = item.chain
        if slot.table is None:
            slot.restored = [self._copied_rows(item, self._files)]
            return
        slot.is_unwritten = False
        if item.chain:
            slot.table.forget(item.chain[base_length(item.chain) - 1].to_version)


def _are_in(chain: Chain, files: Mapping[str, checkpoint_pb2.StateFile]) -> bool:
    return bool(chain) and all(segment.file in files for segment in chain)


def _size_bytes(handle: checkpoint_pb2.StateHandle) -> int:
    return handle.size_bytes or len(handle.inline)
