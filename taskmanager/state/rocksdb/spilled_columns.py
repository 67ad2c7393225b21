"""Values and maps of keys in memory before their entries in the database (lists: ``spilled_lists``).

The columns are those of the in-memory backend. What a key has of values and lists is brought in as a whole
when the key is, entries of maps one by one when they are asked for. Changes stay in memory until a freeze
has written them; an export (``CellExport``, ``MapExport``) reads them on another thread meanwhile.

Entry keys are ``partition | rest of the key`` (see ``entry_keys``); a map's entry has the key in the map behind that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import numpy as np
from typing_extensions import override

from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.entry_keys import (
    PARTITION_BYTES,
    entries_by_key,
    entry_keys,
    map_name,
    map_parts,
)
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.hashmap.cell_columns import CellExport, ValueColumn
from taskmanager.state.hashmap.map_column import MapColumn, MapExport
from taskmanager.state.hashmap.object_column import (
    ColumnExport,
    ColumnHome,
    ObjectColumn,
)
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.spilled_table import LOADED_VERSION, Sealed, Spilled

CELL_BYTES: Final = 80
"""What a cell in memory takes beside its content."""
PACE_CELLS: Final = 2048
"""Cells that are encoded between two pauses."""


class SpillHome(ColumnHome, Protocol):
    """The key space of a spilled column.

    Attributes:
        rests: by slot the entry key without the partition.
    """

    rests: list[bytes]

    @property
    def reader(self) -> Database:
        """The database."""

    @property
    def max_parallelism(self) -> int:
        """Number of key-groups."""

    def pace(self, frozen_at_ms: int) -> None:
        """Called now and then while cells are encoded, on the thread that does so."""


class SpilledColumn(ObjectColumn, Spilled):
    """What all columns before the database do. Stands before the column in memory among the bases.

    Args:
        descriptor: what it holds.
        is_stored: the database holds something of it.

    Attributes:
        average_bytes: of an encoded cell, roughly.
    """

    gives_up_tombstones = False

    def __init__(
        self, home: SpillHome, descriptor: StateDescriptor, partition: int, *, is_stored: bool
    ) -> None:
        super().__init__(home, descriptor)  # type: ignore[call-arg]
        Spilled.__init__(self, partition, is_stored=is_stored)
        self.head = partition.to_bytes(PARTITION_BYTES, "big")
        self.average_bytes = 64.0
        self.version = LOADED_VERSION + 1
        self._spill_home = home

    @override
    def _sealed(self) -> Sealed:
        gone = self._gone(self._written_version)
        export = self.seal(self._written_version, self._spill_home.max_parallelism)
        now_ms = self._spill_home.now_ms()
        return export.version, lambda: self._entries(export, gone, now_ms), export.release

    def rest_of(self, name: bytes, data: bytes) -> bytes:
        """The part of an entry's key that all columns share for one key; ``data`` is its value."""
        return name[PARTITION_BYTES:]

    def may_expire(self, data: bytes, now_ms: int) -> bool:
        """Something in the value of an entry has expired."""
        return self._is_expired(self._codec.decode(data), now_ms)

    @abstractmethod
    def bring_keys(self, slots: list[int]) -> None:
        """Brings in what new keys have: their slots, sorted by their entry keys."""

    @abstractmethod
    def bring_entry(self, slot: int, name: bytes) -> None:
        """Brings in an entry of a key that is in memory."""

    @abstractmethod
    def found(self, slots: Int64Array) -> BoolArray:
        """bool[n]: which of the slots have something here."""

    @abstractmethod
    def keep(self, slots: list[int]) -> None:
        """Forgets all slots but these, which become 0, 1, 2, ...; all changes are written."""

    @abstractmethod
    def _changes(self, export: Any) -> Iterator[tuple[bytes, bytes | None]]:
        """Names and values of entries, None = there is none; of several of one name the last one counts."""

    def _gone(self, since_version: int) -> Iterable[bytes]:
        """Names of entries that were removed after a version, beside what an export tells."""
        return ()

    def _entries(
        self, export: ColumnExport, gone: Iterable[bytes], now_ms: int
    ) -> list[SstEntries]:
        """What is written of an export; on any thread."""
        values: dict[bytes, bytes | None] = dict.fromkeys(gone)
        for row, (name, value) in enumerate(self._changes(export)):
            values[name] = value
            if row % PACE_CELLS == PACE_CELLS - 1:
                self._spill_home.pace(now_ms)
        if not values:
            return []
        sizes = [len(value) for value in values.values() if value is not None]
        if sizes:
            self.average_bytes = sum(sizes) / len(sizes)
        return [entries_by_key(list(values), list(values.values()))]

    def _encoded(self, cell: Any) -> bytes | None:
        return None if cell is ABSENT else self._codec.encode(cell)


class SpilledValues(SpilledColumn, ValueColumn):
    """A value per key; see ``ValueColumn``."""

    def decode(self, data: bytes) -> Any:
        """The cell of an entry."""
        return self._codec.decode(data)

    @override
    def bring_keys(self, slots: list[int]) -> None:
        if not self.is_stored:
            return
        head, rests, values = self.head, self._spill_home.rests, self.values
        entries = self._spill_home.reader.get_many([head + rests[slot] for slot in slots])
        found: list[int] = []
        for slot, data in zip(slots, entries, strict=True):
            if data is not None:
                values[slot] = self.decode(data)
                found.append(slot)
        if found:
            self._versions[found] = LOADED_VERSION
            self.present[found] = True

    @override
    def bring_entry(self, slot: int, name: bytes) -> None:
        """It came with its key."""

    @override
    def found(self, slots: Int64Array) -> BoolArray:
        return self.present[slots]

    @override
    def keep(self, slots: list[int]) -> None:
        values, missing = self.values, len(self.values) - len(slots)
        values[:] = [values[slot] for slot in slots] + [ABSENT] * missing
        self._move_slots(slots)

    @override
    def memory_bytes(self) -> int:
        cells = len(self._spill_home.rests)
        return int(cells * (CELL_BYTES + self.average_bytes)) + self._tombstones.size * CELL_BYTES

    @override
    def _changes(self, export: CellExport) -> Iterator[tuple[bytes, bytes | None]]:
        for keys, cells in export.cells():
            names = entry_keys(self.partition, keys, self._spill_home.max_parallelism).to_list()
            yield from zip(names, map(self._encoded, cells), strict=True)


