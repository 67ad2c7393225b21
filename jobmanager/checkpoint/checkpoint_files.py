"""The files of a job's checkpoints: who refers to them, and when they are deleted.

Brings together the registry (what completed checkpoints name), the uses (who holds which path) and the
deletions (what nobody holds any more).

Invariants (``check``):
- the holders are the kept checkpoints, those under way and the finished tasks, and nobody else;
- no path is in use and on its way out;
- a file that was released is never taken up again: ``claim`` refuses it;
- as long as a checkpoint under way may still name a shared file of a released one, the file stays.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.deletion_queue import DeletionQueue
from jobmanager.checkpoint.file_uses import FileUses, Holder, Role
from jobmanager.checkpoint.shared_state_registry import Claim, RegisteredFiles, SharedStateRegistry
from penstock.errors import InvariantViolation
from penstock.storage.manifest import StoredReference

_LAST_STATES = Holder(Role.LAST_STATES, 0)


class FileReleased(Exception):  # noqa: N818  (says what happened)
    """An ack refers to a file that was released with an older checkpoint."""


class CheckpointFiles:
    """All files of one job's checkpoints."""

    def __init__(self) -> None:
        self.registry = SharedStateRegistry()
        self.deletions = DeletionQueue()
        self._uses = FileUses()

    def claim(
        self, checkpoint_id: int, references: tuple[StoredReference, ...]
    ) -> tuple[Claim, ...]:
        """Takes the references of an ack; what they name is held until ``end``, also where it is refused.

        Raises:
            SharedFileMismatch: a shared key is known for other bytes.
            FileReleased: a file may be gone already.
        """
        holder = Holder(Role.PENDING, checkpoint_id)
        # A copy that was superfluous may be named again: what counts is where its key leads to.
        named = (reference.location.path for reference in references)
        self._uses.hold(holder, [p for p in named if not self.deletions.was_released(p)])
        claims = tuple(self.registry.claim(reference) for reference in references)
        for claim in claims:
            path = claim.resolved.path
            if self.deletions.was_released(path):
                raise FileReleased(
                    f"refers to {path!r}, which was released with an older checkpoint: it had not "
                    f"heard yet that a newer one is complete"
                )
        self._uses.hold(holder, [claim.resolved.path for claim in claims])
        return claims

    def stray(self, references: Iterable[StoredReference]) -> None:
        """Deletes what only an ack that is dropped has uploaded."""
        self.forget(reference.location.path for reference in references)

    def forget(self, paths: Iterable[str]) -> None:
        """Deletes those of the paths that nothing holds."""
        self._discard(path for path in dict.fromkeys(paths) if not self._uses.in_use(path))

    def plan(self, claims: Iterable[Claim]) -> RegisteredFiles:
        """What a checkpoint of these claims is to be registered with; changes nothing.

        Raises:
            SharedFileMismatch: a shared key stands for different bytes.
        """
        return self.registry.plan(claims)

    def hold_last(self, references: Iterable[StoredReference]) -> None:
        """Holds what the last states of finished tasks name, in the place of what they named before."""
        paths = [reference.location.path for reference in references]
        before = self._uses.drop(_LAST_STATES)
        self._uses.hold(_LAST_STATES, paths)
        self._discard(path for path in before if not self._uses.in_use(path))

    def register(self, checkpoint: CompletedCheckpoint) -> None:
        """Counts a completed checkpoint, and holds its files."""
        self.registry.register(checkpoint.checkpoint_id, checkpoint.references)
        holder = Holder(Role.COMPLETED, checkpoint.checkpoint_id)
        self._uses.hold(holder, [checkpoint.manifest_path])
        self._uses.hold(holder, [reference.location.path for reference in checkpoint.references])

    def release(self, checkpoint: CompletedCheckpoint, waiting: Iterable[int]) -> None:
        """Lets go of a completed checkpoint that is no longer kept.

        Args:
            checkpoint: registered.
            waiting: checkpoints that have not all their acks: a task may have based the snapshot that it
                is about to acknowledge on this checkpoint.
        """
        self.registry.release(checkpoint.checkpoint_id)
        shared = [r.location.path for r in checkpoint.references if r.identity is not None]
        for checkpoint_id in waiting:
            self._uses.hold(Holder(Role.PENDING, checkpoint_id), shared)
        self._discard(self._uses.drop(Holder(Role.COMPLETED, checkpoint.checkpoint_id)))

    def end(self, checkpoint_id: int) -> None:
        """A checkpoint is no longer under way: what only its acks held is deleted."""
        self._discard(self._uses.drop(Holder(Role.PENDING, checkpoint_id)))

    def _discard(self, unused: Iterable[str]) -> None:
        self.deletions.add(
            path for path in unused if path and not self.deletions.was_released(path)
        )

    def check(self, kept: Iterable[int], under_way: Iterable[int]) -> None:
        """Checks the invariants.

        Args:
            kept: ids of the completed checkpoints.
            under_way: ids of those that have not ended.

        Raises:
            InvariantViolation: one does not hold.
        """
        for part in (self.registry, self._uses, self.deletions):
            part.check()
        expected = {Holder(Role.COMPLETED, checkpoint_id) for checkpoint_id in kept}
        expected.add(_LAST_STATES)
        expected |= {Holder(Role.PENDING, checkpoint_id) for checkpoint_id in under_way}
        if not self._uses.holders() <= expected:
            raise InvariantViolation("a checkpoint that is over holds files")
        for path in self.deletions.paths():
            if self._uses.in_use(path):
                raise InvariantViolation(f"{path!r} is in use and on its way out")
