"""Maps per key in the database, read and written entry by entry.

The entry key of a map's entry is that of its key (see ``cell_columns``), then the encoded key of the map
and its length (4 bytes, big-endian), which tells where it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from taskmanager.state.descriptors import ABSENT, StateDescriptor, ValueCodec
from taskmanager.state.rocksdb.cell_columns import CELL_BYTES, LENGTH_BYTES, StoredColumn


class _CachedMap:
    """What is cached of one map.

    Attributes:
        entries: stored values by key, ABSENT = the map has no such entry.
        is_complete: all entries of the map are cached.
    """

    __slots__ = ("entries", "is_complete")

    def __init__(self, *, is_complete: bool) -> None:
        self.entries: dict[Any, Any] = {}
        self.is_complete = is_complete


class MapCells(StoredColumn):
    """A map per key; see ``taskmanager.state.backend.MapColumn``."""

    def __init__(self, descriptor: StateDescriptor, *args: Any, **kwargs: Any) -> None:
        assert descriptor.key_codec is not None, f"map state {descriptor.name} has no codec of keys"
        self._key_codec: ValueCodec = descriptor.key_codec
        self._maps: dict[int, _CachedMap] = {}
        self._cached_entries = 0
        super().__init__(descriptor, *args, **kwargs)

    def get(self, slot: int, key: Any) -> Any:
        """The stored value, or ``ABSENT``."""
        cached = self._map(slot)
        try:
            return cached.entries[key]
        except KeyError:
            pass
        if cached.is_complete:
            return ABSENT
        (data,) = self._reader.get_many([self.changes.head + self._rest(slot, key)])
        stored = ABSENT if data is None else self._codec.decode(data)
        cached.entries[key] = stored
        self._cached_entries += 1
        return stored

    def put(self, slot: int, key: Any, stored: Any) -> None:
        """Sets the value of an entry."""
        self._map(slot).entries[key] = stored
        self._cached_entries += 1
        self.changes.live.changes[self._rest(slot, key)] = stored

    def remove(self, slot: int, key: Any) -> None:
        """Removes an entry; none is no error."""
        if self.get(slot, key) is not ABSENT:
            self.put(slot, key, ABSENT)

    def clear(self, slot: int) -> None:
        """Removes all entries of a key."""
        for key, _ in self.items(slot):
            self.put(slot, key, ABSENT)

    def items(self, slot: int) -> list[tuple[Any, Any]]:
        """All (key, stored value) of a key, ordered by the encoded keys."""
        cached = self._map(slot)
        entries = cached.entries
        if not cached.is_complete:
            for name, data in self._stored_entries(slot):
                key = self._map_key(name)
                if key not in entries:
                    entries[key] = self._codec.decode(data)
                    self._cached_entries += 1
            cached.is_complete = True
        present = [item for item in entries.items() if item[1] is not ABSENT]
        encode = self._key_codec.encode
        return sorted(present, key=lambda item: encode(item[0]))

    @override
    def rest_of(self, name: bytes) -> bytes:
        length = int.from_bytes(name[-LENGTH_BYTES:], "big")
        return name[len(self.changes.head) : len(name) - LENGTH_BYTES - length]

    @override
    def encode(self, stored: Any, now_ms: int) -> bytes | None:
        if self.descriptor.ttl_ms and self.is_expired(stored, now_ms):
            return None
        return self._codec.encode(stored)

    @override
    def may_expire(self, data: bytes, now_ms: int) -> bool:
        return self.is_expired(self._codec.decode(data), now_ms)

    @override
    def sweep(self, slot: int, name: bytes | None, now_ms: int) -> int:
        keys = list(self._map(slot).entries) if name is None else [self._map_key(name)]
        removed = 0
        for key in keys:
            stored = self.get(slot, key)
            if stored is not ABSENT and self.is_expired(stored, now_ms):
                self.put(slot, key, ABSENT)
                removed += 1
        return removed

    @override
    def grow(self, room: int) -> None:
        """Maps are made when they are used."""

    @override
    def load(self, slots: list[int]) -> None:
        """Entries are loaded when they are used."""

    @override
    def enter(self, slots: Sequence[int]) -> None:
        """Stored values never change in place."""

    @override
    def leave(self) -> None:
        """Changes are part of the state at once."""

    @override
    def is_present(self, slot: int) -> bool:
        cached = self._maps.get(slot)
        if cached is not None and any(v is not ABSENT for v in cached.entries.values()):
            return True
        return self.changes.is_stored and bool(self.items(slot))

    @override
    def keep(self, slots: list[int]) -> None:
        maps = self._maps
        self._maps = {new: maps[slot] for new, slot in enumerate(slots) if slot in maps}
        self._cached_entries = sum(len(cached.entries) for cached in self._maps.values())

    @override
    def memory_bytes(self) -> int:
        return int(self._cached_entries * (2 * CELL_BYTES + self.changes.average_bytes))

    def _map(self, slot: int) -> _CachedMap:
        cached = self._maps.get(slot)
        if cached is None:
            cached = self._maps[slot] = _CachedMap(is_complete=not self.changes.is_stored)
        return cached

    def _rest(self, slot: int, key: Any) -> bytes:
        encoded = self._key_codec.encode(key)
        return self._rests[slot] + encoded + len(encoded).to_bytes(LENGTH_BYTES, "big")

    def _map_key(self, name: bytes) -> Any:
        length = int.from_bytes(name[-LENGTH_BYTES:], "big")
        end = len(name) - LENGTH_BYTES
        return self._key_codec.decode(name[end - length : end])

    def _stored_entries(self, slot: int) -> Iterator[tuple[bytes, bytes]]:
        begin = self.changes.head + self._rests[slot]
        for names, values in self._reader.scan(begin, _behind(begin)):
            yield from zip(names, values, strict=True)


def _behind(prefix: bytes) -> bytes:
    """The first byte string behind all that begin with ``prefix``, which is not all 0xff."""
    number = int.from_bytes(prefix, "big") + 1
    return number.to_bytes(len(prefix), "big")
