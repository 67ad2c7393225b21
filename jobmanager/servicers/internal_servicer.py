"""What TaskManagers say to the JobManager.

A TaskManager that is not registered, or that talks to an earlier leader, is fenced: it registers
again and learns the leader epoch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import structlog
from typing_extensions import override

from common.pb import internal_pb2, internal_pb2_grpc
from common.refusal_log import RefusalLog
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.installed_version import penstock_version
from jobmanager.results.results_store import ResultsOverflow, ResultsStore
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.config import Configuration
from penstock.errors import Fenced, StoreTransient, StreamError

_PUSH_MARGIN_S = 0.25
_PUSH_WAIT_MAX_S = 60.0


class JobManagerInternalServicer(internal_pb2_grpc.JobManagerInternalServicer):
    """Service ``JobManagerInternal``; errors become statuses in ``ErrorServerInterceptor``."""

    def __init__(
        self,
        config: Configuration,
        dispatcher: DispatcherRunner,
        cluster: ClusterRunner,
        artifacts: ArtifactStore,
        results: ResultsStore,
        leader: LeaderStore,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._cluster = cluster
        self._artifacts = artifacts
        self._results = results
        self._leader = leader
        self._refusals = RefusalLog(structlog.get_logger(__name__))

    @override
    async def RegisterTaskManager(
        self, request: internal_pb2.RegisterTaskManagerRequest, context: Any
    ) -> internal_pb2.RegisterTaskManagerResponse:
        try:
            kept_slot_ids = self._cluster.register(request)
        except StreamError as error:
            self._refusals.tell("taskmanager.refused", request.rpc_address, str(error))
            raise
        return internal_pb2.RegisterTaskManagerResponse(
            leader_epoch=self._leader.epoch,
            cluster_id=self._leader.cluster_id,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
            heartbeat_timeout_ms=self._config.heartbeat_timeout_ms,
            kept_slot_ids=kept_slot_ids,
            protocol_version=DAEMON_PROTOCOL_VERSION,
            version=penstock_version(),
        )

    @override
    async def Heartbeat(
        self, request: internal_pb2.HeartbeatRequest, context: Any
    ) -> internal_pb2.HeartbeatResponse:
        known = request.leader_epoch == self._leader.epoch and self._cluster.heartbeat(request)
        if known:
            self._dispatcher.note_metrics(request.metrics)
            self._cluster.partitions.release_unneeded(
                request.taskmanager_id, self._dispatcher.jobs.has_unended
            )
        return internal_pb2.HeartbeatResponse(
            known=known, leader_epoch=self._leader.epoch, cluster_id=self._leader.cluster_id
        )

    @override
    async def ReportTaskEvents(
        self, request: internal_pb2.ReportTaskEventsRequest, context: Any
    ) -> internal_pb2.ReportTaskEventsResponse:
        self._check_epoch(request.leader_epoch)
        if not self._cluster.is_registered(request.taskmanager_id, request.incarnation):
            raise Fenced(
                f"TaskManager {request.taskmanager_id} is not registered (any more): what it ran "
                "counts as failed; register again"
            )
        for event in request.events:
            if event.HasField("peer_unreachable"):
                self._cluster.peer_unreachable(request.taskmanager_id, event.peer_unreachable)
        await self._dispatcher.report(
            event for event in request.events if not event.HasField("peer_unreachable")
        )
        return internal_pb2.ReportTaskEventsResponse()

    @override
    async def PushResults(
        self, request: internal_pb2.PushResultsRequest, context: Any
    ) -> internal_pb2.PushResultsResponse:
        if request.leader_epoch != self._leader.epoch:
            # Its attempt may go on: that is known when its TaskManager has registered here.
            raise StoreTransient(
                f"leader epoch {request.leader_epoch} is over, this JobManager leads "
                f"{self._leader.epoch}: register, then push again"
            )
        remaining_s = context.time_remaining()
        wait_s = _PUSH_WAIT_MAX_S if remaining_s is None else max(0.0, remaining_s - _PUSH_MARGIN_S)
        try:
            satisfied = await self._results.push(
                request.job_id,
                request.collect_id,
                request.chunk,
                min(wait_s, _PUSH_WAIT_MAX_S),
                request.attempt,
            )
        except ResultsOverflow as error:
            # The slot that pushed must not look like the cause.
            self._dispatcher.fail(request.job_id, error)
            raise
        return internal_pb2.PushResultsResponse(satisfied=satisfied)

    @override
    async def DownloadArtifact(
        self, request: internal_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncIterator[internal_pb2.ArtifactData]:
        async for piece in self._artifacts.download(request.id):
            yield internal_pb2.ArtifactData(data=piece)

    @override
    async def Goodbye(
        self, request: internal_pb2.GoodbyeRequest, context: Any
    ) -> internal_pb2.GoodbyeResponse:
        self._cluster.goodbye(request)
        return internal_pb2.GoodbyeResponse()

    def _check_epoch(self, leader_epoch: int) -> None:
        if leader_epoch != self._leader.epoch:
            raise Fenced(
                f"leader epoch {leader_epoch} is over, this JobManager leads {self._leader.epoch}"
            )
