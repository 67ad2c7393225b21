"""The backend that keeps everything in memory, table by table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import pyarrow as pa

from penstock.storage.key_groups import key_group_range
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.count_table import CountTable
from taskmanager.state.group_table import GroupTable
from taskmanager.state.instances import InstanceTable
from taskmanager.state.row_table import RowTable
from taskmanager.state.session_table import SessionTable
from taskmanager.state.value_log import GroupedLog

_Table = GroupTable | RowTable | SessionTable | CountTable | InstanceTable | GroupedLog
T = TypeVar("T", bound=_Table)

_WHOLE = 0
"""The namespace of states that are not cut into namespaces."""


class HashMapStateBackend:
    """State of one operator in one subtask, in memory.

    Args:
        subtask_index: which of ``parallelism`` subtasks this is.
        max_parallelism: number of key-groups.
    """

    def __init__(self, subtask_index: int, parallelism: int, max_parallelism: int) -> None:
        self._max_parallelism = max_parallelism
        self._key_groups = key_group_range(subtask_index, parallelism, max_parallelism)
        self._states: dict[str, dict[int, _Table]] = {}
        # Per state one emptied table, so that the next namespace need not grow anew.
        self._spare: dict[str, GroupTable] = {}

    @property
    def max_parallelism(self) -> int:
        """Number of key-groups of the operator."""
        return self._max_parallelism

    @property
    def key_groups(self) -> range:
        """The key-groups of this subtask."""
        return self._key_groups

    def group_table(self, name: str, namespace: int, descriptor: AggregateDescriptor) -> GroupTable:
        """Aggregates per key of a namespace; empty where there are none yet."""

        def create() -> GroupTable:
            spare = self._spare.pop(name, None)
            if spare is not None:
                return spare
            return GroupTable(
                descriptor.key_types, descriptor.kinds, descriptor.new_columns(), home=name
            )

        return self._get(name, namespace, create)

    def row_table(self, name: str, namespace: int) -> RowTable:
        """Rows of a namespace; empty where there are none yet."""
        return self._get(name, namespace, RowTable)

    def session_table(
        self, name: str, key_types: Sequence[pa.DataType], gap_ms: int
    ) -> SessionTable:
        """The open sessions of all keys."""
        return self._get(name, _WHOLE, lambda: SessionTable(key_types, gap_ms))

    def count_table(self, name: str, key_types: Sequence[pa.DataType]) -> CountTable:
        """The open count windows of all keys."""
        return self._get(name, _WHOLE, lambda: CountTable(key_types))

    def instance_table(self, name: str, descriptor: AggregateDescriptor) -> InstanceTable:
        """Aggregates of numbered instances (sessions, count windows)."""
        return self._get(
            name, _WHOLE, lambda: InstanceTable(descriptor.kinds, descriptor.new_columns())
        )

    def grouped_log(self, name: str, value_type: pa.DataType) -> GroupedLog:
        """Values of numbered instances."""
        return self._get(name, _WHOLE, lambda: GroupedLog(value_type))

    def namespaces(self, name: str) -> list[int]:
        """Namespaces of a state that exist, ascending."""
        return sorted(self._states.get(name, ()))

    def move(self, name: str, namespace: int, to_name: str, to_namespace: int) -> None:
        """Gives the content of a namespace to one that does not exist yet, without copying."""
        target = self._states.setdefault(to_name, {})
        assert to_namespace not in target, f"{to_name}/{to_namespace} exists already"
        target[to_namespace] = self._states[name].pop(namespace)

    def drop(self, name: str, namespace: int) -> None:
        """Removes a namespace with all in it; nothing happens where it does not exist."""
        table = self._states.get(name, {}).pop(namespace, None)
        if isinstance(table, GroupTable) and table.is_reusable():
            table.clear()
            self._spare[table.home] = table

    def memory_bytes(self) -> int:
        """Approximate size of all states."""
        tables = [table for state in self._states.values() for table in state.values()]
        return sum(table.memory_bytes() for table in [*tables, *self._spare.values()])

    def _get(self, name: str, namespace: int, create: Callable[[], T]) -> T:
        state = self._states.setdefault(name, {})
        table = state.get(namespace)
        if table is None:
            table = state[namespace] = create()
        return cast("T", table)
