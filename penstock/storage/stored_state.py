"""What a checkpoint or savepoint holds, operator by operator and state by state.

The states are read off its manifest; rows of keyed state are in the files of the in-memory backend, and of those only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.run_reader import SegmentPlace, parts_of, segment_batches

_DONE_SPLITS = "done splits"
_DIGEST_BYTES = 16


@dataclass(slots=True)
class KeptState:
    """A state of an operator, in all subtasks.

    Attributes:
        uid: of the operator.
        operator: its name.
        name: as its function declares it, or as the operator calls it.
        kind: "value", "group", "timers", "list", ...; "splits" of a source, of which it keeps a digest where they
            were read to their end.
        backend: that wrote it: "hashmap", "rocksdb"; "" = it is not keyed.
        rows: those that later ones replace included; None = only the backend can count them.
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


def stored_states(manifest: checkpoint_pb2.CheckpointManifest) -> list[KeptState]:
    """All states that it holds, by operator and name."""
    names = {
        operator.uid: operator.name for vertex in manifest.vertices for operator in vertex.operators
    }
    found: dict[tuple[str, str, str], KeptState] = {}
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            for state, rows in _states_of(operator, names.get(operator.operator_uid, "")):
                known = found.setdefault((state.uid, state.name, state.kind), state)
                known._add(subtask.subtask_index, rows)
    for done in manifest.done_splits:
        uid, size = done.operator_uid, len(done.loose) + sum(one.size_bytes for one in done.chunks)
        columns = {"digest": "string"}
        state = KeptState(uid, names.get(uid, ""), _DONE_SPLITS, "splits", columns=columns)
        state.rows = size // _DIGEST_BYTES
        found[uid, state.name, state.kind] = state
    return sorted(found.values(), key=lambda one: (one.uid, one.name, one.kind))


def _states_of(
    operator: checkpoint_pb2.OperatorSnapshot, name: str
) -> Iterator[tuple[KeptState, int | None]]:
    uid, keyed = operator.operator_uid, operator.keyed
    rows: list[int | None] = [0] * len(keyed.tables)
    for segment in keyed.segments:
        so_far = rows[segment.table]
        is_counted = bool(segment.file) and so_far is not None
        rows[segment.table] = (
            so_far + segment.row_count if is_counted and so_far is not None else None
        )
    for table, count in zip(keyed.tables, rows, strict=True):
        columns = _columns(table.schema)
        yield KeptState(uid, name, table.name, table.kind, keyed.backend, 0, columns), count
    for held in operator.lists:
        items = held.item_count or len(held.items)
        kind = checkpoint_pb2.Redistribution.Name(held.redistribution)
        kind = kind.removeprefix("REDISTRIBUTION_").lower() + " list"
        columns = {"item": held.codec or "bytes"}
        yield KeptState(uid, name, held.name, kind, columns=columns), items
    if operator.splits:
        columns = {"id": "string", "position": "bytes", "done": "bool"}
        yield KeptState(uid, name, "splits", "splits", columns=columns), len(operator.splits)


def _columns(schema: bytes) -> dict[str, str]:
    if not schema:
        return {}
    return {one.name: str(one.type) for one in pa.ipc.read_schema(pa.py_buffer(schema))}


def stored_rows(
    manifest: checkpoint_pb2.CheckpointManifest, reader: SnapshotReader, uid: str, name: str
) -> Iterator[dict[str, object]]:
    """The rows of one state, subtask by subtask; of rows of one key the last one, and none that was removed.

    Raises:
        JobRejected: it holds no such state, or the state is in a database.
        StoreNotFound, StoreCorrupt, StoreTransient: a file cannot be read.
    """
    is_there = False
    for done in manifest.done_splits:
        if (done.operator_uid, _DONE_SPLITS) == (uid, name):
            is_there = True
            for content in (*map(reader.read, done.chunks), done.loose):
                for offset in range(0, len(content), _DIGEST_BYTES):
                    yield {"digest": content[offset : offset + _DIGEST_BYTES].hex()}
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            if operator.operator_uid != uid:
                continue
            place = {"subtask": subtask.subtask_index}
            for held in operator.lists:
                if held.name == name:
                    is_there = True
                    yield from ({**place, "item": item} for item in _items(held, reader))
            if name == "splits":
                is_there = is_there or bool(operator.splits)
                yield from ({**place, **_split_fields(split)} for split in operator.splits)
            tables = [index for index, one in enumerate(operator.keyed.tables) if one.name == name]
            if tables and operator.keyed.backend == "rocksdb":
                raise JobRejected(
                    f"state {name!r} of operator {uid!r} is in a database of RocksDB, which only its "
                    "backend reads: take a savepoint with --format canonical"
                )
            for index in tables:
                is_there = True
                rows = _keyed_rows(operator.keyed, index, reader)
                yield from ({**place, **row} for row in rows)
    if not is_there:
        raise JobRejected(
            f"there is no state {name!r} of operator {uid!r}: `penstock state PATH` lists what there is"
        )


def _items(held: checkpoint_pb2.OperatorStateSnapshot, reader: SnapshotReader) -> list[bytes]:
    if not held.HasField("handle"):
        return list(held.items)
    items = checkpoint_pb2.OperatorStateItems.FromString(reader.read(held.handle)).items
    return list(items)[held.first_item : held.first_item + (held.item_count or len(items))]


def _split_fields(split: checkpoint_pb2.SplitSnapshot) -> dict[str, object]:
    position = split.position if split.HasField("position") else None
    return {"id": split.id, "position": position, "done": split.done}


def _keyed_rows(
    keyed: checkpoint_pb2.KeyedStateSnapshot, table: int, reader: SnapshotReader
) -> Iterator[dict[str, object]]:
    kind = keyed.tables[table].kind
    files = {file.name: file.handle for file in keyed.files}
    by_namespace: dict[int, dict[object, dict[str, object]]] = {}
    for segment in keyed.segments:
        if segment.table != table:
            continue
        place = SegmentPlace(
            files[segment.file],
            segment.offset,
            segment.size_bytes,
            parts_of(segment),
            f"state {keyed.tables[table].name!r}, file {segment.file}",
        )
        key_groups = range(keyed.first_key_group, keyed.last_key_group + 1)
        latest = by_namespace.setdefault(segment.namespace, {})
        for batch in segment_batches(reader, place, key_groups):
            identity = [name for name in batch.schema.names if _is_identity(name, kind)]
            for row in batch.to_pylist():
                key = tuple(str(row[name]) for name in identity) if identity else len(latest)
                group = row.pop("__key_group")
                is_foreign = not keyed.first_key_group <= group <= keyed.last_key_group
                if row.pop("__deleted", False) or is_foreign:
                    latest.pop(key, None)
                else:
                    latest[key] = row
    for namespace, rows in sorted(by_namespace.items()):
        for row in rows.values():
            yield {"namespace": namespace, **row} if len(by_namespace) > 1 or namespace else row


def _is_identity(name: str, kind: str) -> bool:
    if kind == "rows":
        return False
    is_key = name.startswith("key_") and name.removeprefix("key_").isdigit()
    return is_key or (kind, name) in _ALSO_IDENTITY


_ALSO_IDENTITY = {("map", "map_key"), ("timers", "time"), ("sessions", "start")}
"""Beside the key: (kind of table, column)."""
