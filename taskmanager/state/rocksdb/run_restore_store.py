"""Fills a new database with what was restored in the run format: a canonical savepoint, or a checkpoint of the
in-memory backend. Rows are read and written in parts of bounded size, whatever the state takes."""

from __future__ import annotations

from typing import Final

from penstock.pb import checkpoint_pb2
from penstock.storage.batch_parts import in_parts
from penstock.storage.entries.run_states import ENDS, ends_table, stored_table
from penstock.storage.run_columns import TIMER_KIND
from taskmanager.state.backend import NO_NAMESPACE, BackendEnvironment
from taskmanager.state.hashmap.restored_rows import RestoredRows, restored_rows
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.entry_batches import EntryFiles
from taskmanager.state.rocksdb.partitions import Partition, PartitionCatalog
from taskmanager.state.rocksdb.run_entries import Sessions, run_entries

_PART_ROWS: Final = 1 << 17
_PART_BYTES: Final = 32 << 20
"""What is sorted and written at once; more only where one batch has more."""


def load_runs(
    environment: BackendEnvironment,
    database: Database,
    catalog: PartitionCatalog,
    key_groups: range,
) -> None:
    """Writes the rows of some key-groups into an empty database.

    Raises:
        Unrecoverable: a snapshot is in a format that cannot be read, or holds what RocksDB cannot keep.
        StoreCorrupt: a file is not what was written.
        StoreNotFound: a file is gone.
        StoreTransient: the database cannot be written.
    """
    files = EntryFiles(database.ingest)
    assert environment.reader is not None, "a snapshot without a reader"
    operator = environment.operator_name or environment.operator_uid
    found = restored_rows(environment.restored, environment.reader, key_groups, operator)
    for (name, namespace), parts in found.items():
        first = parts[0]
        stored_name, schema = stored_table(name, first.kind, first.schema)
        table = checkpoint_pb2.StateTable(name=stored_name, kind=first.kind, schema=schema)
        partition = catalog.partition_for(table, namespace)
        ends = _ends_of(catalog, name, first) if first.kind == "sessions" else None
        entries = run_entries(first.kind, first.schema, environment.max_parallelism)
        for rows in parts:
            is_of_lists = first.kind == "list"  # of which rows may add to those before
            stored = rows.latest() if is_of_lists else rows.batches()
            for batches in in_parts(stored, _PART_BYTES, _PART_ROWS):
                partition.row_count += sum(batch.num_rows for batch in batches)
                files.add(entries.entries(partition.number, batches))
                if ends is not None and isinstance(entries, Sessions):
                    files.add(entries.ends(ends.number, batches))
    files.flush()


def _ends_of(catalog: PartitionCatalog, name: str, sessions: RestoredRows) -> Partition:
    table = checkpoint_pb2.StateTable(
        name=name + ENDS, kind=TIMER_KIND, schema=ends_table(sessions.schema)
    )
    return catalog.partition_for(table, NO_NAMESPACE)
