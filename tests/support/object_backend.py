"""Keyed objects and timers in plain dictionaries: what process functions are tested with by themselves.

Snapshots go through the codecs as files do, in whole. A state of a key is entered by giving it a slot for
the bundle; cells are copied out of the dictionaries and back, so that what is touched without being
reported as changed is lost, as it would be in a database.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob
from penstock.storage.codec import codec_of
from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import encode_keys
from taskmanager.state.backend import BackendEnvironment
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind


class ObjectBackend:
    """The part of a ``KeyedStateBackend`` that process functions use."""

    def __init__(self, environment: BackendEnvironment) -> None:
        self._objects: dict[str, Any] = {}
        self.clock = environment.clock
        for snapshot in environment.restored:
            (file,) = snapshot.files
            self._objects |= pickle.loads(environment.reader.read(file.handle))
        self.space: ObjectSpace | None = None
        self.timers: dict[str, ObjectTimers] = {}

    def key_space(self, key_types: Sequence[pa.DataType]) -> ObjectSpace:
        assert self.space is None, "one per operator"
        self.space = ObjectSpace(self, key_types)
        return self.space

    def timer_table(self, name: str, key_types: Sequence[pa.DataType]) -> ObjectTimers:
        self.timers[name] = ObjectTimers(key_types, self._objects.get(name, ()))
        return self.timers[name]

    def restored_column(self, descriptor: StateDescriptor) -> dict[bytes, Any]:
        """What was restored of a state."""
        found = self._objects.get(f"column.{descriptor.name}")
        if found is None:
            return {}
        codec_name, key_codec_name, entries = found
        assert codec_name == descriptor.codec.name
        codec = codec_of(codec_name)
        if descriptor.kind is StateKind.VALUE:
            return {key: codec.stored(column)[0] for key, column in entries.items()}
        if descriptor.kind is StateKind.LIST:
            return {key: codec.stored(column) for key, column in entries.items()}
        key_codec = codec_of(key_codec_name).for_keys()
        return {
            key: {key_codec.decode(k): codec.decode(v) for k, v in entry.items()}
            for key, entry in entries.items()
        }

    def snapshot(self, checkpoint_id: int) -> Any:
        content: dict[str, Any] = {name: table.content() for name, table in self.timers.items()}
        if self.space is not None:
            assert self.space.bundle is None, "a bundle is open"
            content |= self.space.content()
            content["keys"] = self.space.known
        return _Snapshot(pickle.dumps(content))

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Nothing: each snapshot is whole."""

    def close(self) -> None:
        """Nothing to release."""

    def restored_keys(self) -> dict[bytes, Any]:
        """Encoded key -> its columns."""
        return self._objects.get("keys", {})


class _Snapshot:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def blobs(self) -> Iterable[Blob]:
        yield Blob("objects", lambda: [self._data])

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        file = checkpoint_pb2.StateFile(name="objects", handle=handles["objects"])
        return checkpoint_pb2.KeyedStateSnapshot(backend="objects", files=[file])


class ObjectSpace:
    """A ``KeySpace``."""

    def __init__(self, backend: ObjectBackend, key_types: Sequence[pa.DataType]) -> None:
        self._backend = backend
        self._types = list(key_types)
        self.known: dict[bytes, list[Any]] = dict(backend.restored_keys())
        self.columns: list[Any] = []
        self.bundle: list[bytes] | None = None
        self.swept = 0

    def value_column(self, descriptor: StateDescriptor) -> Any:
        return self._add(CellColumn(descriptor, self._backend.restored_column(descriptor)))

    list_column = value_column

    def map_column(self, descriptor: StateDescriptor) -> Any:
        return self._add(EntryColumn(descriptor, self._backend.restored_column(descriptor), self))

    def _add(self, column: Any) -> Any:
        assert self.bundle is None
        self.columns.append(column)
        return column

    def enter(self, keys: KeyBatch) -> Any:
        assert self.bundle is None, "a bundle is open"
        arrays = keys.to_arrays()
        slots: dict[bytes, int] = {}
        result = np.empty(len(keys), np.int64)
        for row in range(len(keys)):
            key = keys.to_bytes(row)
            result[row] = slots.setdefault(key, len(slots))
            if key not in self.known:
                self.known[key] = [array[row].as_py() for array in arrays]
        self.bundle = list(slots)
        for column in self.columns:
            column.enter(self.bundle)
        return result

    def leave(self) -> None:
        assert self.bundle is not None
        for column in self.columns:
            column.leave(self.bundle)
        self.bundle = None
        held = set().union(*(column.held for column in self.columns))
        self.known = {key: value for key, value in self.known.items() if key in held}

    def keys(self) -> Iterable[KeyBatch]:
        for row in list(self.known.values()):
            yield encode_keys([pa.array([v], t) for v, t in zip(row, self._types, strict=True)])

    def sweep(self, now_ms: int, entries_max: int) -> int:
        assert self.bundle is None
        self.swept += 1
        return 0

    def content(self) -> dict[str, Any]:
        return {f"column.{c.descriptor.name}": c.content() for c in self.columns}


