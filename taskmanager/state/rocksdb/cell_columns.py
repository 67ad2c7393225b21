"""Columns of keyed objects in the database: values and lists (maps: ``map_cells``).

A slot of the key space that is loaded has its cell here, whatever the database says: values and lists as
a whole, entries of maps one by one. Changes go into ``CellChanges`` at the end of a bundle (entries of
maps at once), and what is in the caches stays there until the database has it.

Entry keys are ``partition | rest of the key`` (see ``entry_keys``).
A list is its items one after the other, each with its length in front (4 bytes, little-endian).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from typing_extensions import override

from taskmanager.state.descriptors import ABSENT, StateDescriptor, ValueCodec
from taskmanager.state.rocksdb.cache_host import EntryReader
from taskmanager.state.rocksdb.cell_changes import CellChanges
from taskmanager.state.rocksdb.write_queue_runner import FrozenPart

LENGTH_BYTES: Final = 4
CELL_BYTES: Final = 80
"""What a cached cell takes beside its content."""


class StoredColumn(ABC):
    """What the key space needs of a column.

    Args:
        descriptor: of the state.
        partition: the column's.
        reader: the database.
        rests: by slot the entry key without the partition; always the same list.
        pace: see ``CellChanges``.
        is_stored: the database holds something of it.
    """

    def __init__(
        self,
        descriptor: StateDescriptor,
        partition: int,
        reader: EntryReader,
        rests: list[bytes],
        pace: Callable[[int], None],
        *,
        is_stored: bool,
    ) -> None:
        self.descriptor = descriptor
        self.changes = CellChanges(partition, self.encode, pace, is_stored=is_stored)
        self._codec: ValueCodec = descriptor.codec
        self._reader = reader
        self._rests = rests

    def freeze(self, now_ms: int) -> FrozenPart | None:
        """See ``CellChanges``."""
        return self.changes.freeze(now_ms)

    def rest_of(self, name: bytes) -> bytes:
        """The part of an entry's key that all columns share for one key."""
        return name[len(self.changes.head) :]

    def is_expired(self, stored: Any, now_ms: int) -> bool:
        """A stored value (of a state with a TTL) may be removed."""
        return bool(stored[1] + self.descriptor.ttl_ms <= now_ms)

    @abstractmethod
    def encode(self, stored: Any, now_ms: int) -> bytes | None:
        """The value of an entry; None = it has expired."""

    @abstractmethod
    def may_expire(self, data: bytes, now_ms: int) -> bool:
        """Something in the value of an entry has expired."""

    @abstractmethod
    def sweep(self, slot: int, name: bytes | None, now_ms: int) -> int:
        """Removes what has expired in a cell; how much that was.

        Args:
            name: the entry in which something has expired; None = look at what is cached.
        """

    @abstractmethod
    def grow(self, room: int) -> None:
        """Makes room for slots up to ``room - 1``."""

    @abstractmethod
    def load(self, slots: list[int]) -> None:
        """Loads the cells of slots, sorted by their entry keys."""

    @abstractmethod
    def enter(self, slots: Sequence[int]) -> None:
        """The cells of these slots may be changed until ``leave``."""

    @abstractmethod
    def leave(self) -> None:
        """The changes become part of the state."""

    @abstractmethod
    def is_present(self, slot: int) -> bool:
        """The key has something here."""

    @abstractmethod
    def keep(self, slots: list[int]) -> None:
        """Forgets the cells of all slots but these, which become 0, 1, 2, ...; all changes are written."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Approximate size of what is cached."""


class ValueCells(StoredColumn):
    """A value per key; see ``taskmanager.state.backend.ValueColumn``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.values: list[Any] = []
        self.changed: list[int] = []
        super().__init__(*args, **kwargs)

    @override
    def encode(self, stored: Any, now_ms: int) -> bytes | None:
        if self.descriptor.ttl_ms and self.is_expired(stored, now_ms):
            return None
        return self._codec.encode(stored)

    def decode(self, data: bytes) -> Any:
        """The stored value of an entry."""
        return self._codec.decode(data)

    @override
    def may_expire(self, data: bytes, now_ms: int) -> bool:
        return self.is_expired(self._codec.decode(data), now_ms)

    @override
    def sweep(self, slot: int, name: bytes | None, now_ms: int) -> int:
        stored = self.values[slot]
        if stored is ABSENT or not self.is_expired(stored, now_ms):
            return 0
        self.values[slot] = ABSENT
        self.changed.append(slot)
        return 1

    @override
    def grow(self, room: int) -> None:
        self.values += [ABSENT] * (room - len(self.values))

    @override
    def load(self, slots: list[int]) -> None:
        if not self.changes.is_stored:
            return
        head, rests, values = self.changes.head, self._rests, self.values
        found = self._reader.get_many([head + rests[slot] for slot in slots])
        for slot, data in zip(slots, found, strict=True):
            if data is not None:
                values[slot] = self.decode(data)

    @override
    def enter(self, slots: Sequence[int]) -> None:
        """Stored values never change in place."""

    @override
    def leave(self) -> None:
        if self.changed:
            changes, rests, values = self.changes.live.changes, self._rests, self.values
            for slot in self.changed:
                changes[rests[slot]] = values[slot]
            self.changed.clear()

    @override
    def is_present(self, slot: int) -> bool:
        return self.values[slot] is not ABSENT

    @override
    def keep(self, slots: list[int]) -> None:
        values = self.values
        values[:] = [values[slot] for slot in slots] + [ABSENT] * (len(values) - len(slots))

    @override
    def memory_bytes(self) -> int:
        return int(len(self.values) * (CELL_BYTES + self.changes.average_bytes))


class ListCells(ValueCells):
    """A list per key; see ``taskmanager.state.backend.ListColumn``. An empty list is none."""

    @override
    def encode(self, stored: Any, now_ms: int) -> bytes | None:
        if self.descriptor.ttl_ms:
            stored = [item for item in stored if not self.is_expired(item, now_ms)]
            if not stored:
                return None
        parts: list[bytes] = []
        for item in stored:
            data = self._codec.encode(item)
            parts += (len(data).to_bytes(LENGTH_BYTES, "little"), data)
        return b"".join(parts)

    @override
    def decode(self, data: bytes) -> Any:
        items: list[Any] = []
        position = 0
        while position < len(data):
            start = position + LENGTH_BYTES
            position = start + int.from_bytes(data[position:start], "little")
            items.append(self._codec.decode(data[start:position]))
        return items

    @override
    def may_expire(self, data: bytes, now_ms: int) -> bool:
        return any(self.is_expired(item, now_ms) for item in self.decode(data))

    @override
    def sweep(self, slot: int, name: bytes | None, now_ms: int) -> int:
        items = self.values[slot]
        if items is ABSENT:
            return 0
        kept = [item for item in items if not self.is_expired(item, now_ms)]
        removed = len(items) - len(kept)
        if removed:
            self.values[slot] = kept
            self.changed.append(slot)
        return removed

    @override
    def enter(self, slots: Sequence[int]) -> None:
        for interval in self.changes.unwritten():
            for slot in interval.slots.intersection(slots):
                items = self.values[slot]
                if items is not ABSENT:
                    self.values[slot] = list(items)
                interval.slots.discard(slot)

    @override
    def leave(self) -> None:
        for slot in self.changed:
            if self.values[slot] == []:
                self.values[slot] = ABSENT
        self.changes.live.slots.update(self.changed)
        super().leave()
