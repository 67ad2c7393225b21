"""Which subtask of a source reads which split.

Greedy by size: the largest new split goes to the subtask with the least to read so far. The result
depends only on what was discovered, in which order. Invariants: a split is assigned once and stays
where it is (a later discovery may name it again); a whole that was cut into parts is never cut in
another way (its file was replaced meanwhile); after ``final`` nothing is assigned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.connectors.source import PART_OF, Split


@dataclass(frozen=True, slots=True)
class Assignment:
    """New splits for one subtask, in order of discovery."""

    subtask_index: int
    splits: tuple[Split, ...]
    final: bool


class SplitAssigner:
    """Assigns the splits of one source.

    Args:
        parallelism: subtasks that read.

    Example: the largest split goes to who has least to read; one that is known is not assigned again.
        >>> assigner = SplitAssigner(parallelism=2)
        >>> splits = [Split("small", size=1), Split("large", size=9), Split("middle", size=5)]
        >>> for told in assigner.assign(splits, final=False):
        ...     print(told.subtask_index, [split.id for split in told.splits])
        0 ['large']
        1 ['small', 'middle']
        >>> assigner.assign([Split("large", size=9)], final=False)
        []
    """

    def __init__(self, parallelism: int) -> None:
        assert parallelism >= 1, "a source has subtasks"
        self._load = [0.0] * parallelism
        self._owner_by_split: dict[str, int] = {}
        self._content_of: dict[str, str] = {}
        self._assigned: list[list[Split]] = [[] for _ in range(parallelism)]
        self._started = False
        self._final = False

    @property
    def is_final(self) -> bool:
        """True when no more splits will come."""
        return self._final

    @property
    def has_started(self) -> bool:
        """True when the subtasks have heard of a first discovery."""
        return self._started

    def owner(self, split_id: str) -> int | None:
        """The subtask that reads a split; None = it has not been discovered."""
        return self._owner_by_split.get(split_id)

    def seed(self, split_id: str, subtask_index: int, load: float) -> None:
        """A restored split stays with the subtask it was restored to.

        Args:
            split_id: the split; done ones are named too, so that they are not read again.
            subtask_index: who has it.
            load: what is left to read of it.
        """
        assert not self._started, "seeded before the first discovery"
        self._owner_by_split[split_id] = subtask_index
        self._know(split_id)
        self._load[subtask_index] += load

    def _know(self, split_id: str) -> None:
        whole, _, part = split_id.partition(PART_OF)
        self._content_of.setdefault(whole, part.partition(PART_OF)[0])

    def _is_new(self, split_id: str) -> bool:
        """Whether it is known neither itself nor as another cut of the whole it is part of."""
        whole, _, part = split_id.partition(PART_OF)
        content = part.partition(PART_OF)[0]
        return (
            split_id not in self._owner_by_split and self._content_of.get(whole, content) == content
        )

    def retire(self, subtask_index: int) -> None:
        """A subtask that was restored as finished reads nothing any more."""
        self._load[subtask_index] = math.inf

    def owned_by(self, subtask_index: int) -> list[str]:
        """Ids of all splits of a subtask, in order of assignment."""
        return [id for id, owner in self._owner_by_split.items() if owner == subtask_index]

    def assigned_to(self, subtask_index: int) -> tuple[Split, ...]:
        """Splits a subtask was told of here, in that order; not those it was restored with."""
        return tuple(self._assigned[subtask_index])

    def assign(self, splits: Sequence[Split], final: bool) -> list[Assignment]:
        """Takes a discovery and returns what subtasks must be told.

        Every subtask hears of the first discovery and of the final one, even without a split for
        it; of those between only the subtasks that get something.

        Args:
            splits: what was discovered; splits that were assigned before are skipped.
            final: no more will be discovered.
        """
        if self._final:
            return []
        unique = {split.id: split for split in splits if self._is_new(split.id)}
        for split_id in unique:
            self._know(split_id)
        known_sizes = [split.size for split in unique.values() if split.size > 0]
        # A split of unknown size counts like an average one.
        typical = sum(known_sizes) / len(known_sizes) if known_sizes else 1.0
        weight = {split.id: float(split.size or typical) for split in unique.values()}
        for split in sorted(unique.values(), key=lambda split: (-weight[split.id], split.id)):
            index = min(range(len(self._load)), key=lambda i: (self._load[i], i))
            self._load[index] += weight[split.id]
            self._owner_by_split[split.id] = index
        for split in unique.values():
            self._assigned[self._owner_by_split[split.id]].append(split)
        to_everyone = final or not self._started
        self._started = True
        self._final = final
        assignments = []
        for index in range(len(self._load)):
            own = tuple(s for s in unique.values() if self._owner_by_split[s.id] == index)
            if own or to_everyone:
                assignments.append(Assignment(index, own, final))
        return assignments
