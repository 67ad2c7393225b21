"""Columns with one cell per key: a value, or a list of items (``list_column``).

A bundle may change every cell of the keys that it enters, so a cell that an export still needs is saved
when its key is entered: a value as it is (stored values never change in place), of a list a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

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
from taskmanager.state.run_format import split_tombstones


class ValueColumn(ObjectColumn):
    """A value per key. Cells may be used between ``KeySpace.enter`` and ``leave`` only.

    Attributes:
        values: by slot the stored value, or ``ABSENT``. Read and assigned directly: this is the hot path
            of Python functions. An assignment must be followed by ``changed.append(slot)``.
    """

    kind = "value"
    by_slot = MappingProxyType({**ObjectColumn.by_slot, "_versions": -1})
    _versions: Int64Array
    """-1 = the slot holds nothing."""

    def __init__(self, home: ColumnHome, descriptor: StateDescriptor) -> None:
        *identity, value = self._fields(descriptor)
        super().__init__(home, descriptor, identity, value)
        self.values: list[Any] = [ABSENT] * home.room
        self._tombstones = Tombstones[KeyBatch]()

    @override
    def grow(self, room: int) -> None:
        super().grow(room)
        self.values += [ABSENT] * (room - len(self.values))

    @override
    def save(self, slots: Int64Array) -> None:
        for export in tuple(self.exports):
            if isinstance(export, CellExport):
                export.save(slots, self._versions[slots])

    @override
    def leave(self) -> Int64Array:
        changed = self.changed
        if not changed:
            return np.empty(0, np.int64)
        emptied = self._emptied()
        gone = np.unique(np.array(emptied)) if emptied else np.empty(0, np.int64)
        return self._left(np.fromiter(changed, np.int64, len(changed)), gone)

    def _left(self, slots: Int64Array, gone: Int64Array) -> Int64Array:
        """These slots have changed, and those of them hold nothing any more; returns the latter."""
        values = self.values
        self._touch()
        if len(gone):
            stored = gone[self._versions[gone] >= 0]
            if len(stored) and self._tombstones.are_kept(self.version):
                kept_max = None
                if self.gives_up_tombstones:
                    kept_max = max(TOMBSTONES_MIN, 2 * int(self.present.sum()))
                removed = self._home.keys_of(stored)
                self._tombstones.bury(self.version, removed, len(stored), kept_max)
            for slot in gone.tolist():
                values[slot] = ABSENT
        self._versions[slots] = self.version
        self.present[slots] = True
        self._versions[gone] = -1
        self.present[gone] = False
        self.changed.clear()
        if self.removed:
            self.removed.clear()
        return gone

    def _emptied(self) -> list[int]:
        """Those of the changed slots that hold nothing any more."""
        values = self.values
        slots = self.changed if self.removed is None else self.removed
        return [slot for slot in slots if values[slot] is ABSENT]

    @override
    def forget_slots(self, slots: Int64Array) -> None:
        """Nothing is kept for them."""

    @override
    def sweep(self, slots: Int64Array, now_ms: int) -> int:
        removed = 0
        for slot in slots[self.present[slots]].tolist():
            kept, gone = self._unexpired(self.values[slot], now_ms)
            if gone:
                self.values[slot] = kept
                self.changed.append(slot)
                if self.removed is not None:
                    self.removed.append(slot)
                removed += gone
        return removed

    @override
    def seal(self, since_version: int, max_parallelism: int) -> ColumnExport:
        since = self._tombstones.since(since_version)
        buried = self._tombstones.after(since) if since else []
        export = self._export(since, max_parallelism, buried)
        self.version += 1
        with self._home.lock:
            self.exports.append(export)
        return export

    @override
    def forget(self, version: int) -> None:
        self._tombstones.forget(version)

    @override
    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        for batch in batches:
            removed, rows = split_tombstones(batch, self._key_count)
            if removed is not None:
                self._set(self._home.restored_slots(removed), [ABSENT] * len(removed), -1)
            if rows is not None:
                keys = encode_keys(rows.columns[2 : 2 + self._key_count])
                slots = self._home.restored_slots(keys)
                self._set(slots, self._restored(slots, rows), 0)

    @override
    def memory_bytes(self) -> int:
        used = np.flatnonzero(self.present)
        step = max(1, len(used) // 64)
        average = average_bytes([self.values[slot] for slot in used[::step].tolist()])
        return int(len(used) * average) + len(self.values) * 8 + self._array_bytes()

    def copy_cells(self, slots: Int64Array) -> list[Any]:
        """The cells of slots, which a bundle may now change."""
        values = self.values
        return [values[slot] for slot in slots.tolist()]

    def without_expired(self, cells: list[Any], now_ms: int) -> list[Any]:
        """The cells without what has expired."""
        return [self._unexpired(cell, now_ms)[0] for cell in cells] if self._ttl_ms else cells

    def column_of(self, cells: list[Any]) -> pa.Array:
        """Stored cells as the last column of a segment."""
        return self._codec.column(cells)

    @staticmethod
    def _fields(descriptor: StateDescriptor) -> list[pa.Field]:
        """The columns behind the key; the cells come last."""
        return [codec_field("value", descriptor.codec)]

    def _export(self, *about: Any) -> CellExport:
        return CellExport(self, *about)

    def _restored(self, slots: Int64Array, rows: pa.RecordBatch) -> list[Any]:
        """The cells of slots, of which these rows are loaded."""
        return self._codec.stored(rows.columns[-1])

    def _unexpired(self, cell: Any, now_ms: int) -> tuple[Any, int]:
        """What is left of a cell, and how many values have expired."""
        is_gone = cell is not ABSENT and self._is_expired(cell, now_ms)
        return (ABSENT, 1) if is_gone else (cell, 0)

    def _set(self, slots: Int64Array, cells: list[Any], version: int) -> None:
        values = self.values
        for slot, cell in zip(slots.tolist(), cells, strict=True):
            values[slot] = cell
        self._versions[slots] = version
        self.present[slots] = version >= 0


class CellExport(ColumnExport):
    """A sealed column of cells: walks the slots while bundles go on changing cells.

    A slot is *done* when its cell was saved; a bundle changes the cells of such slots only, of slots that
    the walk has passed, and of those whose version is not in the interval.
    """

    def __init__(
        self,
        column: ValueColumn,
        since_version: int,
        max_parallelism: int,
        tombstones: list[KeyBatch],
    ) -> None:
        super().__init__(column, since_version, max_parallelism)
        self._cells = column
        self._tombstones = tombstones
        self._now_ms = self._home.now_ms()
        self._after = since_version or -1
        self._cursor = 0
        self._stop = len(column.values)
        self._done = np.zeros(self._stop, np.bool_)
        self._saved: list[tuple[Int64Array, list[Any]]] = []

    def save(self, slots: Int64Array, versions: Int64Array) -> None:
        """Saves the cells of slots that are still to be exported."""
        needed = (versions > self._after) & (versions <= self.version) & (slots >= self._cursor)
        slots = np.unique(slots[needed & (slots < self._stop)])
        slots = slots[~self._done[slots]]
        if len(slots):
            self._done[slots] = True
            self._saved.append((slots, self._copies(slots)))

    def cells(self) -> Iterator[tuple[KeyBatch, list[Any]]]:
        """Keys and their cells, empty where nothing is left; of several of one key the last one counts."""
        for keys in self._tombstones:
            yield keys, [ABSENT] * len(keys)
        for _, keys, cells in self._changed_cells():
            yield keys, cells

    @override
    def batches(self) -> Iterator[pa.RecordBatch]:
        kind = self._schema.types[-1]
        for keys in self._tombstones:
            nothing = pa.nulls(len(keys), kind)
            yield self._batch(keys, True, self._columns(np.full(len(keys), -1), nothing))
        for slots, keys, cells in self._changed_cells():
            there = [row for row, cell in enumerate(cells) if not self._cells.is_empty(cell)]
            if len(there) < len(cells):
                rows = np.array(there, np.int64)
                slots, keys, cells = slots[rows], keys.take(rows), [cells[row] for row in there]
            if cells:
                column = self._cells.column_of(cells)
                yield self._batch(keys, False, self._columns(slots, column))

    def _copies(self, slots: Int64Array) -> list[Any]:
        """What is exported of slots, which a bundle may change from now on."""
        return self._cells.copy_cells(slots)

    def _columns(self, slots: Int64Array, cells: pa.Array) -> list[pa.Array]:
        """The columns behind the key; the slot of a tombstone is -1."""
        return [cells]

    def _changed_cells(self) -> Iterator[tuple[Int64Array, KeyBatch, list[Any]]]:
        is_done = False
        while not is_done:
            with self._home.lock:
                self._check()
                slots, cells, keys = self._next()
                is_done = self._cursor >= self._stop
                if is_done:
                    self._end()
            if len(slots):
                yield slots, keys, cells

    def _next(self) -> tuple[Int64Array, list[Any], KeyBatch]:
        start, stop = self._cursor, min(self._cursor + CHUNK_SLOTS, self._stop)
        versions = self._cells._versions[start:stop]
        needed = (versions > self._after) & (versions <= self.version) & ~self._done[start:stop]
        saved, self._saved = self._saved, []
        slots = np.flatnonzero(needed) + start
        cells = self._copies(slots)
        for others, copies in saved:
            slots, cells = np.concatenate([slots, others]), cells + copies
        self._cursor = stop
        cells = self._cells.without_expired(cells, self._now_ms)
        return slots, cells, self._home.keys_of(slots)
