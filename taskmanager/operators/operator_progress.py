"""What an operator of windows has to remember besides its tables: how far time and arrival have come.

Both are kept as operator lists with union redistribution, so that a restored subtask sees the items of
all subtasks, whatever its parallelism:
- a watermark, with the key-groups it holds for: a subtask starts from the smallest of those whose
  key-groups it has any of. Rows that would not have been late before the restore are not late after it;
- a count of arrivals: the largest of all, so that what comes after a restore comes after everything that
  has been numbered, by whichever subtask.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator

import numpy as np

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import Int64Array
from taskmanager.operators.operator import OperatorContext
from taskmanager.state.operator_state import UNION

_WATERMARK = struct.Struct("<qii")
_COUNT = struct.Struct("<q")


class WatermarkState:
    """The watermark of an operator, as it is kept.

    Args:
        by_clock: it is the machine's time: behind the end of data, which fires all that is open, the clock goes on.
    """

    def __init__(self, context: OperatorContext, *, by_clock: bool = False) -> None:
        self._end_ms = context.clock.now_ms() - 1 if by_clock else MAX_TIMESTAMP_MS
        """What a restored operator goes on from where that had come to the end of its data."""
        self._key_groups = context.state.key_groups
        self._max_parallelism = context.state.max_parallelism
        self._list = context.operator_state.list("watermark", UNION)
        self._list.codec = "watermark/1"

    def ranges(self) -> RangeWatermarks:
        """What was restored, key-group by key-group."""
        return RangeWatermarks(self._restored(), self._key_groups, self._max_parallelism)

    def restored_ms(self) -> int:
        """Where to go on; ``MIN_TIMESTAMP_MS`` where nothing was restored."""
        mine = self._key_groups
        return min(
            (
                ms
                for ms, first, last in self._restored()
                if first < mine.stop and last >= mine.start
            ),
            default=MIN_TIMESTAMP_MS,
        )

    def _restored(self) -> Iterator[tuple[int, int, int]]:
        for item in self._list.items:
            ms, first, last = _WATERMARK.unpack(item)
            yield self._end_ms if ms == MAX_TIMESTAMP_MS else ms, first, last

    def keep(self, watermark_ms: int, ranges: RangeWatermarks | None = None) -> None:
        """Makes the watermark part of the next snapshot.

        Args:
            ranges: key-groups that are still ahead of it.
        """
        mine = self._key_groups
        held = [(watermark_ms, mine.start, mine.stop - 1)]
        if ranges is not None:
            held = ranges.after(watermark_ms)
        self._list.items = [_WATERMARK.pack(*one) for one in held]


class RangeWatermarks:
    """How far time had come for each key-group of a restored subtask.

    Where ranges of subtasks meet whose watermarks differed, the smallest counts for the subtask; rows of the others
    are late by their own until the stream has passed the largest, and windows that had fired for them fire for the
    rest only.

    Args:
        items: (watermark, first key-group, last key-group) each; the last one counts.
        max_parallelism: number of key-groups of the operator.
    """

    def __init__(
        self, items: Iterable[tuple[int, int, int]], key_groups: range, max_parallelism: int
    ) -> None:
        self._key_groups = key_groups
        self._max_parallelism = max_parallelism
        self._of_group = np.full(len(key_groups), MIN_TIMESTAMP_MS, np.int64)
        for watermark_ms, first, last in items:
            start, stop = first - key_groups.start, last + 1 - key_groups.start
            self._of_group[max(start, 0) : max(stop, 0)] = watermark_ms
        self.largest_ms = int(self._of_group.max(initial=MIN_TIMESTAMP_MS))

    def are_ahead(self, watermark_ms: int) -> bool:
        """Whether one of them is further than the operator."""
        return watermark_ms < self.largest_ms

    def of_keys(self, keys: KeyBatch) -> Int64Array:
        """The watermark of each key: int64[n]."""
        groups = key_group_of(keys.hashes, self._max_parallelism).astype(np.int64)
        return self._of_group[groups - self._key_groups.start]

    def after(self, watermark_ms: int) -> list[tuple[int, int, int]]:
        """(watermark, first key-group, last key-group) when the operator has come so far."""
        now = np.maximum(self._of_group, watermark_ms)
        bounds = [0, *(np.flatnonzero(np.diff(now)) + 1).tolist(), len(now)]
        first = self._key_groups.start
        return [
            (int(now[start]), first + start, first + stop - 1)
            for start, stop in itertools.pairwise(bounds)
            if start < stop
        ]


class ArrivalCounter:
    """Numbers rows in the order in which an operator gets them.

    Before ``open`` it counts from 0, and nothing is kept.
    """

    def __init__(self) -> None:
        self._arrived = 0

    def open(self, context: OperatorContext) -> None:
        """Goes on where the restored operator has stopped."""
        self._list = context.operator_state.list("arrived", UNION)
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
