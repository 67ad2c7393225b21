"""Checkpoints and savepoints between their trigger and their end, in the order of their ids.

Invariants (``check``): a savepoint is under way alone; at most one is being stored or settled; what is ready waits for
its turn in the order in which it became so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jobmanager.checkpoint.pending import CheckpointPhase, PendingCheckpoint
from penstock.errors import require_invariant


@dataclass(frozen=True, slots=True)
class PendingView:
    """A checkpoint under way, for views.

    Attributes:
        triggered_at_ms: wall-clock time.
        acked: tasks that have acknowledged it, of ``total``.
    """

    checkpoint_id: int
    triggered_at_ms: int
    acked: int
    total: int


class CheckpointsUnderWay:
    """Those of one job.

    Attributes:
        storing: the one that is being stored or settled; None = none is.
    """

    def __init__(self) -> None:
        self.storing: int | None = None
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ready: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingCheckpoint]:
        """Of what is under way now, the oldest first, whatever ends meanwhile."""
        return iter(list(self._pending.values()))

    def add(self, pending: PendingCheckpoint) -> None:
        """One begins."""
        self._pending[pending.checkpoint_id] = pending

    def find(self, checkpoint_id: int) -> PendingCheckpoint | None:
        """The one of this id; None = it has ended."""
        return self._pending.get(checkpoint_id)

    def end(self, pending: PendingCheckpoint) -> None:
        """One has ended."""
        del self._pending[pending.checkpoint_id]
        if pending.checkpoint_id in self._ready:
            self._ready.remove(pending.checkpoint_id)

    def add_ready(self, checkpoint_id: int) -> None:
        """One has all its acks."""
        self._ready.append(checkpoint_id)

    def next_to_store(self) -> PendingCheckpoint | None:
        """The one whose turn it is, which is not ready any more; None = none is, or another is being stored."""
        if self.storing is not None or not self._ready:
            return None
        return self._pending[self._ready.popleft()]

    def stored(self, checkpoint_id: int) -> PendingCheckpoint | None:
        """The store has said what has become of one; None = it was not asked about it."""
        if self.storing != checkpoint_id:
            return None
        self.storing = None
        return self._pending[checkpoint_id]

    @property
    def unsettled(self) -> PendingCheckpoint | None:
        """The checkpoint of which nobody knows whether it is stored."""
        pending = None if self.storing is None else self._pending[self.storing]
        if pending is None or pending.phase is not CheckpointPhase.UNSETTLED:
            return None
        return pending

    @property
    def is_saving(self) -> bool:
        """Whether what is under way is a savepoint, or stops the job."""
        return any(pending.is_alone for pending in self._pending.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, the oldest first."""
        return tuple(self._pending)

    def views(self) -> tuple[PendingView, ...]:
        """All of them, the oldest first."""
        return tuple(
            PendingView(
                one.checkpoint_id, one.triggered_at_ms, one.acked_count, len(one.participants)
            )
            for one in self._pending.values()
        )

    def expiring_ms(self) -> Iterable[int | None]:
        """When each of them expires; None = it no longer does."""
        return (pending.expires_ms for pending in self._pending.values())

    def check_step(self, count_max: int) -> None:
        """The part of ``check`` that costs the same whatever there is.

        Raises:
            InvariantViolation: one does not hold.
        """
        pending = self._pending
        require_invariant(len(pending) <= count_max, "too many under way")
        require_invariant(len(self._ready) <= len(pending), "a checkpoint that is over is ready")
        require_invariant(self.storing is None or self.storing in pending, "a lost store")
        require_invariant(len(pending) <= 1 or not self.is_saving, "a savepoint is not alone")

    def check(self, newest_kept: int, next_id: int) -> None:
        """Checks the invariants.

        Args:
            newest_kept: id of the newest completed checkpoint; 0 = there is none.
            next_id: of the next one.

        Raises:
            InvariantViolation: one does not hold.
        """
        require_invariant(
            list(self._pending) == sorted(self._pending), "checkpoints are out of order"
        )
        for checkpoint_id, pending in self._pending.items():
            require_invariant(checkpoint_id < next_id, "an id is to be used twice")
            require_invariant(newest_kept < checkpoint_id, "one under way is too old")
            require_invariant(
                (checkpoint_id in self._ready) == (pending.phase is CheckpointPhase.READY)
                and (checkpoint_id == self.storing)
                == (pending.phase in (CheckpointPhase.STORING, CheckpointPhase.UNSETTLED)),
                f"checkpoint {checkpoint_id} is {pending.phase.value} in a wrong place",
            )
            require_invariant(
                (pending.acked_count == len(pending.participants))
                == (pending.phase is not CheckpointPhase.WAITING),
                f"checkpoint {checkpoint_id} is {pending.phase.value} with the wrong acks",
            )
