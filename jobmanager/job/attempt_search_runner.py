"""Looks for what an earlier JobManager has deployed of a job, and waits for the TaskManagers that had it.

The job's record names these. Each of them registers and tells what it runs, refuses connections and is gone, or says
nothing until TaskManagers that live would have come; one that does not come soon is told who leads, also when it is waited for
no longer: it may know of no other JobManager, and the job may need its slots. From the beginning of the search on, slots in which
attempts of the job run are the job's; those that it does not take over are freed by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import structlog

from common.clock import Clock
from common.outage_log import OutageLog
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.slot import Slot
from jobmanager.job.job_operation import OperationKind
from jobmanager.job.kept_partitions_runner import KeptPartitionsRunner
from jobmanager.job.operations_runner import OperationsRunner
from jobmanager.liveness.reachability import Reachability
from jobmanager.messages import job_effects, job_events
from jobmanager.rpc.held_attempt_convert import found_attempt
from jobmanager.rpc.reachability_client import why_not_connected
from jobmanager.scheduler.cluster_runner import ClusterRunner
from penstock.errors import StreamError
from penstock.storage.checkpoint_properties import BehindBarrier

_PROBE_TIMEOUT_S: Final = 0.5
_PAUSE_S: Final = 0.1
"""Between two looks at those that have not come."""
_NEWS_PAUSE_S: Final = 0.5
"""Before those are told, and told again, who leads."""
_LATE_NEWS_PAUSE_S: Final = 5.0
"""The same, when they are waited for no longer."""


class AttemptSearchRunner:
    """The search for the attempts of one job.

    Args:
        subtask_count: how many it has.
        taskmanagers: which had attempts of it, and where they are called.
        cluster: where TaskManagers register.
        kept: its complete partitions.
        operations: what users have asked of the job, and has not ended.
        keep_s: how long TaskManagers keep what they run for a JobManager that is silent.
        post: takes what was found.
    """

    def __init__(
        self,
        job_id: str,
        subtask_count: int,
        taskmanagers: Mapping[str, str],
        cluster: ClusterRunner,
        kept: KeptPartitionsRunner,
        clock: Clock,
        operations: OperationsRunner,
        keep_s: float,
        post: Callable[[job_events.JobEvent], None],
    ) -> None:
        self._job_id = job_id
        self._subtask_count = subtask_count
        self._awaited = dict(taskmanagers)
        self._cluster = cluster
        self._kept = kept
        self._clock = clock
        self._operations = operations
        self._keep_s = keep_s
        self._post = post
        log = self._log = structlog.get_logger(__name__).bind(job_id=job_id)
        self._news = {
            address: OutageLog(log.bind(taskmanager=id), "leader.unheard", "leader.heard", "info")
            for id, address in taskmanagers.items()
        }
        self.is_over = False
        cluster.sought.seek(job_id)

    async def find(self, effect: job_effects.FindAttempts) -> None:
        """Answers ``FindAttempts``; returns when nobody is to be told any more who leads."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_leader())
            await self._search(effect)

    async def _search(self, effect: job_effects.FindAttempts) -> None:
        while not await self._is_complete():
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._cluster.wait_for_registration()
        if not self._found():
            await self._kept.wait_for(effect.partitions)
        read = {key for one in self._found() for key in one.reads}
        shared = await self._kept.found_shared(read.union(effect.partitions))
        # From here on nothing may be lost that is not told of behind it.
        found, held = self._found(), self._kept.held()
        for taskmanager_id, _, one in self._cluster.sought.of(self._job_id):
            self._cluster.client(taskmanager_id).note_endpoint(one.endpoint)
        ended = self._cluster.sought.ended_of(self._job_id)
        holders = {one.slot.taskmanager_id for one in found}
        self._end()
        reason = self._why_none()
        self._log.info(
            "attempts.found",
            found=len(found),
            wanted=self._subtask_count,
            partitions=len(held) + len(shared),
            why_not=reason,
        )
        self._post(
            job_events.AttemptsFound(
                effect.attempt,
                found,
                reason,
                (*held, *shared),
                self._kept.endpoints(holders | {one.taskmanager_id for one in held}),
                frozenset(
                    SubtaskId(one.vertex, one.subtask_index)
                    for own in ended.values()
                    for one in own
                ),
                # One that knows of nothing has been started again.
                is_anyone_missing=not self._awaited.keys() <= holders | ended.keys(),
            )
        )

    async def _tell_leader(self) -> None:
        """Tells TaskManagers that have not come who leads, again and again, as long as they wait for a JobManager."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._keep_s):
                while not self.is_over or self._missing():
                    await asyncio.sleep(_LATE_NEWS_PAUSE_S if self.is_over else _NEWS_PAUSE_S)
                    await asyncio.gather(*(self._tell(address) for address in self._missing()))

    async def _tell(self, address: str) -> None:
        try:
            await self._cluster.tell_leader(address, _PROBE_TIMEOUT_S)
        except StreamError as error:  # it is gone, or paused
            self._news[address].failed(reason=str(error))
        else:
            self._news[address].worked()

    def _missing(self) -> list[str]:
        registered = self._cluster.addresses(self._awaited)
        return [address for id, address in self._awaited.items() if id not in registered]

    def _found(self) -> tuple[job_events.FoundAttempt, ...]:
        now_ms = self._clock.now_ms()
        return tuple(
            found_attempt(held, id, incarnation, now_ms)
            for id, incarnation, held in self._cluster.sought.of(self._job_id)
        )

    def abandon(self) -> tuple[Slot, ...]:
        """Looks no longer; returns the slots that are to be freed, since nobody takes them over."""
        if self.is_over:
            return ()
        self._end()
        return tuple(
            slot for own in self._cluster.held_slots(self._job_id).values() for slot in own
        )

    def _end(self) -> None:
        self.is_over = True
        self._cluster.sought.end(self._job_id)

    async def _is_complete(self) -> bool:
        subtasks = {
            (held.attempt.vertex, held.attempt.subtask_index)
            for _, _, held in self._cluster.sought.of(self._job_id)
        }
        if len(subtasks) >= self._subtask_count or self._cluster.settles_in_s <= 0:
            return True
        probes = (why_not_connected(address, _PROBE_TIMEOUT_S) for address in self._missing())
        # One that cannot be reached may run on.
        return all(found is Reachability.REFUSED for found in await asyncio.gather(*probes))

    def _why_none(self) -> str:
        """Whether something that has been done to the tasks cannot be undone but by beginning again."""
        drains = [
            operation
            for operation in self._operations.under_way()
            if operation.kind is OperationKind.STOP and operation.wanted == BehindBarrier.DRAIN.name
        ]
        return "its event time had been ended, to stop it" if drains else ""
