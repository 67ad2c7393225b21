"""Calls to the shared storage of complete partitions, each within a deadline.

What cannot be removed now is logged; it goes with its job, or when the next JobManager leads behind the end of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import structlog

from common.pb import internal_pb2
from jobmanager.checkpoint.store_calls_runner import StoreCallsRunner
from jobmanager.stores.shared_spill_store import SharedSpillStore, open_shared_spill
from penstock.errors import StreamError
from penstock.partition_id import PartitionId

_TIMEOUT_MS: Final = 60_000
_ATTEMPTS: Final = 3


class SharedSpillRunner:
    """The shared storage as the JobManager uses it."""

    def __init__(self, store: SharedSpillStore) -> None:
        self._store = store
        self._calls = StoreCallsRunner("shared spill storage", _TIMEOUT_MS, lambda: None)
        self._log = structlog.get_logger(__name__)

    @property
    def uri(self) -> str:
        """Its name, as TaskManagers are told."""
        return self._store.uri

    def check_writable(self) -> None:
        """See ``SharedSpillStore``; blocks."""
        self._store.check_writable()

    async def found(self, job_id: str, wanted: Collection[PartitionId]) -> frozenset[PartitionId]:
        """Which partitions of a job are complete there; none where it does not answer."""
        for attempt in range(_ATTEMPTS):
            try:
                return await self._calls.run("look", partial(self._store.found, job_id, wanted))
            except StreamError as error:
                self._log.warning(
                    "partitions.not_looked_for", job_id=job_id, attempt=attempt, reason=str(error)
                )
        return frozenset()

    async def release(self, job_id: str, partition_ids: Collection[PartitionId] = ()) -> None:
        """Removes partitions of a job; none named = everything of it but what outlives it."""
        try:
            work = partial(self._store.release, job_id, partition_ids)
            await self._calls.run("remove", work)
        except StreamError as error:
            self._log.warning("partitions.not_released", job_id=job_id, reason=str(error))

    async def sweep(self, is_needed: Callable[[str], bool]) -> None:
        """Removes what belongs to no job.

        Args:
            is_needed: whether a job is known and has not ended.
        """
        try:
            swept = await self._calls.run("sweep", partial(self._store.sweep, is_needed))
        except StreamError as error:
            self._log.warning("partitions.not_swept", reason=str(error))
            return
        if swept:
            self._log.info("partitions.swept", count=len(swept))

    async def promote(
        self, promoted: internal_pb2.PromotedSet, partition_ids: Collection[PartitionId]
    ) -> None:
        """See ``SharedSpillStore``."""
        await self._calls.run("list", partial(self._store.promote, promoted, partition_ids))

    async def promoted(self) -> internal_pb2.Holdings:
        """See ``SharedSpillStore``."""
        return await self._calls.run("look", self._store.promoted)

    async def drop(self, name: str, job_id: str, is_needed: Callable[[str], bool]) -> int:
        """See ``SharedSpillStore``."""
        return await self._calls.run("drop", partial(self._store.drop, name, job_id, is_needed))


def shared_spill(directory: str, cluster_id: str) -> SharedSpillRunner | None:
    """The storage of ``taskmanager.spill.shared-dir``, which nobody has looked at yet; None where there is none.

    Raises:
        ConfigurationError: it is no absolute path and no URI.
    """
    store = open_shared_spill(directory, cluster_id)
    return None if store is None else SharedSpillRunner(store)
