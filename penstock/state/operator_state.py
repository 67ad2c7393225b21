"""States without a key: ``OperatorListState``, ``BroadcastState``. Kept small: all of it is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, Self

import msgpack
from typing_extensions import override

from penstock.errors import JobRejected, StoreCorrupt
from penstock.rows.column_values import short_repr
from penstock.state.base import State, StateScope, codec_for
from penstock.state.lists_and_maps import map_key_codec
from penstock.storage.codec import ABSENT, ENTRY_ARROW, StateError, codec_of
from penstock.storage.codec_migration import MigrationRefusedError, migration

_REDISTRIBUTIONS = ("split", "union")
_ITEM_BYTES = 41
_ENTRY_BYTES = 250
"""About what an item of a list, and an entry of a map, take beside their content."""


class ItemList(Protocol):
    """Where the encoded items live: a named list of the operator.

    Attributes:
        items: encoded; never changed in place, only replaced or appended to.
        codec: how they are encoded.
    """

    items: list[bytes]
    codec: str


class OperatorListState(State):
    """A list of the function's subtask: ``get()``, ``add(item)``, ``add_all``, ``update(items)``, ``clear()``.

    Args:
        name: unique within the function.
        type: of the items, see ``KeyedState``.
        redistribute: after a restart with another parallelism, "split": each item is in one subtask;
            "union": every subtask is given all items of all subtasks.
        codec: "msgpack" or "pickle".
    """

    def __init__(
        self,
        name: str,
        type: Any = None,
        redistribute: Literal["split", "union"] = "split",
        *,
        codec: str | None = None,
    ) -> None:
        super().__init__(name)
        if redistribute not in _REDISTRIBUTIONS:
            raise JobRejected(
                f"state {name!r}: redistribute={redistribute!r} is none of {', '.join(_REDISTRIBUTIONS)}"
            )
        self.codec = codec_for(type, codec, f"state {name!r}")
        self.redistribute = redistribute
        self._held: ItemList | None = None

    def bind(self, held: ItemList) -> Self:
        """The state within a running function.

        Raises:
            StateError: the restored items are of another type.
        """
        _migrate(self, held, "")
        bound = self._copy()
        bound._held = _checked(self, held, self.codec.name)
        return bound

    def get(self) -> list[Any]:
        """The items, in order; the list is the caller's own."""
        codec = self.codec
        return [codec.to_value(codec.decode(item)) for item in self._list("get").items]

    def add(self, item: Any) -> None:
        """Appends one item."""
        self._list("add").items.append(self._encoded(item))

    def add_all(self, items: Iterable[Any]) -> None:
        """Appends items."""
        self._list("add_all").items.extend(self._all_encoded(items, "add_all"))

    def update(self, items: Iterable[Any]) -> None:
        """Replaces all items."""
        self._list("update").items = self._all_encoded(items, "update")

    def clear(self) -> None:
        """Removes all items."""
        self._list("clear").items = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        return len(self._list("len").items)

    @override
    def __bool__(self) -> bool:
        return True if self._held is None else bool(self._held.items)

    def memory_bytes(self) -> int:
        """About how much memory the items take."""
        items = self._list("memory_bytes").items
        return sum(map(len, items)) + _ITEM_BYTES * len(items)

    def _encoded(self, item: Any) -> bytes:
        return self.codec.encode(self._stored(item, self.codec))

    def _all_encoded(self, items: Iterable[Any], method: str) -> list[bytes]:
        self._check_items(items, method)
        return [self._encoded(item) for item in items]

    def _list(self, method: str) -> ItemList:
        if self._held is None:
            raise _unbound(self, method)
        return self._held


