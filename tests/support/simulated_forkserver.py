"""The processes of a simulated TaskManager, and the lines to them: in place of forkserver and socket pairs."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from common.pb import internal_pb2
from penstock.errors import TaskFailure
from taskmanager.processes.exit_cause import ProcessExit
from taskmanager.processes.fork_protocol import ProcessKind
from taskmanager.processes.forkserver_runner import ForkedChild

_SIGKILL = 9


class Process(Protocol):
    """What lives in a simulated process."""

    def handle(self, command: internal_pb2.SlotCommand) -> None:
        """A command arrives."""

    def line_ended(self) -> None:
        """The daemon has closed its end, or is gone."""

    def die(self) -> None:
        """It ends like after SIGKILL."""


class ForkserverHost(Protocol):
    """What processes need of the simulation."""

    pids: Iterator[int]

    def in_order(self, line: str, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time, behind what was sent on the line before."""

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time."""


class SimulatedSlotChannel:
    """The daemon's end of a line to one process, and the process' end of it."""

    def __init__(self, host: ForkserverHost, name: str) -> None:
        self._host = host
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._reports: deque[internal_pb2.SlotReport | None] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False
        self._is_closed = False
        self.process: Process | None = None

    # ------------------------------------------------------------ the daemon's end

    async def send(self, command: internal_pb2.SlotCommand) -> None:
        """See ``SlotChannel``."""
        process = self.process
        if self._is_closed or self._has_ended or process is None:
            raise ConnectionError(f"{self._name} has ended")
        copy = internal_pb2.SlotCommand()
        copy.CopyFrom(command)
        self._host.in_order(f"to {self._name}", lambda: process.handle(copy))

    async def receive(self) -> internal_pb2.SlotReport | None:
        """See ``SlotChannel``."""
        while not self._reports:
            if self._is_closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._reports.popleft()

    def close(self) -> None:
        """See ``SlotChannel``."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon(self._arrived.set)
            process = self.process
            if process is not None:
                self._host.in_order(f"to {self._name}", process.line_ended)

    # ------------------------------------------------------------ the process' end

    def report(self, report: internal_pb2.SlotReport | None) -> None:
        """The process has sent something; None = it has ended."""
        self._has_ended |= report is None
        self._host.in_order(f"from {self._name}", lambda: self._take(report))

    def _take(self, report: internal_pb2.SlotReport | None) -> None:
        self._reports.append(report)
        self._loop.call_soon(self._arrived.set)


Make = Callable[[ProcessKind, str, SimulatedSlotChannel], Process]

_forked: list[SimulatedSlotChannel] = []
"""Whose line is opened next: nothing comes between ``fork`` and ``open``."""


async def open_channel(control: socket.socket) -> SimulatedSlotChannel:
    """In place of ``SlotChannel.open``."""
    control.close()
    return _forked.pop()


class SimulatedForkserver:
    """In place of ``ForkserverRunner``.

    Args:
        host: the simulation.
        name: of its TaskManager.
        make: makes what lives in a process.
    """

    def __init__(self, host: ForkserverHost, name: str, make: Make) -> None:
        self._host = host
        self._name = name
        self._make = make
        self._count = 0
        self.processes: dict[int, tuple[ForkedChild, SimulatedSlotChannel]] = {}
        self.restart_count = 0
        self.is_alive = True

    def __call__(
        self, environment: Mapping[str, str], log_file: Path, arguments: Sequence[str] = ()
    ) -> SimulatedForkserver:
        return self

    async def start(self) -> None:
        """See ``ForkserverRunner``."""

    async def run(self) -> None:
        """See ``ForkserverRunner``."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """See ``ForkserverRunner``."""
        self.die()

    async def fork(
        self,
        descriptors: Sequence[int],
        kind: ProcessKind = ProcessKind.SLOT,
        *,
        preload: str = "",
    ) -> ForkedChild:
        """See ``ForkserverRunner``."""
        if not self.is_alive:
            raise TaskFailure("the forkserver has ended")
        self._count += 1
        exited: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        child = ForkedChild(next(self._host.pids), kind, exited)
        name = f"{self._name}/{self._count}"
        channel = SimulatedSlotChannel(self._host, name)
        channel.process = self._make(kind, name, channel)
        self.processes[child.pid] = (child, channel)
        _forked.append(channel)
        return child

    def kill(self, child: ForkedChild) -> None:
        """See ``ForkserverRunner``."""
        found = self.processes.get(child.pid)
        if found is not None and self.is_alive:
            process = found[1].process
            assert process is not None
            self._host.later(process.die)

    def exited(self, channel: SimulatedSlotChannel, status: int) -> None:
        """A process has ended."""
        for pid, (child, own) in list(self.processes.items()):
            if own is channel:
                del self.processes[pid]
                own.report(None)
                reason = f"process {pid} " + (
                    "was killed by SIGKILL" if status else "exited with status 0"
                )
                ended = ProcessExit(pid, status, reason)
                self._host.in_order(
                    f"ends of {self._name}", lambda c=child, e=ended: _resolve(c, e)
                )

    def die(self) -> None:
        """It ends, and with it whatever it forked."""
        for _, channel in list(self.processes.values()):
            if channel.process is not None:
                channel.process.die()
        self.is_alive = False


def _resolve(child: ForkedChild, ended: ProcessExit) -> None:
    if not child.exited.done():
        child.exited.set_result(ended)


KILLED = -_SIGKILL
