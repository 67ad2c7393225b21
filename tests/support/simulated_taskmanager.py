"""A TaskManager on simulated time: the real daemon, with processes that are objects of the simulation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from common.process import DaemonArguments
from penstock.config import Configuration
from taskmanager.main import TaskManagerDaemon
from taskmanager.processes.fork_protocol import ProcessKind
from taskmanager.rpc.registration_runner import RegistrationRunner
from tests.support.simulated_event_loop import SimulatedEventLoop
from tests.support.simulated_forkserver import (
    ForkserverHost,
    Process,
    SimulatedForkserver,
    SimulatedSlotChannel,
)
from tests.support.simulated_partition_server import ServerHost, SimulatedPartitionServer
from tests.support.simulated_rpc import SimulatedRpc
from tests.support.simulated_slot import SimulatedSlot, SlotHost

JOBMANAGER_PORT = 6123
_FIRST_PORT = 7000


class TaskManagerHost(SlotHost, ServerHost, ForkserverHost, Protocol):
    """What a TaskManager needs of the simulation."""

    config: Configuration
    rpc: SimulatedRpc


class SimulatedTaskManager:
    """One incarnation of a TaskManager, from its start to its end.

    Attributes:
        is_disk_full: hardly any space is left where it spills.
        is_stopping: it has been told to end.
    """

    def __init__(
        self, host: TaskManagerHost, taskmanager_id: str, incarnation: int, slot_count: int
    ) -> None:
        self._host = host
        self.taskmanager_id = taskmanager_id
        self.name = f"{taskmanager_id}.{incarnation}"
        self.port = _FIRST_PORT + incarnation
        self.is_disk_full = False
        self.is_stopping = False
        self.registration: RegistrationRunner | None = None
        self.slots: list[SimulatedSlot] = []
        self.servers: list[SimulatedPartitionServer] = []
        self.directory = host.work_directory / self.name
        self.forkserver = SimulatedForkserver(host, self.name, self._make)
        self.loop = SimulatedEventLoop(host, host.rpc.connects, self.die)
        self.loop.owner = self
        own = {
            "taskmanager.id": taskmanager_id,
            "taskmanager.numberOfTaskSlots": slot_count,
            "taskmanager.rpc.port": self.port,
            "taskmanager.metrics.port": -1,
        }
        arguments = DaemonArguments(self.directory, {}, (f"127.0.0.1:{JOBMANAGER_PORT}",))
        daemon = TaskManagerDaemon(arguments, host.config.merged(own), taskmanager_id, {})
        self._main = self.loop.create_task(daemon.run())
        self._main.add_done_callback(lambda _: self._note_end())

    def _note_end(self) -> None:
        if self.loop.is_alive and not self.is_stopping and not self._main.cancelled():
            error = self._main.exception()
            self._host.broke(error or AssertionError(f"{self.name} has ended"))
        if self.loop.is_alive:
            self.die()

    def _make(self, kind: ProcessKind, name: str, channel: SimulatedSlotChannel) -> Process:
        if kind is ProcessKind.PARTITION_SERVER:
            server = SimulatedPartitionServer(self._host, channel, self.forkserver)
            self.servers.append(server)
            return server
        slot = SimulatedSlot(self._host, self.taskmanager_id, name, channel, self.forkserver)
        self.slots.append(slot)
        return slot

    @property
    def is_alive(self) -> bool:
        """Whether its daemon lives."""
        return self.loop.is_alive

    @property
    def processes(self) -> list[SimulatedSlot]:
        """Slot processes that live."""
        self.slots = [slot for slot in self.slots if slot.is_alive]
        return self.slots

    @property
    def living_servers(self) -> list[SimulatedPartitionServer]:
        """Its partition server, while there is one."""
        self.servers = [server for server in self.servers if server.is_alive]
        return self.servers

    @property
    def has_reported(self) -> bool:
        """All that its slots have said has reached the JobManager."""
        return not self.loop.is_busy and (
            self.registration is None or not len(self.registration._outbox)
        )

    @property
    def spill_directory(self) -> Path:
        """Where what its slots spill lies."""
        return self.directory / f"taskmanager-{self.taskmanager_id}" / "spill"

    def held(self) -> list[str]:
        """Files of partitions in the spill directory."""
        root = self.spill_directory
        return sorted(str(path.relative_to(root)) for path in root.glob("*/**/*") if path.is_file())

    def freeze(self, *, is_frozen: bool) -> None:
        """Its host stands still, or goes on."""
        self.loop.is_frozen = is_frozen
        for process in (*self.processes, *self.living_servers):
            process.is_frozen = is_frozen
        if is_frozen:
            self._host.rpc.froze(self.loop)

    def stop(self) -> None:
        """It is told to end."""
        self.is_stopping = True
        self._main.cancel()

    def die(self) -> None:
        """Its host is gone, and all that ran there."""
        if self.loop.is_alive:
            self.loop.die()
            self._host.rpc.process_gone(self.loop)
            self.forkserver.die()
            shutil.rmtree(self.spill_directory, ignore_errors=True)
