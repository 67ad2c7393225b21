"""Which segments a snapshot of a table consists of, and from which version the next one is exported.

A chain is read from its first segment to its last. Its *base* holds all content (it begins at version 0;
after a restore several segments together may be the base), the others are changes. "Merging" segments
means to export again, from the live table, everything after the version at which the oldest of them
begins.

Policy: three segments of a tier become one of the next; there is one segment of the highest tier, and it
takes part in all that is merged into it. When the changes outnumber the base, or the chain would be too
long, the table is exported whole. So a chain has at most ``LENGTH_MAX`` segments; a change is written about
four times until it is in the highest tier, which is written again every 27th time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.pb.checkpoint_pb2 import StatePart

LENGTH_MAX: Final = 8
FAN_IN: Final = 3
TIER_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a table in a file.

    Attributes:
        row_count: rows, tombstones included.
        from_version: its changes are those after it, ...
        to_version: ... up to this version.
        tier: how often it was merged; 0 for a base.
        parts: what it consists of.
    """

    file: str
    offset: int
    size_bytes: int
    row_count: int
    from_version: int
    to_version: int
    tier: int = 0
    parts: tuple[StatePart, ...] = ()


Chain = tuple[Segment, ...]


@dataclass(frozen=True, slots=True, order=True)
class Export:
    """What to export next.

    Attributes:
        since_version: changes after it; 0 = all content.
        tier: of the segment that it becomes.
    """

    since_version: int
    tier: int


WHOLE: Final = Export(0, 0)


def next_export(
    chain: Chain, rewritten_files: Collection[str] = (), *, by_bytes: bool = False
) -> Export:
    """How a table whose newest confirmed chain is ``chain`` is exported.

    Args:
        chain: without segments, or with segments that later snapshots may refer to.
        rewritten_files: no segment in them is to stay.
        by_bytes: changes add to what the rows of the base hold, so that bytes are compared and not rows.
    """
    base_count = base_length(chain)
    changes = chain[base_count:]
    if not base_count or _outnumber_base(chain, by_bytes=by_bytes):
        return WHOLE
    first, tier = _tiered(changes)
    if base_count + first + 1 > LENGTH_MAX:
        first, tier = 0, TIER_MAX
    if base_count + first + 1 > LENGTH_MAX:
        return WHOLE
    for index, segment in enumerate(chain):
        if segment.file in rewritten_files:
            if index < base_count:
                return WHOLE
            first = min(first, index - base_count)
            tier = max(segment.tier, tier)
            break
    since = changes[first].from_version if first < len(changes) else chain[-1].to_version
    return Export(since, tier)


def extended(chain: Chain, segment: Segment) -> Chain:
    """The chain with a new segment in place of those whose versions it covers."""
    if segment.from_version == 0:
        return (segment,)
    return (*(old for old in chain if old.to_version <= segment.from_version), segment)


def base_length(chain: Chain) -> int:
    """How many segments at the front are the base."""
    return sum(1 for segment in chain if segment.from_version == 0)


def sparse_file(sizes: dict[str, int], chains: Sequence[Chain]) -> str | None:
    """The file of which the smallest part is still referred to, if that is less than half.

    Args:
        sizes: size of each file in bytes.
        chains: all chains that refer to them.
    """
    live = dict.fromkeys(sizes, 0)
    for chain in chains:
        for segment in chain:
            live[segment.file] += segment.size_bytes
    sparse = [name for name in sizes if 0 < live[name] * 2 < sizes[name]]
    return min(sparse, key=lambda name: live[name] / sizes[name], default=None)


def _outnumber_base(chain: Chain, *, by_bytes: bool) -> bool:
    base, *changes = [one.size_bytes if by_bytes else one.row_count for one in chain]
    return sum(changes) > base


def _tiered(changes: Chain) -> tuple[int, int]:
    """Index of the first segment that the next one replaces, and the next one's tier."""
    first, tier = len(changes), 0
    while tier < TIER_MAX:
        run = 0
        while first - run > 0 and changes[first - run - 1].tier == tier:
            run += 1
        if run < FAN_IN - 1:
            return first, tier
        first -= run
        tier += 1
    while first > 0 and changes[first - 1].tier >= TIER_MAX:
        first -= 1
    return first, TIER_MAX