class BroadcastState(State):
    """A map that is the same in all subtasks, since each of them sees the whole broadcast stream.

    ``get``, ``contains``, ``keys``, ``values``, ``items``, ``is_empty`` and what a dict has; ``put``,
    ``remove`` and ``clear`` in ``process_broadcast`` only: elsewhere the subtasks see different rows, and
    their maps would differ.

    Args:
        name: unique within the function.
        key_type: of the map's keys: a plain Arrow type.
        value_type: of its values, see ``KeyedState``.
        codec: "msgpack" or "pickle" for the values.
    """

    def __init__(
        self, name: str, key_type: Any, value_type: Any = None, *, codec: str | None = None
    ) -> None:
        super().__init__(name)
        self.codec = codec_for(value_type, codec, f"state {name!r}")
        self.key_codec = map_key_codec(name, key_type)
        self._held: ItemList | None = None
        self._scope: StateScope | None = None
        self._entries: dict[Any, tuple[Any, bytes]] = {}

    def bind(self, held: ItemList, scope: StateScope) -> Self:
        """The state within a running function, with what was restored.

        Raises:
            StateError: what was restored is of other types.
        """
        _migrate(self, held, self.key_codec.name)
        bound = self._copy()
        name = f"{self.key_codec.name}{ENTRY_ARROW}{self.codec.name}"
        bound._held, bound._scope, bound._entries = _checked(self, held, name), scope, {}
        for item in held.items:
            try:
                key, value = msgpack.unpackb(item)
            except (ValueError, msgpack.UnpackException) as error:
                raise StoreCorrupt(
                    f"an entry of state {self.name!r} cannot be read: {error}"
                ) from error
            bound._entries[self.key_codec.decode(key)] = self.codec.decode(value), item
        return bound

    def snapshot(self) -> None:
        """Puts the content where a snapshot takes it from."""
        assert self._held is not None
        self._held.items = [item for _, item in self._entries.values()]

    def memory_bytes(self) -> int:
        """About how much memory the entries take: each is there as objects and encoded."""
        entries = self._entries
        return sum(2 * len(item) for _, item in entries.values()) + _ENTRY_BYTES * len(entries)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of an entry; ``default`` where there is none."""
        value = self._load(key, "get")
        return default if value is ABSENT else value

    def put(self, key: Any, value: Any) -> None:
        """Sets the value of an entry."""
        self._check_writable("put")
        key = self._key(key)
        stored = self._stored(value, self.codec)
        item = msgpack.packb([self.key_codec.encode(key), self.codec.encode(stored)])
        self._entries[key] = stored, item

    def remove(self, key: Any) -> None:
        """Removes an entry; none is no error."""
        self._check_writable("remove")
        self._entries.pop(self._key(key), None)

    def clear(self) -> None:
        """Removes all entries."""
        self._check_writable("clear")
        self._entries.clear()

    def contains(self, key: Any) -> bool:
        """Whether there is such an entry."""
        return self._load(key, "contains") is not ABSENT

    def keys(self) -> list[Any]:
        """The keys of all entries."""
        return list(self._read("keys"))

    def values(self) -> list[Any]:
        """The values of all entries."""
        return [self.codec.to_value(stored) for stored, _ in self._read("values").values()]

    def items(self) -> list[tuple[Any, Any]]:
        """(key, value) of all entries."""
        entries = self._read("items").items()
        return [(key, self.codec.to_value(stored)) for key, (stored, _) in entries]

    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return not self._read("is_empty")

    def __getitem__(self, key: Any) -> Any:
        value = self._load(key, "[]")
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
        return len(self._read("len"))

    @override
    def __bool__(self) -> bool:
        return True if self._held is None else bool(self._entries)

    def _load(self, key: Any, method: str) -> Any:
        found = self._read(method).get(self._key(key))
        return ABSENT if found is None else self.codec.to_value(found[0])

    def _read(self, method: str) -> dict[Any, tuple[Any, bytes]]:
        if self._held is None:
            raise _unbound(self, method)
        return self._entries

    def _check_writable(self, method: str) -> None:
        self._read(method)
        assert self._scope is not None
        if not self._scope.may_write_broadcast:
            raise StateError(
                f"state {self.name!r}: {method}() is allowed in process_broadcast() only, where every "
                "subtask sees the same rows; here broadcast state can be read"
            )

    def _key(self, key: Any) -> Any:
        if key is None:
            raise StateError(f"state {self.name!r}: None is no key of a map, got {short_repr(key)}")
        return self._stored(key, self.key_codec, ": a key of its map")


def _migrate(state: OperatorListState | BroadcastState, held: ItemList, key_codec: str) -> None:
    """Makes restored items what is declared; what cannot become that stays, to be refused.

    Args:
        key_codec: of the entries of a map; "" = the items are values.
    """
    prefix = f"{key_codec}{ENTRY_ARROW}" if key_codec else ""
    stored = held.codec.removeprefix(prefix)
    if not held.items or not held.codec.startswith(prefix) or stored in ("", state.codec.name):
        return
    old, new = codec_of(stored), state.codec
    try:
        convert = migration(old, new)
    except MigrationRefusedError:
        return
    if convert is not None:
        values = map(_value_of if key_codec else bytes, held.items)
        changed = [new.encode(convert(old.decode(value))) for value in values]
        if key_codec:
            keys = [msgpack.unpackb(item)[0] for item in held.items]
            changed = [msgpack.packb(entry) for entry in zip(keys, changed, strict=True)]
        held.items = changed
    held.codec = f"{prefix}{new.name}"


def _value_of(entry: bytes) -> bytes:
    value: bytes = msgpack.unpackb(entry)[1]
    return value


def _checked(state: State, held: ItemList, codec: str) -> ItemList:
    if held.items and held.codec and held.codec != codec:
        raise StateError(
            f"state {state.name!r} was stored as {held.codec} and is declared as {codec} now: declare it as "
            "it was, or give it another name"
        )
    held.codec = codec
    return held


def _unbound(state: State, method: str) -> StateError:
    return StateError(
        f"state {state.name!r}: {method}() was called on its declaration; state is there when the function "
        "runs in a job, as self.<attribute>"
    )
