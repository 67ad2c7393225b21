"""One slot process and what its daemon knows of it, on simulated time.

The runtime, its exchange and its subtasks are real; the process can die between any two steps. What it
had sent before may still arrive or not; its connections break at their other ends; background work that
had not run never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.partition_id import PartitionId
from taskmanager.network.exchange import DataExchange, SlotIdentity
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.slots.attempt_table import AttemptTable
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.deployment import Deployment, SlotServices
from taskmanager.task.execution import Execution
from taskmanager.task.mailbox import Mailbox
from taskmanager.task.slot_runtime import SlotRuntime
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop
from tests.support.simulated_store import StoreAccess

_FROZEN_NS = 20_000_000


class SlotHost(Protocol):
    """What a slot needs of the simulation."""

    loop: SimulatedLoop
    network: InMemoryNetwork
    config: Configuration
    artifact_paths: dict[str, str]
    work_directory: Path
    partition_wait_ms: int

    def background_delay_ns(self, is_snapshot: bool) -> int:
        """How long work waits for a thread."""

    def open_store(self) -> StoreAccess:
        """The checkpoint store, for one more process."""

    def slot_ended(self) -> None:
        """A slot process has ended, one way or another."""

    def take_report(self, slot: SimulatedSlot, report: internal_pb2.SlotReport) -> None:
        """A slot has sent something."""


class _BackgroundThreads(Executor):
    """Runs work at a later simulated time, unless the process is dead by then."""

    def __init__(self, slot: SimulatedSlot, is_snapshot: bool) -> None:
        self._slot = slot
        self._is_snapshot = is_snapshot

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        slot = self._slot
        slot.background_count += 1

        def work() -> None:
            if slot.is_alive and slot.is_frozen:
                slot.host.loop.call_later(_FROZEN_NS, work)
            elif slot.is_alive:
                slot.background_count -= 1
                future.set_result(fn(*args, **kwargs))

        slot.host.loop.call_later(slot.host.background_delay_ns(self._is_snapshot), work)
        return future


class SimulatedSlot:
    """A slot process from its fork to its end.

    Args:
        name: unlike that of any other process of the simulation.
        spill_directory: of its TaskManager.

    Attributes:
        is_frozen: its threads have no turn, while its connections live on.
        outputs: all that its attempts may have written to the spill directory.
    """

    def __init__(
        self,
        host: SlotHost,
        slot_id: str,
        taskmanager_id: str,
        name: str,
        leader_epoch: int,
        spill_directory: Path,
    ) -> None:
        self.host = host
        self.slot_id = slot_id
        self.taskmanager_id = taskmanager_id
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.attempts = AttemptTable()
        self.outputs: set[PartitionId] = set()
        self.background_count = 0
        self._mailbox = mailbox = Mailbox()
        self._transport = host.network.transport()
        self._store = host.open_store()
        identity = SlotIdentity(
            job_id="job", slot_id=slot_id, host_id="host", leader_epoch=leader_epoch, token=""
        )
        executor = _BackgroundThreads(self, is_snapshot=False)
        self._exchange = DataExchange(
            host.config,
            identity,
            mailbox.post,
            host.loop,
            self._transport,
            on_unreachable=self._peer_unreachable,
            spill=SpillRunner(spill_directory, "job", executor.submit, mailbox.post),
            partition_wait_ms=host.partition_wait_ms,
        )
        self._services = SlotServices(
            config=host.config,
            clock=host.loop,
            exchange=self._exchange,
            executor=executor,
            snapshot_executor=_BackgroundThreads(self, is_snapshot=True),
            memory=ManagedMemory(host.config.taskmanager_memory_managed_bytes),
            work_directory=host.work_directory / name,
            post=mailbox.post,
            report=self._report,
            artifact_paths=host.artifact_paths,
            open_store=lambda _directory: self._store,
        )
        self.runtime = SlotRuntime(
            host.loop, mailbox, self._exchange, self._build, self._services.report
        )

    def _peer_unreachable(self, peer: internal_pb2.DataEndpoint, reason: str) -> None:
        self.runtime.peer_unreachable(peer, reason)

    def _build(
        self, deployment: internal_pb2.TaskDeployment, schedule: Callable[[], None]
    ) -> Execution:
        return Execution(
            deployment,
            Deployment(deployment, self._services, schedule),
            report=self._services.report,
            clock=self.host.loop,
            taskmanager_id=self.taskmanager_id,
            post=self._services.post,
            schedule=schedule,
        )

    def _report(self, report: internal_pb2.SlotReport) -> None:
        if self.is_alive:
            copy = internal_pb2.SlotReport()
            copy.CopyFrom(report)
            self.host.take_report(self, copy)

    def listen(self) -> internal_pb2.DataEndpoint:
        """Opens the slot's door."""
        self.endpoint = self._exchange.listen(f"/{self.name}", "", "")
        return self.endpoint

    def handle(self, command: internal_pb2.SlotCommand) -> None:
        """A command arrives."""
        if self.is_alive:
            deployed = command.deploy
            self.outputs |= {
                PartitionId(
                    output.edge.id,
                    deployed.attempt.vertex,
                    deployed.attempt.subtask_index,
                    deployed.attempt.attempt,
                )
                for output in deployed.outputs
            }
            self._mailbox.post(lambda: self.runtime.handle(command))

    def stop(self) -> None:
        """Ends as it is told to: what runs is cancelled."""
        if self.is_alive:
            self.runtime.stop()
            self._check_nothing_kept()
            self.is_alive = False
            self._exchange.close()
            self._transport.close()
            self.host.slot_ended()

    def _check_nothing_kept(self) -> None:
        """Whatever its attempts kept is accounted for: without them and what they left, nothing is."""
        self._exchange.release_partitions(self.outputs)
        cache = self._exchange._partitions._cache
        is_writing = cache._writes > 0  # what is being written counts until it is
        assert is_writing or not cache.memory_bytes, f"{self.name} keeps {cache.memory_bytes} bytes"
        assert is_writing or not cache.disk_bytes, f"{self.name} counts {cache.disk_bytes} spilled"

    def die(self) -> None:
        """Ends like after SIGKILL."""
        self.is_alive = False
        self._transport.close()
        self.host.slot_ended()
