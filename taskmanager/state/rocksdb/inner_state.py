"""A snapshot of the states in memory inside that of the database, and back.

States in memory are those of older checkpoints that nobody has asked for since they were restored.

A ``rocksdb`` snapshot lists the tables of the database first; their ``kind`` begins with ``rocksdb.``.
Files of the states in memory are renamed ``memory/<instance>/<name>``.
"""

from __future__ import annotations

from typing import Final

from penstock.pb import checkpoint_pb2

STORED_KIND: Final = "rocksdb."
INNER_FORMAT_VERSION: Final = 2
"""Format of the inner snapshot in format 2 of the outer one; that in format 1 had 1, which is read as 2."""

_PREFIX: Final = "memory/"


def add_inner(
    outer: checkpoint_pb2.KeyedStateSnapshot, inner: checkpoint_pb2.KeyedStateSnapshot
) -> None:
    """Adds the snapshot of the states in memory."""
    assert inner.format_version == INNER_FORMAT_VERSION, (
        "needs another format of the outer snapshot"
    )
    first_table = len(outer.tables)
    for file in inner.files:
        added = outer.files.add()
        added.CopyFrom(file)
        added.name = f"{_PREFIX}{inner.instance}/{file.name}"
    outer.tables.extend(inner.tables)
    for segment in inner.segments:
        moved = outer.segments.add()
        moved.CopyFrom(segment)
        moved.table += first_table
        moved.file = f"{_PREFIX}{inner.instance}/{segment.file}"


def inner_part(outer: checkpoint_pb2.KeyedStateSnapshot) -> checkpoint_pb2.KeyedStateSnapshot:
    """The snapshot of the states in memory."""
    tables = [table for table in outer.tables if not table.kind.startswith(STORED_KIND)]
    first_table = len(outer.tables) - len(tables)
    files = [file for file in outer.files if is_inner_file(file)]
    inner = checkpoint_pb2.KeyedStateSnapshot(
        backend="hashmap",
        format_version=INNER_FORMAT_VERSION,
        instance=outer.instance,
        first_key_group=outer.first_key_group,
        last_key_group=outer.last_key_group,
        max_parallelism=outer.max_parallelism,
        tables=tables,
    )
    for file in files:
        _, inner.instance, name = file.name.split("/", 2)
        added = inner.files.add()
        added.CopyFrom(file)
        added.name = name
    for segment in outer.segments:
        if segment.table >= first_table:
            moved = inner.segments.add()
            moved.CopyFrom(segment)
            moved.table -= first_table
            moved.file = segment.file.split("/", 2)[2]
    return inner


def is_inner_file(file: checkpoint_pb2.StateFile) -> bool:
    """The file belongs to the states in memory."""
    return file.name.startswith(_PREFIX)
