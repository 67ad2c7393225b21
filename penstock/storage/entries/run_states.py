"""What the states of a database are called and look like in runs (``run_format``), and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.pb import checkpoint_pb2
from penstock.storage.run_columns import (
    ADDED,
    DELETED_FIELD,
    KEY_GROUP_FIELD,
    OBJECT_KINDS,
    SEQUENCE,
    codec_field,
    field_codec,
)
from penstock.storage.run_lists import marked

COLUMN_PREFIX: Final = "key_space/"
"""Stands before the names of keyed objects in snapshots of a database."""
ENDS: Final = "/ends"
"""Behind the name of sessions: when they end. Runs leave that out."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A state as runs have it.

    Attributes:
        schema: of its rows, key-group included.
        table: its index in the snapshot.
    """

    name: str
    kind: str
    schema: pa.Schema
    table: int


def run_states(
    snapshot: checkpoint_pb2.KeyedStateSnapshot,
) -> Iterator[tuple[RunState, list[checkpoint_pb2.StateSegment]]]:
    """The states of a database that runs have, with their partitions."""
    kinds = {table.name: table.kind for table in snapshot.tables}
    for index, table in enumerate(snapshot.tables):
        of_sessions = table.name.removesuffix(ENDS)
        if of_sessions != table.name and kinds.get(of_sessions) == "sessions":
            continue
        schema = pa.ipc.read_schema(pa.py_buffer(table.schema))
        name = table.name
        if table.kind in OBJECT_KINDS:
            name = name.removeprefix(COLUMN_PREFIX)
        state = RunState(name, table.kind, _run_schema(table.kind, schema), index)
        yield state, [segment for segment in snapshot.segments if segment.table == index]


def stored_table(name: str, kind: str, schema: pa.Schema) -> tuple[str, bytes]:
    """Name and schema that a state of runs has in a database."""
    kept = [field for field in schema if field.name not in ADDED]
    if kind in OBJECT_KINDS:
        name = COLUMN_PREFIX + name
        codec = field_codec(kept[-1])
        kept[-1] = codec_field("value", codec)
        return name, pa.schema(kept).serialize().to_pybytes()
    return name, pa.schema(kept, metadata=schema.metadata).serialize().to_pybytes()


def ends_table(schema: pa.Schema) -> bytes:
    """The schema of the ends of sessions."""
    keys = [field for field in schema if field.name.startswith("key_")]
    return pa.schema([*keys, pa.field("time", pa.int64())]).serialize().to_pybytes()


def _run_schema(kind: str, stored: pa.Schema) -> pa.Schema:
    second = SEQUENCE if kind == "rows" else DELETED_FIELD
    fields = list(stored)
    if kind == "list":
        fields[-1] = fields[-1].with_name("items").with_type(pa.list_(fields[-1].type))
    return marked(kind, pa.schema([KEY_GROUP_FIELD, second, *fields], metadata=stored.metadata))
