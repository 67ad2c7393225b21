"""Checkpoints that have all their acks, on their way into the store: one at a time, in the order in which they have
become ready.

Invariant: nobody waits for one of which the store does not say whether it is stored; until it does none begins.
"""

from __future__ import annotations

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ends import CheckpointEnds
from jobmanager.checkpoint.checkpoint_files import CheckpointFiles
from jobmanager.checkpoint.checkpoint_ids import CheckpointIds
from jobmanager.checkpoint.checkpoint_requests import CheckpointRequests
from jobmanager.checkpoint.checkpoints_under_way import CheckpointsUnderWay
from jobmanager.checkpoint.completed import CompletedCheckpoints
from jobmanager.checkpoint.coordinator_outbox import CoordinatorOutbox
from jobmanager.checkpoint.participating_tasks import ParticipatingTasks
from jobmanager.checkpoint.pending import CheckpointPhase, PendingCheckpoint
from jobmanager.checkpoint.shared_state_registry import SharedFileMismatch


class CheckpointStores:
    """Has them stored.

    Args:
        completed: what can be restored from.
        files: of all of them.
        ids: of the job's checkpoints.
        under_way: what has begun.
        requests: what has not.
        ends: how they end.
        outbox: takes what is to be done.
    """

    def __init__(
        self,
        completed: CompletedCheckpoints,
        files: CheckpointFiles,
        ids: CheckpointIds,
        tasks: ParticipatingTasks,
        under_way: CheckpointsUnderWay,
        requests: CheckpointRequests,
        ends: CheckpointEnds,
        outbox: CoordinatorOutbox,
    ) -> None:
        self._completed = completed
        self._files = files
        self._ids = ids
        self._tasks = tasks
        self._under_way = under_way
        self._requests = requests
        self._ends = ends
        self._outbox = outbox

    def begin_next(self) -> None:
        """Has the next one stored that is ready, as long as none is being stored."""
        while not self._ids.is_asked and (pending := self._under_way.next_to_store()) is not None:
            left = self._tasks.last_references(pending.finished)
            try:
                pending.registration = self._files.plan(
                    [
                        *(claim for _, ack in pending.acks for claim in ack.claims),
                        *self._files.claim(pending.checkpoint_id, tuple(left)),
                    ]
                )
            except SharedFileMismatch as error:
                self._ends.abort(pending, c.AbortReason.STORE_FAILED, str(error))
                continue
            pending.become(CheckpointPhase.STORING)
            self._under_way.storing = pending.checkpoint_id
            left_bytes = sum(reference.location.size_bytes for reference in left)
            self._outbox.add(self._store_order(pending, left_bytes))

    def _store_order(self, pending: PendingCheckpoint, left_bytes: int) -> c.StoreCheckpoint:
        checkpoint_id, is_savepoint = pending.checkpoint_id, pending.is_savepoint
        return c.StoreCheckpoint(
            checkpoint_id=checkpoint_id,
            triggered_at_ms=pending.triggered_at_ms,
            snapshots=tuple((key, ack.snapshot) for key, ack in pending.acks),
            finished=pending.finished,
            replaced=pending.registration.replaced,
            retained=() if is_savepoint else self._completed.ids_with(checkpoint_id),
            next_checkpoint_id=0 if is_savepoint else self._ids.end_with_next_store(),
            state_bytes=pending.summary().state_bytes + left_bytes,
            last=self._tasks.last_states(pending.finished),
            properties=self._requests.properties(pending.request),
        )

    def take_not_stored(self, event: c.CheckpointNotStored) -> bool:
        """The store has not stored one; False = it was not asked to."""
        pending = self._under_way.stored(event.checkpoint_id)
        if pending is None:
            return False
        too_large = event.is_too_large
        reason = c.AbortReason.TOO_LARGE if too_large else c.AbortReason.STORE_FAILED
        was_unknown = pending.phase is CheckpointPhase.UNSETTLED
        self._ends.abort(pending, reason, event.error)
        if was_unknown:
            self._requests.policy.answered()
        self._files.forget(event.left)
        return True

    def take_unknown(self, event: c.StoreOutcomeUnknown) -> bool:
        """The store does not say whether it has stored one; False = it was not asked to."""
        pending = self._under_way.find(event.checkpoint_id)
        if pending is None or self._under_way.storing != event.checkpoint_id:
            return False
        if self._under_way.unsettled is None:
            self.unsettle(pending, event.error)
        return True

    def unsettle(self, pending: PendingCheckpoint, reason: str) -> None:
        """Nobody knows whether it is stored: who waits is not kept waiting until somebody does.

        Who waits for a savepoint is: it may be there, and must not be taken twice.
        """
        pending.become(CheckpointPhase.UNSETTLED)
        pending.unsettled = (
            f"whether checkpoint {pending.checkpoint_id} is stored is not known yet: {reason}"
        )
        self._outbox.add(c.SettleCheckpoint(pending.checkpoint_id, reason))
        given_up = () if pending.is_alone else (pending.give_up_request(),)
        waiting = (*given_up, *self._requests.policy.stop())
        self._outbox.refuse(waiting, c.RequestRefused.UNSETTLED, pending.unsettled)

    def take_stored(self, event: c.CheckpointStored) -> bool:
        """The store has stored one; False = it was not asked to."""
        pending = self._under_way.stored(event.checkpoint_id)
        if pending is None:
            return False
        self._ends.complete(pending, event)
        return True
