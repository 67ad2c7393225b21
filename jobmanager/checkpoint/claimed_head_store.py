"""HEAD of one job as this leader has claimed it.

Calls that are given up on go on beside others: what they were about to do to HEAD they cannot do any more once it
has been claimed again, which the next one does that finds the claim void.

Invariants: HEAD is claimed before anything is written or deleted; of two calls that claim it at the same time none
goes on with what it has found, since nobody knows which of them came last.
"""

from __future__ import annotations

import threading

import structlog

from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from penstock.errors import (
    Fenced,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StreamError,
    Unrecoverable,
)
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HeadOutcomeUnknown, HeadStore
from penstock.storage.object_store import ObjectStore

_SWAP_ATTEMPTS = 10
_SWAP_PAUSE_S = 0.5


class HeadClaim:
    """HEAD as it was claimed once, and what it says since the last swap."""

    def __init__(self, heads: HeadStore, head: checkpoint_pb2.CheckpointHead) -> None:
        self.heads = heads
        self.head = head


class CheckpointsUnreadable(Unrecoverable):
    """HEAD, or all that it names, is not there or cannot be read: a job that runs ends with it."""


class ClaimedHeadStore:
    """Claims HEAD, and swaps it.

    Args:
        store: the job's directory.
        leader_epoch: in whose name it is claimed.

    Attributes:
        first_id: checkpoints before this one are of earlier leaders; None = HEAD was never claimed.
    """

    def __init__(self, job_id: str, store: ObjectStore, leader_epoch: int) -> None:
        self._job_id = job_id
        self._store = store
        self._leader_epoch = leader_epoch
        self.first_id: int | None = None
        self._claim: HeadClaim | None = None
        self._claims = 0
        self._turns = threading.Lock()
        """For what calls that go on at the same time look at, and change, about each other."""
        self._stopped = threading.Event()
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def stop(self) -> None:
        """Retries under way are given up; called from any thread."""
        self._stopped.set()

    @property
    def current(self) -> HeadClaim | None:
        """The claim that was made last; None = it is void, or there was none."""
        with self._turns:
            return self._claim

    def forget(self) -> None:
        """HEAD is claimed again before it is used."""
        with self._turns:
            self._claim = None

    def claimed(self, must_exist: bool, more_ids: int = 0) -> HeadClaim:
        """HEAD under this leader's claim, which is made where there is none.

        Args:
            must_exist: the job has had a HEAD.
            more_ids: to be reserved with the claim.

        Raises:
            Fenced: another leader has the job.
            Unrecoverable: HEAD is not there although it must be, cannot be read, or has no room.
            StoreTransient: the store does not answer now.
        """
        with self._turns:
            claim = self._claim
            if claim is None:
                self._claims += 1
            number = self._claims
        if claim is None:
            heads = HeadStore(self._store)
            try:
                head = heads.claim(
                    self._job_id,
                    self._leader_epoch,
                    must_exist=must_exist,
                    reserved_ids=IDS_RESERVED_AT_ONCE,
                    more_ids=more_ids,
                )
            except StoreFull as error:
                raise Unrecoverable(
                    f"job {self._job_id} has no room for checkpoints: {error}"
                ) from error
            except (StoreNotFound, StoreCorrupt) as error:
                raise self.unusable(error) from error
            with self._turns:
                # Where another call has claimed HEAD since this one began, nobody knows which of them came last.
                is_newest = number == self._claims
                if self.first_id is None:
                    self.first_id = head.next_checkpoint_id - more_ids - IDS_RESERVED_AT_ONCE
                self._claim = claim = HeadClaim(heads, head) if is_newest else None
            if claim is None:
                return self.claimed(must_exist, more_ids)
        return claim

    def void(self, claim: HeadClaim) -> None:
        """Nobody knows any more what HEAD says: it is claimed again before it is used."""
        with self._turns:
            if self._claim is claim:
                self._claim = None

    def swap(self, claim: HeadClaim, head: checkpoint_pb2.CheckpointHead) -> None:
        """Has HEAD say something else; what is not clear is tried again.

        Raises:
            HeadClaimedAgain: it is another claim's.
            HeadOutcomeUnknown: nobody knows what HEAD says now.
        """
        for attempt in range(1, _SWAP_ATTEMPTS + 1):
            try:
                claim.heads.swap(head)
            except HeadOutcomeUnknown as error:
                self._log.warning("checkpoint.head_unclear", reason=str(error))
                if attempt == _SWAP_ATTEMPTS or self._stopped.wait(_SWAP_PAUSE_S):
                    raise
            else:
                claim.head = head
                return

    def unusable(self, error: StreamError) -> CheckpointsUnreadable:
        """What a job ends with whose HEAD, or what that names, is damaged or gone."""
        return CheckpointsUnreadable(
            f"the checkpoints of job {self._job_id} cannot be used: {error}; nothing has been deleted"
        )

    def check_is_ours(self) -> None:
        """Reads HEAD again, and claims nothing.

        Raises:
            Fenced: another leader has the job, another job its checkpoints, or nobody has it any more.
        """
        head = HeadStore(self._store).read()
        mine = self._job_id, self._leader_epoch
        if head is None or (head.job_id, head.leader_epoch) != mine:
            raise Fenced(f"job {self._job_id} is another leader's: nothing of it is swept")
