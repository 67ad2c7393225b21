"""The completed checkpoints that are kept, newest last.

Invariants (``check``): ids increase; never more than ``retained_max`` once a checkpoint has been added
(what was found at the start stays until the next one replaces it in HEAD).
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from penstock.errors import InvariantViolation


class CompletedCheckpoints:
    """What can be restored from.

    Args:
        found: what HEAD names, in any order.
        retained_max: how many to keep, at least 1.
    """

    def __init__(self, found: Iterable[CompletedCheckpoint], retained_max: int) -> None:
        self._kept = sorted(found, key=lambda checkpoint: checkpoint.checkpoint_id)
        self._retained_max = retained_max

    @property
    def kept(self) -> tuple[CompletedCheckpoint, ...]:
        """All of them, newest last."""
        return tuple(self._kept)

    @property
    def latest(self) -> CompletedCheckpoint | None:
        """The newest one."""
        return self._kept[-1] if self._kept else None

    def ids_with(self, checkpoint_id: int) -> tuple[int, ...]:
        """The ids that are kept once this checkpoint is added, this one last."""
        ids = [checkpoint.checkpoint_id for checkpoint in self._kept]
        return (*ids, checkpoint_id)[-self._retained_max :]

    def add(self, checkpoint: CompletedCheckpoint) -> list[CompletedCheckpoint]:
        """Adds the newest one; returns those that are subsumed by it.

        Raises:
            InvariantViolation: it is not the newest one.
        """
        latest = self.latest
        if latest is not None and latest.checkpoint_id >= checkpoint.checkpoint_id:
            raise InvariantViolation(
                f"checkpoint {checkpoint.checkpoint_id} completes after {latest.checkpoint_id}"
            )
        kept = [*self._kept, checkpoint]
        self._kept = kept[-self._retained_max :]
        return kept[: -self._retained_max]

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: ids do not increase.
        """
        ids = [checkpoint.checkpoint_id for checkpoint in self._kept]
        if ids != sorted(set(ids)):
            raise InvariantViolation(f"retained checkpoints are out of order: {ids}")
