"""Columns with a list per key, of which exports write what was added.

From the first seal on every version has a log: which lists were touched in it first, and how long they were then. An
export of what changed after a version thus knows how much of each list is in the segments before. It writes the items
behind that, in a row that says so (``__appended``), and whole lists where one was replaced, or is new.

Example: a list of three items, one of them added since the last export, and a list that is new.
    key_0  __appended  items
    1      true        [30]
    2      false       [7, 8]
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_types import Int64Array
from penstock.storage.run_columns import APPENDED_FIELD, codec_field
from taskmanager.kernels.tombstones import Tombstones
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.hashmap.cell_columns import CellExport, ValueColumn
from taskmanager.state.hashmap.object_column import ColumnExport, ColumnHome

LOGGED_MIN: Final = 1 << 20
"""So many entries of logs are always kept, 16 bytes each."""


class ListColumn(ValueColumn):
    """A list per key, as ``ValueColumn``.

    Attributes:
        values: by slot a list of stored items, or ``ABSENT``. Items may be added to the list in place, or it may be
            replaced, either followed by ``changed.append(slot)``.
        replaced: slots of which anything was done but adding items at the end, likewise.
    """

    kind = "list"
    by_slot = MappingProxyType({**ValueColumn.by_slot, "_lengths": 0, "_replaced_in": -1})
    _lengths: Int64Array
    """At the end of the last bundle."""
    _replaced_in: Int64Array
    """The version in which the list was last replaced or begun."""

    def __init__(self, home: ColumnHome, descriptor: StateDescriptor) -> None:
        super().__init__(home, descriptor)
        self.replaced: list[int] = []
        # Slots, and how long their lists were.
        self._logs = Tombstones[tuple[Int64Array, Int64Array]]()

    @override
    def _left(self, slots: Int64Array, gone: Int64Array) -> Int64Array:
        self._note(np.unique(slots))
        self.replaced.clear()
        return super()._left(slots, gone)

    def _note(self, slots: Int64Array) -> None:
        """These different slots have changed: logs how long their lists were, once in a version."""
        versions, values = self._versions[slots], self.values
        known = slots[(versions >= 0) & (versions < self.version)]
        if self._tombstones.are_kept(self.version):
            self._logs.bury(self.version, (known, self._lengths[known]), len(known))
        self._replaced_in[slots[versions < 0]] = self.version
        self._replaced_in[self.replaced] = self.version
        cells = [values[slot] for slot in slots.tolist()]
        self._lengths[slots] = [0 if cell is ABSENT else len(cell) for cell in cells]

    @override
    def sweep(self, slots: Int64Array, now_ms: int) -> int:
        removed = super().sweep(slots, now_ms)
        self.replaced += self.changed
        return removed

    @override
    def seal(self, since_version: int, max_parallelism: int) -> ColumnExport:
        kept_max = max(LOGGED_MIN, 2 * int(self.present.sum()))
        if self.gives_up_tombstones and self._logs.size > kept_max:
            # Rather a full snapshot than ever more logs of what was touched.
            self.forget(self.version)
            self._tombstones.restart(self.version)
        return super().seal(since_version, max_parallelism)

    @override
    def forget(self, version: int) -> None:
        super().forget(version)
        self._logs.forget(version)

    def _joined(self, slots: Int64Array, cells: list[Any], appended: pa.Array) -> list[Any]:
        """Lists with what was loaded before in front, also in rows before, where they are added to that."""
        values, places = self.values, slots.tolist()
        for slot, cell, is_added in zip(places, cells, appended.to_pylist(), strict=True):
            if is_added and values[slot] is not ABSENT:
                values[slot].extend(cell)
            else:
                values[slot] = cell
        return [values[slot] for slot in places]

    @override
    def _set(self, slots: Int64Array, cells: list[Any], version: int) -> None:
        super()._set(slots, cells, version)
        self._lengths[slots] = [0 if cell is ABSENT else len(cell) for cell in cells]

    @override
    def memory_bytes(self) -> int:
        return super().memory_bytes() + 16 * self._logs.size

    @override
    def column_of(self, cells: list[Any]) -> pa.Array:
        offsets = np.zeros(len(cells) + 1, np.int32)
        np.cumsum([len(cell) for cell in cells], out=offsets[1:])
        items = self._codec.column([item for cell in cells for item in cell])
        return pa.ListArray.from_arrays(pa.array(offsets), items)

    @override
    def is_empty(self, cell: Any) -> bool:
        return cell is ABSENT or not cell

    @staticmethod
    @override
    def _fields(descriptor: StateDescriptor) -> list[pa.Field]:
        kind = pa.list_(descriptor.codec.column_type)
        return [APPENDED_FIELD, codec_field("items", descriptor.codec, kind)]

    @override
    def _export(self, *about: Any) -> CellExport:
        return ListExport(self, *about)

    def starts(self, since_version: int) -> Int64Array:
        """By slot: how many items are in the segments before, where nothing else became of these since; else 0."""
        starts = np.zeros(len(self.values), np.int64)
        if not since_version:
            return starts
        newer = self._logs.after(since_version)
        for slots, lengths in reversed(newer):  # the oldest one stays
            starts[slots] = lengths
        for slots, _ in newer:
            starts[slots[self._replaced_in[slots] > since_version]] = 0
        return starts

    def copy_from(self, slot: int, start: int) -> Any:
        """What is exported of a list of which so many items are in the segments before."""
        items = self.values[slot]
        # A bundle that has not ended may have removed it.
        return ABSENT if items is ABSENT else items[start:]

    @override
    def _restored(self, slots: Int64Array, rows: pa.RecordBatch) -> list[Any]:
        cells, appended = self._lists(rows.columns[-1]), rows.column(APPENDED_FIELD.name)
        return self._joined(slots, cells, appended) if appended.true_count else cells

    def _lists(self, column: pa.Array) -> list[Any]:
        items = self._codec.stored(column.flatten())
        bounds = np.zeros(len(column) + 1, np.int64)
        np.cumsum(
            pa.compute.list_value_length(column).to_numpy(zero_copy_only=False), out=bounds[1:]
        )
        ends = bounds.tolist()
        return [items[start:stop] for start, stop in pairwise(ends)]

    @override
    def _emptied(self) -> list[int]:
        values = self.values
        return [slot for slot in self.changed if self.is_empty(values[slot])]

    @override
    def _unexpired(self, cell: Any, now_ms: int) -> tuple[Any, int]:
        if cell is ABSENT:
            return ABSENT, 0
        kept = [item for item in cell if not self._is_expired(item, now_ms)]
        return kept, len(cell) - len(kept)


class ListExport(CellExport):
    """A sealed column of lists."""

    def __init__(self, column: ListColumn, since_version: int, *about: Any) -> None:
        super().__init__(column, since_version, *about)
        self._lists = column
        self._starts = column.starts(since_version)

    @override
    def _copies(self, slots: Int64Array) -> list[Any]:
        return list(map(self._lists.copy_from, slots.tolist(), self._starts[slots].tolist()))

    @override
    def _columns(self, slots: Int64Array, cells: pa.Array) -> list[pa.Array]:
        return [pa.array((slots >= 0) & (self._starts[slots] > 0)), cells]
