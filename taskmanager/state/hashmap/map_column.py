"""Columns with a map per key, changed entry by entry.

From the first seal on every version has a log of the entries that were touched in it; an incremental
export walks the logs, a full one all maps. The value that an entry had when it is touched for the first
time in a version is saved for the exports that are under way: before the entry changes, so that the
other thread, which reads the entry first and what was saved after that, sees one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.codec import StateCodec
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from penstock.storage.run_columns import codec_field
from taskmanager.kernels import encode_keys
from taskmanager.kernels.tombstones import Tombstones
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.hashmap.object_column import (
    CHUNK_SLOTS,
    TOMBSTONES_MIN,
    ColumnExport,
    ColumnHome,
    ObjectColumn,
)
from taskmanager.state.hashmap.object_sizes import average_bytes

Log = dict[int, set[Any]]
"""Entries by slot."""
Entry = tuple[int, Any, Any]
"""Slot, key, stored value or ABSENT."""


class MapColumn(ObjectColumn):
    """A map per key; entries are loaded and written one by one."""

    kind = "map"

    def __init__(self, home: ColumnHome, descriptor: StateDescriptor) -> None:
        assert descriptor.key_codec is not None, f"map state {descriptor.name} has no codec of keys"
        self.key_codec: StateCodec = descriptor.key_codec
        super().__init__(
            home,
            descriptor,
            [codec_field("map_key", descriptor.key_codec)],
            codec_field("value", descriptor.codec),
        )
        self.maps: list[dict[Any, Any] | None] = [None] * home.room
        self.logs: dict[int, Log] = {}
        self._log: Log | None = None
        self._logged_count = 0
        # Entries of keys that were forgotten since.
        self._tombstones = Tombstones[tuple[KeyBatch, list[Any]]]()

    @override
    def grow(self, room: int) -> None:
        super().grow(room)
        self.maps += [None] * (room - len(self.maps))

    def get(self, slot: int, key: Any) -> Any:
        """The stored value, or ``ABSENT``."""
        entries = self.maps[slot]
        return ABSENT if entries is None else entries.get(key, ABSENT)

    def put(self, slot: int, key: Any, stored: Any) -> None:
        """Sets the value of an entry."""
        entries = self.maps[slot]
        if entries is None:
            entries = self.maps[slot] = {}
        if self._log is not None:
            self._before(slot, key, entries)
        entries[key] = stored
        self.changed.append(slot)

    def remove(self, slot: int, key: Any) -> None:
        """Removes an entry; none is no error."""
        entries = self.maps[slot]
        if entries is None or key not in entries:
            return
        if self._log is not None:
            self._before(slot, key, entries)
        del entries[key]
        self.changed.append(slot)

    def clear(self, slot: int) -> None:
        """Removes all entries of a key."""
        entries = self.maps[slot]
        if not entries:
            return
        if self._log is not None:
            for key in entries:
                self._before(slot, key, entries)
        self.maps[slot] = None
        self.changed.append(slot)

    def items(self, slot: int) -> list[tuple[Any, Any]]:
        """All (key, stored value) of a key, ordered by the encoded keys: that depends on the content alone."""
        entries = self.maps[slot]
        if not entries:
            return []
        encode = self.key_codec.encode
        return sorted(entries.items(), key=lambda item: encode(item[0]))

    @override
    def save(self, slots: Int64Array) -> None:
        """Entries are saved one by one."""

    @override
    def leave(self) -> Int64Array:
        if not self.changed:
            return np.empty(0, np.int64)
        self._touch()
        slots = set(self.changed)
        self.changed.clear()
        self.present[list(slots)] = True
        gone = np.array(sorted(slot for slot in slots if not self.maps[slot]), np.int64)
        self.present[gone] = False
        for slot in gone.tolist():
            self.maps[slot] = None
        return gone

    @override
    def forget_slots(self, slots: Int64Array) -> None:
        for version, log in self.logs.items():
            touched = [(slot, log.pop(slot)) for slot in slots.tolist() if slot in log]
            if touched:
                rows = np.array([slot for slot, entries in touched for _ in entries], np.int64)
                keys = [key for _, entries in touched for key in entries]
                self._logged_count -= len(keys)
                self._tombstones.bury(version, (self._home.keys_of(rows), keys), len(keys))

    @override
    def sweep(self, slots: Int64Array, now_ms: int) -> int:
        removed = 0
        for slot in slots[self.present[slots]].tolist():
            entries = self.maps[slot] or {}
            expired = [key for key, cell in entries.items() if self._is_expired(cell, now_ms)]
            for key in expired:
                self.remove(slot, key)
            removed += len(expired)
        return removed

    @override
    def seal(self, since_version: int, max_parallelism: int) -> ColumnExport:
        told = self._logged_count + self._tombstones.size
        if self.gives_up_tombstones and told > max(TOMBSTONES_MIN, 2 * int(self.present.sum())):
            # Rather a full snapshot than ever more logs of what was touched.
            self.forget(self.version)
            self._tombstones.restart(self.version)
        since = self._tombstones.since(since_version)
        logs = [log for version, log in self.logs.items() if since and version > since]
        buried = self._tombstones.after(since) if since else []
        export = MapExport(self, since, max_parallelism, logs, buried)
        self.version += 1
        self._log = self.logs[self.version] = {}
        with self._home.lock:
            self.exports.append(export)
        return export

    @override
    def forget(self, version: int) -> None:
        for old in [old for old in self.logs if old <= version]:
            self._logged_count -= sum(map(len, self.logs.pop(old).values()))
        self._tombstones.forget(version)

    @override
    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        for batch in batches:
            slots = self._home.restored_slots(encode_keys(batch.columns[2 : 2 + self._key_count]))
            keys = self.key_codec.stored(batch.column(2 + self._key_count))
            deleted = batch.column(1).to_pylist()
            stored = _stored(self._codec, batch)
            for slot, key, is_deleted, cell in zip(
                slots.tolist(), keys, deleted, stored, strict=True
            ):
                entries = self.maps[slot]
                if entries is None:
                    entries = self.maps[slot] = {}
                if is_deleted:
                    entries.pop(key, None)
                else:
                    entries[key] = cell
            touched = np.unique(slots)
            self.present[touched] = [bool(self.maps[slot]) for slot in touched.tolist()]

    @override
    def memory_bytes(self) -> int:
        used = np.flatnonzero(self.present)
        step = max(1, len(used) // 32)
        average = average_bytes([self.maps[slot] for slot in used[::step].tolist()])
        told = self._logged_count + self._tombstones.size
        return int(len(used) * average) + len(self.maps) * 9 + told * 80

    def is_expired(self, stored: Any, now_ms: int) -> bool:
        """A value has a time stamp that is too old."""
        return self._ttl_ms > 0 and self._is_expired(stored, now_ms)

    def columns_of(self, keys: list[Any], cells: list[Any]) -> list[pa.Array]:
        """The columns behind the key of n entries, ``ABSENT`` for those that are not there."""
        there = np.array([cell is not ABSENT for cell in cells], np.bool_)
        values = self._codec.column([cell for cell in cells if cell is not ABSENT])
        if not there.all():
            values = values.take(pa.array(np.cumsum(there) - 1, mask=~there))
        return [self.key_codec.column(keys), values]

    def _before(self, slot: int, key: Any, entries: dict[Any, Any]) -> None:
        """An entry is about to change: logs it, and saves it for exports, once in a version."""
        log = self._log
        assert log is not None
        touched = log.get(slot)
        if touched is None:
            touched = log[slot] = set()
        if key not in touched:
            touched.add(key)
            self._logged_count += 1
            for export in tuple(self.exports):  # an I/O thread may end one meanwhile
                if isinstance(export, MapExport):
                    export.save(slot, key, entries.get(key, ABSENT))


class MapExport(ColumnExport):
    """A sealed map column."""

    def __init__(
        self,
        column: MapColumn,
        since_version: int,
        max_parallelism: int,
        logs: list[Log],
        tombstones: list[tuple[KeyBatch, list[Any]]],
    ) -> None:
        super().__init__(column, since_version, max_parallelism)
        self._maps = column
        self._logs = logs
        self._tombstones = tombstones
        self._now_ms = self._home.now_ms()
        self._stop = len(column.maps)
        self._saved: dict[int, dict[Any, Any]] = {}

    def save(self, slot: int, key: Any, stored: Any) -> None:
        """An entry changes: the first value it had is the one that counts."""
        saved = self._saved.get(slot)
        if saved is None:
            saved = self._saved[slot] = {}
        saved.setdefault(key, stored)

    def entries(self) -> Iterator[tuple[KeyBatch, list[Any], list[Any]]]:
        """Keys, keys of their maps and stored values, ``ABSENT`` for what is gone; each entry once."""
        for keys, map_keys in self._tombstones:
            yield keys, map_keys, [ABSENT] * len(map_keys)
        part: list[Entry] = []
        for entry in self._touched_entries() if self.since_version else self._all_entries():
            part.append(entry)
            if len(part) >= CHUNK_SLOTS:
                yield self._with_keys(part)
                part = []
        if part:
            yield self._with_keys(part)
        with self._home.lock:
            self._end()

    @override
    def batches(self) -> Iterator[pa.RecordBatch]:
        for keys, map_keys, cells in self.entries():
            deleted = np.array([cell is ABSENT for cell in cells], np.bool_)
            yield self._batch(keys, deleted, self._maps.columns_of(map_keys, cells))

    def _with_keys(self, part: list[Entry]) -> tuple[KeyBatch, list[Any], list[Any]]:
        with self._home.lock:
            self._check()
            keys = self._home.keys_of(np.array([slot for slot, _, _ in part], np.int64))
        return keys, [key for _, key, _ in part], [cell for _, _, cell in part]

    def _all_entries(self) -> Iterator[Entry]:
        for slot in range(self._stop):
            entries = self._maps.maps[slot]
            # Copied in one step of the interpreter, and before what was saved is read.
            found = {} if entries is None else entries.copy()
            found.update(self._saved.get(slot, {}).copy())
            for key, cell in found.items():
                if cell is not ABSENT and not self._maps.is_expired(cell, self._now_ms):
                    yield slot, key, cell

    def _touched_entries(self) -> Iterator[Entry]:
        """The entries of the logs; what is not there any more, or has expired, as ``ABSENT``."""
        slots = {slot for log in self._logs for slot in log}
        for slot in slots:
            for key in set().union(*(log[slot] for log in self._logs if slot in log)):
                cell = (self._maps.maps[slot] or {}).get(key, ABSENT)
                cell = self._saved.get(slot, {}).get(key, cell)
                if cell is not ABSENT and self._maps.is_expired(cell, self._now_ms):
                    cell = ABSENT
                yield slot, key, cell


def _stored(codec: StateCodec, batch: pa.RecordBatch) -> list[Any]:
    """The stored values of a batch; those of tombstones are undefined."""
    deleted = batch.column(1)
    if not deleted.true_count:
        return codec.stored(batch.columns[-1])
    kept = iter(codec.stored(batch.columns[-1].filter(pa.compute.invert(deleted))))
    return [None if is_deleted else next(kept) for is_deleted in deleted.to_pylist()]
