"""The TaskManager daemon: puts its parts together, serves, and undoes everything at its end.

    python -P -m taskmanager --dir DIR [-D key=value ...] [--jobmanager HOST:PORT[,HOST:PORT]]

Everything that is started is undone in reverse order when the daemon is told to end, when it cannot
go on, and when it fails while starting: slots, forkserver, server, registration file, directories.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from common.auth import load_token, require_token
from common.clock import SystemClock
from common.grpc_server import make_server
from common.log import configure_logging, get_logger
from common.log_keeper import LogKeeper
from common.metrics import AttemptMetricsCollector
from common.metrics_server import METRICS_OFF, MetricsServer
from common.pb import internal_pb2
from common.pb.internal_pb2_grpc import add_TaskManagerInternalServicer_to_server
from common.process import (
    DaemonArguments,
    DaemonRegistration,
    adopt_orphans,
    host_id,
    keep_private,
    owned_by_parent,
    parse_daemon_arguments,
    stop_requests,
)
from penstock.client.addresses import format_address
from penstock.config import Configuration
from penstock.errors import ConfigurationError, StreamError
from penstock.local.owned_directories import (
    OwnedDirectory,
    create_runtime_directory,
    sweep_runtime_directories,
    sweep_work_directories,
)
from penstock.storage.private_directories import make_private
from taskmanager.daemon.disk_guard import DiskLimits
from taskmanager.daemon.disk_guard_runner import DiskGuardRunner
from taskmanager.daemon.identity import identify, new_taskmanager_id
from taskmanager.daemon.local_state_runner import LocalStateKeeper, local_state_roots
from taskmanager.daemon.made_token_runner import await_made_token
from taskmanager.daemon.partition_keeper_runner import PartitionKeeper
from taskmanager.daemon.partition_server_runner import PartitionServerRunner
from taskmanager.daemon.slot_environment import slot_variables
from taskmanager.daemon.spill_directory import own_spill_directory
from taskmanager.processes.background import Background
from taskmanager.processes.fork_child import TERMINAL_VARIABLE
from taskmanager.processes.forkserver_runner import ForkserverRunner
from taskmanager.rpc.jobmanager_client import JobManagerClient
from taskmanager.rpc.registration_runner import RegistrationRunner
from taskmanager.rpc.result_forwarder_runner import ResultForwarder
from taskmanager.rpc.taskmanager_servicer import TaskManagerServicer
from taskmanager.slots.artifact_store import ArtifactStore
from taskmanager.slots.requirements import installed_packages
from taskmanager.slots.slot_supervisor_runner import SlotEnvironment, SlotSupervisor
from taskmanager.slots.slot_table import SlotTable

_ROLE = "taskmanager"
_GOODBYE_TIMEOUT_S = 0.5
_SERVER_GRACE_S = 0.2
_STDOUT = 1

_Gauges = Sequence[tuple[str, str, Callable[[], float]]]
"""Name without its prefix, description, value."""


@dataclass(frozen=True, slots=True)
class _Directories:
    """What this TaskManager owns on disk: files of slots, sockets, partitions."""

    work: Path
    runtime: Path
    spill: Path


@dataclass(frozen=True, slots=True)
class _Metrics:
    """Where metrics are put, and where they are served, "" for nowhere."""

    registry: CollectorRegistry
    address: str


class TaskManagerDaemon:
    """One TaskManager.

    Args:
        arguments: the command line.
        config: the configuration.
        taskmanager_id: its name in the cluster.
        environment: environment variables.
        forkserver_arguments: for tests that run other code in slots.
        user_umask: of slots, whose files are the user's; -1 = as this process has it.
    """

    def __init__(
        self,
        arguments: DaemonArguments,
        config: Configuration,
        taskmanager_id: str,
        environment: Mapping[str, str],
        forkserver_arguments: Sequence[str] = (),
        user_umask: int = -1,
    ) -> None:
        self._user_umask = user_umask
        self._directory = arguments.directory
        self._jobmanagers = arguments.jobmanager_addresses(config)
        self._config = config
        self._id = taskmanager_id
        self._environment = environment
        self._forkserver_arguments = forkserver_arguments
        self._registration: RegistrationRunner | None = None
        self._log = get_logger(__name__)

    def _why_not_serving(self) -> str:
        """For health checks; any thread may ask."""
        if self._registration is None:
            return "the TaskManager is starting, or stopping"
        return "" if self._registration.registration else "no JobManager has registered it"

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            StreamError: it cannot start, or the JobManager does not take it.
        """
        async with AsyncExitStack() as resources:
            # First, so that a port that cannot be had is told though there is no JobManager yet.
            metrics = self._start_metrics(resources)
            token = await self._token()
            work = self._own_directories(resources)
            spill = self._own_spill_directory(resources, work.path)
            runtime = create_runtime_directory(f"{os.getpid()}-{secrets.token_hex(4)}")
            resources.callback(runtime.remove)
            async with asyncio.TaskGroup() as group, AsyncExitStack() as services:
                directories = _Directories(work.path, runtime.path, spill.path)
                failed = await self._start(group, services, directories, token, metrics)
                raise await failed

    async def _token(self) -> str:
        """The secret that was given, else the one that the JobManager has made for this user."""
        config = self._config
        token = load_token(config.security_token_file, self._environment)
        require_token(config.taskmanager_bind_host, token, "taskmanager.bind-host")
        if token or config.security_open_loopback:
            return token
        return await await_made_token(self._jobmanagers, self._directory)

    def _own_directories(self, resources: AsyncExitStack) -> OwnedDirectory:
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in (*sweep_runtime_directories(), *sweep_work_directories(self._directory)):
            self._log.info("directory.swept", path=str(path))
        work = OwnedDirectory.create(self._directory / f"{_ROLE}-{self._id}")
        resources.callback(work.remove)
        return work

    def _own_spill_directory(self, resources: AsyncExitStack, work: Path) -> OwnedDirectory:
        spill, swept = own_spill_directory(self._config.taskmanager_spill_dir, work, self._id)
        resources.callback(spill.remove)
        for path in swept:
            self._log.info("directory.swept", path=str(path))
        return spill

    async def _start(
        self,
        group: asyncio.TaskGroup,
        services: AsyncExitStack,
        directories: _Directories,
        token: str,
        metrics: _Metrics,
    ) -> asyncio.Future[Exception]:
        """Starts everything; ``services`` knows how to end it.

        Returns:
            Resolved with the error when the daemon cannot go on.
        """
        config, clock, background = self._config, SystemClock(), Background(group)
        logs = self._directory / "logs"
        forkserver = ForkserverRunner(
            slot_variables(self._environment, self._directory / "cache"),
            logs / f"{_ROLE}-{self._id}-forkserver.log",
            self._forkserver_arguments,
            user_umask=self._user_umask,
        )
        services.push_async_callback(forkserver.stop)
        await forkserver.start()
        own_host_id = host_id(config.taskmanager_host, directories.runtime.parent)
        server = PartitionServerRunner(
            self._server_configuration(directories, own_host_id, token),
            logs / f"{_ROLE}-{self._id}-partition-server.log",
            forkserver,
            clock,
        )
        services.push_async_callback(server.stop)
        partition_endpoint = await server.start()

        client = JobManagerClient(self._jobmanagers, token, config.rpc_timeout_ms / 1000)
        services.push_async_callback(client.close)
        packages = await asyncio.to_thread(installed_packages)
        table = SlotTable(config.taskmanager_slots)
        local_state = local_state_roots(config.local_backup_directories, self._directory, self._id)
        for root in local_state if config.writes_local_copies else ():
            make_private(root)

        def report_event(event: internal_pb2.TaskEvent) -> None:
            registration.report(event)

        supervisor = SlotSupervisor(
            environment=SlotEnvironment(
                taskmanager_id=self._id,
                host_id=own_host_id,
                config=config,
                log_directory=logs / "jobs",
                socket_directory=directories.runtime,
                work_directory=directories.work,
                spill_directory=directories.spill,
                local_state=local_state,
                packages=packages,
                terminal_fd=self._terminal(),
                token=token,
            ),
            table=table,
            forkserver=forkserver,
            artifacts=ArtifactStore(directories.work, client.download_artifact, background),
            background=background,
            clock=clock,
            report_event=report_event,
            take_results=ResultForwarder(client, background, lambda: table.leader_epoch).take,
        )

        async def follow(cluster_id: str, leader_epoch: int) -> None:
            await supervisor.drop(
                table.follow(cluster_id, leader_epoch),
                f"leader epoch {leader_epoch} of cluster {cluster_id} has begun",
            )

        async def enter(leader_epoch: int, incarnation: str) -> None:
            # The JobManager may call before its answer to the registration has arrived.
            await registration.wait_registered()
            table.check_epoch(leader_epoch)
            registration.check_incarnation(incarnation)

        keeper = PartitionKeeper(
            directory=directories.spill,
            server=server,
            clock=clock,
            grace_ms=config.taskmanager_partitions_grace_ms,
            is_registered=lambda: registration.registration is not None,
            writing=supervisor.writing,
        )
        local_state_keeper = LocalStateKeeper(
            local_state,
            clock,
            config.taskmanager_local_state_retention_ms,
            has_slots=lambda job_id: any(holder == job_id for _, holder in table.holders()),
        )
        guard = DiskGuardRunner(
            directories.spill,
            DiskLimits(
                config.taskmanager_spill_min_free_bytes,
                config.taskmanager_spill_hard_min_free_bytes,
                config.taskmanager_spill_wait_timeout_ms,
            ),
            clock,
            supervisor.set_spilling,
        )
        await guard.look()
        log_keeper = LogKeeper(
            lambda: (*logs.glob(f"{_ROLE}-{self._id}*"), *(logs / "jobs").glob("*/*.log*")),
            config.taskmanager_logs_max_bytes,
            # Of a job that has no slot here nobody writes any more.
            lambda path: (
                path.parent == logs
                or any(job_id == path.parent.name for _, job_id in table.holders())
            ),
        )

        rpc_server = make_server(token)
        add_TaskManagerInternalServicer_to_server(
            TaskManagerServicer(
                supervisor, keeper, partition_endpoint, local_state_keeper, enter, logs / "jobs"
            ),
            rpc_server,
        )
        port = self._bind(rpc_server)
        address = format_address(config.taskmanager_host, port)
        registration = RegistrationRunner(
            identity=identify(
                self._id, address, config.taskmanager_slots, packages, partition_endpoint
            ),
            client=client,
            clock=clock,
            grace_s=config.taskmanager_jobmanager_grace_ms / 1000,
            new_incarnation=lambda: secrets.token_hex(8),
            metrics=supervisor.metrics,
            held_slots=supervisor.held_slots,
            held_partitions=lambda: keeper.held,
            spill_bytes=lambda: keeper.spill_bytes,
            follow=follow,
            drop_all=supervisor.drop_all,
        )
        await rpc_server.start()
        self._registration = registration
        services.push_async_callback(rpc_server.stop, _SERVER_GRACE_S)
        gauges: _Gauges = (
            ("slots", "Slots of this TaskManager.", lambda: table.capacity),
            ("slots_free", "Slots that no job has.", lambda: table.free_count),
            (
                "forkserver_restarts",
                "Fork servers that had to be replaced since the start.",
                lambda: forkserver.restart_count,
            ),
            (
                "partition_server_restarts",
                "Partition servers that had to be replaced since the start.",
                lambda: server.restart_count,
            ),
            (
                "dropped_events",
                "Events of tasks that were dropped because the JobManager did not take them.",
                lambda: registration.dropped_events,
            ),
            (
                "held_partitions",
                "Complete result partitions on disk.",
                lambda: keeper.held.count,
            ),
            (
                "spill_bytes",
                "Files of result partitions, complete or not.",
                lambda: keeper.spill_bytes,
            ),
            (
                "spill_free_bytes",
                "Free space on the disk of the spill directory.",
                lambda: guard.free_bytes,
            ),
        )
        metrics.registry.register(AttemptMetricsCollector(supervisor.named_metrics))
        for name, help_text, read in gauges:
            gauge = Gauge(f"penstock_taskmanager_{name}", help_text, registry=metrics.registry)
            gauge.set_function(read)
        registration_file = DaemonRegistration(self._directory, _ROLE, self._id)
        services.callback(registration_file.remove)
        registration_file.write(address, metrics.address)

        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        def start(name: str, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return group.create_task(_until_failed(loop, failed), name=name)

        processes = [
            start("forkserver", forkserver.run()),
            start("partition server", server.run()),
        ]
        watches = [
            start("registration", registration.run()),
            start("partitions", keeper.run()),
            start("disk guard", guard.run()),
            start("local state", local_state_keeper.run()),
            start("logs", log_keeper.run()),
        ]

        async def end() -> None:
            self._registration = None
            has_failed = failed.done() and not failed.cancelled()
            reason = str(failed.result()) if has_failed else "the TaskManager was told to end"
            # The loops first: what ends now must be neither started nor registered again.
            await registration.say_goodbye(reason, _GOODBYE_TIMEOUT_S, is_planned=not has_failed)
            for loop in watches:
                loop.cancel()
            await supervisor.drop_all(reason)
            for loop in processes:
                loop.cancel()
            await asyncio.wait([*watches, *processes])

        services.push_async_callback(end)
        self._log.info("taskmanager.started", id=self._id, address=address, pid=os.getpid())
        return failed

    def _server_configuration(
        self, directories: _Directories, own_host_id: str, token: str
    ) -> internal_pb2.SlotConfiguration:
        """What the partition server is told: a slot without a job, for every leader."""
        config = self._config
        unix_path = directories.runtime / "partitions.sock"
        return internal_pb2.SlotConfiguration(
            slot_id=f"partitions-{self._id}",
            taskmanager_id=self._id,
            host_id=own_host_id,
            unix_socket_path=str(unix_path) if config.taskmanager_local_sockets else "",
            tcp_bind_host=config.taskmanager_bind_host,
            tcp_advertised_host=config.taskmanager_host,
            config=config.to_mapping(),
            token=token,
            spill_directory=str(directories.spill),
        )

    def _bind(self, server: grpc.aio.Server) -> int:
        wanted = format_address(
            self._config.taskmanager_bind_host, self._config.taskmanager_rpc_port
        )
        try:
            return server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise ConfigurationError(
                f"the TaskManager cannot listen on {wanted}: the port is in use or the address is "
                "not this machine's; choose another taskmanager.rpc.port (0 takes a free one) or "
                "taskmanager.bind-host"
            ) from error

    def _start_metrics(self, resources: AsyncExitStack) -> _Metrics:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        metrics = MetricsServer(
            registry,
            self._config.taskmanager_bind_host,
            self._config.taskmanager_metrics_port,
            "taskmanager.metrics.port",
            why_not_serving=self._why_not_serving,
        )
        port = metrics.start()
        resources.push_async_callback(asyncio.to_thread, metrics.stop)
        is_off = port == METRICS_OFF
        return _Metrics(
            registry, "" if is_off else format_address(self._config.taskmanager_host, port)
        )

    def _terminal(self) -> int | None:
        """Descriptor that print sinks write to besides their logs."""
        if not self._config.print_to_terminal:
            return None
        text = self._environment.get(TERMINAL_VARIABLE, str(_STDOUT))
        try:
            descriptor = int(text)
            os.fstat(descriptor)
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"{TERMINAL_VARIABLE}={text} is no open file descriptor of this process"
            ) from error
        return descriptor


