"""What a checkpoint is taken as: said by who wants it, carried by its barriers, kept in its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckpointKind(Enum):
    """Whose it is. The numbers are part of our formats."""

    CHECKPOINT = 0
    """The job's: HEAD names it, and later ones take its place."""
    SAVEPOINT = 1
    """Its user's: HEAD never names it, and nothing builds upon it."""


class BehindBarrier(Enum):
    """What becomes of the job behind the barrier. The numbers are part of our formats."""

    GO_ON = 0
    """Sources read on."""
    HOLD = 1
    """Sources read nothing, and timers rest, until the checkpoint has succeeded or failed."""
    DRAIN = 2
    """As HOLD, and event time ends before the barrier: every window fires."""
    END = 3
    """There is nothing: every task has reached the end of its data."""
    MOVE = 4
    """As HOLD; what is to leave its TaskManager begins elsewhere from it then, and the others go on."""


class SavepointFormat(Enum):
    """How a savepoint holds keyed state. The numbers are part of our formats."""

    NATIVE = 0
    """As the backend keeps it: files that are there already are taken over."""
    CANONICAL = 1
    """As runs that either backend reads."""


@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """What a checkpoint is taken as.

    Attributes:
        target: the directory of the savepoint; "" = it makes none.
        is_full: it refers to no file of an earlier one.
        behind: what becomes of the job behind its barrier.
        format: of a savepoint.

    Example: what is taken every interval, and what ends a bounded job.
        >>> CheckpointProperties().kind.name, CheckpointProperties().is_full
        ('CHECKPOINT', False)
        >>> CheckpointProperties(behind=BehindBarrier.END).behind.name
        'END'
    """

    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    target: str = ""
    is_full: bool = False
    behind: BehindBarrier = BehindBarrier.GO_ON
    format: SavepointFormat = SavepointFormat.NATIVE

    @property
    def is_savepoint(self) -> bool:
        """Whether it is its user's, and not the job's."""
        return self.kind is CheckpointKind.SAVEPOINT

    @property
    def is_stop(self) -> bool:
        """Whether the job ends with it: its own checkpoint, and a savepoint with the same content."""
        return not self.is_savepoint and self.behind in (BehindBarrier.HOLD, BehindBarrier.DRAIN)

    @property
    def is_saved(self) -> bool:
        """Whether it is the job's own, which goes on behind it, and a savepoint has the same content."""
        return not self.is_savepoint and bool(self.target) and not self.is_stop

    @property
    def is_move(self) -> bool:
        """Whether some of the job's subtasks are started elsewhere from it."""
        return self.behind is BehindBarrier.MOVE

    @property
    def is_alone(self) -> bool:
        """Whether no other is under way beside it."""
        return self.is_savepoint or self.is_saved or self.is_stop or self.is_move


PLAIN = CheckpointProperties()
"""As it is taken every interval."""
