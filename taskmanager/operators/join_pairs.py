"""Which rows of two sides make pairs, as indices, some at a time (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.graph.join_schemas import keeps_left, keeps_right
from penstock.pb import graph_pb2
from penstock.storage.key_types import Int64Array

_ROW_BITS: Final = 31

NO_ROW = -1
"""Stands for the missing row of a pair, and for a key that equals nothing."""


def joined_pairs(
    left: Int64Array, right: Int64Array, how: graph_pb2.JoinKind.ValueType, rows_max: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """The pairs of rows with equal keys, and the rows without a partner that the join keeps.

    Args:
        left: int64[n] numbers of keys (equal keys, equal numbers), about as small as there are keys; ``NO_ROW`` =
            equals nothing.
        right: int64[m], the same.
        rows_max: pairs at a time.

    Returns:
        Rows of both sides, pair by pair; ``NO_ROW`` where there is no partner.
    """
    bound = 1 + max(int(left.max(initial=NO_ROW)), int(right.max(initial=NO_ROW)))
    order = _rows_by_number(right)
    of_number = np.bincount(right + 1, minlength=bound + 1)
    ends = np.cumsum(of_number)
    counts = np.where(left < 0, 0, of_number[left + 1])
    starts = ends[left + 1] - counts
    emitted = np.maximum(counts, 1) if keeps_left(how) else counts
    for first, stop in pieces(emitted, rows_max):
        of_left, within = spread(emitted[first:stop])
        of_left += first
        of_right = np.full(len(of_left), NO_ROW, np.int64)
        has_partner = counts[of_left] > 0
        of_right[has_partner] = order[(starts[of_left] + within)[has_partner]]
        for at in range(0, len(of_left), rows_max):
            yield of_left[at : at + rows_max], of_right[at : at + rows_max]
    if keeps_right(how):
        has_left = np.zeros(bound + 1, np.bool_)
        has_left[left[left >= 0] + 1] = True
        alone = np.flatnonzero(~has_left[right + 1])
        for at in range(0, len(alone), rows_max):
            of_right = alone[at : at + rows_max]
            yield np.full(len(of_right), NO_ROW, np.int64), of_right


def _rows_by_number(numbers: Int64Array) -> Int64Array:
    """The rows by their number, in their own order where that is equal: words are sorted, many times as fast as rows."""
    if len(numbers) >> _ROW_BITS or int(numbers.max(initial=0)) >> (62 - _ROW_BITS):
        return np.argsort(numbers, kind="stable")
    words = (numbers << _ROW_BITS) | np.arange(len(numbers))
    words.sort()
    rows: Int64Array = words & ((1 << _ROW_BITS) - 1)
    return rows


def pieces(counts: Int64Array, rows_max: int) -> Iterator[tuple[int, int]]:
    """Cuts rows into ranges of about ``rows_max`` results each, and of at least one row.

    Args:
        counts: int64[n], results of each row.
    """
    ends = np.cumsum(counts)
    start = done = 0
    while start < len(counts):
        stop = max(int(np.searchsorted(ends, done + rows_max, side="right")), start + 1)
        yield start, stop
        start, done = stop, int(ends[stop - 1])


def spread(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Each row as often as it has results: the rows, and which of the row's results it is."""
    row = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, within
