"""The twins of ``compiled_chains``: value by value, each block looked for from the first."""

from __future__ import annotations

from penstock.storage.key_types import Int64Array


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
    """See ``compiled_chains.extend_chains``."""
    for at, group in enumerate(groups[row:].tolist(), row):
        sizes = _block_sizes(int(count[group]) + 1)
        if count[group] == sum(sizes[:-1]):
            if used[0] + 1 + sizes[-1] > len(entries):
                return at
            entries[used[0], 0] = end[group]
            end[group] = used[0] + 1
            used[0] += 1 + sizes[-1]
        entries[end[group]] = first + at, sequence[at]
        end[group] += 1
        count[group] += 1
    return len(groups)


def read_chains(
    end: Int64Array,
    bounds: Int64Array,
    entries: Int64Array,
    positions: Int64Array,
    sequence: Int64Array,
) -> None:
    """See ``compiled_chains.read_chains``."""
    for chain, stop in enumerate(end.tolist()):
        first, last = bounds[chain : chain + 2].tolist()
        sizes = _block_sizes(last - first)
        while sizes:
            length = last - first - sum(sizes[:-1])
            positions[last - length : last] = entries[stop - length : stop, 0]
            sequence[last - length : last] = entries[stop - length : stop, 1]
            stop = int(entries[stop - length - 1, 0])
            last -= length
            sizes.pop()


def _block_sizes(values: int) -> list[int]:
    """Sizes of the blocks that so many values lie in."""
    sizes: list[int] = []
    while sum(sizes) < values:
        sizes.append(1 << len(sizes))
    return sizes
