"""States with a list or a map per key: ``ListState``, ``MapState``.

Items and entries are stored one by one: a change writes what changed, and each has its own time to live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import pyarrow as pa
from typing_extensions import override

from penstock.errors import JobRejected
from penstock.state.base import KeyedState, Ttl, codec_for
from penstock.storage.codec import ABSENT, StateError
from penstock.storage.nested_codec import map_entries


class ListState(KeyedState):
    """A list per key: ``get()``, ``add(item)``, ``update(items)``, ``clear()``.

    Args:
        name: unique within the function.
        type: of the items, see ``KeyedState``.
    """

    kind: ClassVar[Literal["value", "list", "map"]] = "list"
    _values: Any = None
    _changed: Any = None
    _replaced: Any = None

    def get(self) -> list[Any]:
        """The key's items, in order; the list is the caller's own."""
        return self._load(self._slot("get"))

    def add(self, item: Any) -> None:
        """Appends one item."""
        self._append(self._slot("add"), [self._item(item)])

    def add_all(self, items: Iterable[Any]) -> None:
        """Appends items."""
        slot = self._slot("add_all")
        self._append(slot, self._items(items, "add_all"))

    def update(self, items: Iterable[Any]) -> None:
        """Replaces all items."""
        slot = self._slot("update")
        self._replace(slot, self._items(items, "update"))

    def clear(self) -> None:
        """Removes all items; none is no error."""
        self._replace(self._slot("clear"), [])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        slot = self._slot("len")
        held = self._values[slot]
        if held is ABSENT:
            return 0
        return len(self._live(slot, held, is_read=False) if self._ttl_ms else held)

    @override
    def __bool__(self) -> bool:
        return True if not self.is_bound else len(self) > 0

    def get_many(self, keys: pa.Array) -> pa.Array:
        """The lists of n keys of the batch; null where there is none."""
        found = [self._load(slot) or None for slot in self._slots(keys, "get_many")]
        return self._array(found, self._array_type)

    def put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Replaces the lists of n keys of the batch; null removes."""
        for slot, items in self._pairs(keys, values, self._array_type, "put_many"):
            self._replace(slot, [] if items is None else self._items(items, "put_many"))

    @override
    def enter(self) -> None:
        self._values = self._column.values
        self._changed = self._column.changed
        self._replaced = self._column.replaced

    @override
    def is_present(self, slot: int) -> bool:
        return self._values[slot] is not ABSENT

    @property
    def _array_type(self) -> pa.DataType | None:
        """Type of arrays of lists, None where the items have no Arrow type."""
        item_type = self.codec.value_type
        return None if item_type is None else pa.list_(item_type)

    def _item(self, item: Any) -> Any:
        stored = self._stored(item, self.codec)
        return (stored, self._scope.now_ms) if self._ttl_ms else stored

    def _items(self, items: Iterable[Any], method: str) -> list[Any]:
        self._check_items(items, method)
        return [self._item(item) for item in items]

    def _append(self, slot: int, stored: list[Any]) -> None:
        if not stored:
            return
        held = self._values[slot]
        if held is ABSENT:
            self._values[slot] = stored
        else:
            held.extend(stored)
        self._changed.append(slot)

    def _replace(self, slot: int, stored: list[Any]) -> None:
        if stored or self._values[slot] is not ABSENT:
            self._values[slot] = stored or ABSENT
            self._changed.append(slot)
            self._replaced.append(slot)

    def _load(self, slot: int) -> list[Any]:
        held = self._values[slot]
        if held is ABSENT:
            return []
        if self._ttl_ms:
            held = [stored for stored, _ in self._live(slot, held)]
        return list(map(self.codec.to_value, held))

    def _live(self, slot: int, held: list[Any], *, is_read: bool = True) -> list[Any]:
        """The (stored, stamp) to be seen; takes away expired items that are not. What is read is renewed."""
        now_ms = self._scope.now_ms
        live = [item for item in held if not self._is_expired(item[1])]
        seen = held if self._returns_expired else live
        has_changed = len(seen) < len(held)
        if is_read and self._reads_stamp and any(stamp != now_ms for _, stamp in live):
            seen = [item if self._is_expired(item[1]) else (item[0], now_ms) for item in seen]
            has_changed = True
        if has_changed:
            self._replace(slot, seen)
        return seen


