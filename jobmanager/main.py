"""The JobManager daemon: alone in its directory, or one of several of which one leads."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector

from common.clock import SystemClock
from common.daemon_metrics import SwapCollector, TokenCollector, show_uptime
from common.log import configure_logging
from common.metrics_server import Pages
from common.process import (
    DaemonRegistration,
    keep_private,
    owned_by_parent,
    parse_daemon_arguments,
    stop_requests,
)
from common.tls.certificates_store import show_certificates
from common.tls.daemon_tls_runner import DaemonTls
from jobmanager.assembly_runner import ROLE, leading, serving
from jobmanager.leadership.leadership_metrics import LeadershipCollector
from jobmanager.leadership.leadership_runner import LeadershipRunner
from jobmanager.rpc.open_ports_runner import OpenPorts, open_ports
from jobmanager.stores.directory_lock import DirectoryLock
from jobmanager.stores.leader_store import LeaderStore
from jobmanager.traces.reporter_loader import check_reporter
from penstock.client.announced_tokens import Announcement
from penstock.config import Configuration
from penstock.errors import StreamError
from penstock.storage.open_store import is_s3, open_store, use_s3
from penstock.storage.private_directories import make_private
from penstock.storage.store_names import substore
from penstock.storage.swap_counts import SWAPS

EXIT_OVER = 75
"""Status of a JobManager whose part in the election is over: its supervisor starts it again."""


async def run_daemon(
    config: Configuration, directory: Path, end: Callable[[str], NoReturn]
) -> None:
    """Serves until it is asked to stop.

    Args:
        config: of the cluster.
        end: ends the process, where it is one of several and its part is over.
    """
    with stop_requests() as stop, DaemonTls.running(config) as tls:
        if config.high_availability_type == "none":
            async with (
                serving(config, directory, SystemClock(), tls) as jobmanager,
                _announced(config, jobmanager.ports),
            ):
                registration = DaemonRegistration(directory, ROLE, config.jobmanager_id)
                try:
                    await _serve(registration, jobmanager.ports, stop)
                finally:
                    await asyncio.to_thread(registration.remove)
        else:
            await _serve_elected(config, directory, stop, end, tls)
    structlog.get_logger(__name__).info("jobmanager.stopped")


async def _serve(registration: DaemonRegistration, ports: OpenPorts, stop: asyncio.Event) -> None:
    log = structlog.get_logger(__name__)
    await asyncio.to_thread(registration.write, ports.address, ports.metrics_address)
    log.info("jobmanager.started", address=ports.address, metrics_address=ports.metrics_address)
    await stop.wait()
    log.info("jobmanager.stopping")


async def _serve_elected(
    config: Configuration,
    directory: Path,
    stop: asyncio.Event,
    end: Callable[[str], NoReturn],
    tls: DaemonTls | None,
) -> None:
    """One of several JobManagers: stands by, and leads when it is its turn."""
    # What cannot be had is said now, and not when it is this one's turn.
    await asyncio.to_thread(check_reporter, config)
    use_s3(lambda: config.s3)
    kept = substore(config.high_availability_storage_dir, config.high_availability_cluster_id)
    lock = await asyncio.to_thread(DirectoryLock, directory / ROLE / config.jobmanager_id)
    registration = DaemonRegistration(directory, ROLE, config.jobmanager_id)
    async with AsyncExitStack() as resources:
        resources.callback(lock.close)
        if not is_s3(kept):
            await asyncio.to_thread(make_private, Path(kept.removeprefix("file://")))
        store = LeaderStore(open_store(kept), kept)
        ports = await open_ports(config, directory, tls)
        resources.push_async_callback(ports.close)
        # Clients look for the token in every phase, and who starts daemons for those that live.
        await resources.enter_async_context(_announced(config, ports))
        clock = SystemClock()
        leadership = LeadershipRunner(config, ports.address, store, end, clock)
        resources.push_async_callback(leadership.stop)
        resources.push_async_callback(asyncio.to_thread, registration.remove)
        await _stand_by(config, registration, ports, leadership)
        if not await _comes_first(leadership.lead(), stop.wait()):
            return
        lead = partial(leading, config, directory, clock, store, kept, kept)
        async with (
            lead(ports, leadership.numbers, tls, leadership.stop) as jobmanager,
            asyncio.TaskGroup() as tasks,
        ):
            if jobmanager.report_span is not None:
                leadership.tell_election(jobmanager.report_span)
            keeping = tasks.create_task(leadership.keep())
            try:
                await _serve(registration, ports, stop)
            finally:
                keeping.cancel()


async def _stand_by(
    config: Configuration,
    registration: DaemonRegistration,
    ports: OpenPorts,
    leadership: LeadershipRunner,
) -> None:
    """A standby answers, with its health and who leads, from now on."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(LeadershipCollector(lambda: 0, leadership.numbers))
    registry.register(SwapCollector(SWAPS))
    show_uptime(registry, ROLE)
    show_certificates(registry, ROLE, config)
    registry.register(TokenCollector(ROLE, ports.keyring))
    standby = leadership.standby
    ports.server.serve(standby.answer_on)
    await ports.server.start()
    ports.show(Pages(registry, lambda: standby.why_not_serving, lambda: standby.status))
    await asyncio.to_thread(registration.write, ports.address, ports.metrics_address)
    structlog.get_logger(__name__).info("jobmanager.standing_by", address=ports.address)


