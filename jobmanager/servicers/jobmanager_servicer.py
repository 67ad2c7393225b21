"""What clients ask of the JobManager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from typing_extensions import override

from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.dispatcher.drains_runner import DrainsRunner
from jobmanager.installed_version import penstock_version
from jobmanager.job.operation_views import operation_message
from jobmanager.partitions.promoted import newest_named
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.partition_convert import persisted_details
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION, PROTOCOL_VERSION
from penstock.errors import (
    Fenced,
    JobNotFound,
    JobRejected,
    ProtocolMismatch,
    StoreNotFound,
    TaskManagerLost,
)
from penstock.pb import client_pb2, client_pb2_grpc
from penstock.storage.checkpoint_properties import SavepointFormat

_WATCH_INTERVAL_MIN_MS = 20


class JobManagerServicer(client_pb2_grpc.JobManagerServicer):
    """Service ``JobManager``; errors become statuses in ``ErrorServerInterceptor``."""

    def __init__(
        self,
        dispatcher: DispatcherRunner,
        cluster: ClusterRunner,
        drains: DrainsRunner,
        artifacts: ArtifactStore,
        results: ResultsStore,
        leader: LeaderStore,
    ) -> None:
        self._dispatcher = dispatcher
        self._cluster = cluster
        self._drains = drains
        self._artifacts = artifacts
        self._results = results
        self._leader = leader

    @override
    async def Hello(
        self, request: client_pb2.HelloRequest, context: Any
    ) -> client_pb2.HelloResponse:
        """Refuses what could not work later."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the client (penstock {request.client_version}) speaks protocol "
                f"{request.protocol_version}, this JobManager (penstock {penstock_version()}) "
                f"speaks {PROTOCOL_VERSION}: install the same version on both sides"
            )
        return client_pb2.HelloResponse(
            protocol_version=PROTOCOL_VERSION,
            server_version=penstock_version(),
            cluster_id=self._leader.cluster_id,
            leader_epoch=self._leader.epoch,
            daemon_protocol_version=DAEMON_PROTOCOL_VERSION,
        )

    @override
    async def MissingArtifacts(
        self, request: client_pb2.MissingArtifactsRequest, context: Any
    ) -> client_pb2.MissingArtifactsResponse:
        await self._dispatcher.check_storage()
        return client_pb2.MissingArtifactsResponse(
            ids=await self._artifacts.find_missing(request.ids)
        )

    @override
    async def UploadArtifact(
        self, request_iterator: AsyncIterator[client_pb2.ArtifactChunk], context: Any
    ) -> client_pb2.UploadArtifactResponse:
        """Stores an artifact; the first chunk names it."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            raise JobRejected("an upload must have at least one chunk, which names the artifact")

        async def pieces() -> AsyncIterator[bytes]:
            yield first.data
            async for chunk in request_iterator:
                yield chunk.data

        size_bytes = await self._artifacts.upload(first.id, pieces())
        return client_pb2.UploadArtifactResponse(size_bytes=size_bytes)

    @override
    async def SubmitJob(
        self, request: client_pb2.SubmitJobRequest, context: Any
    ) -> client_pb2.SubmitJobResponse:
        await self._dispatcher.submit(request.job_id, request.graph)
        return client_pb2.SubmitJobResponse(job_id=request.job_id)

    @override
    async def ListJobs(
        self, request: client_pb2.ListJobsRequest, context: Any
    ) -> client_pb2.ListJobsResponse:
        if request.look_again:
            await self._dispatcher.ends.look_again()
        return client_pb2.ListJobsResponse(
            jobs=[record.summary() for record in self._dispatcher.records()]
        )

    @override
    async def GetJob(
        self, request: client_pb2.GetJobRequest, context: Any
    ) -> client_pb2.JobDetails:
        return self._dispatcher.find(request.job_id).details()

    @override
    async def WatchJob(
        self, request: client_pb2.WatchJobRequest, context: Any
    ) -> AsyncIterator[client_pb2.JobDetails]:
        interval_ms = request.interval_ms
        if interval_ms > 0:
            interval_ms = max(interval_ms, _WATCH_INTERVAL_MIN_MS)
        async for details in self._dispatcher.watch(request.job_id, interval_ms):
            yield details

    @override
    async def CancelJob(
        self, request: client_pb2.CancelJobRequest, context: Any
    ) -> client_pb2.CancelJobResponse:
        await self._dispatcher.cancel(request.job_id)
        return client_pb2.CancelJobResponse()

    @override
    async def TriggerCheckpoint(
        self, request: client_pb2.TriggerCheckpointRequest, context: Any
    ) -> client_pb2.TriggerCheckpointResponse:
        checkpoint_id = await self._dispatcher.operations.checkpoint(
            request.job_id, request.operation_id
        )
        return client_pb2.TriggerCheckpointResponse(checkpoint_id=checkpoint_id)

    @override
    async def TriggerSavepoint(
        self, request: client_pb2.TriggerSavepointRequest, context: Any
    ) -> client_pb2.OperationDetails:
        operation = await self._dispatcher.operations.savepoint(
            request.job_id,
            request.operation_id,
            request.directory,
            SavepointFormat(request.format),
        )
        return operation_message(self._dispatcher.find(request.job_id).job_id, operation)

    @override
    async def StopJob(
        self, request: client_pb2.StopJobRequest, context: Any
    ) -> client_pb2.OperationDetails:
        operation = await self._dispatcher.operations.stop(
            request.job_id,
            request.operation_id,
            request.directory,
            SavepointFormat(request.format),
            drain=request.drain,
        )
        return operation_message(self._dispatcher.find(request.job_id).job_id, operation)

    @override
    async def DrainTaskManager(
        self, request: client_pb2.DrainTaskManagerRequest, context: Any
    ) -> client_pb2.OperationDetails:
        taskmanager_id, operation_id = request.taskmanager_id, request.operation_id
        if request.undo:
            await self._drains.undo(taskmanager_id)
            return client_pb2.OperationDetails(
                kind=client_pb2.OPERATION_KIND_DRAIN, taskmanager_id=taskmanager_id
            )
        operation = await self._drains.drain(
            taskmanager_id, operation_id, makes_again=request.makes_again
        )
        return operation_message("", operation)

    @override
    async def GetOperation(
        self, request: client_pb2.GetOperationRequest, context: Any
    ) -> client_pb2.OperationDetails:
        drain = self._drains.find(request.job_id, request.operation_id)
        if drain is not None:
            return operation_message("", drain)
        operation = self._dispatcher.operations.find(request.job_id, request.operation_id)
        return operation_message(self._dispatcher.find(request.job_id).job_id, operation)

    @override
    async def ListCheckpoints(
        self, request: client_pb2.ListCheckpointsRequest, context: Any
    ) -> client_pb2.ListCheckpointsResponse:
        return self._dispatcher.find(request.job_id).checkpoints()

    @override
    async def ListExceptions(
        self, request: client_pb2.ListExceptionsRequest, context: Any
    ) -> client_pb2.ListExceptionsResponse:
        return self._dispatcher.find(request.job_id).exceptions()

    @override
    async def FetchResults(
        self, request: client_pb2.FetchResultsRequest, context: Any
    ) -> AsyncIterator[client_pb2.ResultChunk]:
        job_id = self._dispatcher.find(request.job_id).job_id
        async for chunk in self._results.fetch(job_id, request.collect_id):
            yield chunk

    @override
    async def ReadLogs(
        self, request: client_pb2.ReadLogsRequest, context: Any
    ) -> AsyncIterator[client_pb2.LogChunk]:
        """What attempts have written, TaskManager by TaskManager."""
        record = self._dispatcher.find(request.job_id)
        if not record.has_subtask(request.vertex, request.subtask_index):
            raise JobNotFound(
                f"job {record.job_id} has no subtask {request.vertex or '*'}/"
                f"{request.subtask_index}: `penstock info {record.job_id}` lists them"
            )
        unreachable = []
        # TaskManagers that share a directory have the logs of each other's attempts as well.
        sent_by: dict[tuple[str, int, int], str] = {}
        for taskmanager_id in record.taskmanagers_of(request.vertex, request.subtask_index):
            try:
                client = self._cluster.client(taskmanager_id)
                logs = client.read_logs(record.job_id, request.vertex, request.subtask_index)
                async for chunk in logs:
                    log = chunk.vertex, chunk.subtask_index, chunk.attempt
                    if sent_by.setdefault(log, taskmanager_id) == taskmanager_id:
                        yield chunk
            except (TaskManagerLost, Fenced):  # the latter: it is just registering anew
                unreachable.append(taskmanager_id)
        if unreachable:
            raise StoreNotFound(
                f"the logs on TaskManager {', '.join(unreachable)} cannot be read: it is gone; "
                "they lie under logs/jobs of its directory"
            )

    @override
    async def ListPartitions(
        self, request: client_pb2.ListPartitionsRequest, context: Any
    ) -> client_pb2.ListPartitionsResponse:
        return client_pb2.ListPartitionsResponse(
            partitions=self._cluster.partitions.details(promoted=request.promoted)
        )

    @override
    async def FindPersisted(
        self, request: client_pb2.FindPersistedRequest, context: Any
    ) -> client_pb2.PersistedDetails:
        found = newest_named(self._cluster.partitions.promoted(), request.name)
        return persisted_details(found)

    @override
    async def DropPartitions(
        self, request: client_pb2.DropPartitionsRequest, context: Any
    ) -> client_pb2.DropPartitionsResponse:
        dropped = await self._cluster.partitions.drop(request.name)
        return client_pb2.DropPartitionsResponse(dropped=dropped)

    @override
    async def GetCluster(
        self, request: client_pb2.GetClusterRequest, context: Any
    ) -> client_pb2.ClusterDetails:
        counts = self._cluster.counts
        return client_pb2.ClusterDetails(
            cluster_id=self._leader.cluster_id,
            leader_epoch=self._leader.epoch,
            version=penstock_version(),
            slots_total=counts.total,
            slots_free=counts.free,
            taskmanagers=self._cluster.details(),
        )
