"""The tables of a database, made when an operator asks for them first.

A state that was restored from a checkpoint of the time when it was kept in memory is among the states in
memory still: it moves into the database when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from taskmanager.state.backend import AggregateDescriptor, KeyedStateBackend
from taskmanager.state.instances import InstanceState
from taskmanager.state.rocksdb.cache_host import StoredTable, TableHome
from taskmanager.state.rocksdb.column_rows import StoredColumnTable
from taskmanager.state.rocksdb.count_rows import StoredCountTable
from taskmanager.state.rocksdb.group_rows import StoredGroupTable
from taskmanager.state.rocksdb.partitions import (
    COLUMN_KIND,
    COUNT_KIND,
    GROUP_KIND,
    ROW_KIND,
    SESSION_KIND,
    TIMER_KIND,
    Partition,
    PartitionCatalog,
    columns_schema,
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

WHOLE: Final = 0
"""The namespace of states that are not cut into namespaces."""
_ENDS: Final = "/ends"
"""Behind the name of sessions: when they end."""
_LATEST_MS: Final = (1 << 63) - 1
_FORMER_ROWS: Final = 1 << 16


class StoredTables:
    """The tables of an operator. Every method raises ``TaskFailure`` where a state was restored with
    other types, and ``Unrecoverable`` where values of a type cannot be kept.

    Args:
        catalog: which namespaces there are.
        home: where the tables are.
        inner: the states in memory.
        owner: of the states, for messages.
    """

    def __init__(
        self, catalog: PartitionCatalog, home: TableHome, inner: KeyedStateBackend, owner: str
    ) -> None:
        self._catalog = catalog
        self._home = home
        self._inner = inner
        self._owner = owner

    def opened(self) -> list[StoredTable]:
        """Those that were asked for."""
        partitions = self._catalog.all_partitions()
        return [partition.table for partition in partitions if partition.table is not None]

    def groups(
        self, name: str, namespace: int, descriptor: AggregateDescriptor
    ) -> StoredGroupTable:
        """Aggregates of numbers."""
        partition = self._partition(name, namespace, GROUP_KIND, lambda: group_schema(descriptor))
        table = partition.table
        if table is None:
            table = partition.table = StoredGroupTable(
                partition.number,
                descriptor,
                self._home.max_parallelism,
                self._home.reader,
                self._home.host,
                is_complete=not partition.is_stored,
            )
        assert isinstance(table, StoredGroupTable), f"{name} is no state of aggregates"
        return table

    def columns(
        self, name: str, namespace: int, descriptor: AggregateDescriptor
    ) -> StoredColumnTable:
        """Aggregates that are not numbers alone."""
        is_former = self._is_former(name, namespace)
        former = self._inner.group_table(name, namespace, descriptor) if is_former else None
        partition = self._partition(
            name, namespace, COLUMN_KIND, lambda: columns_schema(descriptor)
        )
        table = partition.table
        if table is None:
            table = partition.table = StoredColumnTable(
                partition.number, descriptor, self._home, is_complete=not partition.is_stored
            )
        assert isinstance(table, StoredColumnTable), f"{name} is no state of such aggregates"
        if former is not None:
            table.merge(former)
            self._inner.drop(name, namespace)
        return table

    def rows(self, name: str, namespace: int, descriptor: RowDescriptor) -> StoredRowTable:
        """Rows of a namespace."""
        is_former = self._is_former(name, namespace)
        former = self._inner.row_table(name, namespace, descriptor) if is_former else None
        partition = self._partition(name, namespace, ROW_KIND, lambda: row_schema(descriptor))
        table = partition.table
        if table is None:
            table = partition.table = StoredRowTable(
                partition.number,
                descriptor,
                self._home,
                is_complete=not partition.is_stored,
                row_count=partition.row_count,
            )
        assert isinstance(table, StoredRowTable), f"{name} is no state of rows"
        if former is not None:
            rows = former.in_memory()
            for batch, sequence in zip(rows.batches, rows.sequences, strict=True):
                table.add(batch, sequence)
            self._inner.drop(name, namespace)
        return table

    def sessions(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> StoredSessionTable:
        """Open sessions."""
        is_former = self._is_former(name, WHOLE)
        former = None
        if is_former:
            former = self._inner.session_table(name, key_types, gap_ms, new_contents)
        partition = self._partition(
            name, WHOLE, SESSION_KIND, lambda: sessions_schema(key_types, new_contents())
        )
        table = partition.table
        if table is None:
            ends = self._partition(name + _ENDS, WHOLE, TIMER_KIND, lambda: timer_schema(key_types))
            table = partition.table = StoredSessionTable(
                partition.number,
                ends.number,
                key_types,
                gap_ms,
                new_contents,
                self._home,
                is_complete=not partition.is_stored,
            )
        assert isinstance(table, StoredSessionTable), f"{name} is no state of sessions"
        if former is not None:
            table.adopt(former)
            self._inner.drop(name, WHOLE)
        return table

    def counts(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        ttl_ms: int,
    ) -> StoredCountTable:
        """Open count windows."""
        is_former = self._is_former(name, WHOLE)
        former = None
        if is_former:
            former = self._inner.count_table(name, key_types, new_contents, ttl_ms)
        partition = self._partition(
            name, WHOLE, COUNT_KIND, lambda: counts_schema(key_types, new_contents(), ttl_ms)
        )
        table = partition.table
        if table is None:
            table = partition.table = StoredCountTable(
                partition.number,
                key_types,
                new_contents,
                self._home,
                ttl_ms,
                is_complete=not partition.is_stored,
            )
        assert isinstance(table, StoredCountTable), f"{name} is no state of count windows"
        if former is not None:
            table.adopt(former)
            self._inner.drop(name, WHOLE)
        return table

    def timers(self, name: str, key_types: Sequence[pa.DataType]) -> StoredTimerTable:
        """Timers."""
        is_former = self._is_former(name, WHOLE)
        former = self._inner.timer_table(name, key_types) if is_former else None
        partition = self._partition(name, WHOLE, TIMER_KIND, lambda: timer_schema(key_types))
        table = partition.table
        if table is None:
            table = partition.table = StoredTimerTable(
                partition.number,
                key_types,
                self._home.reader,
                self._home.host,
                is_complete=not partition.is_stored,
            )
        assert isinstance(table, StoredTimerTable), f"{name} is no state of timers"
        if former is not None:
            while (timers := former.take_due(_LATEST_MS, _FORMER_ROWS)) is not None:
                table.register(*timers)
            self._inner.drop(name, WHOLE)
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

    def _is_former(self, name: str, namespace: int) -> bool:
        """The state was restored from a checkpoint in which it was among those in memory."""
        return namespace in self._inner.namespaces(name)
