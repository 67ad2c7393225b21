"""A process beside the slots, seen from the daemon: one without user code that serves every job.

It is forked like a slot and speaks a slot's control protocol, but outlives slots. Invariants: there is at most one; it is found at one address for the life of the daemon, also
when it had to be started again, so that consumers need not be told; it ends with the daemon (its line
ends, and it dies with the forkserver).
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.log import get_logger
from common.pb import internal_pb2
from penstock.client.keyring import Token, keyring_of
from penstock.errors import StreamError, TaskFailure
from taskmanager.processes.exit_cause import log_tail
from taskmanager.processes.fork_protocol import ProcessKind
from taskmanager.processes.forkserver_runner import ForkedChild, ForkserverRunner
from taskmanager.processes.slot_channel import SlotChannel

_READY_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 1.0
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 5.0
_STEADY_S = 30.0
"""Who has lived for so long is started again at once when it dies."""


@dataclass(frozen=True, slots=True)
class HelperProcess:
    """One that runs, and the line to it."""

    child: ForkedChild
    channel: SlotChannel


class HelperProcessRunner:
    """Keeps one such process running.

    Args:
        configuration: what it is told: its name, its addresses and what it needs besides.
        log_file: takes what it prints.
        clock: measures how long it has lived.
        token: what each one is told as it starts; "" = none.
    """

    def __init__(
        self,
        kind: ProcessKind,
        configuration: internal_pb2.SlotConfiguration,
        log_file: Path,
        forkserver: ForkserverRunner,
        clock: Clock,
        token: Token = "",
    ) -> None:
        self._kind = kind
        self._event = kind.replace(" ", "_")
        """What events of it begin with."""
        self._configuration = configuration
        self._log_file = log_file
        self._forkserver = forkserver
        self._clock = clock
        self._keyring = keyring_of(token)
        self.process: HelperProcess | None = None
        """It, None while there is none."""
        self._endpoint: internal_pb2.DataEndpoint | None = None
        self._log = get_logger(__name__)
        self.restart_count = 0

    # ------------------------------------------------------------ life

    async def start(self) -> internal_pb2.DataEndpoint:
        """Starts the first one and returns where it listens, for good.

        Raises:
            StreamError: it ended, or was not ready in time.
        """
        self.process, self._endpoint = await self._launch()
        # From now on at this port: a new one is found by those who know the old one.
        port = self._endpoint.tcp_port
        if port:
            self._configuration.config["taskmanager.data.port"] = str(port)
        return self._endpoint

    async def run(self) -> None:
        """Starts it again whenever it has ended, until cancelled. ``start`` comes first."""
        backoff_s = _BACKOFF_FIRST_S
        try:
            while True:
                if self.process is not None:
                    started_ns = self._clock.monotonic_ns()
                    reason = await self._watch(self.process)
                    self.process = None
                    self._log.error(f"{self._event}.lost", reason=reason)
                    if self._clock.monotonic_ns() - started_ns > _STEADY_S * 1e9:
                        backoff_s = _BACKOFF_FIRST_S
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
                try:
                    self.process, _ = await self._launch()
                    self.restart_count += 1
                except StreamError as error:
                    self._log.error(f"{self._event}.failed", reason=str(error))
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Ends it; harmless when there is none."""
        process, self.process = self.process, None
        if process is not None:
            await self._end(process)

    # ------------------------------------------------------------ one process

    async def _launch(self) -> tuple[HelperProcess, internal_pb2.DataEndpoint]:
        if self._configuration.unix_socket_path:
            # What a killed one leaves there would refuse the next one.
            Path(self._configuration.unix_socket_path).unlink(missing_ok=True)  # noqa: ASYNC240
        process = await self._fork()
        try:
            endpoint = await self._configure(process)
        except BaseException:
            await self._end(process)
            raise
        self._log.info(f"{self._event}.started", pid=process.child.pid, port=endpoint.tcp_port)
        return process, endpoint

    async def _fork(self) -> HelperProcess:
        await asyncio.to_thread(self._log_file.parent.mkdir, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        log = os.open(self._log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            child = await self._forkserver.fork([theirs.fileno(), log], self._kind)
            return HelperProcess(child, await SlotChannel.open(ours))
        except BaseException:
            ours.close()  # which ends the process, if there is one
            raise
        finally:
            theirs.close()
            os.close(log)

    async def _configure(self, process: HelperProcess) -> internal_pb2.DataEndpoint:
        self._configuration.token = self._keyring.text
        self._configuration.token_path = self._keyring.place
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await process.channel.send(internal_pb2.SlotCommand(configure=self._configuration))
                report = await process.channel.receive()
        except (TimeoutError, ConnectionError):
            report = None
        if report is None or report.WhichOneof("report") != "ready":
            raise TaskFailure(
                f"the {process.child.name} was not ready within {_READY_TIMEOUT_S:.0f} s, or ended;"
                f" {self._log_file} ends with:\n{log_tail(self._log_file)}"
            )
        if self._endpoint is not None and report.ready != self._endpoint:
            raise TaskFailure(
                f"port {self._endpoint.tcp_port} of the {self._kind} has been taken by another"
                " process: until it ends, nobody reaches what is here"
            )
        return report.ready

    async def _watch(self, process: HelperProcess) -> str:
        """Waits until the process has ended; returns how it did."""
        try:
            while await process.channel.receive() is not None:
                pass  # it has nothing to say
        except StreamError as error:
            self._log.error(f"{self._event}.misunderstood", reason=str(error))
        await self._end(process)
        return process.child.exited.result().reason

    async def _end(self, process: HelperProcess) -> None:
        process.channel.close()
        try:
            await asyncio.wait([process.child.exited], timeout=_END_TIMEOUT_S)
        finally:
            self._forkserver.kill(process.child)
        await asyncio.wait([process.child.exited])
