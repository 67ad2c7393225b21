"""Columns that rows of state have in runs beside the state itself; which they are by kind of table is told in ``run_format``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.codec import StateCodec, codec_of
from penstock.storage.key_groups import UInt16Array
from penstock.storage.key_types import Int64Array, value_type

BACKEND: Final = "hashmap"
"""What snapshots in this format say they are of: that backend writes no others, and canonical savepoints are in it
whatever backend they were taken of."""
RUN_VERSION: Final = 4
FORMATS_READ: Final = (3, 4)

KEY_GROUP: Final = "__key_group"
DELETED: Final = "__deleted"
KEY_GROUP_FIELD: Final = pa.field(KEY_GROUP, pa.uint16(), nullable=False)
DELETED_FIELD: Final = pa.field(DELETED, pa.bool_(), nullable=False)
SEQUENCE: Final = pa.field("__sequence", pa.int64(), nullable=False)
"""Place of a row in the order of arrival."""
APPENDED_FIELD: Final = pa.field("__appended", pa.bool_(), nullable=False)
"""The items of a row of a list come behind those of the rows before; where the column is missing none do."""
ADDED: Final = frozenset({KEY_GROUP, DELETED, SEQUENCE.name, APPENDED_FIELD.name})
"""Columns that are no part of the state."""

CODEC: Final = b"codec"
"""In the metadata of a field: how its values are encoded."""
ROW_KEYS: Final = b"row_keys"
"""In the metadata of the exported rows' schema: the names of the key columns, as JSON."""

OBJECT_KINDS: Final = frozenset({"value", "list", "map"})
"""Kinds of tables that hold what functions declare."""
TIMER_KIND: Final = "timers"
"""Of tables of timers in snapshots."""


def key_fields(key_types: Sequence[pa.DataType]) -> list[pa.Field]:
    """The key columns of a segment."""
    return [pa.field(f"key_{index}", value_type(kind)) for index, kind in enumerate(key_types)]


def keyed_schema(identity: Sequence[pa.Field], content: Sequence[pa.Field]) -> pa.Schema:
    """Schema of rows that are known by their first columns: key-group, tombstone mark, identity, content."""
    return pa.schema([KEY_GROUP_FIELD, DELETED_FIELD, *identity, *content])


def codec_field(name: str, codec: StateCodec, kind: pa.DataType | None = None) -> pa.Field:
    """A column of stored values."""
    return pa.field(name, kind or codec.column_type, metadata={CODEC: codec.name.encode()})


def field_codec(field: pa.Field) -> StateCodec:
    """The codec of the values of a column."""
    return codec_of((field.metadata or {})[CODEC].decode())


def sorted_batch(
    schema: pa.Schema, key_groups: UInt16Array, columns: Sequence[pa.Array]
) -> pa.RecordBatch:
    """A batch of a segment.

    Args:
        key_groups: uint16[n], in any order.
        columns: the other columns of the schema, n rows each.
    """
    if len(key_groups) and (key_groups[1:] < key_groups[:-1]).any():
        order = np.argsort(key_groups, kind="stable")
        key_groups = key_groups[order]
        columns = [_taken(column, order) for column in columns]
    return pa.RecordBatch.from_arrays([pa.array(key_groups), *columns], schema=schema)


def _taken(column: pa.Array, order: Int64Array) -> pa.Array:
    """The values at some places."""
    if is_plain(column):
        return pa.array(column.to_numpy()[order])
    return column if is_same_mark(column) else column.take(pa.array(order))


def within(batch: pa.RecordBatch, key_groups: range) -> pa.RecordBatch:
    """The rows of a batch that belong to a range of key-groups; not copied."""
    groups = batch.column(0).to_numpy()
    start = int(np.searchsorted(groups, key_groups.start, side="left"))
    stop = int(np.searchsorted(groups, key_groups.stop, side="left"))
    if start == 0 and stop == len(groups):
        return batch
    return batch.slice(start, stop - start)


def is_plain(column: pa.Array) -> bool:
    """Whether it is an array for numpy, which is faster than Arrow on it."""
    return pa.types.is_integer(column.type) and not column.null_count


def is_same_mark(column: pa.Array) -> bool:
    """Whether it is a column of marks that are all the same, as those of tombstones mostly are."""
    is_mark = pa.types.is_boolean(column.type) and not column.null_count
    return is_mark and column.true_count in (0, len(column))
