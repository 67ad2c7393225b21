"""One TaskManager, put together: which parts there are, who knows whom, in what order they start."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from common.clock import SystemClock
from common.daemon_metrics import TokenCollector, show_gauge, show_uptime
from common.daemon_server import DaemonServer
from common.log_keeper import LogKeeper
from common.metrics import AttemptMetricsCollector
from common.pb import internal_pb2
from common.pb.internal_pb2_grpc import add_TaskManagerInternalServicer_to_server
from common.process import DaemonRegistration, host_id
from common.store_metrics import show_stores
from common.tls.certificates_store import show_certificates
from common.tls.daemon_tls_runner import DaemonTls
from penstock.client.addresses import format_address
from penstock.client.keyring import Keyring
from penstock.config import Configuration
from penstock.errors import ConfigurationError, InvariantViolation
from penstock.storage.private_directories import make_private
from taskmanager.daemon.disk_guard import DiskLimits
from taskmanager.daemon.disk_guard_runner import DiskGuardRunner
from taskmanager.daemon.helper_process_runner import HelperProcessRunner
from taskmanager.daemon.identity import identify
from taskmanager.daemon.local_state_runner import LocalStateKeeper, local_state_roots
from taskmanager.daemon.partition_keeper_runner import PartitionKeeper
from taskmanager.daemon.partition_server_runner import PartitionServerRunner
from taskmanager.daemon.parts_runner import DaemonPart, Loops
from taskmanager.daemon.slot_environment import slot_variables
from taskmanager.network.gateway import GATEWAY_SOCKET, Gateway
from taskmanager.partitions.spill_counts import SPILL, SpillCollector
from taskmanager.processes.background import Background
from taskmanager.processes.fork_protocol import ProcessKind
from taskmanager.processes.forkserver_runner import ForkserverRunner
from taskmanager.rpc.jobmanager_client import JobManagerClient
from taskmanager.rpc.registration_runner import RegistrationRunner
from taskmanager.rpc.result_forwarder_runner import ResultForwarder
from taskmanager.rpc.taskmanager_servicer import TaskManagerServicer
from taskmanager.slots.artifact_cache_store import ArtifactCache
from taskmanager.slots.slot_environment import SlotEnvironment
from taskmanager.slots.slot_supervisor_runner import SlotSupervisor
from taskmanager.slots.slot_table import SlotTable
from taskmanager.spark.left_sessions_runner import LeftSessions

ROLE = "taskmanager"
_GOODBYE_TIMEOUT_S = 0.5
_SERVER_GRACE_S = 0.2


@dataclass(frozen=True, slots=True)
class TaskManagerSite:
    """What a TaskManager is given.

    Attributes:
        taskmanager_id: its name in the cluster.
        keyring: the cluster's secret, if there is one.
        directory: of the daemon; logs and caches stay there.
        work: its own on disk, for files of slots.
        runtime: its own, for sockets.
        spill: its own, for partitions.
        packages: what is installed, with versions.
        terminal: descriptor that print sinks write to besides their logs, None = none.
        registry: where metrics are put.
        metrics_address: where they are served, "" = nowhere.
        forkserver_arguments: for tests that run other code in slots.
        user_umask: of slots, whose files are the user's; -1 = as this process has it.
        tls: of calls between daemons, None = they are plain.
        left_sessions: ends what slots have left on servers of Spark Connect.
    """

    taskmanager_id: str
    config: Configuration
    jobmanagers: tuple[str, ...]
    keyring: Keyring
    environment: Mapping[str, str]
    directory: Path
    work: Path
    runtime: Path
    spill: Path
    packages: dict[str, str]
    terminal: int | None
    registry: CollectorRegistry
    metrics_address: str
    forkserver_arguments: Sequence[str]
    user_umask: int
    tls: DaemonTls | None
    left_sessions: LeftSessions

    @property
    def host_id(self) -> str:
        """The same for all that can reach each other's sockets in the file system."""
        return host_id(self.config.taskmanager_host, self.runtime.parent)

    @property
    def logs(self) -> Path:
        """Where this daemon and its slots log."""
        return self.directory / "logs"

    @property
    def logs_of_jobs(self) -> Path:
        """Where slots log, by job."""
        return self.logs / "jobs"


