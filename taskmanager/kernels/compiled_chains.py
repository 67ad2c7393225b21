"""Compiled loops over the values of groups, each of which knows the one before it in its group."""

from __future__ import annotations

from penstock.storage.key_types import Int64Array
from taskmanager.kernels.jit import INT64, INT64S, INT64S_IN, VOID, kernel


@kernel(VOID(INT64S_IN, INT64, INT64S, INT64S, INT64S))
def link_values(
    groups: Int64Array, first: int, last: Int64Array, count: Int64Array, previous: Int64Array
) -> None:
    """See ``interface.Kernels.link_values``."""
    for row in range(len(groups)):
        group = groups[row]
        previous[first + row] = last[group]
        last[group] = first + row
        count[group] += 1


@kernel(VOID(INT64S_IN, INT64S_IN, INT64S_IN, INT64S))
def linked_values(
    last: Int64Array, bounds: Int64Array, previous: Int64Array, positions: Int64Array
) -> None:
    """See ``interface.Kernels.linked_values``."""
    for chain in range(len(last)):
        position = last[chain]
        for place in range(bounds[chain + 1] - 1, bounds[chain] - 1, -1):
            positions[place] = position
            position = previous[position]
