"""The savepoint that a job was started from, and has claimed: it goes once nothing names it."""

from __future__ import annotations

import structlog

from penstock.errors import StoreNotFound, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import open_store
from penstock.storage.restore_point import remove_savepoint
from penstock.storage.savepoint import OWNER_PATH, owner_of


class ClaimedSavepointStore:
    """What one job was started from.

    Attributes:
        started_from: what the job was started from; None = from nothing, or that is not known yet. Replaced as a
            whole, so that any thread may read it.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self.started_from: checkpoint_pb2.StartedFrom | None = None
        self._has_dropped = False
        """What the job has claimed is gone."""
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def note(self, head: checkpoint_pb2.CheckpointHead) -> None:
        """Takes from HEAD what the job was started from."""
        if head.HasField("started_from"):
            noted = checkpoint_pb2.StartedFrom()
            noted.CopyFrom(head.started_from)
            self.started_from = noted

    def drop(self, head: checkpoint_pb2.CheckpointHead, checkpoint_id: int | None = None) -> None:
        """Removes the savepoint that the job has claimed, once nothing names it and nobody reads it any more.

        Args:
            checkpoint_id: the newest: where the savepoint was not taken over, tasks hear of the first own one, and read
                the savepoint no more, before they take part in the next; None = the job has ended.
        """
        started = head.started_from
        since = started.independent_since_checkpoint_id
        is_read = checkpoint_id is not None and (not since or since >= checkpoint_id)
        is_needed = is_read and not started.taken_over
        if not (started.claimed and started.is_savepoint) or is_needed or self._has_dropped:
            return
        store = open_store(started.path)
        try:
            if self._is_owner(store):
                remove_savepoint(store)
            self._has_dropped = True
        except StoreTransient as error:
            self._log.warning("savepoint.not_removed", path=started.path, reason=str(error))
            if checkpoint_id is None:
                raise

    def _is_owner(self, store: ObjectStore) -> bool:
        try:
            return owner_of(store.get(OWNER_PATH)) == self._job_id
        except StoreNotFound:
            store.remove_remains()  # a removal that has come as far as that
            return False
