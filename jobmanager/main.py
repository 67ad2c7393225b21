"""The JobManager daemon: the one place where its parts are put together."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import structlog

from common.auth import load_token, require_token
from common.clock import Clock, SystemClock
from common.grpc_server import make_server
from common.log import configure_logging
from common.log_keeper import LogKeeper
from common.metrics_server import METRICS_OFF, MetricsServer
from common.pb import internal_pb2_grpc
from common.process import (
    DaemonRegistration,
    keep_private,
    owned_by_parent,
    parse_daemon_arguments,
    stop_requests,
)
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.dispatcher.failure_enricher_loader import load_failure_labels
from jobmanager.metrics import build_registry
from jobmanager.results.results_store import ResultsStore
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler.cluster_runner import ClusterRunner
from jobmanager.servicers.internal_servicer import JobManagerInternalServicer
from jobmanager.servicers.jobmanager_servicer import JobManagerServicer
from jobmanager.stores.artifact_store import ArtifactStore
from jobmanager.stores.directory_lock import DirectoryLock
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.client.addresses import format_address
from penstock.client.announced_tokens import Announcement
from penstock.client.credentials import make_own_token
from penstock.config import Configuration
from penstock.errors import StreamError
from penstock.pb import client_pb2_grpc
from penstock.storage.open_store import open_store, substore, use_s3

ROLE = "jobmanager"
_ID = "1"  # one JobManager per directory: ``DirectoryLock``
_SERVER_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class RunningJobManager:
    """A JobManager that serves.

    Attributes:
        port: of the gRPC server.
        metrics_port: of Prometheus' endpoint, ``METRICS_OFF`` where there is none.
        made_token_file: holds the token that it has made for its user, None where it was given one.
    """

    port: int
    metrics_port: int
    made_token_file: Path | None
    dispatcher: DispatcherRunner
    cluster: ClusterRunner


@asynccontextmanager
async def serving(
    config: Configuration, directory: Path, clock: Clock
) -> AsyncIterator[RunningJobManager]:
    """A JobManager for the time of the block; at its end running jobs fail and everything is closed.

    Args:
        config: of the cluster.
        directory: the daemon's directory.
        clock: where the time comes from.

    Raises:
        StreamError: a port, a file or a setting is not to be had.
    """
    use_s3(lambda: config.s3)
    token, made_token_file = load_token(config.security_token_file), None
    require_token(config.jobmanager_bind_host, token, "jobmanager.bind-host")
    storage = Path(config.jobmanager_storage_dir) if config.jobmanager_storage_dir else directory
    kept = directory / "jobmanager"
    lock = DirectoryLock(kept)
    try:
        leader = LeaderStore(open_store(str(kept)), str(kept))
        await asyncio.to_thread(leader.take_over)
        jobs = substore(str(kept), "jobs")
        store = JobStore(open_store(jobs), jobs, leader)
        if not token and not config.security_open_loopback:
            made_token_file = make_own_token(directory)
            token = load_token(str(made_token_file))
        artifacts = ArtifactStore(storage / "artifacts")
        results = ResultsStore()
        labels = load_failure_labels(config.jobmanager_failure_enrichers)

        def connect(taskmanager_id: str, address: str, incarnation: str) -> TaskManagerClient:
            return TaskManagerClient(
                taskmanager_id,
                address,
                token=token,
                leader_epoch=leader.epoch,
                rpc_timeout_ms=config.rpc_timeout_ms,
                silence_max_ms=config.heartbeat_timeout_ms,
                incarnation=incarnation,
            )

        cluster = ClusterRunner(config, connect, clock)
        dispatcher = DispatcherRunner(config, cluster, artifacts, store, results, clock, labels)
        server = make_server(token)
        client_pb2_grpc.add_JobManagerServicer_to_server(
            JobManagerServicer(dispatcher, cluster, artifacts, results, leader), server
        )
        internal_pb2_grpc.add_JobManagerInternalServicer_to_server(
            JobManagerInternalServicer(config, dispatcher, cluster, artifacts, results, leader),
            server,
        )
        log_keeper = LogKeeper(
            lambda: (directory / "logs").glob(f"{ROLE}-{_ID}*"),
            config.jobmanager_logs_max_bytes,
            lambda _path: True,
        )
        metrics = MetricsServer(
            build_registry(dispatcher, cluster),
            config.jobmanager_bind_host,
            config.jobmanager_metrics_port,
            "jobmanager.metrics.port",
            why_not_serving=lambda: dispatcher.why_not_serving,
        )
        try:
            port = _bind(server, config.jobmanager_bind_host, config.jobmanager_rpc_port)
            metrics_port = metrics.start()
            async with asyncio.TaskGroup() as tasks:
                actors = []
                actors.append(tasks.create_task(log_keeper.run()))
                for actor in (cluster, dispatcher):
                    started = asyncio.Event()
                    actors.append(tasks.create_task(actor.run(started)))
                    await started.wait()
                await server.start()
                try:
                    yield RunningJobManager(
                        port, metrics_port, made_token_file, dispatcher, cluster
                    )
                finally:
                    await dispatcher.stop()
                    await server.stop(_SERVER_GRACE_S)
                    for task in reversed(actors):
                        task.cancel()
        finally:
            await server.stop(None)
            metrics.stop()
            artifacts.close()
    finally:
        lock.close()


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Binds the server's port and returns it.

    Raises:
        StreamError: the port cannot be had, and why.
    """
    try:
        bound = server.add_insecure_port(format_address(host, port))
    except RuntimeError:
        bound = 0
    if bound:
        return bound
    reason = _why_not(host, port)
    if reason == errno.EADDRINUSE:
        raise StreamError(
            f"port {port} on {host} is in use: stop what listens there (another JobManager?), or "
            "choose another one with -D jobmanager.rpc.port=PORT (0 takes a free one)"
        )
    text = "the name is unknown" if reason is None else errno.errorcode.get(reason, str(reason))
    raise StreamError(
        f"the JobManager cannot listen on {format_address(host, port)} ({text}): check "
        "jobmanager.bind-host and jobmanager.rpc.port"
    )


