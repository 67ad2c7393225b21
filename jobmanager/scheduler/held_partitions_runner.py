"""Follows what TaskManagers hold, and has them release what nobody needs.

A call that fails is made again after the next heartbeat that names the partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import structlog
from typing_extensions import override

from common.pb import internal_pb2
from jobmanager.partitions.held_partitions import HeldPartitions, Holdings
from jobmanager.partitions.partition_tracker import SHARED_STORAGE
from jobmanager.partitions.promoted import (
    PromotedPart,
    PromotedPartitions,
    name_taken,
    of_job,
    replaced_meanwhile,
)
from jobmanager.rpc.partition_convert import holdings_of, partition_details
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.shared_spill_runner import SharedSpillRunner
from jobmanager.stores.shared_spill_store import partition_of
from penstock.errors import JobRejected, PartitionUnavailable, StreamError, Unrecoverable
from penstock.graph.persisted import persist_sinks, persisted_sources
from penstock.partition_id import PartitionId
from penstock.pb import client_pb2, graph_pb2

_LOOK_AGAIN_S: Final = 5.0


class ReadingJobs(Protocol):
    """The jobs that a JobManager knows, as far as they have to do with what outlives jobs."""

    def reads(self) -> Collection[tuple[str, str]] | None:
        """Names and jobs of sets that jobs read which have not ended; None = that cannot be told."""

    def has_unended(self, job_id: str) -> bool:
        """Whether a job is known and has not ended."""


class _NoJobs(ReadingJobs):
    @override
    def reads(self) -> frozenset[tuple[str, str]]:
        return frozenset()

    @override
    def has_unended(self, job_id: str) -> bool:
        return False


class HeldPartitionsRunner:
    """What TaskManagers hold.

    Args:
        client: the client of a registered TaskManager; raises ``TaskManagerLost`` for another one.
        start: runs work for as long as the cluster runs.
        settles_in_s: how long TaskManagers that are not there may still take to register; 0 or less = they are
            gone.
    """

    def __init__(
        self,
        client: Callable[[str], TaskManagerClient],
        start: Callable[[Coroutine[Any, Any, None]], None],
        settles_in_s: Callable[[], float],
    ) -> None:
        self.shared: SharedSpillRunner | None = None
        """Storage that complete partitions of jobs are written to; None = TaskManagers keep them."""
        self._client = client
        self._start = start
        self._held = HeldPartitions()
        self._releasing: set[tuple[str, str, str]] = set()
        """TaskManager, job, and the name it is promoted under, "" = none."""
        self._settles_in_s = settles_in_s
        self._changed = asyncio.Event()
        self._looks = 0
        self._has_shared = False
        self._claimed: set[str] = set()
        self.jobs: ReadingJobs = _NoJobs()
        """Those that are known."""
        self._read_by_new: list[Collection[tuple[str, str]]] = []
        """The same of jobs that are being accepted."""
        self._log = structlog.get_logger(__name__)
        self.counts = (0, 0)
        """Number and bytes of all; replaced as a whole, so that any thread may read it."""

    @property
    def _is_settled(self) -> bool:
        return self._settles_in_s() <= 0 and (self.shared is None or self._has_shared)

    def observe(self, taskmanager_id: str, holdings: Holdings) -> None:
        """A TaskManager has said what it holds."""
        self._held.observe(taskmanager_id, holdings)
        self._changed.set()
        self.counts = (self._held.count, self._held.size_bytes)

    def lost(self, taskmanager_id: str) -> None:
        """A TaskManager is gone."""
        self._held.lost(taskmanager_id)
        self.counts = (self._held.count, self._held.size_bytes)

    def of(self, taskmanager_id: str) -> Holdings:
        """What a TaskManager holds."""
        return self._held.of(taskmanager_id)

    def of_job(self, job_id: str) -> Mapping[PartitionId, str]:
        """The TaskManager of each complete partition of a job, of those that have registered."""
        return self._held.of_job(job_id)

    async def locate(
        self, job_id: str, wanted: Collection[PartitionId]
    ) -> Mapping[PartitionId, str]:
        """Finds partitions of a job, and waits for TaskManagers that may still register where some are missing.

        Returns:
            The TaskManager of each that is there.
        """
        while True:
            self._changed.clear()
            found = self._held.find(job_id, wanted)
            if len(found) == len(wanted) or self._is_settled:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settles_in_s()):
                    await self._changed.wait()

    def release_unneeded(
        self, taskmanager_id: str, needs_partitions: Callable[[str], bool]
    ) -> None:
        """Begins to release what a TaskManager holds of jobs that do not need it, what broken promotions
        have left, and what was replaced and nobody reads.

        Args:
            needs_partitions: whether a job is known and has not ended.
        """
        for job_id in self._held.unneeded_jobs(taskmanager_id, needs_partitions):
            self._begin_release(taskmanager_id, job_id)
        if self._is_settled:  # who has been told that a set is whole may still have to register
            for holder in (taskmanager_id, SHARED_STORAGE):
                left = self._held.unconfirmed(holder, needs_partitions)
                replaced = self._held.replaced_at(holder, needs_partitions)
                for name, job_id in (*left, *self._unread(replaced)):
                    self._begin_release(holder, job_id, name)

    def _begin_release(self, taskmanager_id: str, job_id: str, promoted_as: str = "") -> None:
        key = (taskmanager_id, job_id, promoted_as)
        if key not in self._releasing:
            self._releasing.add(key)
            self._start(self._release(*key))

    async def _release(self, taskmanager_id: str, job_id: str, promoted_as: str) -> None:
        try:
            if promoted_as:
                await self.drop_on(taskmanager_id, promoted_as, job_id)
            else:
                await self._client(taskmanager_id).release_partitions(job_id, ())
        except StreamError as error:
            self._log.warning(
                "partitions.not_released",
                taskmanager_id=taskmanager_id,
                job_id=job_id,
                reason=str(error),
            )
        finally:
            self._releasing.discard((taskmanager_id, job_id, promoted_as))

    def details(self, *, promoted: bool) -> list[client_pb2.PartitionDetails]:
        """What clients see: no part of what has not been promoted as a whole.

        Args:
            promoted: only those that outlive their job.
        """
        newest = {(found.whole.name, found.whole.job_id) for found in self._newest()}
        confirmed = self._held.confirmed()
        details = []
        for taskmanager_id, partition in self._held.all():
            key = partition.promoted_as, partition.job_id
            if key in confirmed and key not in newest:
                partition = replace(partition, promoted_as="")  # another one has the name
            if key in newest or (not promoted and (key in confirmed or not partition.promoted_as)):
                details.append(partition_details(taskmanager_id, partition))
        return details

    async def drop(self, name: str) -> int:
        """Drops what was promoted under a name; returns how many partitions that were.

        Raises:
            JobRejected: nothing has that name.
            StreamError: a TaskManager could not drop its part; asking again is harmless.
        """
        holders = self._held.holders_of(name)
        if not holders:
            raise JobRejected(
                f"no partitions are promoted as {name!r}: `penstock partitions --promoted` lists them"
            )
        return sum([await self.drop_on(holder, name) for holder in holders])

    async def drop_on(self, taskmanager_id: str, name: str, job_id: str = "") -> int:
        """Drops what one TaskManager holds of a name; returns how many partitions that were.

        Args:
            job_id: whose; "" = of all jobs.

        Raises:
            StreamError: it could not; asking again is harmless.
        """
        if taskmanager_id == SHARED_STORAGE and self.shared is not None:
            dropped = await self.shared.drop(name, job_id, self.jobs.has_unended)
            await self._look_at_shared(self.shared)
            return dropped
        client = self._client(taskmanager_id)
        response = await client.drop_promoted_partitions(name, job_id)
        self.observe(taskmanager_id, holdings_of(response.holdings))
        return response.dropped

    async def promote_on(
        self,
        taskmanager_id: str,
        promoted: internal_pb2.PromotedSet,
        partitions: Sequence[internal_pb2.PartitionId],
    ) -> None:
        """Lets partitions of one TaskManager outlive their job.

        Raises:
            StreamError: it could not; asking again is harmless.
        """
        if taskmanager_id == SHARED_STORAGE and self.shared is not None:
            await self.shared.promote(promoted, [partition_of(one) for one in partitions])
            await self._look_at_shared(self.shared)
            return
        client = self._client(taskmanager_id)
        holdings = await client.promote_partitions(promoted, partitions)
        self.observe(taskmanager_id, holdings_of(holdings))

    def promoted(self) -> list[PromotedPartitions]:
        """What outlives its job, and what had the same name before and is still there."""
        return self._held.promoted()

    async def load_shared(self) -> None:
        """Reads what outlives jobs on shared storage; where that does not answer, it is asked again in the background."""
        if self.shared is None:
            return
        try:
            await self._look_at_shared(self.shared)
        except StreamError as error:
            self._log.warning("partitions.not_read", reason=str(error))
            self._start(self._keep_looking(self.shared))

    async def sweep_shared(self) -> None:
        """Removes from shared storage what belongs to no job, and does not outlive one."""
        if self.shared is not None:
            await self.shared.sweep(self.jobs.has_unended)

    async def _keep_looking(self, shared: SharedSpillRunner) -> None:
        while not self._has_shared:
            await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                await self._look_at_shared(shared)
            except StreamError as error:
                self._log.warning("partitions.not_read", reason=str(error))

    async def _look_at_shared(self, shared: SharedSpillRunner) -> None:
        """Sees what outlives jobs there.

        Raises:
            StreamError: that cannot be told now.
        """
        number = self._looks = self._looks + 1
        found = await shared.promoted()
        found.version = number
        self.observe(SHARED_STORAGE, holdings_of(found))
        self._has_shared = True

    def _newest(self) -> Collection[PromotedPartitions]:
        return {found.whole.name: found for found in self.promoted()}.values()

    def newest_ms(self, name: str) -> int:
        """When what has a name was promoted; 0 = nothing has it."""
        return next(
            (found.whole.promoted_at_ms for found in self._newest() if found.whole.name == name), 0
        )

    def replaced(self, name: str) -> list[str]:
        """Jobs whose sets had a name before, and which nobody reads."""
        replaced = [(name, job_id) for job_id in self._held.replaced(name)]
        return [job_id for _, job_id in self._unread(replaced)]

    def _unread(self, sets: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of sets, by name and job, that no job reads."""
        read = self.jobs.reads()
        if read is None:
            return []
        new = {key for keys in self._read_by_new for key in keys}
        return [key for key in sets if key not in read and key not in new]

    def holders(self, name: str, job_id: str) -> list[str]:
        """TaskManagers with partitions that one job has promoted under a name."""
        return self._held.holders_of(name, job_id)

    def parts_of(self, name: str, job_id: str) -> tuple[PromotedPart, ...]:
        """What one job has promoted under a name.

        Raises:
            Unrecoverable: some of it is gone.
            PartitionUnavailable: some of it is not there, but its TaskManager may still come back.
        """
        try:
            return of_job(self.promoted(), name, job_id)
        except Unrecoverable as error:
            if self._is_settled:
                raise
            raise PartitionUnavailable(
                f"{error} (or they have not registered yet, or the shared storage has not answered: the JobManager has "
                "just started)"
            ) from error

    async def registered_parts_of(self, name: str, job_id: str) -> tuple[PromotedPart, ...]:
        """As ``parts_of``, and waits for TaskManagers that may still register where some are missing."""
        while True:
            self._changed.clear()
            try:
                return self.parts_of(name, job_id)
            except PartitionUnavailable:
                rest_s = self._settles_in_s()
                if rest_s <= 0:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._changed.wait()

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[None]:
        """Within it no other job is given the name.

        Raises:
            JobRejected: another one has claimed it.
        """
        if name in self._claimed:
            raise JobRejected(f"another job is being persisted as {name!r} at this moment")
        self._claimed.add(name)
        try:
            yield
        finally:
            self._claimed.discard(name)

    def check_free(self, name: str) -> None:
        """Checks that nothing has a name.

        Raises:
            JobRejected: something has.
        """
        if any(found.whole.name == name for found in self.promoted()):
            raise JobRejected(name_taken(name))

    def check_replaces(self, sink: graph_pb2.PersistSink) -> None:
        """Checks that a job may take a name.

        Raises:
            JobRejected: something has it, or something else than what it means to replace.
        """
        if self.shared is not None and not self._has_shared:
            raise JobRejected(
                f"{self.shared.uri} has not answered yet, so it is not known whether something is persisted as "
                f"{sink.name!r}: try again"
            )
        if not sink.overwrite:
            self.check_free(sink.name)
        elif sink.replaces_job_id:
            newest = {found.whole.name: found.whole.job_id for found in self.promoted()}
            if newest.get(sink.name) != sink.replaces_job_id:
                raise JobRejected(replaced_meanwhile(sink.name, sink.replaces_job_id))

    @contextlib.contextmanager
    def checked(self, graph: graph_pb2.JobGraph) -> Iterator[None]:
        """Checks that a new job finds what it reads, and that the names are free that it persists under; within it,
        what it reads stays.

        Raises:
            JobRejected: it does not, or they are not.
        """
        sources = persisted_sources(graph)
        promoted = self.promoted()
        for source in sources:
            try:
                of_job(promoted, source.name, source.job_id)
            except Unrecoverable as error:
                raise JobRejected(str(error)) from error
        for sink in persist_sinks(graph):
            self.check_replaces(sink)
        read = [(source.name, source.job_id) for source in sources]
        self._read_by_new.append(read)
        try:
            yield
        finally:
            self._read_by_new.remove(read)
