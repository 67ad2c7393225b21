"""Gets rivals their slots, and starts them.

What fails here concerns the rival alone: it becomes ``RivalNotStarted``, and no failure of its TaskManager.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import assert_never

import structlog

from common.pb import internal_pb2
from jobmanager.job.job_description import JobDescription
from jobmanager.messages import job_effects, job_events
from jobmanager.rpc.graph_convert import DeploymentMessages, cause_of_error, endpoint_of
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.admission import admission_problem
from jobmanager.scheduler.cluster_runner import ClusterRunner
from penstock.errors import StreamError

Allocate = Callable[
    [TaskManagerClient, tuple[str, ...]], Awaitable[internal_pb2.AllocateSlotsResponse]
]
Deploy = Callable[[TaskManagerClient, list[internal_pb2.TaskDeployment]], Awaitable[None]]


class RivalRunner:
    """The rivals of one job.

    Args:
        job: whose they are.
        cluster: where slots come from.
        messages: makes messages of plans.
        allocate: starts processes in slots.
        deploy: starts attempts in them.
        post: takes events for the job's machine.
        in_order: runs actions of one lane one after the other.
        now_ms: the wall clock.
    """

    def __init__(
        self,
        job: JobDescription,
        cluster: ClusterRunner,
        messages: DeploymentMessages,
        allocate: Allocate,
        deploy: Deploy,
        post: Callable[[job_events.JobEvent], None],
        in_order: Callable[[str, Callable[[], Awaitable[None]]], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._messages = messages
        self._allocate = allocate
        self._deploy = deploy
        self._post = post
        self._in_order = in_order
        self._now_ms = now_ms
        self._log = structlog.get_logger(__name__).bind(job_id=job.job_id)

    def perform(
        self,
        effect: job_effects.RequestSpareSlots | job_effects.StartRival | job_effects.ReportRival,
    ) -> None:
        """Begins to do what the machine wants."""
        match effect:
            case job_effects.RequestSpareSlots():
                self._request_slots(effect)
            case job_effects.StartRival(taskmanager_id):
                self._in_order(taskmanager_id, lambda: self._start(effect))
            case job_effects.ReportRival():
                self._report(effect)
            case _:
                assert_never(effect)

    def _request_slots(self, effect: job_effects.RequestSpareSlots) -> None:
        # Elsewhere the job's code cannot run.
        unfit = {
            facts.taskmanager_id
            for facts in self._cluster.facts()
            if admission_problem(self._job.stamp, [facts]) is not None
        }
        for subtask, avoided in effect.wanted:
            slot = self._cluster.take_spare_slot(self._job.job_id, unfit | {avoided})
            if slot is not None:
                self._post(job_events.SpareSlotGranted(subtask, slot))

    async def _start(self, effect: job_effects.StartRival) -> None:
        key = effect.task.attempt
        try:
            client = self._cluster.client(effect.taskmanager_id)
            response = await self._allocate(client, (effect.task.slot_id,))
            has_server = response.HasField("partition_endpoint")
            server = endpoint_of(response.partition_endpoint) if has_server else None
            # Before anything that the rival itself has to say.
            self._post(job_events.RivalStarted(key, server))
            await self._deploy(client, [self._messages.task(effect.task)])
            if effect.splits:
                await client.send_commands(self._messages.commands(effect.splits))
        except StreamError as error:
            cause = cause_of_error(error, self._now_ms(), effect.taskmanager_id)
            self._post(job_events.RivalNotStarted(key, cause))

    def _report(self, effect: job_effects.ReportRival) -> None:
        rival = effect.rival
        self._log.info(
            f"rival.{effect.fate.value}",
            vertex=rival.vertex,
            subtask_index=rival.subtask_index,
            attempt=rival.attempt,
            beside=effect.beside.attempt,
            reason=effect.reason,
        )