class MapState(KeyedState):
    """A map per key: ``get``, ``put``, ``remove``, ``contains``, ``keys``, ``values``, ``items``,
    ``is_empty``, ``clear``, and what a dict has.

    Args:
        name: unique within the function.
        key_type: of the map's keys: a plain Arrow type (not nested, not msgpack).
        type: of the map's values, see ``KeyedState``.
    """

    kind: ClassVar[Literal["value", "list", "map"]] = "map"

    def __init__(
        self,
        name: str,
        key_type: Any,
        type: Any = None,
        *,
        ttl: Ttl | None = None,
        codec: str | None = None,
        queryable: bool = False,
    ) -> None:
        super().__init__(name, type, ttl=ttl, codec=codec, queryable=queryable)
        self.key_codec = map_key_codec(name, key_type)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of an entry; ``default`` where there is none."""
        value = self._load(self._slot("get"), self._key(key))
        return default if value is ABSENT else value

    def put(self, key: Any, value: Any) -> None:
        """Sets the value of an entry."""
        self._save(self._slot("put"), key, value)

    def put_all(self, entries: Mapping[Any, Any]) -> None:
        """Sets several entries."""
        slot = self._slot("put_all")
        for key, value in entries.items():
            self._save(slot, key, value)

    def remove(self, key: Any) -> None:
        """Removes an entry; none is no error."""
        self._column.remove(self._slot("remove"), self._key(key))

    def contains(self, key: Any) -> bool:
        """Whether there is such an entry."""
        return self._load(self._slot("contains"), self._key(key)) is not ABSENT

    def keys(self) -> list[Any]:
        """The keys of all entries, in an order that depends on the content alone."""
        return [key for key, _ in self._entries(self._slot("keys"))]

    def values(self) -> list[Any]:
        """The values of all entries, in the order of ``keys``."""
        return [self.codec.to_value(value) for _, value in self._entries(self._slot("values"))]

    def items(self) -> list[tuple[Any, Any]]:
        """(key, value) of all entries, in the order of ``keys``."""
        to_value = self.codec.to_value
        return [(key, to_value(value)) for key, value in self._entries(self._slot("items"))]

    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return not self._entries(self._slot("is_empty"), is_read=False)

    def clear(self) -> None:
        """Removes all entries; none is no error."""
        self._column.clear(self._slot("clear"))

    def __getitem__(self, key: Any) -> Any:
        value = self._load(self._slot("[]"), self._key(key))
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Any) -> None:
        if not self.contains(key):
            raise KeyError(key)
        self.remove(key)

    def __contains__(self, key: object) -> bool:
        return self.contains(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries(self._slot("len"), is_read=False))

    @override
    def __bool__(self) -> bool:
        return True if not self.is_bound else not self.is_empty()

    def get_many(self, keys: pa.Array) -> pa.Array:
        """The maps of n keys of the batch; null where there is none."""
        to_value = self.codec.to_value
        found = [
            [(key, to_value(value)) for key, value in self._entries(slot)] or None
            for slot in self._slots(keys, "get_many")
        ]
        return self._array(found, self._array_type)

    def put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Replaces the maps of n keys of the batch; null removes."""
        for slot, entries in self._pairs(keys, values, self._array_type, "put_many"):
            self._column.clear(slot)
            for key, value in self._given_entries(entries):
                self._save(slot, key, value)

    @property
    def _array_type(self) -> pa.DataType | None:
        """Type of arrays of maps, None where the values have no Arrow type."""
        assert self.key_codec is not None
        item_type = self.codec.value_type
        return None if item_type is None else pa.map_(self.key_codec.value_type, item_type)

    @override
    def is_present(self, slot: int) -> bool:
        return bool(self._column.items(slot))

    def _key(self, key: Any) -> Any:
        assert self.key_codec is not None
        if type(key) is self.key_codec.exact_type:
            return key
        if key is None:
            raise StateError(f"state {self.name!r}: None is no key of a map")
        return self._stored(key, self.key_codec, ": a key of its maps")

    def _given_entries(self, entries: Any) -> Iterable[Sequence[Any]]:
        try:
            return () if entries is None else map_entries(entries)
        except ValueError as error:
            raise StateError(f"state {self.name!r}: put_many() takes maps, {error}") from error

    def _save(self, slot: int, key: Any, value: Any) -> None:
        stored = self._stored(value, self.codec)
        if self._ttl_ms:
            stored = (stored, self._scope.now_ms)
        self._column.put(slot, self._key(key), stored)

    def _load(self, slot: int, key: Any) -> Any:
        stored = self._column.get(slot, key)
        if self._is_plain or stored is ABSENT:
            return stored
        if self._ttl_ms:
            stored, stamp_ms = stored
            if self._is_expired(stamp_ms):
                if not self._returns_expired:
                    self._column.remove(slot, key)
                    return ABSENT
            elif self._reads_stamp and stamp_ms != self._scope.now_ms:
                self._column.put(slot, key, (stored, self._scope.now_ms))
        return self.codec.to_value(stored)

    def _entries(self, slot: int, *, is_read: bool = True) -> list[tuple[Any, Any]]:
        """(key, stored value) of the entries that are to be seen."""
        entries: list[tuple[Any, Any]] = self._column.items(slot)
        if not self._ttl_ms:
            return entries
        seen = []
        for key, (stored, stamp_ms) in entries:
            if self._is_expired(stamp_ms):
                if not self._returns_expired:
                    self._column.remove(slot, key)
                    continue
            elif is_read and self._reads_stamp and stamp_ms != self._scope.now_ms:
                self._column.put(slot, key, (stored, self._scope.now_ms))
            seen.append((key, stored))
        return seen


def map_key_codec(state: str, key_type: Any) -> Any:
    """The codec of the keys of a map.

    Raises:
        JobRejected: values of the type are no keys.
    """
    codec = codec_for(key_type, None, f"state {state!r}: key type")
    if key_type is None or not codec.is_immutable:
        raise JobRejected(
            f"state {state!r}: keys of a map have a plain type such as pa.string() or pa.int64(), "
            f"not {codec.expected}"
        )
    return codec.for_keys()
