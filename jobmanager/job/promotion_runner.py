"""Lets what a job persists outlive it, on all TaskManagers or on none.

It counts when all TaskManagers have their part and the first of them has been told so: what a JobManager that dies
before leaves is nothing, and is removed. What had the name before goes last, so that there is always
something complete to read, and not before the jobs that read it have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import structlog

from common.clock import Clock
from common.pb import internal_pb2
from jobmanager.messages import job_effects
from jobmanager.rpc.graph_convert import partition_id
from jobmanager.rpc.persisted_convert import persisted_edges, persisted_sink
from jobmanager.scheduler.held_partitions_runner import HeldPartitionsRunner
from jobmanager.stores.shared_spill_store import partition_of
from penstock.errors import StoreNotFound, StreamError
from penstock.pb import graph_pb2


@dataclass(frozen=True, slots=True)
class _Output:
    """One persisted stream of the job, and its partitions by TaskManager."""

    promoted: internal_pb2.PromotedSet
    sink: graph_pb2.PersistSink
    partitions: dict[str, list[internal_pb2.PartitionId]] = field(default_factory=dict)


class PromotionRunner:
    """Promotes the partitions of one job."""

    def __init__(
        self, job_id: str, graph: graph_pb2.JobGraph, held: HeldPartitionsRunner, clock: Clock
    ) -> None:
        self._job_id = job_id
        self._graph = graph
        self._held = held
        self._clock = clock
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    async def promote(self, partitions: Iterable[job_effects.PersistedPartition]) -> None:
        """Promotes all of them.

        Raises:
            JobRejected: a name is taken.
            StreamError: a TaskManager could not do its part; nothing is left.
        """
        outputs = self._outputs(partitions)
        names = [output.promoted.name for output in outputs]
        with ExitStack() as claims:
            for name in names:
                claims.enter_context(self._held.claimed(name))
            if not all(self._is_promoted(output) for output in outputs):
                # What an earlier try of this job may have left.
                await self._drop(names)
                await self._promote_all(outputs)
            for name in names:
                await self._drop_replaced(name)

    async def _promote_all(self, outputs: Sequence[_Output]) -> None:
        for output in outputs:
            self._held.check_replaces(output.sink)
        try:
            for output in outputs:
                await self._promote(output)
            for output in outputs:
                output.promoted.confirmed = True
                await self._promote(output)
        except StreamError:
            await self._drop([output.promoted.name for output in outputs])
            raise

    def _is_promoted(self, output: _Output) -> bool:
        """An earlier JobManager has done it, and what had the name may be gone already: it stays as it is."""
        wanted = {
            (taskmanager_id, partition_of(one))
            for taskmanager_id, ids in output.partitions.items()
            for one in ids
        }
        return any(
            found.whole.job_id == self._job_id
            and found.whole.name == output.promoted.name
            and {(part.taskmanager_id, part.partition_id) for part in found.parts} == wanted
            for found in self._held.promoted()
        )

    async def _promote(self, output: _Output) -> None:
        for taskmanager_id, ids in output.partitions.items():
            await self._held.promote_on(taskmanager_id, output.promoted, ids)

    def _outputs(self, partitions: Iterable[job_effects.PersistedPartition]) -> list[_Output]:
        """By sink.

        Raises:
            StoreNotFound: some of an output is not there.
        """
        by_edge: dict[str, list[job_effects.PersistedPartition]] = {}
        for partition in partitions:
            by_edge.setdefault(partition.edge_id, []).append(partition)
        parallelism = {vertex.id: vertex.parallelism for vertex in self._graph.vertices}
        return [
            self._output(edge, by_edge.get(edge.id, []), parallelism[edge.source_vertex])
            for edge in persisted_edges(self._graph)
        ]

    def _output(
        self, edge: graph_pb2.Edge, own: Sequence[job_effects.PersistedPartition], count: int
    ) -> _Output:
        sink = persisted_sink(self._graph, edge)
        if len(own) != count:
            raise StoreNotFound(
                f"only {len(own)} of the {count} partitions for {sink.name!r} are there"
            )
        output = _Output(
            internal_pb2.PromotedSet(
                name=sink.name,
                job_id=self._job_id,
                schema=edge.schema,
                partition_count=count,
                # Clocks differ between JobManagers, and what is newer counts.
                promoted_at_ms=max(self._clock.now_ms(), self._held.newest_ms(sink.name) + 1),
                updates_of=sink.updates_of,
            ),
            sink,
        )
        for partition in own:
            ids = output.partitions.setdefault(partition.taskmanager_id, [])
            ids.append(partition_id(edge.id, partition.producer))
        return output

    async def _drop(self, names: Iterable[str]) -> None:
        """Removes what this job has promoted."""
        for name in names:
            for holder in self._held.holders(name, self._job_id):
                await self._drop_on(holder, name, self._job_id)

    async def _drop_replaced(self, name: str) -> None:
        """Removes what other jobs have promoted, and nobody reads."""
        for job_id in self._held.replaced(name):
            if job_id != self._job_id:
                for holder in self._held.holders(name, job_id):
                    await self._drop_on(holder, name, job_id)

    async def _drop_on(self, taskmanager_id: str, name: str, job_id: str) -> None:
        """Where it cannot be done, what stays is incomplete, or older than what counts."""
        try:
            await self._held.drop_on(taskmanager_id, name, job_id)
        except StreamError as error:
            self._log.warning(
                "partitions.not_dropped",
                taskmanager_id=taskmanager_id,
                name=name,
                reason=str(error),
            )
