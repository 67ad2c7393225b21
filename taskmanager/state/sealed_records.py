"""Snapshots of tables whose content is the records of a ``RecordTable``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import key_group_of
from taskmanager.kernels import RecordTable, Rows, encode_keys
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.state.key_batches import concatenated_keys
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

    def batch(keys: KeyBatch, is_deleted: bool, others: list[pa.Array]) -> pa.RecordBatch:
        columns = plain_keys(keys).to_arrays()
        is_key = key_count == len(columns)
        hashes = keys.hashes if is_key else encode_keys(columns[:key_count]).hashes
        groups = pa.array(key_group_of(hashes, max_parallelism))
        arrays = [groups, pa.repeat(is_deleted, len(keys)), *columns, *others]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    for keys in _joined(export.tombstones):
        missing = schema.types[2 + len(keys.types) :]
        yield batch(keys, True, [pa.nulls(len(keys), kind) for kind in missing])
    for rows in records.exported(export):
        if len(rows.keys):
            yield batch(rows.keys, False, content(rows))


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
