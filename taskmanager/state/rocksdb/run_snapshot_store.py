"""A snapshot of the database in the run format: what a canonical savepoint has of it.

The hard links of a freeze are a database of their own, which nobody changes. It is read partition by
partition, in parts of bounded size, on the thread that writes the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

import pyarrow as pa

from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.entries.database_reader_store import ReadOnlyDatabase
from penstock.storage.entries.entry_keys import partition_bounds
from penstock.storage.entries.entry_rows import entry_rows
from penstock.storage.entries.run_states import run_states
from penstock.storage.run_columns import BACKEND, RUN_VERSION
from penstock.storage.run_lists import with_marks
from penstock.storage.run_merge import identity_of, whole_lists
from penstock.storage.run_writer import SegmentWriter
from taskmanager.state.rocksdb.snapshot_store import LinkedSnapshot
from taskmanager.state.rocksdb.write_queue_runner import Freeze, WriteQueue


class RunSnapshot(LinkedSnapshot):
    """See ``BackendSnapshot``.

    Args:
        file_name: of the file that is written.
    """

    def __init__(
        self,
        checkpoint_id: int,
        header: checkpoint_pb2.KeyedStateSnapshot,
        queue: WriteQueue,
        freeze: Freeze,
        file_name: str,
    ) -> None:
        super().__init__(checkpoint_id, header, queue, freeze)
        self._file_name = file_name
        self._tables: list[checkpoint_pb2.StateTable] = []
        self._segments: list[checkpoint_pb2.StateSegment] = []

    def blobs(self) -> Iterator[Blob]:
        """Writes what was frozen, then gives all of it as rows.

        Raises:
            StreamError: it was discarded, or cannot be written.
        """
        self._queue.write_until(self._freeze)
        if self._header.segments:
            yield Blob(self._file_name, self._chunks)

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """See ``BackendSnapshot``."""
        header = self._header
        snapshot = checkpoint_pb2.KeyedStateSnapshot(
            backend=BACKEND,
            format_version=RUN_VERSION,
            instance=self._file_name,
            first_key_group=header.first_key_group,
            last_key_group=header.last_key_group,
            max_parallelism=header.max_parallelism,
            tables=self._tables,
            segments=self._segments,
        )
        if header.segments:
            snapshot.files.add(name=self._file_name, handle=handles[self._file_name])
        self._remove_links()
        return snapshot

    def _chunks(self) -> Iterator[bytes | memoryview]:
        offset = 0
        with closing(ReadOnlyDatabase(self._directory)) as database:
            for state, partitions in run_states(self._header):
                limit = self._header.max_parallelism
                entries = entry_rows(state.kind, state.schema, limit)
                table = len(self._tables)
                schema = state.schema.serialize().to_pybytes()
                self._tables.append(
                    checkpoint_pb2.StateTable(name=state.name, kind=state.kind, schema=schema)
                )
                for partition in partitions:
                    writer = SegmentWriter()
                    scan = database.scan(*partition_bounds(partition.offset))
                    rows: Iterator[pa.RecordBatch] = (entries.batch(*found) for found in scan)
                    if state.kind == "list":
                        rows = map(with_marks, whole_lists(rows, identity_of("list", state.schema)))
                    for part in writer.write(rows):
                        self._check()
                        yield part
                    self._check()
                    self._segments.append(
                        writer.whole(table, partition.namespace, self._file_name, offset)
                    )
                    offset += writer.size_bytes

    def _check(self) -> None:
        if self._is_discarded:
            raise self._gone()