class TaskManagerAssembly:
    """The parts of one TaskManager.

    Attributes:
        address: where calls are served, "" = not yet.
    """

    def __init__(self, site: TaskManagerSite, group: asyncio.TaskGroup) -> None:
        self._site = site
        self._clock = SystemClock()
        self._loops = Loops(group)
        self._registration: RegistrationRunner | None = None
        self._partition_endpoint = internal_pb2.DataEndpoint()
        self._is_ending = False
        self.address = ""
        config = site.config
        self._forkserver = ForkserverRunner(
            slot_variables(site.environment, site.directory / "cache"),
            site.logs / f"{ROLE}-{site.taskmanager_id}-forkserver.log",
            site.forkserver_arguments,
            user_umask=site.user_umask,
            kept_children=lambda: site.left_sessions.pids,
        )
        self._gateway: Gateway | None = None
        self._gateway_process = self._make_gateway()
        self._partition_server_configuration = _partition_server_configuration(site)
        self._partition_server = PartitionServerRunner(
            self._partition_server_configuration,
            site.logs / f"{ROLE}-{site.taskmanager_id}-partition-server.log",
            self._forkserver,
            self._clock,
            site.keyring,
        )
        self._client = JobManagerClient(
            site.jobmanagers, site.keyring, config.rpc_timeout_ms / 1000, site.tls
        )
        self._table = SlotTable(config.taskmanager_slots)
        self._local_state = local_state_roots(
            config.local_backup_directories, site.directory, site.taskmanager_id
        )
        self._supervisor = self._make_supervisor(Background(group))
        self._partition_keeper = PartitionKeeper(
            directory=site.spill,
            server=self._partition_server,
            clock=self._clock,
            grace_ms=config.taskmanager_partitions_grace_ms,
            is_registered=lambda: self._registered().registration is not None,
            writing=self._supervisor.writing,
        )
        self._local_state_keeper = LocalStateKeeper(
            self._local_state,
            self._clock,
            config.taskmanager_local_state_retention_ms,
            has_slots=self._has_slots,
        )
        self._disk_guard = DiskGuardRunner(
            site.spill,
            DiskLimits(
                config.taskmanager_spill_min_free_bytes,
                config.taskmanager_spill_hard_min_free_bytes,
                config.taskmanager_spill_wait_timeout_ms,
            ),
            self._clock,
            self._supervisor.set_spilling,
        )
        self._registration_file = DaemonRegistration(site.directory, ROLE, site.taskmanager_id)
        self._server = DaemonServer(site.keyring, site.tls)

    @property
    def failed(self) -> asyncio.Future[Exception]:
        """Resolved with the error when the daemon cannot go on."""
        return self._loops.failed

    def why_not_serving(self) -> str:
        """For health checks; any thread may ask."""
        registration = self._registration
        if registration is None or self._is_ending:
            return "the TaskManager is starting, or stopping"
        return "" if registration.registration else "no JobManager has registered it"

    def parts(self) -> list[DaemonPart]:
        """All parts, in the order in which they start; they stop in the reverse order.

        What watches stops first, and then slots: what ends must be neither started nor registered again.
        """
        loop = self._loops.part
        return [
            DaemonPart("calls to the JobManager", stop=self._client.close),
            DaemonPart("fork server", self._forkserver.start, self._forkserver.stop),
            *(
                [DaemonPart("gateway", self._open_gateway, self._gateway_process.stop)]
                if self._site.tls
                else []
            ),
            DaemonPart("partition server", self._serve_partitions, self._partition_server.stop),
            DaemonPart("directories of local state", self._make_local_state_private),
            DaemonPart("room on the disk", self._disk_guard.look),
            DaemonPart("serving", self._serve, partial(self._server.stop, _SERVER_GRACE_S)),
            DaemonPart("metrics", self._export),
            DaemonPart("registration file", self._write_registration, self._remove_registration),
            loop("watch over the fork server", self._forkserver.run),
            *(
                [loop("watch over the gateway", self._gateway_process.run)]
                if self._site.tls
                else []
            ),
            loop("watch over the partition server", self._partition_server.run),
            DaemonPart("slots", stop=lambda: self._supervisor.drop_all(self._why_it_ends())),
            loop("registration", lambda: self._registered().run()),
            loop("partitions", self._partition_keeper.run),
            loop("disk guard", self._disk_guard.run),
            loop("local state", self._local_state_keeper.run),
            loop("logs", self._log_keeper().run),
            DaemonPart("goodbye", stop=self._say_goodbye),
        ]

    # ------------------------------------------------------------ what parts are made of

    def _make_gateway(self) -> HelperProcessRunner:
        site = self._site
        return HelperProcessRunner(
            ProcessKind.GATEWAY,
            _gateway_configuration(site),
            site.logs / f"{ROLE}-{site.taskmanager_id}-gateway.log",
            self._forkserver,
            self._clock,
        )

    def _make_supervisor(self, background: Background) -> SlotSupervisor:
        site = self._site
        results = ResultForwarder(self._client, background, lambda: self._table.leader_epoch)
        return SlotSupervisor(
            environment=SlotEnvironment(
                taskmanager_id=site.taskmanager_id,
                host_id=site.host_id,
                config=site.config,
                log_directory=site.logs_of_jobs,
                socket_directory=site.runtime,
                work_directory=site.work,
                spill_directory=site.spill,
                local_state=self._local_state,
                packages=site.packages,
                terminal_fd=site.terminal,
                token=site.keyring,
                gateway=lambda: self._gateway,
                left_sessions=site.left_sessions,
            ),
            table=self._table,
            forkserver=self._forkserver,
            artifacts=ArtifactCache(site.work, self._client.download_artifact, background),
            background=background,
            clock=self._clock,
            report_event=lambda event: self._registered().report(event),
            take_results=results.take,
        )

    def _log_keeper(self) -> LogKeeper:
        logs, jobs = self._site.logs, self._site.logs_of_jobs
        own = f"{ROLE}-{self._site.taskmanager_id}*"
        return LogKeeper(
            lambda: (*logs.glob(own), *jobs.glob("*/*.log*")),
            self._site.config.taskmanager_logs_max_bytes,
            # Of a job that has no slot here nobody writes any more.
            lambda path: path.parent == logs or self._has_slots(path.parent.name),
        )

    def _has_slots(self, job_id: str) -> bool:
        return any(holder == job_id for _, holder in self._table.holders())

    # ------------------------------------------------------------ starting

    async def _make_local_state_private(self) -> None:
        for root in self._local_state if self._site.config.writes_local_copies else ():
            make_private(root)

    async def _open_gateway(self) -> None:
        endpoint = await self._gateway_process.start()
        self._gateway = Gateway(endpoint.unix_path, endpoint.tcp_port)
        self._partition_server_configuration.gateway_unix_path = endpoint.unix_path
        self._partition_server_configuration.gateway_port = endpoint.tcp_port

    async def _serve_partitions(self) -> None:
        self._partition_endpoint = await self._partition_server.start()

    async def _serve(self) -> None:
        """Takes calls of the JobManager, which may come before its answer to the registration has."""
        site, config = self._site, self._site.config
        servicer = TaskManagerServicer(
            self._supervisor,
            self._partition_keeper,
            self._partition_endpoint,
            self._local_state_keeper,
            self._enter,
            site.logs_of_jobs,
            lambda told: self._registered().hear_of_leader(told),
        )
        self._server.serve(partial(add_TaskManagerInternalServicer_to_server, servicer))
        port = _bind(self._server, config)
        self.address = format_address(config.taskmanager_host, port)
        self._registration = RegistrationRunner(
            identity=await asyncio.to_thread(
                identify,
                site.taskmanager_id,
                self.address,
                config.taskmanager_slots,
                site.packages,
                self._partition_endpoint,
            ),
            client=self._client,
            clock=self._clock,
            grace_s=config.jobmanager_grace_ms / 1000,
            new_incarnation=lambda: secrets.token_hex(8),
            metrics=self._supervisor.metrics,
            held_slots=self._supervisor.held_slots,
            held_attempts=self._supervisor.held_attempts,
            ended_attempts=self._supervisor.ended_attempts,
            held_partitions=lambda: self._partition_keeper.held,
            see_partitions=self._partition_keeper.see,
            spill_bytes=lambda: self._partition_keeper.spill_bytes,
            follow=self._follow,
            drop_all=self._supervisor.drop_all,
            event_arrived=self._supervisor.event_arrived,
        )
        await self._server.start()

    async def _follow(self, cluster_id: str, leader_epoch: int, kept: Sequence[str]) -> None:
        await self._supervisor.drop(
            self._table.follow(cluster_id, leader_epoch, kept),
            f"leader epoch {leader_epoch} of cluster {cluster_id} has begun",
        )

    async def _enter(self, leader_epoch: int, incarnation: str) -> None:
        registration = self._registered()
        await registration.wait_registered()
        self._table.check_epoch(leader_epoch)
        registration.check_incarnation(incarnation)

    async def _export(self) -> None:
        gauges: Mapping[str, tuple[str, Callable[[], float]]] = {
            "slots": ("Slots of this TaskManager.", lambda: self._table.capacity),
            "slots_free": ("Slots that no job has.", lambda: self._table.free_count),
            "forkserver_restarts": (
                "Fork servers that had to be replaced since the start.",
                lambda: self._forkserver.restart_count,
            ),
            "partition_server_restarts": (
                "Partition servers that had to be replaced since the start.",
                lambda: self._partition_server.restart_count,
            ),
            "gateway_restarts": (
                "TLS gateways that had to be replaced since the start.",
                lambda: self._gateway_process.restart_count,
            ),
            "heartbeat_age_seconds": (
                "Time since the JobManager has answered a heartbeat or a report.",
                lambda: self._registered().heartbeat_age_s,
            ),
            "dropped_events": (
                "Events of tasks that were dropped because the JobManager did not take them.",
                lambda: self._registered().dropped_events,
            ),
            "held_partitions": (
                "Complete result partitions on disk.",
                lambda: self._partition_keeper.held.count,
            ),
            "spill_bytes": (
                "Files of result partitions, complete or not.",
                lambda: self._partition_keeper.spill_bytes,
            ),
            "spill_free_bytes": (
                "Free space on the disk of the spill directory.",
                lambda: self._disk_guard.free_bytes,
            ),
        }
        registry = self._site.registry
        registry.register(AttemptMetricsCollector(self._supervisor.named_metrics))
        show_stores(registry)
        registry.register(SpillCollector(SPILL))
        show_uptime(registry, ROLE)
        show_certificates(registry, ROLE, self._site.config)
        registry.register(TokenCollector(ROLE, self._site.keyring))
        for name, (help_text, read) in gauges.items():
            show_gauge(registry, f"penstock_taskmanager_{name}", help_text, read)

    async def _write_registration(self) -> None:
        await asyncio.to_thread(
            self._registration_file.write, self.address, self._site.metrics_address
        )

    def _registered(self) -> RegistrationRunner:
        """Made before anything runs that asks for it."""
        if self._registration is None:
            raise InvariantViolation(
                "a part has asked for the registration before calls are served"
            )
        return self._registration

    # ------------------------------------------------------------ stopping

    async def _remove_registration(self) -> None:
        self._registration_file.remove()

    async def _say_goodbye(self) -> None:
        self._is_ending = True
        await self._registered().say_goodbye(
            self._why_it_ends(), _GOODBYE_TIMEOUT_S, is_planned=not self._has_failed
        )

    @property
    def _has_failed(self) -> bool:
        return self.failed.done() and not self.failed.cancelled()

    def _why_it_ends(self) -> str:
        return str(self.failed.result()) if self._has_failed else "the TaskManager was told to end"