class CellColumn:
    """A ``ValueColumn`` or ``ListColumn``."""

    def __init__(self, descriptor: StateDescriptor, held: dict[bytes, Any]) -> None:
        self.descriptor = descriptor
        self.held = held
        self.values: list[Any] = []
        self.changed: list[int] = []
        self.replaced: list[int] = []

    def enter(self, bundle: list[bytes]) -> None:
        self.values = [_copied(self.held.get(key, ABSENT)) for key in bundle]
        self.changed = []

    def leave(self, bundle: list[bytes]) -> None:
        for slot in set(self.changed):
            self.held.pop(bundle[slot], None)
            if self.values[slot] is not ABSENT:
                self.held[bundle[slot]] = _copied(self.values[slot])
        self.values, self.changed, self.replaced = [], [], []

    def content(self) -> Any:
        codec = self.descriptor.codec
        is_list = self.descriptor.kind is StateKind.LIST
        entries = {
            key: codec.column(stored if is_list else [stored]) for key, stored in self.held.items()
        }
        return codec.name, None, entries


class EntryColumn:
    """A ``MapColumn``."""

    def __init__(
        self, descriptor: StateDescriptor, held: dict[bytes, dict[Any, Any]], space: ObjectSpace
    ) -> None:
        self.descriptor = descriptor
        self.held = held
        self._space = space

    def enter(self, bundle: list[bytes]) -> None:
        pass

    def leave(self, bundle: list[bytes]) -> None:
        self.held = {key: entries for key, entries in self.held.items() if entries}

    def _of(self, slot: int) -> dict[Any, Any]:
        assert self._space.bundle is not None
        return self.held.setdefault(self._space.bundle[slot], {})

    def get(self, slot: int, key: Any) -> Any:
        return self._of(slot).get(key, ABSENT)

    def put(self, slot: int, key: Any, stored: Any) -> None:
        self._of(slot)[key] = stored

    def remove(self, slot: int, key: Any) -> None:
        self._of(slot).pop(key, None)

    def clear(self, slot: int) -> None:
        self._of(slot).clear()

    def items(self, slot: int) -> list[tuple[Any, Any]]:
        return sorted(self._of(slot).items(), key=lambda item: repr(item[0]))

    def content(self) -> Any:
        codec, key_codec = self.descriptor.codec, self.descriptor.key_codec
        assert key_codec is not None
        entries = {
            key: {key_codec.encode(k): codec.encode(v) for k, v in held.items()}
            for key, held in self.held.items()
        }
        return codec.name, key_codec.name, entries


class ObjectTimers:
    """A ``TimerTable``."""

    def __init__(self, key_types: Sequence[pa.DataType], restored: Iterable[Any]) -> None:
        self._types = list(key_types)
        self._timers: dict[tuple[int, bytes], list[Any]] = dict(restored)

    def __len__(self) -> int:
        return len(self._timers)

    def register(self, keys: KeyBatch, times: Any) -> None:
        arrays = keys.to_arrays()
        for row, time_ms in enumerate(times.tolist()):
            key = [array[row].as_py() for array in arrays]
            self._timers[time_ms, keys.to_bytes(row)] = key

    def delete(self, keys: KeyBatch, times: Any) -> None:
        for row, time_ms in enumerate(times.tolist()):
            self._timers.pop((time_ms, keys.to_bytes(row)), None)

    def next_time(self) -> int | None:
        return min((time_ms for time_ms, _ in self._timers), default=None)

    def take_due(self, up_to_ms: int, limit: int) -> Any:
        due = sorted(timer for timer in self._timers if timer[0] <= up_to_ms)[:limit]
        if not due:
            return None
        rows = [self._timers.pop(timer) for timer in due]
        arrays = [
            pa.array(column, kind)
            for column, kind in zip(zip(*rows, strict=True), self._types, strict=True)
        ]
        return encode_keys(arrays), np.array([time_ms for time_ms, _ in due], np.int64)

    def content(self) -> list[Any]:
        return list(self._timers.items())


def _copied(stored: Any) -> Any:
    return list(stored) if isinstance(stored, list) else stored
