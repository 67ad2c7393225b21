"""The tables of a backend, made when an operator asks for them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from penstock.storage.entries.run_states import ENDS
from penstock.storage.run_columns import TIMER_KIND
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import StoredTable, TableHome
from taskmanager.state.rocksdb.count_rows import StoredCountTable
from taskmanager.state.rocksdb.group_rows import StoredGroupTable
from taskmanager.state.rocksdb.migrated_entries import MigratedEntries
from taskmanager.state.rocksdb.partitions import Partition, PartitionCatalog
from taskmanager.state.rocksdb.session_rows import StoredSessionTable
from taskmanager.state.rocksdb.spilled_table import KeyedSpill
from taskmanager.state.rocksdb.timer_rows import StoredTimerTable
from taskmanager.state.rocksdb.window_rows import StoredRowTable
from taskmanager.state.row_table import RowDescriptor
from taskmanager.state.timer_order import timer_schema

T = TypeVar("T", bound=StoredTable)

WHOLE: Final = 0
"""The namespace of states that are not cut into namespaces."""


class StoredTables:
    """The part of a backend that has the tables. Every method raises ``TaskFailure`` where a state was restored with
    other types, and ``Unrecoverable`` where values of a type cannot be kept.

    Args:
        owner: of the states, for messages.
        migrated: what was written for other declarations.
    """

    def __init__(
        self, catalog: PartitionCatalog, home: TableHome, owner: str, migrated: MigratedEntries
    ) -> None:
        self._catalog = catalog
        self._home = home
        self._owner = owner
        self._migrated = migrated

    def _opened(self) -> list[StoredTable]:
        """Those that were asked for."""
        partitions = self._catalog.all_partitions()
        return [partition.table for partition in partitions if partition.table is not None]

    def group_table(
        self, name: str, namespace: int, descriptor: AggregateDescriptor
    ) -> StoredGroupTable:
        """Aggregates per key."""
        return self._table(name, namespace, StoredGroupTable, descriptor)

    def row_table(self, name: str, namespace: int, descriptor: RowDescriptor) -> StoredRowTable:
        """Rows of a namespace."""
        return self._table(name, namespace, StoredRowTable, descriptor)

    def session_table(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> StoredSessionTable:
        """Open sessions."""

        def make(found: Partition, home: TableHome) -> StoredSessionTable:
            ends = self._catalog.partition(
                name + ENDS, WHOLE, TIMER_KIND, timer_schema(key_types), self._owner
            )
            return StoredSessionTable(found, home, ends.number, key_types, gap_ms, new_contents)

        return self._table(name, WHOLE, make)

    def count_table(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        ttl_ms: int = 0,
    ) -> StoredCountTable:
        """Open count windows."""
        return self._table(name, WHOLE, StoredCountTable, key_types, new_contents, ttl_ms)

    def timer_table(self, name: str, key_types: Sequence[pa.DataType]) -> StoredTimerTable:
        """Timers."""
        return self._table(name, WHOLE, StoredTimerTable, key_types)

    def _table(self, name: str, namespace: int, make: Callable[..., T], *about: Any) -> T:
        """The table of a namespace; ``make`` is given where it lies, the home of tables, and what it is about."""
        partition = self._catalog.found(name, namespace) or self._catalog.unused_partition()
        table: Any = partition.table
        if table is None:
            table = make(partition, self._home, *about)
            schema = table.schema()
            if isinstance(table, KeyedSpill) and self._migrated.aggregates(
                name, table.kind, schema, table.identity_count
            ):
                table = make(partition, self._home, *about)  # it lies elsewhere now
            self._catalog.keep(partition, name, namespace, table.kind, schema, self._owner)
            partition.table = table
        return table
