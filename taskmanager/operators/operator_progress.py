"""What an operator of windows has to remember besides its tables: how far time and arrival have come.

Both are kept as operator lists with union redistribution, so that a restored subtask sees the items of
all subtasks, whatever its parallelism:
- a watermark, with the key-groups it holds for: a subtask starts from the smallest of those whose
  key-groups it has any of. Rows that would not have been late before the restore are not late after it;
- a count of arrivals: the largest of all, so that what comes after a restore comes after everything that
  has been numbered, by whichever subtask.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from common.elements import MIN_TIMESTAMP_MS
from taskmanager.operators.operator import OperatorContext
from taskmanager.state.operator_state import UNION

Int64Array = npt.NDArray[np.int64]

_WATERMARK = struct.Struct("<qii")
_COUNT = struct.Struct("<q")


class WatermarkState:
    """The watermark of an operator, as it is kept.

    Args:
        context: with the restored lists.
        name: of the list.
    """

    def __init__(self, context: OperatorContext, name: str = "watermark") -> None:
        self._key_groups = context.state.key_groups
        self._list = context.operator_state.list(name, UNION)
        self._list.codec = "watermark/1"

    def restored_ms(self) -> int:
        """Where to go on; ``MIN_TIMESTAMP_MS`` where nothing was restored."""
        items = [_WATERMARK.unpack(item) for item in self._list.items]
        mine = self._key_groups
        return min(
            (ms for ms, first, last in items if first < mine.stop and last >= mine.start),
            default=MIN_TIMESTAMP_MS,
        )

    def keep(self, watermark_ms: int) -> None:
        """Makes the watermark part of the next snapshot."""
        mine = self._key_groups
        self._list.items = [_WATERMARK.pack(watermark_ms, mine.start, mine.stop - 1)]


class ArrivalCounter:
    """Numbers rows in the order in which an operator gets them.

    Before ``open`` it counts from 0, and nothing is kept.
    """

    def __init__(self) -> None:
        self._arrived = 0

    def open(self, context: OperatorContext, name: str = "arrived") -> None:
        """Goes on where the restored operator has stopped."""
        self._list = context.operator_state.list(name, UNION)
        self._list.codec = "count/1"
        counts = [_COUNT.unpack(item)[0] for item in self._list.items]
        self._arrived = max([self._arrived, *counts])

    def take(self, rows: int) -> Int64Array:
        """The numbers of the next rows: int64[rows]."""
        first = self._arrived
        self._arrived += rows
        return np.arange(first, self._arrived)

    def keep(self) -> None:
        """Makes the count part of the next snapshot."""
        self._list.items = [_COUNT.pack(self._arrived)]
