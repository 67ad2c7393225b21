"""One checkpoint from its trigger to its end.

    WAITING -> all acks -> READY -> its turn -> STORING -> stored -> COMPLETED
    each of the three -> ABORTED; STORING only where the store says that it has not stored it. Where it says
    nothing, or does not know -> UNSETTLED, until it is known.

Invariants: states follow ``TRANSITIONS``; READY holds exactly one ack of each participant and of nobody
else; an end is never left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.shared_state_registry import Claim, RegisteredFiles
from jobmanager.checkpoint.trigger_policy import PERIODIC, Request
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from penstock.errors import InvariantViolation


class CheckpointPhase(Enum):
    """Where a checkpoint stands."""

    WAITING = "waiting for acks"
    READY = "all acks are here"
    STORING = "being stored"
    UNSETTLED = "stored or not"
    COMPLETED = "completed"
    ABORTED = "aborted"


TRANSITIONS: Final[dict[CheckpointPhase, frozenset[CheckpointPhase]]] = {
    CheckpointPhase.WAITING: frozenset({CheckpointPhase.READY, CheckpointPhase.ABORTED}),
    CheckpointPhase.READY: frozenset({CheckpointPhase.STORING, CheckpointPhase.ABORTED}),
    CheckpointPhase.STORING: frozenset(
        {CheckpointPhase.COMPLETED, CheckpointPhase.ABORTED, CheckpointPhase.UNSETTLED}
    ),
    CheckpointPhase.UNSETTLED: frozenset({CheckpointPhase.COMPLETED, CheckpointPhase.ABORTED}),
    CheckpointPhase.COMPLETED: frozenset(),
    CheckpointPhase.ABORTED: frozenset(),
}


_BOUNDED: Final = (CheckpointPhase.WAITING, CheckpointPhase.READY, CheckpointPhase.STORING)


@dataclass(frozen=True, slots=True)
class Ack:
    """What a participant has handed in."""

    snapshot: object
    claims: tuple[Claim, ...]
    summary: SnapshotSummary
    has_finished: bool = False


class PendingCheckpoint:
    """A checkpoint under way.

    Args:
        request: what it is taken for.
        triggered_at_ms: wall-clock time.
        started_ms: steady time.
        deadline_ms: steady time at which it is overdue.
        participants: tasks that have to acknowledge it.
        finished: tasks that had finished before.
    """

    def __init__(
        self,
        checkpoint_id: int,
        request: Request,
        *,
        triggered_at_ms: int,
        started_ms: int,
        deadline_ms: int,
        participants: Iterable[AttemptKey],
        finished: tuple[AttemptKey, ...],
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.request = request
        self._properties = request.properties
        self.triggered_at_ms = triggered_at_ms
        self.started_ms = started_ms
        self.deadline_ms = deadline_ms
        self.finished = finished
        self.phase = CheckpointPhase.WAITING
        self.registration = RegisteredFiles((), ())
        """What it will be registered with; set once it is being stored."""
        self.unsettled = ""
        """Why it is not known whether it is stored."""
        self._acks: dict[AttemptKey, Ack | None] = dict.fromkeys(participants)
        self._acked = 0

    @property
    def is_savepoint(self) -> bool:
        """Whether it is its user's, also where nobody waits for it any more."""
        return self._properties.is_savepoint

    @property
    def is_stop(self) -> bool:
        """Whether the job ends with it."""
        return self._properties.is_stop

    @property
    def is_saved(self) -> bool:
        """Whether a savepoint is made of it, and the job goes on."""
        return self._properties.is_saved

    @property
    def is_alone(self) -> bool:
        """Whether nothing else is under way beside it."""
        return self._properties.is_alone

    @property
    def is_move(self) -> bool:
        """Whether some of the job's subtasks are started elsewhere from it."""
        return self._properties.is_move

    @property
    def target(self) -> str:
        """The directory that a savepoint is written to."""
        return self._properties.target

    @property
    def participants(self) -> tuple[AttemptKey, ...]:
        """Tasks that have to acknowledge it."""
        return tuple(self._acks)

    @property
    def acked_count(self) -> int:
        """Tasks that have acknowledged it."""
        return self._acked

    @property
    def acks(self) -> tuple[tuple[AttemptKey, Ack], ...]:
        """The acks so far, in the order of the participants."""
        return tuple((key, ack) for key, ack in self._acks.items() if ack is not None)

    @property
    def expires_ms(self) -> int | None:
        """Steady time at which it expires; None = it no longer does."""
        return self.deadline_ms if self.phase in _BOUNDED else None

    @property
    def restored_as_finished(self) -> frozenset[SubtaskId]:
        """Subtasks that have done all their work for whoever restores it."""
        done = (key for key, ack in self.acks if ack.has_finished)
        return frozenset(key.subtask for key in (*self.finished, *done))

    def waits_for(self, key: AttemptKey) -> bool:
        """Whether it cannot complete without an ack of this attempt."""
        return (
            self.phase is CheckpointPhase.WAITING and key in self._acks and self._acks[key] is None
        )

    def missing(self) -> list[AttemptKey]:
        """Tasks that have not acknowledged it."""
        return [key for key, ack in self._acks.items() if ack is None]

    def acknowledge(self, key: AttemptKey, ack: Ack) -> None:
        """Takes an ack it waits for; becomes READY with the last one.

        Raises:
            InvariantViolation: it does not wait for it.
        """
        if not self.waits_for(key):
            raise InvariantViolation(f"checkpoint {self.checkpoint_id} waits for no ack of {key}")
        self._acks[key] = ack
        self._acked += 1
        if self._acked == len(self._acks):
            self.become(CheckpointPhase.READY)

    def give_up_request(self) -> Request:
        """What it was taken for, which from now on waits for it no longer."""
        request, self.request = self.request, PERIODIC
        return request

    def become(self, phase: CheckpointPhase) -> None:
        """Makes the transition.

        Raises:
            InvariantViolation: it is illegal.
        """
        if phase not in TRANSITIONS[self.phase]:
            raise InvariantViolation(
                f"checkpoint {self.checkpoint_id}: {self.phase.name} cannot become {phase.name}"
            )
        if phase is CheckpointPhase.READY and self._acked != len(self._acks):
            raise InvariantViolation(f"checkpoint {self.checkpoint_id} misses {self.missing()}")
        self.phase = phase

    def summary(self) -> SnapshotSummary:
        """Numbers of all acks: the largest times, the sums of bytes."""
        return summarize(ack.summary for _, ack in self.acks)


def summarize(summaries: Iterable[SnapshotSummary]) -> SnapshotSummary:
    """Numbers of several subtasks: the largest times, the sums of bytes."""
    total = SnapshotSummary()
    for summary in summaries:
        total = SnapshotSummary(
            start_delay_ms=max(total.start_delay_ms, summary.start_delay_ms),
            alignment_ms=max(total.alignment_ms, summary.alignment_ms),
            sync_ms=max(total.sync_ms, summary.sync_ms),
            async_ms=max(total.async_ms, summary.async_ms),
            uploaded_bytes=total.uploaded_bytes + summary.uploaded_bytes,
            state_bytes=total.state_bytes + summary.state_bytes,
            aligned_bytes=total.aligned_bytes + summary.aligned_bytes,
        )
    return total
