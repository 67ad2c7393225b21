"""Deletes files of a job's checkpoints that nothing names any more, and all of them when the job is over for good.

Invariant: HEAD is claimed before the directory is emptied, and goes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.claimed_head_store import ClaimedHeadStore
from jobmanager.checkpoint.claimed_savepoint_store import ClaimedSavepointStore
from jobmanager.checkpoint.next_head import head_emptied
from penstock.errors import StoreTransient
from penstock.storage.head import HEAD_PATH
from penstock.storage.object_store import ObjectStore, delete_all


class CheckpointDeletionsRunner:
    """Deletes in one directory.

    Args:
        store: its directory.
        claimed_savepoint: what it was started from.
        now_ms: the wall clock.
    """

    def __init__(
        self,
        job_id: str,
        store: ObjectStore,
        heads: ClaimedHeadStore,
        claimed_savepoint: ClaimedSavepointStore,
        now_ms: Callable[[], int],
    ) -> None:
        self._job_id = job_id
        self._store = store
        self._heads = heads
        self._claimed_savepoint = claimed_savepoint
        self._now_ms = now_ms
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def delete(self, paths: Iterable[str]) -> c.FilesDeleted:
        """Deletes objects that nothing refers to any more."""
        left = self._store.delete_many(paths)
        for path, error in left.items():
            self._log.warning("checkpoint.not_deleted", path=path, reason=str(error))
        return c.FilesDeleted(tuple(left), self._now_ms())

    def discard(
        self,
        *,
        must_exist: bool = False,
        is_emptied: bool = False,
        emptied: Callable[[], None] = lambda: None,
    ) -> None:
        """The job is over for good: deletes everything. To be repeated after an error.

        Args:
            must_exist: the job has had a HEAD.
            is_emptied: ``emptied`` has been called; what is there now is HEAD, or came behind it.
            emptied: called when nothing but HEAD is left.

        HEAD is swapped to name nothing first, which only its owner can, and goes last: what it names is
        there at every moment, and a leader that has been deposed deletes nothing.

        Raises:
            Fenced: another leader has the job.
            StreamError: something is left.
        """
        if not is_emptied:
            self._empty(must_exist)
            emptied()
        # HEAD also where it is not there: a swap that came too late has left its lock.
        found = [one.path for one in self._store.list("")]
        delete_all(self._store, dict.fromkeys((HEAD_PATH, *found)))
        self._store.remove_remains()
        if left := self._store.list(""):
            raise StoreTransient(
                f"{left[0].path} in {self._store!r} was written while job {self._job_id} was deleted"
            )

    def _empty(self, must_exist: bool) -> None:
        claim = self._heads.claimed(must_exist)
        self._heads.forget()
        empty = head_emptied(claim.head)
        self._heads.swap(claim, empty)
        self._claimed_savepoint.drop(empty)
        found = [one.path for one in self._store.list("")]
        delete_all(self._store, [path for path in found if path != HEAD_PATH])
