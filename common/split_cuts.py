"""A whole that may be read in one way or in another, never in both.

A split may stand for others: a file into which others have been merged. Both it and they are reported, and which is
read depends on what is known: who has read some of the others goes on with those, and everybody else reads the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from penstock.connectors.source import PART_OF


class _Split(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def replaces(self) -> Iterable[str]: ...


S = TypeVar("S", bound=_Split)


def in_one_cut(splits: Sequence[S], knows: Callable[[list[str]], Iterable[bool]]) -> list[S]:
    """Leaves out what must not be read beside the others.

    Args:
        splits: of one report: with one that replaces others comes all of them, and its own other parts.
        knows: which wholes are being read or have been read, in whatever parts.

    Example: nothing is known, or one of those that were replaced.
        >>> from penstock.connectors.source import Split
        >>> splits = [Split("a"), Split("b"), Split("ab", replaces=("a", "b"))]
        >>> [split.id for split in in_one_cut(splits, lambda ids: [False] * len(ids))]
        ['ab']
        >>> [split.id for split in in_one_cut(splits, lambda ids: [id == "a" for id in ids])]
        ['a', 'b']
    """
    left_out: set[str] = set()
    for split in splits:
        if not split.replaces:
            continue
        whole, others = _whole_of(split), list(split.replaces)
        reads_others = any(knows(others)) and not any(knows([whole]))
        left_out.update([whole] if reads_others else others)
    return (
        [split for split in splits if _whole_of(split) not in left_out] if left_out else [*splits]
    )


def _whole_of(split: _Split) -> str:
    return split.id.partition(PART_OF)[0]
