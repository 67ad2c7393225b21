"""Compiled loops over the values of groups, which lie in blocks that double in size."""

from __future__ import annotations

from penstock.storage.key_types import Int64Array
from taskmanager.kernels.jit import INT64, INT64S, INT64S_IN, RECORDS, RECORDS_IN, VOID, kernel


@kernel(INT64(INT64S_IN, INT64S_IN, INT64, INT64, INT64S, INT64S, RECORDS, INT64S))
def extend_chains(
    groups: Int64Array,
    sequence: Int64Array,
    row: int,
    first: int,
    end: Int64Array,
    count: Int64Array,
    entries: Int64Array,
    used: Int64Array,
) -> int:
    """Adds n values to the chains of their groups, from ``row`` on.

    A chain is made of blocks with room for 1, 2, 4, ... values; in front of each block is where the one before
    it ends.

    Args:
        groups: int64[n].
        sequence: int64[n], kept beside each value.
        first: the position of the first of the n values.
        end: by group the entry behind its newest value; changed.
        count: by group how many it has; changed.
        entries: int64[m, 2], position and sequence of values; changed.
        used: int64[1], how many of the entries are taken; changed.

    Returns:
        How many of the n are done: not all where there was no entry left.
    """
    while row < len(groups):
        group = groups[row]
        held = count[group]
        if held & (held + 1) == 0:  # 0, 1, 3, 7, ...: its blocks are full
            block = used[0]
            if block + held + 2 > entries.shape[0]:
                break
            entries[block, 0] = end[group]
            end[group] = block + 1
            used[0] = block + held + 2
        place = end[group]
        entries[place, 0] = first + row
        entries[place, 1] = sequence[row]
        end[group] = place + 1
        count[group] = held + 1
        row += 1
    return row


@kernel(VOID(INT64S_IN, INT64S_IN, RECORDS_IN, INT64S, INT64S))
def read_chains(
    end: Int64Array,
    bounds: Int64Array,
    entries: Int64Array,
    positions: Int64Array,
    sequence: Int64Array,
) -> None:
    """What lies in the chains of n groups, one group after the other, oldest first.

    Args:
        end: int64[n], see ``extend_chains``.
        bounds: int64[n + 1], 0 and the running sums of how many values they have.
        entries: see ``extend_chains``.
        positions: int64[bounds[n]], filled.
        sequence: int64[bounds[n]], filled.
    """
    for chain in range(len(end)):
        first, stop = bounds[chain], end[chain]
        length = bounds[chain + 1] - first
        before = 0  # values in the blocks before the last one
        while 2 * before + 1 < length:
            before = 2 * before + 1
        length -= before
        while length > 0:
            start = stop - length
            for place in range(length):
                positions[first + before + place] = entries[start + place, 0]
                sequence[first + before + place] = entries[start + place, 1]
            stop = entries[start - 1, 0]
            length = (before + 1) // 2
            before = (before - 1) // 2
