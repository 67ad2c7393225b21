"""The keyed states of a checkpoint or savepoint, as tools see them: which there are, and what their rows look like (pure).

Whatever backend has written a state, its rows are

================== ============================================================================================
``__key_group``    uint16
``__namespace``    int64: the window or slice that a row belongs to; 0 where there are none
``key_0``, ...     the key
``map_key``, ...   what else a row is known by: the key in a map, the time of a timer, the start of a session
``value``, ...     what is kept; ``items`` of a list
``__expires_at_ms`` int64, or a list of them beside ``items``: from when on a value may be gone; only with a time to live
================== ============================================================================================

Values are as their codec stores them in columns: plain types as they are, all else as bytes (``plain_values``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import Stamped, StateCodec
from penstock.storage.entries.entry_rows import key_types_of
from penstock.storage.entries.file_names import BACKEND
from penstock.storage.entries.file_names import FORMATS_READ as DATABASES_READ
from penstock.storage.entries.run_states import run_states
from penstock.storage.plain_codecs import PickleCodec
from penstock.storage.run_columns import BACKEND as RUNS
from penstock.storage.run_columns import DELETED, FORMATS_READ, KEY_GROUP, OBJECT_KINDS, field_codec
from penstock.storage.run_lists import unmarked

NAMESPACE: Final = pa.field("__namespace", pa.int64(), nullable=False)
EXPIRES_AT: Final = "__expires_at_ms"
_TTL: Final = b"ttl_ms"


@dataclass(frozen=True, slots=True)
class StatePieces:
    """What one subtask has of a state.

    Attributes:
        table: as the snapshot calls it.
        schema: of the rows in runs.
    """

    subtask_index: int
    snapshot: checkpoint_pb2.KeyedStateSnapshot
    table: int
    schema: pa.Schema

    @property
    def key_groups(self) -> range:
        """Whose rows count here."""
        return range(self.snapshot.first_key_group, self.snapshot.last_key_group + 1)

    def by_namespace(self) -> dict[int, list[checkpoint_pb2.StateSegment]]:
        """The segments, or the partitions of a database, in their order."""
        found: dict[int, list[checkpoint_pb2.StateSegment]] = {}
        for segment in self.snapshot.segments:
            if segment.table == self.table:
                found.setdefault(segment.namespace, []).append(segment)
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class StoredKeyedState:
    """A keyed state of an operator.

    Attributes:
        operator: its name.
        name: as the function declares it, or as the operator calls it.
        kind: "value", "list", "map", "group", "timers", "rows", "sessions", "counts".
        backend: "hashmap" or "rocksdb"; canonical savepoints of either say "hashmap".
        codec: of values, of a list's items, of a map's values, without time stamps; None = of another kind.
        map_key_codec: of a map's keys.
        ttl_ms: 0 = values live for ever.
        pieces: of the subtasks that have some of it.
    """

    uid: str
    operator: str
    name: str
    kind: str
    backend: str
    max_parallelism: int
    key_types: tuple[pa.DataType, ...]
    codec: StateCodec | None
    map_key_codec: StateCodec | None
    ttl_ms: int
    schema: pa.Schema
    pieces: tuple[StatePieces, ...]


def keyed_states(manifest: checkpoint_pb2.CheckpointManifest) -> list[StoredKeyedState]:
    """The keyed states that it holds, by operator and name.

    Raises:
        StoreCorrupt: one is in a format that this version does not read.
    """
    declared = {
        operator.uid: operator for vertex in manifest.vertices for operator in vertex.operators
    }
    found: dict[tuple[str, str, str], tuple[str, list[StatePieces]]] = {}
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            keyed = operator.keyed
            for name, kind, index, schema in _tables(keyed, operator.operator_uid):
                piece = StatePieces(subtask.subtask_index, keyed, index, schema)
                known = found.setdefault((operator.operator_uid, name, kind), (keyed.backend, []))
                known[1].append(piece)
    return [
        _state(declared.get(uid), uid, name, kind, backend, pieces)
        for (uid, name, kind), (backend, pieces) in sorted(found.items())
    ]


def _tables(
    keyed: checkpoint_pb2.KeyedStateSnapshot, uid: str
) -> Iterator[tuple[str, str, int, pa.Schema]]:
    """Name, kind, index and schema of the rows in runs of the states of a snapshot."""
    if not keyed.tables:
        return
    known = {RUNS: FORMATS_READ, BACKEND: DATABASES_READ}
    formats = known.get(keyed.backend, ())
    if keyed.format_version not in formats:
        raise StoreCorrupt(
            f"the state of operator {uid!r} was written by backend {keyed.backend!r} in its format "
            f"{keyed.format_version}, which this version of Penstock does not read: use the version that wrote it"
        )
    if keyed.backend == RUNS:
        for index, table in enumerate(keyed.tables):
            schema = pa.ipc.read_schema(pa.py_buffer(table.schema))
            yield table.name, table.kind, index, unmarked(schema)
        return
    for state, _ in run_states(keyed):
        yield state.name, state.kind, state.table, unmarked(state.schema)


def _state(
    declared: checkpoint_pb2.OperatorFingerprint | None,
    uid: str,
    name: str,
    kind: str,
    backend: str,
    pieces: list[StatePieces],
) -> StoredKeyedState:
    stored = pieces[0].schema
    codec = map_key = None
    ttl_ms = 0
    if kind in OBJECT_KINDS:
        codec = field_codec(stored.field(len(stored) - 1))
        map_key = field_codec(stored.field(len(stored) - 2)) if kind == "map" else None
        if isinstance(codec, Stamped):
            codec = codec.inner
            ttl_ms = int((stored.metadata or {}).get(_TTL, b"0")) or _declared_ttl(declared, name)
    return StoredKeyedState(
        uid,
        "" if declared is None else declared.name,
        name,
        kind,
        backend,
        pieces[0].snapshot.max_parallelism,
        key_types_of(stored),
        codec,
        map_key,
        ttl_ms,
        _shown_schema(stored, kind, codec, is_stamped=_is_stamped(stored, kind)),
        tuple(pieces),
    )


def _declared_ttl(declared: checkpoint_pb2.OperatorFingerprint | None, name: str) -> int:
    if declared is None:
        return 0
    states = declared.declared.process.states
    return next((one.ttl_ms for one in states if one.name == name), 0)


def _is_stamped(stored: pa.Schema, kind: str) -> bool:
    return kind in OBJECT_KINDS and isinstance(field_codec(stored.field(len(stored) - 1)), Stamped)


def _shown_schema(
    stored: pa.Schema, kind: str, codec: StateCodec | None, *, is_stamped: bool
) -> pa.Schema:
    fields = [one for one in stored if one.name not in (KEY_GROUP, DELETED)]
    if is_stamped:
        assert codec is not None
        value, time = codec.column_type, pa.int64()
        if kind == "list":
            value, time = pa.list_(value), pa.list_(time)
        fields[-1:] = [pa.field(fields[-1].name, value), pa.field(EXPIRES_AT, time)]
    plain = [pa.field(one.name, one.type) for one in fields]
    return pa.schema([stored.field(KEY_GROUP), NAMESPACE, *plain])


def shown_rows(
    state: StoredKeyedState, batches: Iterable[pa.RecordBatch], namespace: int
) -> Iterator[pa.RecordBatch]:
    """Rows of runs, none of them a tombstone, as rows of the state."""
    for batch in batches:
        columns = {
            name: column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
            if name != DELETED
        }
        columns[NAMESPACE.name] = pa.repeat(pa.scalar(namespace, pa.int64()), batch.num_rows)
        if EXPIRES_AT in state.schema.names:
            last = batch.schema.names[-1]
            columns[last], columns[EXPIRES_AT] = _unstamped(columns[last], state)
        arrays = [_typed(columns[field.name], field.type) for field in state.schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=state.schema)


def _unstamped(column: pa.Array, state: StoredKeyedState) -> tuple[pa.Array, pa.Array]:
    """Values, and when they expire."""
    if state.kind != "list":
        values, stamps = column.flatten()
        return values, pc.add(stamps, state.ttl_ms)
    values, stamps = column.flatten().flatten()
    lengths = pc.list_value_length(column).to_pylist()
    offsets = pa.array(
        [0, *pc.cumulative_sum(pa.array(lengths, pa.int64())).to_pylist()], pa.int32()
    )
    made = pa.ListArray.from_arrays
    return made(offsets, values), made(offsets, pc.add(stamps, state.ttl_ms))


def _typed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)


def plain_values(codec: StateCodec, column: pa.Array) -> pa.Array | list[Any]:
    """Values as the function sees them, as an array of their Arrow type, or as Python objects where they have none.

    What was pickled stays bytes: reading it would run code of who wrote it.
    """
    if codec.column_type == codec.value_type:
        return column
    if isinstance(codec, PickleCodec):
        return column
    values = [None if one is None else codec.to_value(one) for one in codec.stored(column)]
    return values if codec.value_type is None else pa.array(values, codec.value_type)
