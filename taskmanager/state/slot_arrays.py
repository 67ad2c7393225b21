"""Arrays with a number per slot, growing with the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])

_ROOM_MIN: Final = 64


def grown(array: Numbers, length: int, fill: int = 0) -> Numbers:
    """The array with room for ``length`` numbers: itself where it has that, else one at least twice as long."""
    if length <= len(array):
        return array
    longer = np.full(max(length, 2 * len(array)), fill, array.dtype)
    longer[: len(array)] = array
    return longer  # type: ignore[return-value]


class SlotArrays:
    """Base of tables with attributes that are arrays, all indexed by the same slots.

    A subclass names them in ``by_slot``, each with what a slot holds before anybody sets it: a bool where
    they are marks.
    """

    by_slot: ClassVar[Mapping[str, int]]

    def _make_arrays(self, room: int = _ROOM_MIN) -> None:
        for name, fill in self.by_slot.items():
            setattr(self, name, np.full(room, fill))

    def _move_slots(self, slots: Sequence[int]) -> None:
        """What these slots hold is what 0, 1, 2, ... hold from now on; the others hold what they did at first."""
        for name, fill in self.by_slot.items():
            array = getattr(self, name)
            moved = np.full(len(array), fill)
            moved[: len(slots)] = array[slots]
            setattr(self, name, moved)

    def _reserve(self, slots: int) -> None:
        """Makes room for the slots 0 .. ``slots`` - 1."""
        for name, fill in self.by_slot.items():
            array = getattr(self, name)
            if slots <= len(array):
                return
            setattr(self, name, grown(array, slots, fill))

    def _array_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.by_slot)
