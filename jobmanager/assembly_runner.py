"""A JobManager that serves: the one place where its parts are put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.clock import Clock
from common.daemon_metrics import TokenCollector
from common.daemon_server import DaemonServer
from common.log_keeper import LogKeeper
from common.metrics_server import Pages
from common.pb import internal_pb2, internal_pb2_grpc
from common.tls.certificates_store import show_certificates
from common.tls.daemon_tls_runner import DaemonTls
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.dispatcher.drains_runner import DrainsRunner
from jobmanager.dispatcher.failure_enricher_loader import load_failure_labels
from jobmanager.leadership.leadership_metrics import LeadershipCollector
from jobmanager.leadership.leadership_numbers import LeadershipNumbers
from jobmanager.metrics import build_registry
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.leader_news_client import LeaderNewsClient
from jobmanager.rpc.open_ports_runner import OpenPorts, open_ports
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.scheduler.shared_spill_runner import shared_spill
from jobmanager.servicers.internal_servicer import JobManagerInternalServicer
from jobmanager.servicers.jobmanager_servicer import JobManagerServicer
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.directory_lock import DirectoryLock
from jobmanager.stores.drains_store import DrainsStore
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LeaderStore
from jobmanager.traces.reporter_loader import Traces, load_reporter
from jobmanager.traces.span import ReportSpan
from penstock.client.keyring import Keyring, Token
from penstock.config import Configuration
from penstock.pb import client_pb2_grpc
from penstock.storage.open_store import is_s3, open_store, use_s3
from penstock.storage.store_names import substore

ROLE = "jobmanager"
_SERVER_GRACE_S = 0.5
_SWEEP_PAUSE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunningJobManager:
    """A JobManager that serves.

    Attributes:
        report_span: takes what is traced; None = nothing is.
    """

    ports: OpenPorts
    report_span: ReportSpan | None
    dispatcher: DispatcherRunner
    cluster: ClusterRunner


@asynccontextmanager
async def serving(
    config: Configuration, directory: Path, clock: Clock, tls: DaemonTls | None = None
) -> AsyncIterator[RunningJobManager]:
    """The one JobManager of a directory, for the time of the block.

    Args: as ``leading``.

    Raises:
        StreamError: a port, a file or a setting is not to be had.
    """
    kept = str(directory / "jobmanager")
    storage = config.jobmanager_storage_dir or str(directory)
    lock = await asyncio.to_thread(DirectoryLock, Path(kept))
    try:
        leader = LeaderStore(open_store(kept), kept)
        await asyncio.to_thread(leader.take_over)
        ports = await open_ports(config, directory, tls)
        try:
            alone = LeadershipNumbers()
            async with leading(
                config, directory, clock, leader, kept, storage, ports, alone, tls
            ) as jobmanager:
                yield jobmanager
        finally:
            await ports.close()
    finally:
        lock.close()


@asynccontextmanager
async def leading(
    config: Configuration,
    directory: Path,
    clock: Clock,
    leader: LeaderStore,
    kept: str,
    storage: str,
    ports: OpenPorts,
    numbers: LeadershipNumbers,
    tls: DaemonTls | None = None,
    hand_over: Callable[[], Coroutine[None, None, None]] | None = None,
) -> AsyncIterator[RunningJobManager]:
    """A JobManager that leads, for the time of the block; then running jobs are left or fail, and nobody is answered.

    Args:
        config: of the cluster.
        leader: it, as LEADER knows it.
        kept: the store of what the JobManagers of the cluster keep.
        storage: that of uploaded code and data.
        ports: where it answers as soon as it can, in place of whoever does.
        numbers: what is known of the election.
        hand_over: lets another one lead, as soon as nothing of any job is under way here.

    Raises:
        StreamError: a port, a file or a setting is not to be had.
    """
    use_s3(lambda: config.s3)
    artifacts = await asyncio.to_thread(_artifacts, storage)
    try:
        results = ResultsStore()
        cluster = _cluster(config, ports, leader, tls, clock)
        traces = load_reporter(config, leader.cluster_id)
        store = _job_store(kept, leader)
        dispatcher = _dispatcher(config, cluster, artifacts, store, results, clock, traces)
        drains = _drains(dispatcher, cluster, kept, leader)
        ports.show(_pages(config, dispatcher, cluster, leader, numbers, ports.keyring))
        async with _acting(_log_keeper(config, directory), cluster, dispatcher, drains):
            _serve(
                ports.server,
                JobManagerServicer(dispatcher, cluster, drains, artifacts, results, leader),
                JobManagerInternalServicer(config, dispatcher, cluster, artifacts, results, leader),
            )
            await ports.server.start()
            cluster.note_answering()
            try:
                yield RunningJobManager(ports, traces.report, dispatcher, cluster)
            finally:
                await dispatcher.stop()
                await _hand_over(ports.server, hand_over)
                traces.close()
    finally:
        artifacts.close()


async def _hand_over(
    server: DaemonServer, hand_over: Callable[[], Coroutine[None, None, None]] | None
) -> None:
    """Another one leads while the last calls here are answered."""
    async with asyncio.TaskGroup() as ends:
        ends.create_task(server.stop(_SERVER_GRACE_S))
        if hand_over is not None:
            ends.create_task(hand_over())


def _serve(
    server: DaemonServer,
    for_clients: JobManagerServicer,
    for_taskmanagers: JobManagerInternalServicer,
) -> None:
    server.serve(
        partial(client_pb2_grpc.add_JobManagerServicer_to_server, for_clients),
        partial(internal_pb2_grpc.add_JobManagerInternalServicer_to_server, for_taskmanagers),
    )


@asynccontextmanager
async def _acting(
    log_keeper: LogKeeper,
    cluster: ClusterRunner,
    dispatcher: DispatcherRunner,
    drains: DrainsRunner,
) -> AsyncIterator[None]:
    """The actors, which run until the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        actors = [tasks.create_task(log_keeper.run())]
        for actor in (cluster, dispatcher, drains):
            started = asyncio.Event()
            actors.append(tasks.create_task(actor.run(started)))
            await started.wait()
        try:
            yield
        finally:
            for task in reversed(actors):
                task.cancel()


