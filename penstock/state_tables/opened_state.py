"""A checkpoint or savepoint, opened to be read as tables: ``ps.open_state(path)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from os import PathLike, fspath

import pyarrow as pa
from typing_extensions import override

from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.state_tables.declared_tables import DeclaredList, declared_lists, declared_tables
from penstock.state_tables.operator_tables import (
    DONE_SCHEMA,
    DONE_SPLITS,
    SPLITS,
    SPLITS_SCHEMA,
    done_batches,
    list_batch,
    list_kind,
    list_schema,
    splits_batch,
)
from penstock.state_tables.state_view import KEY_GROUP, StateView
from penstock.storage.blobs import SnapshotReader
from penstock.storage.codec import StateError
from penstock.storage.entries.file_names import BACKEND as ROCKSDB
from penstock.storage.keyed_state import StatePieces, StoredKeyedState, keyed_states
from penstock.storage.object_store import ObjectStore
from penstock.storage.packed_files_store import PackedReader
from penstock.storage.restore_point import RestorePoint, open_restore_point
from penstock.storage.run_columns import TIMER_KIND
from penstock.storage.state_rows_store import StateRows
from penstock.storage.store_names import whole_name

_ALL_KEY_GROUPS = range(1 << 16)
_BROADCAST = checkpoint_pb2.REDISTRIBUTION_BROADCAST


@dataclass(frozen=True, slots=True)
class StateTableInfo:
    """A state of an operator.

    Attributes:
        name: by which it is read.
        kind: "value", "list", "map", "group" (accumulators of windows or of running aggregates), "sessions", "counts"
            (windows of so many rows), "rows", "timers"; of an operator as a whole "split list", "union list",
            "broadcast map", "splits", "done splits".
    """

    name: str
    kind: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class StoredOperator:
    """An operator that has state.

    Attributes:
        kind: "process", "window_aggregate", "source", ...
        parallelism: subtasks that it had.
    """

    uid: str
    name: str
    kind: str
    parallelism: int
    max_parallelism: int
    states: tuple[StateTableInfo, ...]


@dataclass(frozen=True, slots=True)
class TablePiece:
    """A part of a table that is read by itself: what one old subtask has of it.

    Attributes:
        place: among the parts.
        first_key_group, last_key_group: both inclusive; 0 and -1 where it has no keys.
    """

    place: int
    first_key_group: int
    last_key_group: int


class StateTables:
    """What a checkpoint or savepoint holds.

    Attributes:
        path: of the savepoint, or of the one checkpoint.
        job_id, job_name: of the job that it was taken of.
        is_savepoint: or else a checkpoint.
        operators: those with state, in the order of the job's graph.
    """

    def __init__(self, point: RestorePoint) -> None:
        manifest = point.manifest
        self.path = point.uri
        self.job_id, self.job_name = manifest.job_id, manifest.job_name
        self.checkpoint_id = manifest.checkpoint_id
        self.is_savepoint = point.is_savepoint
        self._point = point
        self._reader = PackedReader(point.store, manifest)
        self._held: dict[str, list[tuple[int, checkpoint_pb2.OperatorSnapshot]]] = {}
        for subtask in manifest.subtasks:
            for operator in subtask.operators:
                held = self._held.setdefault(operator.operator_uid, [])
                held.append((subtask.subtask_index, operator))
        self._stored = {one.uid: one for vertex in manifest.vertices for one in vertex.operators}
        self._done = {one.operator_uid: one for one in manifest.done_splits}
        self._keyed = {(one.uid, one.name): one for one in keyed_states(manifest)}
        self.operators = tuple(self._operators())

    @override
    def __repr__(self) -> str:
        return f"<state in {self.path}: {', '.join(one.uid for one in self.operators)}>"

    @override
    def __str__(self) -> str:
        what = "savepoint" if self.is_savepoint else "checkpoint"
        lines = [f"{what} {self.checkpoint_id} of job {self.job_name!r} in {self.path}"]
        for operator in self.operators:
            lines.append(f"{operator.uid} ({operator.name}, {operator.max_parallelism} key-groups)")
            for state in operator.states:
                columns = ", ".join(f"{one.name}: {one.type}" for one in state.schema)
                lines.append(f"  {state.name} ({state.kind}): {columns}")
        return "\n".join(lines)

    def operator(self, uid: str) -> StoredOperator:
        """The operator of a uid.

        Raises:
            StateError: there is none, or it has no state.
        """
        for operator in self.operators:
            if operator.uid == uid:
                return operator
        known = ", ".join(repr(one.uid) for one in self.operators)
        reason = "has no state" if uid in self._stored else "is not there"
        raise StateError(
            f"operator {uid!r} {reason} in {self.path}: there is state of {known or 'none'}"
        )

    def schema(self, uid: str, state: str) -> pa.Schema:
        """The columns of a state's table.

        Raises:
            StateError: there is no such state.
        """
        operator = self.operator(uid)
        for one in operator.states:
            if one.name == state:
                return one.schema
        known = ", ".join(repr(one.name) for one in operator.states)
        raise StateError(f"operator {uid!r} has no state {state!r} in {self.path}: it has {known}")

    def check_key_groups(self, uid: str, state: str, key_groups: range | None) -> None:
        """Checks that a state may have rows of these key-groups; None = all.

        Raises:
            StateError: there is no such state, it has no key-groups, or they are no range of them.
        """
        has_keys = KEY_GROUP in self.schema(uid, state).names
        if key_groups is None:
            return
        wanted, most = checked_range(key_groups), self.operator(uid).max_parallelism
        where = f"state {state!r} of operator {uid!r}"
        if not has_keys:
            raise StateError(f"{where} has no key-groups: leave key_groups={wanted!r} out")
        if wanted.start < 0 or wanted.start >= most:
            raise StateError(f"{where} has key-groups 0 to {most - 1}: none is in {wanted!r}")

    def read(self, uid: str, state: str, *, key_groups: range | None = None) -> pa.Table:
        """All rows of a state.

        Args:
            key_groups: whose rows are wanted; None = all.

        Raises:
            StateError: there is no such state, none of it can be of these key-groups, or the job has retired the
                checkpoint meanwhile.
            StoreCorrupt: a file is damaged.
        """
        schema = self.schema(uid, state)
        return pa.Table.from_batches(self.batches(uid, state, key_groups=key_groups), schema)

    def batches(
        self, uid: str, state: str, *, key_groups: range | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same in batches, read as they are asked for."""
        self.check_key_groups(uid, state, key_groups)
        wanted = _ALL_KEY_GROUPS if key_groups is None else key_groups
        for piece in self.pieces(uid, state):
            own = range(
                max(piece.first_key_group, wanted.start), min(piece.last_key_group + 1, wanted.stop)
            )
            if own or (piece.last_key_group < 0 and key_groups is None):
                yield from self.piece_batches(uid, state, piece, own)

    def pieces(self, uid: str, state: str) -> list[TablePiece]:
        """The parts of a table; each can be read by another process."""
        self.schema(uid, state)
        keyed = self._keyed.get((uid, state))
        if keyed is not None:
            return [
                TablePiece(place, one.key_groups.start, one.key_groups.stop - 1)
                for place, one in enumerate(keyed.pieces)
            ]
        if state == DONE_SPLITS:
            return [TablePiece(0, 0, -1)]
        held = [
            TablePiece(place, 0, -1)
            for place, (_, operator) in enumerate(self._held[uid])
            if (state == SPLITS and operator.splits)
            or any(one.name == state for one in operator.lists)
        ]
        is_copied = any(
            one.name == state and one.redistribution == _BROADCAST
            for _, operator in self._held[uid]
            for one in operator.lists
        )
        return held[:1] if is_copied else held

    def piece_bytes(self, uid: str, state: str, piece: TablePiece) -> int:
        """About how much is read of files for a part; 0 where it cannot be read in several."""
        keyed = self._keyed.get((uid, state))
        if keyed is None:
            return 0
        held = keyed.pieces[piece.place]
        if keyed.backend == ROCKSDB:  # its timers lie in the order of time
            of_files = sum(one.handle.size_bytes for one in held.snapshot.files)
            return 0 if keyed.kind == TIMER_KIND else of_files
        return sum(one.size_bytes for own in held.by_namespace().values() for one in own)

    def piece_batches(
        self, uid: str, state: str, piece: TablePiece, key_groups: range
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one part.

        Args:
            key_groups: of keyed state.
        """
        try:
            yield from self._piece_batches(uid, state, piece, key_groups)
        except StoreNotFound as error:
            raise self._gone(error) from error
        except StoreCorrupt as error:
            raise StoreCorrupt(f"state {state!r} of operator {uid!r}: {error}") from error

    def _piece_batches(
        self, uid: str, state: str, piece: TablePiece, key_groups: range
    ) -> Iterator[pa.RecordBatch]:
        keyed = self._keyed.get((uid, state))
        if keyed is not None:
            view = self.view(keyed)
            for namespace, batch in self.stored_rows(keyed, keyed.pieces[piece.place], key_groups):
                yield view.shown(namespace, batch)
            return
        if state == DONE_SPLITS:
            yield from done_batches(self._done[uid], self._reader)
            return
        subtask_index, operator = self._held[uid][piece.place]
        if state == SPLITS:
            yield splits_batch(operator, subtask_index)
            return
        for held in operator.lists:
            if held.name == state:
                yield list_batch(held, subtask_index, self._reader)

    def stored_rows(
        self, keyed: StoredKeyedState, piece: StatePieces, key_groups: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(namespace, rows as they are in runs) that one subtask has of a state."""
        with StateRows(self._reader) as rows:
            for namespace, batches in rows.stored_of(keyed, piece, key_groups):
                for batch in batches:
                    yield namespace, batch

    def view(self, keyed: StoredKeyedState) -> StateView:
        """What a keyed state is as a table."""
        declared = self._stored[keyed.uid].declared
        stored = keyed.pieces[0].schema
        return StateView(keyed.name, keyed.kind, stored, declared, keyed.ttl_ms)

    @property
    def manifest(self) -> checkpoint_pb2.CheckpointManifest:
        """What it says of itself."""
        return self._point.manifest

    @property
    def store(self) -> ObjectStore:
        """Where it is."""
        return self._point.store

    @property
    def reader(self) -> SnapshotReader:
        """Of its files."""
        return self._reader

    def states_of(self, uid: str) -> tuple[StateTableInfo, ...]:
        """The states of an operator; none where it has none."""
        return next((one.states for one in self.operators if one.uid == uid), ())

    def views_of(self, uid: str) -> Mapping[str, StateView]:
        """The keyed states of an operator, by name."""
        return {name: self.view(one) for (owner, name), one in self._keyed.items() if owner == uid}

    def lists_of(self, uid: str) -> Mapping[str, DeclaredList]:
        """The states without a key of an operator, by name."""
        return {
            held.name: DeclaredList(held.name, held.codec, held.redistribution)
            for _, operator in self._held.get(uid, [])
            for held in operator.lists
        }

    def stored_batches(self, uid: str, state: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(namespace, rows as they are in runs) of a keyed state."""
        keyed = self._keyed[uid, state]
        try:
            for piece in keyed.pieces:
                yield from self.stored_rows(keyed, piece)
        except StoreNotFound as error:
            raise self._gone(error) from error

    def _operators(self) -> Iterator[StoredOperator]:
        for vertex in self._point.manifest.vertices:
            for stored in vertex.operators:
                states = tuple(self._states(stored.uid))
                if states:
                    yield StoredOperator(
                        stored.uid,
                        stored.name,
                        stored.kind,
                        vertex.parallelism,
                        vertex.max_parallelism,
                        states,
                    )

    def _states(self, uid: str) -> Iterator[StateTableInfo]:
        seen: set[str] = set()
        has_splits = False
        for (owner, name), keyed in self._keyed.items():
            if owner == uid:
                seen.add(name)
                yield StateTableInfo(name, keyed.kind, self.view(keyed).schema)
        for _, operator in self._held.get(uid, []):
            for held in operator.lists:
                if held.name not in seen:
                    seen.add(held.name)
                    yield StateTableInfo(held.name, list_kind(held), list_schema(held))
            has_splits = has_splits or bool(operator.splits)
        if has_splits:
            yield StateTableInfo(SPLITS, SPLITS, SPLITS_SCHEMA)
        yield from self._empty(uid, seen)
        if uid in self._done:
            yield StateTableInfo(DONE_SPLITS, DONE_SPLITS, DONE_SCHEMA)

    def _empty(self, uid: str, seen: AbstractSet[str]) -> Iterator[StateTableInfo]:
        """What an operator has declared beside these, and nothing has come to; not every backend stores it."""
        known = self._stored[uid].declared
        for name, one in declared_tables(known).items():
            if name not in seen:
                view = StateView(one.name, one.kind, one.schema, known, one.ttl_ms)
                yield StateTableInfo(name, one.kind, view.schema)
        for name, what in declared_lists(known).items():
            if name not in seen:
                held = checkpoint_pb2.OperatorStateSnapshot(
                    codec=what.codec, redistribution=what.redistribution
                )
                yield StateTableInfo(name, list_kind(held), list_schema(held))

    def _gone(self, error: StoreNotFound) -> Exception:
        """What is to be said of a file that is missing."""
        if not self.is_savepoint:
            try:
                open_restore_point(self.path, use="read")
            except JobRejected:
                return StateError(
                    f"{self.path} was retired by its job while it was read, and its files are gone: reading pins "
                    "nothing; read the newest checkpoint, keep more of them "
                    "(execution.checkpointing.num-retained), or take a savepoint"
                )
        return StoreNotFound(f"{self.path} is not whole any more: {error}")


def open_state(path: str | PathLike[str]) -> StateTables:
    """Opens a checkpoint or savepoint to be read as tables; nothing of it is loaded yet.

    Args:
        path: of a savepoint, of a job's checkpoints (its newest one is meant), or of one ``chk-<n>``; also ``s3://``.

    Raises:
        StateError: there is none, or it is damaged or copied in part.
        StoreTransient: it cannot be read now.
    """
    text = fspath(path) if isinstance(path, (str, PathLike)) else ""
    if not isinstance(text, str) or not text:
        raise StateError(f"open_state({path!r}): give the path of a savepoint or checkpoint")
    try:
        return StateTables(open_restore_point(whole_name(text), use="read"))
    except JobRejected as error:
        raise StateError(str(error)) from error


def checked_range(key_groups: range) -> range:
    """A range of key-groups as it was given.

    Raises:
        StateError: it is none.
    """
    if not isinstance(key_groups, range) or key_groups.step != 1:
        raise StateError(f"key_groups={key_groups!r} is no range of key-groups: range(0, 64)")
    return key_groups
