"""What the machine of a job must know of the checkpoint that its tasks start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jobmanager.checkpoint import messages as c
from jobmanager.graph.execution_attempt import SubtaskId


@dataclass(frozen=True, slots=True)
class RestoredSplit:
    """A split that a restored subtask reads or has read."""

    vertex: str
    operator_uid: str
    subtask_index: int
    split_id: str
    size: int
    done: bool


@dataclass(frozen=True, slots=True)
class RestoredRead:
    """How far a restored subtask had read the output of a producer.

    Attributes:
        attempt: of the producer whose rows they were.
    """

    reader: SubtaskId
    edge_id: str
    producer_index: int
    attempt: int
    rows: int


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """What the machine needs to know of the checkpoint its tasks start from.

    Attributes:
        finished: subtasks that had done all their work.
        reads: of edges that keep their rows.
        subtasks: those it holds, the finished ones included.
        left: what those that had finished go on holding.
        done: what of sources has been read to its end, beside what ``splits`` names.
    """

    checkpoint_id: int
    finished: frozenset[SubtaskId] = frozenset()
    splits: tuple[RestoredSplit, ...] = ()
    reads: tuple[RestoredRead, ...] = ()
    subtasks: frozenset[SubtaskId] = frozenset()
    left: tuple[tuple[SubtaskId, c.LastState], ...] = ()
    done: tuple[c.SourceDone, ...] = ()

    def without(self, is_left_out: Callable[[SubtaskId], bool]) -> RestoredCheckpoint:
        """The same, but for subtasks that start from nothing."""
        return RestoredCheckpoint(
            self.checkpoint_id,
            frozenset(subtask for subtask in self.finished if not is_left_out(subtask)),
            tuple(
                split
                for split in self.splits
                if not is_left_out(SubtaskId(split.vertex, split.subtask_index))
            ),
            tuple(read for read in self.reads if not is_left_out(read.reader)),
            frozenset(subtask for subtask in self.subtasks if not is_left_out(subtask)),
            tuple(left for left in self.left if not is_left_out(left[0])),
            self.done,
        )
