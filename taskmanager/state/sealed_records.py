"""Snapshots of tables whose content is the records of a ``RecordTable``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import key_group_of
from penstock.storage.run_columns import sorted_batch
from taskmanager.kernels import RecordTable, Rows, encode_keys
from taskmanager.kernels.record_versions import RecordExport
from taskmanager.state.key_batches import concatenated_keys
from taskmanager.state.run_format import plain_keys

TOMBSTONE_ROWS_MAX = 1 << 16


class SealedRecords:
    """Changed records of a table; exported while the table goes on changing.

    Args:
        records: the table.
        export: what to export of it.
        schema: key-group, tombstone mark, the columns of the records' keys, then ``content``.
        key_count: how many of the records' key columns decide the key-group.
        max_parallelism: number of key-groups.
        content: makes the other columns.
    """

    def __init__(
        self,
        records: RecordTable,
        export: RecordExport,
        schema: pa.Schema,
        key_count: int,
        max_parallelism: int,
        content: Callable[[Rows], list[pa.Array]],
    ) -> None:
        self._records = records
        self._export = export
        self._schema = schema
        self._key_count = key_count
        self._max_parallelism = max_parallelism
        self._content = content

    @property
    def since_version(self) -> int:
        """The changes are those after it."""
        return self._export.since_version

    @property
    def version(self) -> int:
        """The version that was sealed."""
        return self._export.version

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Tombstones, then rows.

        Raises:
            ReleasedError: ``release`` was called before the last one.
        """
        for keys in _joined(self._export.tombstones):
            missing = self._schema.types[2 + len(keys.types) :]
            yield self._batch(keys, True, [pa.nulls(len(keys), kind) for kind in missing])
        for rows in self._records.exported(self._export):
            if len(rows.keys):
                yield self._batch(rows.keys, False, self._content(rows))

    def release(self) -> None:
        """Ends the export."""
        self._export.release()

    def _batch(self, keys: KeyBatch, is_deleted: bool, content: list[pa.Array]) -> pa.RecordBatch:
        columns = plain_keys(keys).to_arrays()
        if self._key_count == len(columns):
            hashes = keys.hashes
        else:
            hashes = encode_keys(columns[: self._key_count]).hashes
        groups = key_group_of(hashes, self._max_parallelism)
        deleted = pa.repeat(is_deleted, len(keys))
        return sorted_batch(self._schema, groups, [deleted, *columns, *content])


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
