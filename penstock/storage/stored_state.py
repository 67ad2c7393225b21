"""What a checkpoint or savepoint holds, operator by operator and state by state, as people look at it.

Which states there are is read off its manifest; rows of keyed state are read out of the files (``state_rows_store``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2
from penstock.rows.column_values import shown_value
from penstock.storage.blobs import SnapshotReader, list_items
from penstock.storage.codec import StateCodec
from penstock.storage.entries.file_names import BACKEND
from penstock.storage.keyed_state import (
    NAMESPACE,
    StatePieces,
    StoredKeyedState,
    keyed_states,
    plain_values,
)
from penstock.storage.run_columns import KEY_GROUP
from penstock.storage.split_digest import DIGEST_BYTES
from penstock.storage.state_rows_store import StateRows

_DONE_SPLITS = "done splits"


@dataclass(slots=True)
class KeptState:
    """A state of an operator, in all subtasks.

    Attributes:
        operator: its name.
        name: as its function declares it, or as the operator calls it.
        kind: "value", "group", "timers", "list", ...; "splits" of a source, of which it keeps a digest where they
            were read to their end.
        backend: that wrote it: "hashmap", "rocksdb"; "" = it is not keyed.
        rows: None = not counted.
        columns: name -> type.
        subtasks: that hold some of it; none = it is the job's.
    """

    uid: str
    operator: str
    name: str
    kind: str
    backend: str = ""
    rows: int | None = 0
    columns: dict[str, str] = field(default_factory=dict)
    subtasks: list[int] = field(default_factory=list)

    def _add(self, subtask_index: int, rows: int | None) -> None:
        self.rows = None if rows is None or self.rows is None else self.rows + rows
        if subtask_index not in self.subtasks:
            self.subtasks.append(subtask_index)


def stored_states(
    manifest: checkpoint_pb2.CheckpointManifest, reader: SnapshotReader | None
) -> list[KeptState]:
    """All states that it holds, by operator and name.

    Args:
        reader: rows of keyed state are counted, for which they are read; None = they are not.

    Raises:
        StoreNotFound, StoreCorrupt, StoreTransient: a file cannot be read.
    """
    names = {
        operator.uid: operator.name for vertex in manifest.vertices for operator in vertex.operators
    }
    found: dict[tuple[str, str, str], KeptState] = {}
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            for state, rows in _states_without_keys(operator, names.get(operator.operator_uid, "")):
                known = found.setdefault((state.uid, state.name, state.kind), state)
                known._add(subtask.subtask_index, rows)
    for keyed, piece, count in _keyed_rows_of(manifest, reader):
        kept = KeptState(keyed.uid, keyed.operator, keyed.name, keyed.kind, keyed.backend)
        kept.columns = _columns(keyed)
        known = found.setdefault((keyed.uid, keyed.name, keyed.kind), kept)
        known._add(piece.subtask_index, count)
    for done in manifest.done_splits:
        uid, size = done.operator_uid, len(done.loose) + sum(one.size_bytes for one in done.chunks)
        columns = {"digest": "string"}
        kept = KeptState(uid, names.get(uid, ""), _DONE_SPLITS, "splits", columns=columns)
        kept.rows = size // DIGEST_BYTES
        found[uid, kept.name, kept.kind] = kept
    return sorted(found.values(), key=lambda one: (one.uid, one.name, one.kind))


def _columns(state: StoredKeyedState) -> dict[str, str]:
    """What rows show: values as the type that they are declared with, or how they are encoded where they have none."""
    hidden = {KEY_GROUP} if _has_namespaces(state) else {KEY_GROUP, NAMESPACE.name}
    found = {_shown_name(one.name): str(one.type) for one in state.schema if one.name not in hidden}
    if state.map_key_codec is not None:
        found["map_key"] = _type_name(state.map_key_codec)
    if state.codec is not None:
        value = _type_name(state.codec)
        found |= {"items": f"list<item: {value}>"} if state.kind == "list" else {"value": value}
    return found


def _type_name(codec: StateCodec) -> str:
    return codec.name if codec.value_type is None else str(codec.value_type)


def _has_namespaces(state: StoredKeyedState) -> bool:
    return any(set(piece.by_namespace()) - {0} for piece in state.pieces)


def _keyed_rows_of(
    manifest: checkpoint_pb2.CheckpointManifest, reader: SnapshotReader | None
) -> Iterator[tuple[StoredKeyedState, StatePieces, int | None]]:
    """How many rows of a state each subtask has."""
    found = [(state, piece) for state in keyed_states(manifest) for piece in state.pieces]
    found.sort(key=lambda one: (one[0].uid, one[1].subtask_index))  # snapshot by snapshot
    with ExitStack() as stack:
        read = None if reader is None else stack.enter_context(StateRows(reader))
        for state, piece in found:
            rows = _told_rows(piece)
            if rows is None and read is not None:
                parts = read.batches_of(state, piece)
                rows = sum(batch.num_rows for _, batches in parts for batch in batches)
            yield state, piece, rows


def _told_rows(piece: StatePieces) -> int | None:
    """What the manifest says where it is sure: a chain of one segment holds no row twice, and no tombstone."""
    chains = piece.by_namespace().values()
    if any(len(chain) > 1 for chain in chains) or (chains and piece.snapshot.backend == BACKEND):
        return None
    return sum(segment.row_count for chain in chains for segment in chain)


def _states_without_keys(
    operator: checkpoint_pb2.OperatorSnapshot, name: str
) -> Iterator[tuple[KeptState, int]]:
    uid = operator.operator_uid
    for held in operator.lists:
        items = held.item_count or len(held.items)
        kind = checkpoint_pb2.Redistribution.Name(held.redistribution)
        kind = kind.removeprefix("REDISTRIBUTION_").lower() + " list"
        columns = {"item": held.codec or "bytes"}
        yield KeptState(uid, name, held.name, kind, columns=columns), items
    if operator.splits:
        columns = {"id": "string", "position": "bytes", "done": "bool"}
        yield KeptState(uid, name, "splits", "splits", columns=columns), len(operator.splits)


def stored_rows(
    manifest: checkpoint_pb2.CheckpointManifest, reader: SnapshotReader, uid: str, name: str
) -> Iterator[dict[str, object]]:
    """The rows of one state, subtask by subtask.

    Raises:
        JobRejected: it holds no such state.
        StoreNotFound, StoreCorrupt, StoreTransient: a file cannot be read.
    """
    keyed = [one for one in keyed_states(manifest) if (one.uid, one.name) == (uid, name)]
    others = list(_without_keys(manifest, reader, uid, name))
    if not keyed and not others:
        raise JobRejected(
            f"there is no state {name!r} of operator {uid!r}: `penstock state PATH` lists what there is"
        )
    for rows in others:
        yield from rows
    for state in keyed:
        with StateRows(reader) as read:
            for piece in state.pieces:
                yield from _keyed_rows(state, piece, read)


def _without_keys(
    manifest: checkpoint_pb2.CheckpointManifest, reader: SnapshotReader, uid: str, name: str
) -> Iterator[Iterator[dict[str, object]]]:
    """The rows of each state of that name that is not kept by key."""
    for done in manifest.done_splits:
        if (done.operator_uid, _DONE_SPLITS) == (uid, name):
            yield _digests(done, reader)
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            if operator.operator_uid != uid:
                continue
            place: dict[str, object] = {"subtask": subtask.subtask_index}
            for held in operator.lists:
                if held.name == name:
                    yield _item_rows(place, held, reader)
            if name == "splits" and operator.splits:
                yield ({**place, **_split_fields(split)} for split in operator.splits)


def _digests(
    done: checkpoint_pb2.DoneSplits, reader: SnapshotReader
) -> Iterator[dict[str, object]]:
    for content in (*map(reader.read, done.chunks), done.loose):
        for offset in range(0, len(content), DIGEST_BYTES):
            yield {"digest": content[offset : offset + DIGEST_BYTES].hex()}


def _item_rows(
    place: dict[str, object], held: checkpoint_pb2.OperatorStateSnapshot, reader: SnapshotReader
) -> Iterator[dict[str, object]]:
    for item in list_items(held, reader):
        yield {**place, "item": item}


def _split_fields(split: checkpoint_pb2.SplitSnapshot) -> dict[str, object]:
    position = split.position if split.HasField("position") else None
    return {"id": split.id, "position": position, "done": split.done}


def _keyed_rows(
    state: StoredKeyedState, piece: StatePieces, read: StateRows
) -> Iterator[dict[str, object]]:
    hidden = {KEY_GROUP} if _has_namespaces(state) else {KEY_GROUP, NAMESPACE.name}
    for _, batches in read.batches_of(state, piece):
        for batch in batches:
            columns = {
                _shown_name(name): _shown_values(state, name, column)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
                if name not in hidden
            }
            for values in zip(*columns.values(), strict=True):
                yield {"subtask": piece.subtask_index, **dict(zip(columns, values, strict=True))}


def _shown_name(name: str) -> str:
    """Columns that are no part of the state go by their names without the underscores."""
    return name.removeprefix("__")


def _shown_values(state: StoredKeyedState, name: str, column: pa.Array) -> Iterable[object]:
    """Values as the function sees them."""
    if name == "map_key" and state.map_key_codec is not None:
        return _objects(plain_values(state.map_key_codec, column))
    if state.codec is None or name not in ("value", "items"):
        return _objects(column)
    if state.kind != "list":
        return _objects(plain_values(state.codec, column))
    lengths = pa.compute.list_value_length(column).to_pylist()
    items = iter(_objects(plain_values(state.codec, column.flatten())))
    return [[next(items) for _ in range(length)] for length in lengths]


def _objects(values: pa.Array | list[Any]) -> list[object]:
    if isinstance(values, list):
        return values
    try:
        if values.type != pa.time64("ns"):  # of which Python has the microseconds only
            return list(values.to_pylist())
    except (ValueError, OverflowError):  # times that Python has not
        pass
    return [shown_value(value) for value in values]
