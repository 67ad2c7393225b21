"""Finds and removes what a job's attempts have left behind: with TaskManagers, or on shared storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.graph.job_plan import JobPlan
from jobmanager.messages import job_effects, job_events
from jobmanager.partitions.partition_tracker import SHARED_STORAGE
from jobmanager.rpc.graph_convert import endpoint_of, partition_id
from jobmanager.scheduler.cluster_runner import ClusterRunner
from penstock.errors import StreamError, TaskManagerLost
from penstock.partition_id import PartitionId


class KeptPartitionsRunner:
    """The complete partitions of one job.

    Args:
        job_id: whose they are.
        cluster: TaskManagers and shared storage.
    """

    def __init__(
        self,
        job_id: str,
        plan: JobPlan,
        cluster: ClusterRunner,
        log: Any,
    ) -> None:
        self._job_id = job_id
        self._shared_edges = frozenset(edge.id for edge in plan.edges if edge.may_be_shared)
        self._cluster = cluster
        self._log = log

    @property
    def shared_uri(self) -> str:
        """Where blocking partitions are written to; "" = TaskManagers keep them."""
        shared = self._cluster.partitions.shared
        return "" if shared is None else shared.uri

    async def wait_for(self, wanted: Iterable[tuple[str, AttemptKey]]) -> None:
        """Waits for TaskManagers that may still register, where of some partitions one is missing that TaskManagers keep."""
        is_shared = self._cluster.partitions.shared is not None
        ids = {_id_of(*one) for one in wanted if not (is_shared and one[0] in self._shared_edges)}
        await self._cluster.partitions.locate(self._job_id, ids)

    def held(self) -> tuple[job_events.LocatedPartition, ...]:
        """What TaskManagers that have registered hold of the job."""
        held = self._cluster.partitions.of_job(self._job_id)
        endpoints = dict(self.endpoints(held.values()))
        return tuple(
            _located(partition, holder, endpoints[holder])
            for partition, holder in held.items()
            if holder in endpoints
        )

    async def found_shared(
        self, wanted: Collection[tuple[str, AttemptKey]]
    ) -> tuple[job_events.LocatedPartition, ...]:
        """What of some partitions is complete on shared storage."""
        shared = self._cluster.partitions.shared
        ids = {_id_of(*one) for one in wanted if one[0] in self._shared_edges}
        if shared is None or not ids:
            return ()
        found = await shared.found(self._job_id, ids)
        return tuple(_located(one, SHARED_STORAGE, Endpoint("")) for one in found)

    def endpoints(self, taskmanagers: Iterable[str]) -> tuple[tuple[str, Endpoint], ...]:
        """Where TaskManagers serve what finished attempts have written; those that do not are left out."""
        endpoints: dict[str, Endpoint] = {}
        for taskmanager_id in sorted(set(taskmanagers) - {SHARED_STORAGE}):
            with suppress(TaskManagerLost):
                client = self._cluster.client(taskmanager_id)
                endpoints[taskmanager_id] = endpoint_of(client.partition_endpoint)
        return tuple(endpoints.items())

    def lying(self, outputs: Collection[KeptOutput]) -> tuple[job_effects.ReleasePartitions, ...]:
        """What TaskManagers hold of some outputs."""
        found: dict[str, list[tuple[str, AttemptKey]]] = {}
        for one, taskmanager_id in self._cluster.partitions.of_job(self._job_id).items():
            producer = AttemptKey(one.vertex, one.subtask_index, one.attempt)
            if KeptOutput(one.edge_id, producer.subtask) in outputs:
                found.setdefault(taskmanager_id, []).append((one.edge_id, producer))
        return tuple(job_effects.ReleasePartitions(id, tuple(own)) for id, own in found.items())

    async def release(self, effect: job_effects.ReleasePartitions) -> None:
        """Removes partitions. A TaskManager that does not hear of it is told when its heartbeat names them; what
        is left on shared storage goes with the job, or is swept when another JobManager leads behind its end."""
        shared = self._cluster.partitions.shared
        if effect.taskmanager_id == SHARED_STORAGE:
            if shared is not None:
                await shared.release(self._job_id, [_id_of(*one) for one in effect.partitions])
            return
        try:
            client = self._cluster.client(effect.taskmanager_id)
            released = [partition_id(*one) for one in effect.partitions]
            await client.release_partitions(self._job_id, released)
        except StreamError as error:
            self._log.warning(
                "partitions.not_released",
                taskmanager_id=effect.taskmanager_id,
                reason=str(error),
            )


def _located(
    partition: PartitionId, holder: str, endpoint: Endpoint
) -> job_events.LocatedPartition:
    producer = AttemptKey(partition.vertex, partition.subtask_index, partition.attempt)
    return job_events.LocatedPartition(holder, endpoint, partition.edge_id, producer)


def _id_of(edge_id: str, producer: AttemptKey) -> PartitionId:
    return PartitionId(edge_id, producer.vertex, producer.subtask_index, producer.attempt)
