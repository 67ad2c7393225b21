"""What keyed operators keep their state behind.

An operator has one backend, and in it named states. State of windows is cut into *namespaces* (a slice
by its start), which come and go as a whole: nothing needs a timer per key.

The operators' side of the contract:
- what they get from the backend they ask for again in every call, and never keep beyond it;
- they change it only while they handle an element, and whenever a generator of theirs yields, state is
  what may be moved out of memory; a snapshot is taken when no generator is under way.

A backend decides where tables live, knows which key-groups it owns, and sees every table it gave out;
so it can freeze, write and restore them without the operators.

A snapshot, in the story of a barrier: ``snapshot`` is its synchronous part on the mailbox thread and only
marks a version; the ``BackendSnapshot`` it returns is exported, written and described on an I/O thread
while the operator goes on; ``checkpoint_completed`` tells that it counts: only then may later snapshots
refer to what it has written. A snapshot whose checkpoint is aborted joins the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from common.clock import Clock
from penstock.errors import CheckpointAborted
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob, SnapshotReader
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import key_group_range
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import AccumulatorKind
from taskmanager.state.count_table import CountTable
from taskmanager.state.group_column import GroupColumn
from taskmanager.state.group_table import GroupTable
from taskmanager.state.hashmap.key_space import KeySpace
from taskmanager.state.instances import InstanceState
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.row_table import RowDescriptor, RowTable
from taskmanager.state.session_table import SessionTable
from taskmanager.state.state_sizes import StateSizes

NO_NAMESPACE: Final = 0
"""The namespace of states that are not cut into namespaces."""


@dataclass(frozen=True, slots=True)
class BackendEnvironment:
    """What a backend is opened with.

    Attributes:
        restored: snapshots with key-groups of this subtask, in the backend's own format or the run format.
        work_directory: the backend's own, empty or missing; removed by ``close``.
        memory: what the states of the slot may take together.
        is_incremental: upload only what changed since the last confirmed checkpoint.
    """

    operator_uid: str
    operator_name: str
    subtask_index: int
    parallelism: int
    max_parallelism: int
    clock: Clock
    memory: ManagedMemory
    work_directory: Path
    is_incremental: bool = True
    restored: tuple[checkpoint_pb2.KeyedStateSnapshot, ...] = ()
    reader: SnapshotReader | None = None


@dataclass(frozen=True, slots=True)
class AggregateDescriptor:
    """A state of aggregates per key.

    Attributes:
        kinds: the numbers per key.
        new_columns: makes the empty group columns of a new table.
        uses: per number what it is for (``AggregateLayout.slot_uses``); () = there is one set for ever.
    """

    key_types: tuple[pa.DataType, ...]
    kinds: tuple[AccumulatorKind, ...]
    new_columns: Callable[[], list[GroupColumn]]
    uses: tuple[tuple[str, ...], ...] = ()


class TimerTable(Protocol):
    """Timers: a set of (key, time)."""

    def __len__(self) -> int: ...

    def register(self, keys: KeyBatch, times: Int64Array) -> None:
        """Adds n timers; one that is there already stays one."""

    def delete(self, keys: KeyBatch, times: Int64Array) -> None:
        """Removes timers; those that are not there are ignored."""

    def next_time(self) -> int | None:
        """A time that no timer is before, None = no timers. It is the smallest time, unless timers with a
        smaller one were deleted lately: so whoever wakes up for it may find nothing due."""

    def take_due(self, up_to_ms: int, limit: int) -> tuple[KeyBatch, Int64Array] | None:
        """Removes and returns the earliest timers with time <= ``up_to_ms``, at most ``limit`` of them, by
        time and then key (in an order that depends on the content alone); None = there are none."""


class BackendSnapshot(Protocol):
    """What ``KeyedStateBackend.snapshot`` has frozen. Used on an I/O thread, by one thread at a time."""

    def blobs(self) -> Iterable[Blob]:
        """The bytes that must be written for this snapshot; may take its time."""

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """The snapshot, once its blobs are written; refers to older files too."""

    def discard(self) -> None:
        """The snapshot will not be written or described: gives back what was frozen. Repeatable."""


class KeyedStateBackend(ABC):
    """State of one operator in one subtask.

    Args:
        environment: whose state it is, and what was restored.
        owner: of the states, for messages.
    """

    def __init__(self, environment: BackendEnvironment, owner: str) -> None:
        self._environment = environment
        self._owner = owner
        self._key_groups = key_group_range(
            environment.subtask_index, environment.parallelism, environment.max_parallelism
        )
        self._is_closed = False

    @property
    def max_parallelism(self) -> int:
        """Number of key-groups of the operator."""
        return self._environment.max_parallelism

    @property
    def key_groups(self) -> range:
        """The key-groups of this subtask."""
        return self._key_groups

    def group_table(self, name: str, namespace: int, descriptor: AggregateDescriptor) -> GroupTable:
        """Aggregates per key of a namespace; empty where there are none yet."""
        return self._table(GroupTable, name, namespace, descriptor)

    def row_table(self, name: str, namespace: int, descriptor: RowDescriptor) -> RowTable:
        """Rows of a namespace; empty where there are none yet."""
        return self._table(RowTable, name, namespace, descriptor)

    def session_table(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        gap_ms: int,
        new_contents: Callable[[], InstanceState],
    ) -> SessionTable:
        """The open sessions of all keys, with what they hold; ``new_contents`` makes the empty contents
        of a new table (``InstanceTable``, ``GroupedLog``)."""
        return self._table(SessionTable, name, NO_NAMESPACE, key_types, gap_ms, new_contents)

    def count_table(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        new_contents: Callable[[], InstanceState],
        ttl_ms: int = 0,
    ) -> CountTable:
        """The open count windows of all keys, with what they hold.

        Args:
            ttl_ms: how long a key without rows is kept; 0 = always.
        """
        return self._table(CountTable, name, NO_NAMESPACE, key_types, new_contents, ttl_ms)

    def timer_table(self, name: str, key_types: Sequence[pa.DataType]) -> TimerTable:
        """Timers of all keys."""
        return self._table(TimerTable, name, NO_NAMESPACE, key_types)

    @abstractmethod
    def _table(self, kind: type, name: str, namespace: int, *about: Any) -> Any:
        """The table of a namespace, made of what it is about where there is none yet.

        Raises:
            TaskFailure: the state was restored with other types.
            Unrecoverable: values of a type cannot be kept.
        """

    @abstractmethod
    def key_space(self, key_types: Sequence[pa.DataType]) -> KeySpace:
        """The objects of all keys; one per operator."""

    @abstractmethod
    def namespaces(self, name: str) -> list[int]:
        """Namespaces of a state that exist, ascending; restored ones included."""

    @abstractmethod
    def drop(self, name: str, namespace: int) -> None:
        """Removes a namespace with all in it; nothing happens where it does not exist."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Approximate size of all states in memory."""

    @abstractmethod
    def sizes(self) -> StateSizes:
        """What each state takes; quick, for metrics."""

    @abstractmethod
    def snapshot(
        self, checkpoint_id: int, *, is_full: bool = False, in_runs: bool = False
    ) -> BackendSnapshot:
        """The synchronous part of a snapshot; a few milliseconds, however large the state.

        Args:
            is_full: it is to refer to nothing that was written before.
            in_runs: it is to be whole, and in the run format, which either backend can be restored from.

        Raises:
            CheckpointAborted: too many snapshots are still being written, or the backend is closed.
            StoreTransient: a file of the state is damaged.
        """

    @abstractmethod
    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """A checkpoint is complete: later snapshots may refer to its files."""

    @abstractmethod
    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete: its files are gone, its changes join the next snapshot."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads, closes and removes files. Snapshots that are being written fail."""

    def _check_open(self, checkpoint_id: int, open_count: int, open_max: int) -> None:
        if self._is_closed:
            raise CheckpointAborted(checkpoint_id, f"{self._owner} has ended")
        if open_count >= open_max:
            raise CheckpointAborted(
                checkpoint_id,
                f"{open_count} snapshots of {self._owner} are still being written: raise "
                "execution.checkpointing.interval or execution.checkpointing.min-pause",
            )

    def _header(
        self, backend: str, format_version: int, instance: str
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """A snapshot without tables, segments and files."""
        return checkpoint_pb2.KeyedStateSnapshot(
            backend=backend,
            format_version=format_version,
            instance=instance,
            first_key_group=self._key_groups.start,
            last_key_group=self._key_groups.stop - 1,
            max_parallelism=self.max_parallelism,
        )
