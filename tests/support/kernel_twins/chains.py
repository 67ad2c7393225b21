"""The twins of ``compiled_chains``: value by value, in Python."""

from __future__ import annotations

from penstock.storage.key_types import Int64Array


def link_values(
    groups: Int64Array, first: int, last: Int64Array, count: Int64Array, previous: Int64Array
) -> None:
    """See ``interface.Kernels.link_values``."""
    for position, group in enumerate(groups.tolist(), first):
        previous[position], last[group] = last[group], position
        count[group] += 1


def linked_values(
    last: Int64Array, bounds: Int64Array, previous: Int64Array, positions: Int64Array
) -> None:
    """See ``interface.Kernels.linked_values``."""
    for chain, position in enumerate(last.tolist()):
        found = []
        for _ in range(bounds[chain], bounds[chain + 1]):
            found.append(position)
            position = int(previous[position])
        positions[bounds[chain] : bounds[chain + 1]] = found[::-1]
