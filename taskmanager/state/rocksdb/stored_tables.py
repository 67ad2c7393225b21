"""The tables of a database, made when an operator asks for them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import StoredTable, TableHome
from taskmanager.state.rocksdb.count_rows import StoredCountTable
from taskmanager.state.rocksdb.group_rows import StoredGroupTable
from taskmanager.state.rocksdb.partitions import (
    COUNT_KIND,
    GROUP_KIND,
    ROW_KIND,
    SESSION_KIND,
    TIMER_KIND,
    Partition,
    PartitionCatalog,
    counts_schema,
    group_schema,
    row_schema,
    sessions_schema,
    timer_schema,
)
from taskmanager.state.rocksdb.session_rows import StoredSessionTable
from taskmanager.state.rocksdb.timer_rows import StoredTimerTable
from taskmanager.state.rocksdb.window_rows import StoredRowTable
from taskmanager.state.row_table import RowDescriptor

T = TypeVar("T", bound=StoredTable)

WHOLE: Final = 0
"""The namespace of states that are not cut into namespaces."""
_ENDS: Final = "/ends"
"""Behind the name of sessions: when they end."""


class StoredTables:
    """The tables of an operator. Every method raises ``TaskFailure`` where a state was restored with
    other types, and ``Unrecoverable`` where values of a type cannot be kept.

    Args:
        catalog: which namespaces there are.
        home: where the tables are.
        owner: of the states, for messages.
    """

    def __init__(self, catalog: PartitionCatalog, home: TableHome, owner: str) -> None:
        self._catalog = catalog
        self._home = home
        self._owner = owner

    def opened(self) -> list[StoredTable]:
        """Those that were asked for."""
        partitions = self._catalog.all_partitions()
        return [partition.table for partition in partitions if partition.table is not None]

    def groups(
        self, name: str, namespace: int, descriptor: AggregateDescriptor
    ) -> StoredGroupTable:
        """Aggregates per key."""
        return self._table(
            name,
            namespace,
            GROUP_KIND,
            lambda: group_schema(descriptor),
            lambda found: StoredGroupTable(
                found.number, descriptor, self._home, is_complete=not found.is_stored
            ),
        )

    def rows(self, name: str, namespace: int, descriptor: RowDescriptor) -> StoredRowTable:
        """Rows of a namespace."""
        return self._table(
            name,
            namespace,
            ROW_KIND,
            lambda: row_schema(descriptor),
            lambda found: StoredRowTable(
                found.number,
                descriptor,
                self._home,
                is_complete=not found.is_stored,
                row_count=found.row_count,
            ),
        )

    def sessions(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> StoredSessionTable:
        """Open sessions."""

        def make(found: Partition) -> StoredSessionTable:
            ends = self._partition(name + _ENDS, WHOLE, TIMER_KIND, lambda: timer_schema(key_types))
            return StoredSessionTable(
                found.number,
                ends.number,
                key_types,
                gap_ms,
                new_contents,
                self._home,
                is_complete=not found.is_stored,
            )

        return self._table(
            name, WHOLE, SESSION_KIND, lambda: sessions_schema(key_types, new_contents()), make
        )

    def counts(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        ttl_ms: int,
    ) -> StoredCountTable:
        """Open count windows."""
        return self._table(
            name,
            WHOLE,
            COUNT_KIND,
            lambda: counts_schema(key_types, new_contents(), ttl_ms),
            lambda found: StoredCountTable(
                found.number,
                key_types,
                new_contents,
                self._home,
                ttl_ms,
                is_complete=not found.is_stored,
            ),
        )

    def timers(self, name: str, key_types: Sequence[pa.DataType]) -> StoredTimerTable:
        """Timers."""
        return self._table(
            name,
            WHOLE,
            TIMER_KIND,
            lambda: timer_schema(key_types),
            lambda found: StoredTimerTable(
                found.number, key_types, self._home, is_complete=not found.is_stored
            ),
        )

    def _table(
        self,
        name: str,
        namespace: int,
        kind: str,
        schema: Callable[[], bytes],
        make: Callable[[Partition], T],
    ) -> T:
        partition = self._partition(name, namespace, kind, schema)
        table: Any = partition.table
        if table is None:
            table = partition.table = make(partition)
        else:
            assert self._catalog.states[name].kind == kind, f"{name} is no state of {kind}"
        return table

    def _partition(
        self, name: str, namespace: int, kind: str, schema: Callable[[], bytes]
    ) -> Partition:
        state = self._catalog.states.get(name)
        partition = None if state is None else state.partitions.get(namespace)
        if partition is not None and partition.table is not None:
            return partition
        state = self._catalog.state(name, kind, schema(), self._owner)
        if partition is None:
            partition = Partition(self._catalog.new_number(), is_stored=False)
            state.partitions[namespace] = partition
        return partition
