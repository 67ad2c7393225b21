"""What keyed operators keep their state behind.

An operator has one backend, and in it named states. State of windows is cut into *namespaces* (a slice
by its start, a firing by its window's end), which come and go as a whole: nothing needs a timer per key.

The operators' side of the contract:
- what they get from the backend they ask for again in every call, and never keep beyond it;
- they change it only while they handle an element, and whenever a generator of theirs yields, state is
  what a snapshot may take: rows that were handed out have been removed or are counted as emitted.

A backend decides where tables live, knows which key-groups it owns, and sees every table it gave out;
so it can freeze, write and restore them without the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from taskmanager.kernels import AccumulatorKind
from taskmanager.state.count_table import CountTable
from taskmanager.state.group_columns import GroupColumn
from taskmanager.state.group_table import GroupTable
from taskmanager.state.instances import InstanceTable
from taskmanager.state.row_table import RowTable
from taskmanager.state.session_table import SessionTable
from taskmanager.state.value_log import GroupedLog


@dataclass(frozen=True, slots=True)
class AggregateDescriptor:
    """A state of aggregates per key.

    Attributes:
        key_types: types of the key columns.
        kinds: the numbers per key.
        new_columns: makes the empty group columns of a new table.
    """

    key_types: tuple[pa.DataType, ...]
    kinds: tuple[AccumulatorKind, ...]
    new_columns: Callable[[], list[GroupColumn]]


class KeyedStateBackend(Protocol):
    """State of one operator in one subtask."""

    @property
    def max_parallelism(self) -> int:
        """Number of key-groups of the operator."""

    @property
    def key_groups(self) -> range:
        """The key-groups of this subtask."""

    def group_table(self, name: str, namespace: int, descriptor: AggregateDescriptor) -> GroupTable:
        """Aggregates per key of a namespace; empty where there are none yet."""

    def row_table(self, name: str, namespace: int) -> RowTable:
        """Rows of a namespace; empty where there are none yet."""

    def session_table(
        self, name: str, key_types: Sequence[pa.DataType], gap_ms: int
    ) -> SessionTable:
        """The open sessions of all keys."""

    def count_table(self, name: str, key_types: Sequence[pa.DataType]) -> CountTable:
        """The open count windows of all keys."""

    def instance_table(self, name: str, descriptor: AggregateDescriptor) -> InstanceTable:
        """Aggregates of numbered instances (sessions, count windows)."""

    def grouped_log(self, name: str, value_type: pa.DataType) -> GroupedLog:
        """Values of numbered instances."""

    def namespaces(self, name: str) -> list[int]:
        """Namespaces of a state that exist, ascending."""

    def move(self, name: str, namespace: int, to_name: str, to_namespace: int) -> None:
        """Gives the content of a namespace to one that does not exist yet, without copying."""

    def drop(self, name: str, namespace: int) -> None:
        """Removes a namespace with all in it; nothing happens where it does not exist."""

    def memory_bytes(self) -> int:
        """Approximate size of all states."""
