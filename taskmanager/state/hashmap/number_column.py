"""A column of numbers in arrays, for functions that are compiled; to all others its cells are a list's.

Cells are stored forms as elsewhere (int, float, bool), so snapshots are those of ``ValueColumn``.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from typing_extensions import override

from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.backend import kernels
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.hashmap.cell_columns import ValueColumn
from taskmanager.state.hashmap.object_column import ColumnHome

_NONE: Int64Array = np.empty(0, np.int64)


class NumberCells:
    """Cells by slot, in arrays.

    Args:
        kind: "int64", "float64" or "bool".
        room: cells.

    Attributes:
        numbers: zero where there is none.
        are_there: bool[room].

    Example:
        >>> cells = NumberCells("int64", 2)
        >>> cells[1] = 7
        >>> cells[0] is ABSENT, cells[1], cells.at(np.array([1, 0, 1]))[::2]
        (True, 7, [7, 7])
    """

    __slots__ = ("are_there", "numbers")

    def __init__(self, kind: str, room: int) -> None:
        self.numbers: Any = np.zeros(room, kind)
        self.are_there: BoolArray = np.zeros(room, np.bool_)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, slot: int) -> Any:
        if slot is None:
            raise TypeError("there is no key")
        return self.numbers.item(slot) if self.are_there[slot] else ABSENT

    def __setitem__(self, slot: int, cell: Any) -> None:
        if slot is None:
            raise TypeError("there is no key")
        is_there = cell is not ABSENT
        self.are_there[slot] = is_there
        self.numbers[slot] = cell if is_there else 0

    def __iadd__(self, more: list[Any]) -> Self:
        """Room for as many cells, all empty."""
        self.numbers = np.append(self.numbers, np.zeros(len(more), self.numbers.dtype))
        self.are_there = np.append(self.are_there, np.zeros(len(more), np.bool_))
        return self

    def at(self, slots: Int64Array) -> list[Any]:
        """The cells of slots."""
        cells: list[Any] = self.numbers[slots].tolist()
        there = self.are_there[slots]
        if not there.all():
            for row in np.flatnonzero(~there).tolist():
                cells[row] = ABSENT
        return cells

    @property
    def nbytes(self) -> int:
        """Their size."""
        return int(self.numbers.nbytes + self.are_there.nbytes)


class NumberColumn(ValueColumn):
    """A number per key.

    Attributes:
        changed_numbers: bool[room], slots whose number a loop has changed; see ``put_numbers``. All False outside of bundles.
    """

    by_slot = MappingProxyType({**ValueColumn.by_slot, "changed_numbers": False})
    changed_numbers: BoolArray

    def __init__(self, home: ColumnHome, descriptor: StateDescriptor) -> None:
        super().__init__(home, descriptor)
        self.values: Any = NumberCells(descriptor.number_kind, home.room)
        self._loop_slots: list[Int64Array] = []

    def put_numbers(self, slots: Int64Array) -> None:
        """A loop may have changed the numbers in these slots: those that it has are changed."""
        self._loop_slots.append(slots)

    @property
    @override
    def has_changed(self) -> bool:
        return bool(self.changed or self._loop_slots)

    @override
    def leave(self) -> Int64Array:
        parts, self._loop_slots = self._loop_slots, []
        if self.changed:
            parts.append(np.array(self.changed, np.int64))
            self.changed_numbers[parts[-1]] = True
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        gone = np.empty(len(slots), np.int64)
        stamped, count = kernels().stamp_changed(
            slots,
            self.changed_numbers,
            self.values.are_there,
            self._versions,
            self.present,
            self.version,
            gone,
        )
        return self._left(_NONE, gone[:count].copy()) if stamped or count else _NONE

    @override
    def memory_bytes(self) -> int:
        return int(self.values.nbytes + self._array_bytes())

    @override
    def copy_cells(self, slots: Int64Array) -> list[Any]:
        cells: list[Any] = self.values.at(slots)
        return cells

    @override
    def _set(self, slots: Int64Array, cells: Iterable[Any], version: int) -> None:
        values, cells = self.values, list(cells)
        values.are_there[slots] = version >= 0
        values.numbers[slots] = cells if version >= 0 else 0
        self._versions[slots] = version
        self.present[slots] = version >= 0