def _job_store(kept: str, leader: LeaderStore) -> JobStore:
    jobs = substore(kept, "jobs")
    return JobStore(open_store(jobs), jobs, leader)


def _drains(
    dispatcher: DispatcherRunner, cluster: ClusterRunner, kept: str, leader: LeaderStore
) -> DrainsRunner:
    store = DrainsStore(open_store(kept), kept, leader)
    return DrainsRunner(dispatcher.jobs, cluster, store)


def _artifacts(storage: str) -> ArtifactStore:
    """A listing costs the more the larger the bucket, and nobody waits for what is swept."""
    pause_s = _SWEEP_PAUSE_S if is_s3(storage) else 0.0
    return ArtifactStore(open_store(substore(storage, "artifacts")), pause_s)


def _dispatcher(
    config: Configuration,
    cluster: ClusterRunner,
    artifacts: ArtifactStore,
    store: JobStore,
    results: ResultsStore,
    clock: Clock,
    traces: Traces,
) -> DispatcherRunner:
    labels = load_failure_labels(config.jobmanager_failure_enrichers)
    return DispatcherRunner(
        config, cluster, artifacts, store, results, clock, labels, traces.report
    )


def _cluster(
    config: Configuration,
    ports: OpenPorts,
    leader: LeaderStore,
    tls: DaemonTls | None,
    clock: Clock,
) -> ClusterRunner:
    news = internal_pb2.HearOfLeaderRequest(
        leader_epoch=leader.epoch, cluster_id=leader.cluster_id, rpc_address=ports.address
    )
    tell_leader = LeaderNewsClient(news, ports.keyring, tls).tell
    connect = _connect(config, ports.keyring, leader, tls)
    cluster = ClusterRunner(config, connect, clock, tell_leader)
    spill = shared_spill(config.taskmanager_spill_shared_dir, leader.cluster_id)
    cluster.partitions.shared = spill
    return cluster


def _connect(
    config: Configuration, token: Token, leader: LeaderStore, tls: DaemonTls | None
) -> Callable[[str, str, str], TaskManagerClient]:
    def connect(taskmanager_id: str, address: str, incarnation: str) -> TaskManagerClient:
        return TaskManagerClient(
            taskmanager_id,
            address,
            token=token,
            leader_epoch=leader.epoch,
            rpc_timeout_ms=config.rpc_timeout_ms,
            silence_max_ms=config.heartbeat_timeout_ms,
            incarnation=incarnation,
            tls=tls,
        )

    return connect


def _log_keeper(config: Configuration, directory: Path) -> LogKeeper:
    return LogKeeper(
        lambda: (directory / "logs").glob(f"{ROLE}-{config.jobmanager_id}*"),
        config.jobmanager_logs_max_bytes,
        lambda _path: True,
    )


def _pages(
    config: Configuration,
    dispatcher: DispatcherRunner,
    cluster: ClusterRunner,
    leader: LeaderStore,
    numbers: LeadershipNumbers,
    keyring: Keyring,
) -> Pages:
    registry = build_registry(dispatcher, cluster)
    registry.register(TokenCollector(ROLE, keyring))
    show_certificates(registry, ROLE, config)
    registry.register(LeadershipCollector(lambda: leader.epoch, numbers))
    status = "serving" if config.high_availability_type == "none" else "leader; serving"
    return Pages(registry, lambda: dispatcher.why_not_serving, lambda: status)