def _why_not(host: str, port: int) -> int | None:
    """The error of binding; gRPC does not tell it. None = the host cannot be resolved."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno
    return errno.EADDRINUSE  # it was, a moment ago


@contextmanager
def _announced(config: Configuration, jobmanager: RunningJobManager) -> Iterator[None]:
    """Tells this user's other processes where the token is that was made for them."""
    announcement: Announcement | None = None
    if jobmanager.made_token_file is not None:
        try:
            announcement = Announcement(
                config.jobmanager_rpc_address,
                config.jobmanager_bind_host,
                jobmanager.port,
                jobmanager.made_token_file.absolute(),
            )
        except (OSError, RuntimeError) as error:  # the latter: there is no home
            structlog.get_logger(__name__).warning(
                "token.not_announced",
                token_file=str(jobmanager.made_token_file),
                reason=str(error),
            )
    try:
        yield
    finally:
        if announcement is not None:
            announcement.remove()


async def run_daemon(config: Configuration, directory: Path) -> None:
    """Serves until it is asked to stop."""
    log = structlog.get_logger(__name__)
    with stop_requests() as stop:
        async with serving(config, directory, SystemClock()) as jobmanager:
            host = config.jobmanager_rpc_address
            address = format_address(host, jobmanager.port)
            metrics_address = (
                ""
                if jobmanager.metrics_port == METRICS_OFF
                else format_address(host, jobmanager.metrics_port)
            )
            registration = DaemonRegistration(directory, ROLE, _ID)
            with _announced(config, jobmanager):
                registration.write(address, metrics_address)
                try:
                    log.info("jobmanager.started", address=address, metrics_address=metrics_address)
                    await stop.wait()
                    log.info("jobmanager.stopping")
                finally:
                    registration.remove()
    log.info("jobmanager.stopped")


def main(argv: Sequence[str]) -> int:
    """Runs the daemon; returns its exit status."""
    try:
        arguments = parse_daemon_arguments(ROLE, argv)
        config = arguments.load_configuration()
        keep_private(arguments.directory)
        configure_logging(
            ROLE, arguments.directory / "logs" / f"{ROLE}-{_ID}.log", config.log_level
        )
    except StreamError as error:
        sys.stderr.write(f"jobmanager: {error}\n")
        return 2
    try:
        with owned_by_parent(arguments.directory):
            asyncio.run(run_daemon(config, arguments.directory))
    except StreamError as error:
        sys.stderr.write(f"jobmanager: {error}\n")
        return 1
    return 0