async def _comes_first(work: Coroutine[Any, Any, None], other: Coroutine[Any, Any, object]) -> bool:
    """Runs both; False where the other is done first, which ends the work."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return not tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _announced(config: Configuration, ports: OpenPorts) -> AsyncIterator[None]:
    """Tells this user's other processes where the token is that was made for them."""
    announcement: Announcement | None = None
    if ports.made_token_file is not None:
        announcement = await asyncio.to_thread(_announce, config, ports.port, ports.made_token_file)
    try:
        yield
    finally:
        if announcement is not None:
            await asyncio.to_thread(announcement.remove)


def _announce(config: Configuration, port: int, made_token_file: Path) -> Announcement | None:
    try:
        return Announcement(
            config.jobmanager_rpc_address,
            config.jobmanager_bind_host,
            port,
            made_token_file.absolute(),
        )
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        structlog.get_logger(__name__).warning(
            "token.not_announced", token_file=str(made_token_file), reason=str(error)
        )
        return None


def _end(restart: list[str], reason: str) -> NoReturn:
    """Ends this process at once: whatever it believed may be wrong, so nobody hears another word of it.

    Args:
        restart: what it executes instead; nothing = it exits, and its supervisor starts it again.
    """
    structlog.get_logger(__name__).error("leadership.over", reason=reason)
    logging.shutdown()
    sys.stdout.flush()
    if restart:
        os.execv(restart[0], restart)
    os._exit(EXIT_OVER)


def main(argv: Sequence[str]) -> int:
    """Runs the daemon; returns its exit status."""
    try:
        arguments = parse_daemon_arguments(ROLE, argv)
        config = arguments.load_configuration()
        keep_private(arguments.directory)
        log_file = arguments.directory / "logs" / f"{ROLE}-{config.jobmanager_id}.log"
        configure_logging(ROLE, log_file, config.log_level)
    except StreamError as error:
        sys.stderr.write(f"jobmanager: {error}\n")
        return 2
    for told in config.without_effect():
        structlog.get_logger(__name__).warning("configuration.without_effect", reason=told)
    command = [sys.executable, "-P", "-m", ROLE, *argv] if arguments.restarts_itself else []
    try:
        with owned_by_parent(arguments.directory):
            asyncio.run(run_daemon(config, arguments.directory, partial(_end, command)))
    except StreamError as error:
        sys.stderr.write(f"jobmanager: {error}\n")
        return 1
    return 0
