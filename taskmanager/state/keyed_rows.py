"""Rows of tables that keep one row per key: how they are exported, and which of them count.

A row is identified by its first columns behind the key-group (its *identity*: the key, and what
distinguishes several things of one key). A segment holds the tombstones first, then the changed rows;
of several rows of one identity in a chain the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from penstock.errors import TaskFailure
from penstock.storage.key_encoding import encode_keys
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.state.value_log import FrozenStates
from taskmanager.state.wide_columns import narrow_batches

MakeColumns = Callable[[Int64Array], list[pa.Array]]
"""Columns of the rows with these indices."""

SEGMENT_BATCH_ROWS = 1 << 13


def sealed_batches(
    schema: pa.Schema,
    key_count: int,
    max_parallelism: int,
    identity: list[pa.Array],
    content: MakeColumns,
    dead: list[pa.Array] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Changed rows and tombstones as they were when their table was sealed: tombstones first, each batch by key-group.

    Args:
        schema: ``keyed_schema``.
        key_count: how many of the identity's columns are the key.
        identity: columns of the changed rows.
        content: makes the columns of changed rows; called on an I/O thread.
        dead: identity columns of removed rows; may name rows that are there again.
    """

    def rows_of(
        known: list[pa.Array], make: MakeColumns, *, is_deleted: bool
    ) -> Iterator[pa.RecordBatch]:
        hashes = encode_keys(known[:key_count]).hashes
        groups = key_group_of(hashes, max_parallelism)
        order = np.argsort(groups, kind="stable")
        for start in range(0, len(order), SEGMENT_BATCH_ROWS):
            rows = order[start : start + SEGMENT_BATCH_ROWS]
            indices = pa.array(rows)
            arrays = [
                pa.array(groups[rows]),
                pa.repeat(is_deleted, len(rows)),
                *(column.take(indices) for column in known),
                *make(rows),
            ]
            yield from narrow_batches(arrays, schema)

    if dead is not None and len(dead[0]):
        missing = schema.types[2 + len(dead) :]
        yield from rows_of(
            dead, lambda rows: [pa.nulls(len(rows), kind) for kind in missing], is_deleted=True
        )
    yield from rows_of(identity, content, is_deleted=False)


def checked_rows(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The restored rows, with the columns of ``schema``.

    Raises:
        TaskFailure: they have other columns.
    """
    found = [(field.name, field.type) for field in batch.schema]
    expected = [(field.name, field.type) for field in schema]
    if found != expected:
        raise TaskFailure(
            f"restored state does not fit the operator: it has the columns {_columns(found)}, the "
            f"operator needs {_columns(expected)}; start from a checkpoint of the same job graph, or "
            "give the operator another uid so that it starts without state"
        )
    return batch


def _columns(columns: list[tuple[str, pa.DataType]]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in columns)


def present_states(frozen: Sequence[FrozenStates], present: BoolArray) -> MakeColumns:
    """States of rows of which only some have one; null for the others.

    Args:
        frozen: per column the states of the rows that have one, in their order.
        present: bool[n], which of the rows have one.
    """
    position = np.cumsum(present) - 1

    def states(rows: Int64Array) -> list[pa.Array]:
        is_there = present[rows]
        columns = [column(position[rows[is_there]]) for column in frozen]
        if is_there.all():
            return columns
        spread = pa.array(np.cumsum(is_there) - 1, mask=~is_there)
        return [column.take(spread) for column in columns]

    return states
