"""Which subtask of a source reads which split.

Greedy by size: the largest new split goes to the subtask with the least to read so far. The result
depends only on what was discovered, in which order. Invariants: a split is assigned once and stays
where it is (a later discovery may name it again); a whole that was cut into parts is never cut in
another way (its file was replaced meanwhile); after ``final`` nothing is assigned.

Splits that a completed checkpoint knows as done are kept as a set of digests. All others are *open*: who has
them may begin again and must be told of them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.done_splits import NOTHING_DONE, DoneSplits
from common.split_cuts import in_one_cut
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
        done: what has been read to its end before.
        keeps_done: whether splits are kept that are done, since they may be read again beside who has read them.

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

    def __init__(
        self, parallelism: int, done: DoneSplits = NOTHING_DONE, *, keeps_done: bool = False
    ) -> None:
        assert parallelism >= 1, "a source has subtasks"
        self.done = done
        """What a completed checkpoint knows as done."""
        self._keeps_done = keeps_done
        self._load = [0.0] * parallelism
        self._owner_by_split: dict[str, int] = {}
        self._open_wholes: dict[str, tuple[str, int]] = {}
        """Whole of open splits -> what tells its content, and how many they are."""
        self._assigned: list[dict[str, Split]] = [{} for _ in range(parallelism)]
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
        """The subtask that reads an open split; None = there is none."""
        return self._owner_by_split.get(split_id)

    def seed(self, split_id: str, subtask_index: int, load: float) -> None:
        """A restored split stays with the subtask it was restored to.

        Args:
            subtask_index: who has it.
            load: what is left to read of it.
        """
        assert not self._started, "seeded before the first discovery"
        self._open(split_id, subtask_index)
        self._load[subtask_index] += load

    def note_given(self, subtask_index: int, splits: Iterable[Split]) -> None:
        """A subtask has these, though not from here; what is known of them already stays as it is."""
        for split in splits:
            if split.id not in self._owner_by_split:
                self._open(split.id, subtask_index)
                self._load[subtask_index] += float(split.size or 1)
            if self._owner_by_split[split.id] == subtask_index:
                self._assigned[subtask_index][split.id] = split

    def _open(self, split_id: str, subtask_index: int) -> None:
        self._owner_by_split[split_id] = subtask_index
        whole, content = _whole_and_content(split_id)
        known, count = self._open_wholes.get(whole, (content, 0))
        self._open_wholes[whole] = known, count + 1

    def _new(self, splits: Sequence[Split]) -> dict[str, Split]:
        """Those that are known neither themselves nor as another cut of the whole that they are part of."""
        unknown = {}
        for split in in_one_cut(splits, self._knows):
            whole, content = _whole_and_content(split.id)
            known, _ = self._open_wholes.get(whole, (content, 0))
            if split.id not in self._owner_by_split and known == content:
                unknown[split.id] = split
        admitted = self.done.admits(list(unknown))
        return {
            split.id: split
            for split, is_new in zip(unknown.values(), admitted, strict=True)
            if is_new
        }

    def _knows(self, wholes: list[str]) -> list[bool]:
        """Which of these are read, or have been, in whatever parts."""
        held = self.done.holds(wholes)
        return [
            is_done or whole in self._open_wholes
            for whole, is_done in zip(wholes, held, strict=True)
        ]

    def complete(self, done: DoneSplits, split_ids: Iterable[str]) -> None:
        """A checkpoint is complete, from which on some splits need not be told to anybody again.

        Args:
            done: all that has been read to its end by then.
            split_ids: those that may have been open until then.
        """
        self.done = done
        for split_id in () if self._keeps_done else split_ids:
            owner = self._owner_by_split.pop(split_id, None)
            if owner is None:
                continue
            self._assigned[owner].pop(split_id, None)
            whole, _ = _whole_and_content(split_id)
            content, count = self._open_wholes.pop(whole)
            if count > 1:
                self._open_wholes[whole] = content, count - 1

    def adopt(self, done: DoneSplits) -> None:
        """As ``complete``, where it is not known which were open."""
        ids = list(self._owner_by_split)
        held = done.holds(ids)
        self.complete(done, [id for id, is_done in zip(ids, held, strict=True) if is_done])

    def retire(self, subtask_index: int) -> None:
        """A subtask that was restored as finished reads nothing any more."""
        self._load[subtask_index] = math.inf

    def owned_by(self, subtask_index: int) -> list[str]:
        """Ids of the open splits of a subtask, in order of assignment."""
        return [id for id, owner in self._owner_by_split.items() if owner == subtask_index]

    def assigned_to(self, subtask_index: int) -> tuple[Split, ...]:
        """Splits a subtask was told of here, in that order, as far as they are kept; not those it was restored
        with."""
        return tuple(self._assigned[subtask_index].values())

    def left_to(self, subtask_index: int) -> list[Split]:
        """Of these, the ones that a subtask must be told of again that goes on from a checkpoint."""
        splits = self.assigned_to(subtask_index)
        held = self.done.holds([split.id for split in splits])
        return [split for split, is_done in zip(splits, held, strict=True) if not is_done]

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
        unique = self._new(splits)
        known_sizes = [split.size for split in unique.values() if split.size > 0]
        # A split of unknown size counts like an average one.
        typical = sum(known_sizes) / len(known_sizes) if known_sizes else 1.0
        weight = {split.id: float(split.size or typical) for split in unique.values()}
        for split in sorted(unique.values(), key=lambda split: (-weight[split.id], split.id)):
            index = min(range(len(self._load)), key=lambda i: (self._load[i], i))
            self._load[index] += weight[split.id]
            self._open(split.id, index)
        for split in unique.values():
            self._assigned[self._owner_by_split[split.id]][split.id] = split
        to_everyone = final or not self._started
        self._started = True
        self._final = final
        assignments = []
        for index in range(len(self._load)):
            own = tuple(s for s in unique.values() if self._owner_by_split[s.id] == index)
            if own or to_everyone:
                assignments.append(Assignment(index, own, final))
        return assignments


def _whole_and_content(split_id: str) -> tuple[str, str]:
    """The whole that a split is or is a part of, and what tells its content."""
    whole, _, part = split_id.partition(PART_OF)
    return whole, part.partition(PART_OF)[0]