def _gateway_configuration(site: TaskManagerSite) -> internal_pb2.SlotConfiguration:
    """What the gateway is told: a slot without a job."""
    return internal_pb2.SlotConfiguration(
        slot_id=f"gateway-{site.taskmanager_id}",
        taskmanager_id=site.taskmanager_id,
        host_id=site.host_id,
        unix_socket_path=str(site.runtime / GATEWAY_SOCKET),
        tcp_bind_host=site.config.taskmanager_bind_host,
        tcp_advertised_host=site.config.taskmanager_host,
        config=site.config.to_mapping(),
    )


def _partition_server_configuration(site: TaskManagerSite) -> internal_pb2.SlotConfiguration:
    """What the partition server is told: a slot without a job, for every leader."""
    config = site.config
    unix_path = site.runtime / "partitions.sock"
    return internal_pb2.SlotConfiguration(
        slot_id=f"partitions-{site.taskmanager_id}",
        taskmanager_id=site.taskmanager_id,
        host_id=site.host_id,
        unix_socket_path=str(unix_path) if config.taskmanager_local_sockets or site.tls else "",
        tcp_bind_host=config.taskmanager_bind_host,
        tcp_advertised_host=config.taskmanager_host,
        config=config.to_mapping(),
        spill_directory=str(site.spill),
    )


def _bind(server: DaemonServer, config: Configuration) -> int:
    host, port = config.taskmanager_bind_host, config.taskmanager_rpc_port
    wanted = format_address(host, port)
    try:
        return server.bind(host, port)
    except RuntimeError as error:
        raise ConfigurationError(
            f"the TaskManager cannot listen on {wanted}: the port is in use or the address is "
            "not this machine's; choose another taskmanager.rpc.port (0 takes a free one) or "
            "taskmanager.bind-host"
        ) from error