async def _until_failed(loop: Coroutine[Any, Any, None], failed: asyncio.Future[Exception]) -> None:
    try:
        await loop
    except StreamError as error:
        if not failed.done():
            failed.set_result(error)


async def _run(daemon: TaskManagerDaemon) -> None:
    """Runs the daemon until a signal or its parent's end asks it to stop."""
    with stop_requests() as stop:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(daemon.run(), name="taskmanager")
            stopping = group.create_task(stop.wait(), name="stop")
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            stopping.cancel()


def main(argv: Sequence[str] | None = None, forkserver_arguments: Sequence[str] = ()) -> int:
    """Runs the TaskManager.

    Args:
        argv: the command line without the program's name.
        forkserver_arguments: for tests that run other code in slots.

    Returns:
        0 when it was told to end, 1 when it could not start or go on, 2 for wrong use.
    """
    log = get_logger(__name__)
    try:
        arguments = parse_daemon_arguments(_ROLE, sys.argv[1:] if argv is None else argv)
        config = arguments.load_configuration()
        taskmanager_id = new_taskmanager_id(config)
        user_umask = keep_private(arguments.directory)
        log_file = arguments.directory / "logs" / f"{_ROLE}-{taskmanager_id}.log"
        configure_logging(_ROLE, log_file, config.log_level)
    except StreamError as error:
        print(f"taskmanager: {error}", file=sys.stderr)  # noqa: T201 - there is no log yet
        return 2
    try:
        daemon = TaskManagerDaemon(
            arguments, config, taskmanager_id, os.environ, forkserver_arguments, user_umask
        )
        adopt_orphans()  # of a forkserver that was killed
        with owned_by_parent(arguments.directory):
            asyncio.run(_run(daemon))
    except* StreamError as failures:
        reasons = [str(failure) for failure in _leaves(failures)]
    else:
        reasons = []
    for reason in reasons:
        log.error("taskmanager.failed", reason=reason)
    log.info("taskmanager.stopped")
    return 1 if reasons else 0


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
