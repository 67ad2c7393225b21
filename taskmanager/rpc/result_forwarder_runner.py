"""Rows of collect sinks on their way from slots to the JobManager.

Each collect of each attempt has a queue and a task of its own: a client that reads one collect does
not wait for another. Invariants: chunks of a collect leave in order, one at a time; the slot hears
``ResultsTaken`` only after the JobManager has taken the chunk; at most ``_QUEUED_MAX`` chunks wait
here per collect, then the slot's line is not read on (slots keep far fewer under way); rows that the
JobManager refuses are wanted by nobody where it has fenced them off, else they end the slot, so that
their attempt fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.log import get_logger
from common.pb import internal_pb2
from penstock.errors import Fenced, StreamError
from taskmanager.processes.background import Background, BackgroundWork
from taskmanager.rpc.jobmanager_client import JobManagerClient, is_transient
from taskmanager.slots.attempt_table import JobAttemptKey, key_of
from taskmanager.slots.slot_process_runner import SlotProcessRunner

_QUEUED_MAX = 64
_PUSH_TIMEOUT_S = 60.0
_RETRY_S = 0.2

_CollectKey = tuple[JobAttemptKey, str]


class ResultForwarder:
    """Pushes results of all slots.

    Args:
        leader_epoch: the epoch that the calls carry.
    """

    def __init__(
        self, client: JobManagerClient, background: Background, leader_epoch: Callable[[], int]
    ) -> None:
        self._client = client
        self._background = background
        self._leader_epoch = leader_epoch
        self._queues: dict[_CollectKey, asyncio.Queue[internal_pb2.SlotResults]] = {}
        self._work: dict[_CollectKey, BackgroundWork[None]] = {}
        self._log = get_logger(__name__)

    async def take(self, slot: SlotProcessRunner, results: internal_pb2.SlotResults) -> None:
        """Takes a chunk from a slot; waits while too many are under way."""
        key = (key_of(results.attempt), results.collect_id)
        queue = self._queues.get(key)
        if queue is None:
            queue = asyncio.Queue(_QUEUED_MAX)
            self._queues[key] = queue
            self._work[key] = self._background.start(
                self._forward(key, slot, queue), f"results of collect {results.collect_id}"
            )
        await queue.put(results)

    async def _forward(
        self,
        key: _CollectKey,
        slot: SlotProcessRunner,
        queue: asyncio.Queue[internal_pb2.SlotResults],
    ) -> None:
        """Pushes one collect's chunks until its slot has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                pushing = group.create_task(self._push_all(slot, queue))
                await slot.ended.wait()
                pushing.cancel()
        finally:
            self._queues.pop(key, None)
            self._work.pop(key, None)

    async def _push_all(
        self, slot: SlotProcessRunner, queue: asyncio.Queue[internal_pb2.SlotResults]
    ) -> None:
        while True:
            results = await queue.get()
            try:
                satisfied = await self._push(slot.job_id, results)
            except StreamError as error:
                self._log.error("results.refused", job_id=slot.job_id, reason=str(error))
                slot.kill(
                    f"the JobManager did not take rows of collect {results.collect_id}: {error}"
                )
                return
            slot.attempts.sent_rows(results.attempt)
            await slot.send(
                internal_pb2.SlotCommand(
                    results_taken=internal_pb2.ResultsTaken(
                        attempt=results.attempt,
                        collect_id=results.collect_id,
                        sequence=results.chunk.sequence,
                        satisfied=satisfied,
                    )
                )
            )

    async def _push(self, job_id: str, results: internal_pb2.SlotResults) -> bool:
        """Pushes one chunk; True when no more are wanted.

        Raises:
            StreamError: the JobManager will never take it.
        """
        request = internal_pb2.PushResultsRequest(
            job_id=job_id,
            collect_id=results.collect_id,
            chunk=results.chunk,
            attempt=results.attempt.attempt,
        )
        while True:
            request.leader_epoch = self._leader_epoch()
            try:
                return (await self._client.push_results(request, _PUSH_TIMEOUT_S)).satisfied
            except Fenced as error:
                # The job has ended, or goes on with another attempt: its slot is about to be freed.
                self._log.warning("results.fenced", job_id=job_id, reason=str(error))
                return True
            except StreamError as error:
                if not is_transient(error):
                    raise
                self._log.info("results.retried", job_id=job_id, reason=str(error))
            await asyncio.sleep(_RETRY_S)
