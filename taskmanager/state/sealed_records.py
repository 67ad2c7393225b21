"""Snapshots of tables whose content is the records of a ``RecordTable``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch, concatenated_keys
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import BoolArray
from taskmanager.kernels import RecordTable, Rows, encode_keys
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.state.run_format import plain_keys

TOMBSTONE_ROWS_MAX = 1 << 16


def record_batches(
    records: RecordTable,
    export: RecordExport,
    schema: pa.Schema,
    key_count: int,
    max_parallelism: int,
    content: Callable[[Rows], list[pa.Array]],
) -> Iterator[pa.RecordBatch]:
    """Changed records of a table, exported while the table goes on changing: tombstones, then rows.

    Args:
        export: what to export of it.
        schema: key-group, tombstone mark, the columns of the records' keys, then ``content``.
        key_count: how many of the records' key columns decide the key-group.
        content: makes the other columns.

    Raises:
        ReleasedError: the export was released before the last one.
    """

    batch = partial(marked_rows, schema, key_count, max_parallelism)
    for keys in _joined(export.tombstones):
        missing = schema.types[2 + len(keys.types) :]
        yield batch(keys, True, [pa.nulls(len(keys), kind) for kind in missing])
    for rows in records.exported(export):
        if len(rows.keys):
            yield batch(rows.keys, False, content(rows))


def marked_rows(
    schema: pa.Schema,
    key_count: int,
    max_parallelism: int,
    keys: KeyBatch,
    is_deleted: bool | BoolArray,
    content: Sequence[pa.Array],
) -> pa.RecordBatch:
    """Rows of a ``keyed_schema``.

    Args:
        key_count: how many columns of ``keys`` decide the key-group.
        content: the columns behind those of ``keys``.
    """
    columns, deleted = plain_keys(keys).to_arrays(), is_deleted
    is_key = key_count == len(columns)
    hashes = keys.hashes if is_key else encode_keys(columns[:key_count]).hashes
    groups = pa.array(key_group_of(hashes, max_parallelism))
    marks = pa.repeat(deleted, len(keys)) if isinstance(deleted, bool) else pa.array(deleted)
    return pa.RecordBatch.from_arrays([groups, marks, *columns, *content], schema=schema)


def _joined(batches: list[KeyBatch]) -> Iterator[KeyBatch]:
    """The same keys in batches of about ``TOMBSTONE_ROWS_MAX``."""
    gathered: list[KeyBatch] = []
    count = 0
    for batch in batches:
        gathered.append(batch)
        count += len(batch)
        if count >= TOMBSTONE_ROWS_MAX:
            yield concatenated_keys(gathered)
            gathered, count = [], 0
    if gathered:
        yield concatenated_keys(gathered)
