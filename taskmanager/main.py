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
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from common.auth import load_token, require_token
from common.keyring_runner import refreshed
from common.log import configure_logging, get_logger
from common.metrics_server import METRICS_OFF, MetricsServer, Pages
from common.process import (
    DaemonArguments,
    adopt_orphans,
    keep_private,
    owned_by_parent,
    parse_daemon_arguments,
    stop_requests,
)
from common.tls.daemon_tls_runner import DaemonTls
from penstock.client.addresses import format_address
from penstock.client.keyring import Keyring
from penstock.config import Configuration
from penstock.errors import ConfigurationError, StreamError
from penstock.local.owned_directories import (
    OwnedDirectory,
    create_runtime_directory,
    sweep_runtime_directories,
    sweep_work_directories,
)
from penstock.storage.open_store import use_s3
from taskmanager.assembly_runner import ROLE, TaskManagerAssembly, TaskManagerSite
from taskmanager.daemon.identity import new_taskmanager_id
from taskmanager.daemon.made_token_runner import await_made_token
from taskmanager.daemon.parts_runner import start_in_order
from taskmanager.daemon.slot_environment import slot_variables
from taskmanager.daemon.spill_directory import own_spill_directory
from taskmanager.processes.fork_child import TERMINAL_VARIABLE
from taskmanager.slots.requirements import installed_packages
from taskmanager.spark.left_sessions_runner import LeftSessions

_STDOUT = 1


@dataclass(frozen=True, slots=True)
class _Metrics:
    """Where metrics are put, and where they are served, "" for nowhere."""

    registry: CollectorRegistry
    address: str


class TaskManagerDaemon:
    """One TaskManager.

    Args:
        taskmanager_id: its name in the cluster.
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
        self._left_sessions = LeftSessions(slot_variables(environment, self._directory / "cache"))
        self._assembly: TaskManagerAssembly | None = None
        self._log = get_logger(__name__)

    def _why_not_serving(self) -> str:
        """For health checks; any thread may ask."""
        if self._assembly is None:
            return "the TaskManager is starting"
        return self._assembly.why_not_serving()

    async def run(self) -> None:
        """Serves until cancelled.

        Raises:
            StreamError: it cannot start, or the JobManager does not take it.
        """
        async with AsyncExitStack() as resources:
            # First, so that a port that cannot be had is told though there is no JobManager yet.
            metrics = self._start_metrics(resources)
            keyring = await self._keyring()
            resources.enter_context(refreshed(keyring))
            tls = resources.enter_context(DaemonTls.running(self._config))
            await asyncio.to_thread(self._sweep_directories)
            work = await self._own_work_directory(resources)
            spill = await self._own_spill_directory(resources, work.path)
            runtime = await asyncio.to_thread(
                create_runtime_directory, f"{os.getpid()}-{secrets.token_hex(4)}"
            )
            resources.push_async_callback(asyncio.to_thread, runtime.remove)
            site = TaskManagerSite(
                taskmanager_id=self._id,
                config=self._config,
                jobmanagers=self._jobmanagers,
                keyring=keyring,
                environment=self._environment,
                directory=self._directory,
                work=work.path,
                runtime=runtime.path,
                spill=spill.path,
                packages=await asyncio.to_thread(installed_packages),
                terminal=self._terminal(),
                registry=metrics.registry,
                metrics_address=metrics.address,
                forkserver_arguments=self._forkserver_arguments,
                user_umask=self._user_umask,
                tls=tls,
                left_sessions=self._left_sessions,
            )
            async with asyncio.TaskGroup() as group, AsyncExitStack() as started:
                self._assembly = assembly = TaskManagerAssembly(site, group)
                await start_in_order(assembly.parts(), started)
                address = assembly.address
                self._log.info("taskmanager.started", id=self._id, address=address, pid=os.getpid())
                raise await assembly.failed

    async def _keyring(self) -> Keyring:
        """The secret that was given, else the one that the JobManager has made for this user."""
        config = self._config
        token = load_token(config.security_token_file, self._environment)
        has_tls = config.security_ssl_internal_enabled
        require_token(config.taskmanager_bind_host, token, "taskmanager.bind-host", has_tls=has_tls)
        if has_tls:
            return Keyring(())  # certificates take its place
        if token or config.security_open_loopback:
            return token
        return await await_made_token(self._jobmanagers, self._directory)

    def _sweep_directories(self) -> None:
        """Removes what TaskManagers that were killed have left: gigabytes of state, perhaps."""
        self._directory.mkdir(parents=True, exist_ok=True)
        work = sweep_work_directories(self._directory, self._left_sessions.end_of_taskmanager)
        for path in (*sweep_runtime_directories(), *work):
            self._log.info("directory.swept", path=str(path))

    async def _own_work_directory(self, resources: AsyncExitStack) -> OwnedDirectory:
        path = self._directory / f"{ROLE}-{self._id}"
        work = await asyncio.to_thread(OwnedDirectory.create, path)
        resources.push_async_callback(asyncio.to_thread, work.remove)
        return work

    async def _own_spill_directory(self, resources: AsyncExitStack, work: Path) -> OwnedDirectory:
        spill, swept = await asyncio.to_thread(
            own_spill_directory, self._config.taskmanager_spill_dir, work, self._id
        )
        resources.push_async_callback(asyncio.to_thread, spill.remove)
        for path in swept:
            self._log.info("directory.swept", path=str(path))
        return spill

    def _start_metrics(self, resources: AsyncExitStack) -> _Metrics:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        metrics = MetricsServer(
            Pages(registry, self._why_not_serving),
            self._config.taskmanager_bind_host,
            self._config.taskmanager_metrics_port,
            "taskmanager.metrics.port",
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
        arguments = parse_daemon_arguments(ROLE, sys.argv[1:] if argv is None else argv)
        config = arguments.load_configuration()
        taskmanager_id = new_taskmanager_id(config)
        user_umask = keep_private(arguments.directory)
        log_file = arguments.directory / "logs" / f"{ROLE}-{taskmanager_id}.log"
        configure_logging(ROLE, log_file, config.log_level)
        use_s3(lambda: config.s3)
    except StreamError as error:
        print(f"taskmanager: {error}", file=sys.stderr)  # noqa: T201 - there is no log yet
        return 2
    for told in config.without_effect():
        log.warning("configuration.without_effect", reason=told)
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