class SpilledMaps(SpilledColumn, MapColumn):
    """A map per key; see ``MapColumn``.

    In memory ``ABSENT`` stands for an entry that there is not. A map all of whose entries are in memory is
    *complete*.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = self.logs[self.version] = {}
        self._complete: set[int] = set()
        self._entry_count = 0

    @override
    def get(self, slot: int, key: Any) -> Any:
        entries = self._map(slot)
        try:
            return entries[key]
        except KeyError:
            pass
        if slot in self._complete:
            return ABSENT
        (data,) = self._spill_home.reader.get_many([self._name(slot, key)])
        cell = entries[key] = ABSENT if data is None else self._codec.decode(data)
        self._entry_count += 1
        return cell

    @override
    def put(self, slot: int, key: Any, stored: Any) -> None:
        self._map(slot)
        self._entry_count += 1
        super().put(slot, key, stored)

    @override
    def remove(self, slot: int, key: Any) -> None:
        if self.get(slot, key) is not ABSENT:
            self.put(slot, key, ABSENT)

    @override
    def clear(self, slot: int) -> None:
        for key, _ in self.items(slot):
            self.put(slot, key, ABSENT)

    @override
    def items(self, slot: int) -> list[tuple[Any, Any]]:
        entries = self._map(slot)
        if slot not in self._complete:
            for name, data in self._stored_entries(slot):
                key = self._map_key(name)
                if key not in entries:
                    entries[key] = self._codec.decode(data)
                    self._entry_count += 1
            self._complete.add(slot)
        encode = self.key_codec.encode
        present = [item for item in entries.items() if item[1] is not ABSENT]
        return sorted(present, key=lambda item: encode(item[0]))

    @override
    def rest_of(self, name: bytes, data: bytes) -> bytes:
        return map_parts(name)[0][PARTITION_BYTES:]

    @override
    def leave(self) -> Int64Array:
        self._touch()
        self.changed.clear()
        return np.empty(0, np.int64)

    @override
    def bring_keys(self, slots: list[int]) -> None:
        """Entries are brought in when they are used."""

    @override
    def bring_entry(self, slot: int, name: bytes) -> None:
        self.get(slot, self._map_key(name))

    @override
    def found(self, slots: Int64Array) -> BoolArray:
        return np.array([self._has_entries(slot) for slot in slots.tolist()], np.bool_)

    @override
    def sweep(self, slots: Int64Array, now_ms: int) -> int:
        removed = 0
        for slot in slots.tolist():
            for key, cell in list((self.maps[slot] or {}).items()):
                if cell is not ABSENT and self._is_expired(cell, now_ms):
                    self.put(slot, key, ABSENT)
                    removed += 1
        return removed

    @override
    def keep(self, slots: list[int]) -> None:
        maps = self.maps
        maps[:] = [maps[slot] for slot in slots] + [None] * (len(maps) - len(slots))
        complete = self._complete
        self._complete = {new for new, slot in enumerate(slots) if slot in complete}
        self._entry_count = sum(len(entries) for entries in maps if entries)

    @override
    def memory_bytes(self) -> int:
        return int(self._entry_count * (2 * CELL_BYTES + self.average_bytes))

    @override
    def _changes(self, export: MapExport) -> Iterator[tuple[bytes, bytes | None]]:
        encode, limit = self.key_codec.encode, self._spill_home.max_parallelism
        for keys, map_keys, cells in export.entries():
            heads = entry_keys(self.partition, keys, limit).to_list()
            names = map(map_name, heads, map(encode, map_keys))
            yield from zip(names, map(self._encoded, cells), strict=True)

    def _map(self, slot: int) -> dict[Any, Any]:
        entries = self.maps[slot]
        if entries is None:
            entries = self.maps[slot] = {}
            if not self.is_stored:
                self._complete.add(slot)
        return entries

    def _has_entries(self, slot: int) -> bool:
        entries = self.maps[slot]
        if entries and any(cell is not ABSENT for cell in entries.values()):
            return True
        return self.is_stored and slot not in self._complete and bool(self.items(slot))

    def _name(self, slot: int, key: Any) -> bytes:
        return map_name(self.head + self._spill_home.rests[slot], self.key_codec.encode(key))

    def _map_key(self, name: bytes) -> Any:
        return self.key_codec.decode(map_parts(name)[1])

    def _stored_entries(self, slot: int) -> Iterator[tuple[bytes, bytes]]:
        begin = self.head + self._spill_home.rests[slot]
        for names, values in self._spill_home.reader.scan(begin, _behind(begin)):
            yield from zip(names, values, strict=True)


def _behind(prefix: bytes) -> bytes:
    """The first byte string behind all that begin with ``prefix``, which is not all 0xff."""
    number = int.from_bytes(prefix, "big") + 1
    return number.to_bytes(len(prefix), "big")
