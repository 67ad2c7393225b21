"""What the columns of a key space have in common: which slots are in use, and how they are exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from penstock.storage.run_columns import key_fields, keyed_schema
from taskmanager.kernels.record_versions import ReleasedError
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.sealed_records import marked_rows
from taskmanager.state.slot_arrays import SlotArrays
from taskmanager.state.snapshot_table import SealedTable

CHUNK_SLOTS: Final = 1 << 13
TOMBSTONES_MIN: Final = 1 << 16
"""That many tombstones are always kept."""


class ColumnHome(Protocol):
    """The key space of a column."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while cells are saved or exported."""

    @property
    def key_types(self) -> tuple[pa.DataType, ...]:
        """Types of the key columns."""

    @property
    def room(self) -> int:
        """Slots that there is room for."""

    def now_ms(self) -> int:
        """Wall-clock time."""

    def keys_of(self, slots: Int64Array) -> KeyBatch:
        """The keys of slots."""

    def restored_slots(self, keys: KeyBatch) -> Int64Array:
        """The slots of keys, new ones included."""


class ObjectColumn(SlotArrays, ABC):
    """A state of a key space.

    Args:
        descriptor: what it holds.
        identity: columns behind the key that are part of a row's identity.
        value: the last column.

    Attributes:
        changed: slots that were changed since ``enter``, in any order, also more than once.
        removed: those that were given ``ABSENT``, likewise, where who assigns has made it a list; None = all that
            were changed are looked at.
        present: bool[room], which slots hold something; up to date outside of bundles.
    """

    kind = ""
    by_slot = MappingProxyType({"present": False})
    present: BoolArray
    gives_up_tombstones: ClassVar[bool] = True
    """Where there are too many, the next snapshot is a full one."""

    def __init__(
        self,
        home: ColumnHome,
        descriptor: StateDescriptor,
        identity: Sequence[pa.Field],
        value: pa.Field,
    ) -> None:
        self.changed: list[int] = []
        self.removed: list[int] | None = None
        self._make_arrays(home.room)
        self.descriptor = descriptor
        self.exports: list[ColumnExport] = []
        self.version = 1
        self._home = home
        self._codec = descriptor.codec
        self._ttl_ms = descriptor.ttl_ms
        self._key_count = len(home.key_types)
        self._changed_in = 0
        schema = keyed_schema([*key_fields(home.key_types), *identity], [value])
        self._schema = (
            schema.with_metadata({"ttl_ms": str(self._ttl_ms)}) if self._ttl_ms else schema
        )

    def schema(self) -> pa.Schema:
        """Schema of the exported rows."""
        return self._schema

    @property
    def has_changed(self) -> bool:
        """Something may have been changed since ``enter``."""
        return bool(self.changed)

    def is_changed(self, since_version: int) -> bool:
        """Something has changed after that version."""
        return self._changed_in > since_version

    def grow(self, room: int) -> None:
        """Makes room for the slots up to ``room`` - 1."""
        self._reserve(room)

    def is_empty(self, cell: Any) -> bool:
        """There is nothing in a cell."""
        return cell is ABSENT

    @abstractmethod
    def save(self, slots: Int64Array) -> None:
        """A bundle may change these slots: saves what exports still need (under the lock)."""

    @abstractmethod
    def leave(self) -> Int64Array:
        """Makes the changes of a bundle part of the state; the slots that hold nothing any more."""

    @abstractmethod
    def forget_slots(self, slots: Int64Array) -> None:
        """The slots, which hold nothing, will belong to other keys. There are no exports."""

    @abstractmethod
    def sweep(self, slots: Int64Array, now_ms: int) -> int:
        """Removes what has expired in these slots, as in a bundle; returns how much."""

    @abstractmethod
    def seal(self, since_version: int, max_parallelism: int) -> ColumnExport:
        """Freezes what changed after ``since_version``."""

    @abstractmethod
    def forget(self, version: int) -> None:
        """Tombstones up to the version may go."""

    @abstractmethod
    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        """Adds restored rows."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Approximate size, the objects estimated from a few of them."""

    def _touch(self) -> None:
        self._changed_in = self.version

    def _is_expired(self, stored: Any, now_ms: int) -> bool:
        return bool(stored[1] + self._ttl_ms <= now_ms)


class ColumnExport(SealedTable, ABC):
    """A sealed column.

    Args:
        column: what is exported.
        since_version: changes after it, 0 = all content.
    """

    def __init__(self, column: ObjectColumn, since_version: int, max_parallelism: int) -> None:
        super().__init__(since_version, column.version, None)
        self._column = column
        self._home = column._home
        self._max_parallelism = max_parallelism
        self._schema = column.schema()
        self._is_released = False

    @abstractmethod
    @override
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Tombstones and rows; each identity once."""

    @override
    def release(self) -> None:
        with self._home.lock:
            self._is_released = True
            self._end()

    def _end(self) -> None:
        """Nothing needs to be saved any more (under the lock)."""
        if self in self._column.exports:
            self._column.exports.remove(self)

    def _check(self) -> None:
        if self._is_released:
            raise ReleasedError("the snapshot was discarded while it was being written")

    def _batch(
        self, keys: KeyBatch, is_deleted: bool | BoolArray, content: Sequence[pa.Array]
    ) -> pa.RecordBatch:
        count = len(self._home.key_types)
        return marked_rows(self._schema, count, self._max_parallelism, keys, is_deleted, content)
