"""What a job reads of earlier ones: where it lies when tasks are deployed, and what it means when it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.pb import internal_pb2
from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.partitions.promoted import share_of
from jobmanager.rpc.persisted_convert import add_persisted_input, persisted_source
from jobmanager.scheduler.held_partitions_runner import HeldPartitionsRunner
from penstock.errors import StreamError, Unrecoverable
from penstock.pb import graph_pb2


class PersistedInputsRunner:
    """The persisted inputs of one job.

    Args:
        endpoint_of: the partition server of a TaskManager; raises ``TaskManagerLost`` where there is none.
    """

    def __init__(
        self,
        graph: graph_pb2.JobGraph,
        held: HeldPartitionsRunner,
        endpoint_of: Callable[[str], internal_pb2.DataEndpoint],
    ) -> None:
        self._sources = {
            vertex.id: source
            for vertex in graph.vertices
            if (source := persisted_source(vertex)) is not None
        }
        self._held = held
        self._endpoint_of = endpoint_of

    async def connect(self, tasks: Iterable[internal_pb2.TaskDeployment]) -> None:
        """Tells tasks where to read, once TaskManagers that may still register have done so, as far as that matters.

        Raises:
            Unrecoverable: some of it is gone.
            PartitionUnavailable: it may still come back.
        """
        for task in tasks:
            source = self._sources.get(task.vertex.id)
            # One that had done all its work has nothing to read.
            if source is not None and not task.restore.finished:
                parts = await self._held.registered_parts_of(source.name, source.job_id)
                share = share_of(parts, task.attempt.subtask_index, task.vertex.parallelism)
                shared = "" if self._held.shared is None else self._held.shared.uri
                add_persisted_input(task, share, self._endpoint_of, shared)

    def loss(self, execution: ExecutionGraph) -> StreamError | None:
        """Why the job cannot come to its end, now that a TaskManager is lost; None = it can."""
        unfinished = {
            attempt.key.vertex
            for attempt in execution.current()
            if attempt.state is not AttemptState.FINISHED
        }
        for vertex_id in sorted(unfinished & self._sources.keys()):
            source = self._sources[vertex_id]
            try:
                self._held.parts_of(source.name, source.job_id)
            except Unrecoverable as error:
                return error
            except StreamError:  # it may still come back: the tasks that miss it say so
                continue
        return None
