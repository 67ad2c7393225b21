"""A set of pairs of words that keeps the order in which they came.

The pairs lie in two arrays that are only ever appended to; a table of slots says where each of them is. So what
was there at one moment can be read on any thread while more are added.

>>> pairs = PairSet()
>>> pairs.add(np.array([1, 1, 2]), np.array([5, 5, 5])).tolist()
[True, False, True]
>>> [column.tolist() for column in pairs.columns()]
[[1, 2], [5, 5]]
"""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.layout import PAIRS_MAX

_ROOM_MIN: Final = 64


class PairSet:
    """See the module."""

    def __init__(self) -> None:
        self._kernels = process_kernels()
        self._count = 0
        self._ones = np.empty(_ROOM_MIN, np.int64)
        self._others = np.empty(_ROOM_MIN, np.int64)
        self._slots = np.full(2 * _ROOM_MIN, -1, np.int64)

    def __len__(self) -> int:
        return self._count

    def add(self, ones: Int64Array, others: Int64Array) -> BoolArray:
        """Adds n pairs.

        Returns:
            bool[n], which of them were not there; of equal ones in one call that is the first.

        Raises:
            OverflowError: there are too many.
        """
        self._make_room(self._count + len(ones))
        is_new = np.empty(len(ones), np.bool_)
        self._count = self._kernels.add_pairs(
            np.ascontiguousarray(ones),
            np.ascontiguousarray(others),
            self._slots,
            self._ones,
            self._others,
            self._count,
            is_new,
        )
        return is_new

    def columns(self) -> tuple[Int64Array, Int64Array]:
        """The pairs that are there now: views that later additions do not change."""
        return self._ones[: self._count], self._others[: self._count]

    @property
    def memory_bytes(self) -> int:
        """Bytes of its arrays."""
        return self._ones.nbytes + self._others.nbytes + self._slots.nbytes

    def _make_room(self, count: int) -> None:
        room = len(self._ones)
        if count <= room:
            return
        if count > PAIRS_MAX:
            raise OverflowError(f"more than {PAIRS_MAX:,} pairs")
        while room < count:
            room *= 2
        for name in ("_ones", "_others"):
            longer = np.empty(room, np.int64)
            longer[: self._count] = getattr(self, name)[: self._count]
            setattr(self, name, longer)
        self._slots = np.full(2 * room, -1, np.int64)
        self._kernels.place_pairs(self._ones, self._others, self._count, self._slots)
