"""Which consumer gets which of the files that a producer has been given whole (pure).

Files cannot be cut, so they are dealt out only where that is fair; elsewhere rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

GivenFiles = Sequence[tuple[str, int]]
"""Path and number of rows of each, at least one."""

_UNEVEN_MAX: Final = 1.25


def dealt(files: GivenFiles, consumers: int) -> list[list[tuple[str, int]]] | None:
    """The files of each consumer.

    Returns:
        None where one would have more than a quarter above the others' mean.

    Example: the largest go first, each to who has least.
        >>> dealt([("a", 4), ("b", 5), ("c", 1)], 2)
        [[('b', 5)], [('a', 4), ('c', 1)]]
        >>> dealt([("a", 4)], 2) is None
        True
    """
    shares: list[list[tuple[str, int]]] = [[] for _ in range(consumers)]
    rows = [0] * consumers
    for file in sorted(files, key=lambda one: (-one[1], one[0])):
        least = min(range(consumers), key=rows.__getitem__)
        shares[least].append(file)
        rows[least] += file[1]
    is_fair = max(rows) * consumers <= sum(rows) * _UNEVEN_MAX
    return shares if is_fair else None
