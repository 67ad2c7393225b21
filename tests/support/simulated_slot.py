"""One slot process and what its daemon knows of it, on simulated time.

The runtime, its exchange and its subtasks are real; the process can die between any two steps. What it
had sent before may still arrive or not; its connections break at their other ends; background work that
had not run never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from common.elements import CheckpointBarrier
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.partition_id import PartitionId
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.processes.mailbox import Mailbox
from taskmanager.snapshot.subtask_snapshot import Alignment
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.deployment import Deployment
from taskmanager.task.exchange import DataExchange, SlotIdentity
from taskmanager.task.execution import Execution
from taskmanager.task.slot_runtime import SlotRuntime
from taskmanager.task.slot_services import SlotServices
from taskmanager.task.subtask import Subtask
from tests.support.in_memory_network import InMemoryNetwork
from tests.support.simulated_forkserver import KILLED, SimulatedForkserver, SimulatedSlotChannel
from tests.support.simulated_messages import attempt_name, event_words, slot_command_words
from tests.support.simulated_store import StoreAccess
from tests.support.simulated_threads import ProcessHost, SimulatedThreads


class SlotHost(ProcessHost, Protocol):
    """What a slot needs of the simulation."""

    network: InMemoryNetwork
    work_directory: Path
    partition_wait_ms: int

    def open_store(self) -> StoreAccess:
        """The checkpoint store, for one more process."""

    def open_savepoint(self, uri: str) -> StoreAccess | None:
        """The directory of a savepoint, for one more process; None = it is none."""

    def new_name(self) -> str:
        """What nothing else in the simulation is called; the same in every run of a seed."""

    def tell(self, process: str, text: str) -> None:
        """Something has happened to a process."""

    def slot_ended(self, name: str) -> None:
        """A slot process has ended, one way or another."""

    def take_report(self, slot: SimulatedSlot, report: internal_pb2.SlotReport) -> None:
        """A slot has sent something."""


class _WatchedDeployment(Deployment):
    """A deployment whose snapshots are part of the story.

    Args:
        tell: takes what happens, in words.
    """

    def __init__(
        self,
        deployment: internal_pb2.TaskDeployment,
        services: SlotServices,
        schedule: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(deployment, services, schedule)
        self._name = attempt_name(deployment.attempt)
        self._tell = tell

    def build(self, execution: Execution) -> Subtask:
        """See ``SubtaskParts``."""
        subtask = super().build(execution)
        take_snapshot = subtask._take_snapshot

        def told(barrier: CheckpointBarrier, alignment: Alignment | None) -> None:
            self._tell(f"{self._name} barrier {barrier.checkpoint_id}")
            take_snapshot(barrier, alignment)

        subtask._take_snapshot = told  # type: ignore[method-assign]
        return subtask


class SimulatedSlot:
    """A slot process from its fork to its end.

    Args:
        name: unlike that of any other process of the simulation.
        channel: its line to the daemon.
        forkserver: hears of its end.

    Attributes:
        is_frozen: its threads have no turn, while its connections live on.
        outputs: all that its attempts may have written to the spill directory.
    """

    def __init__(
        self,
        host: SlotHost,
        taskmanager_id: str,
        name: str,
        channel: SimulatedSlotChannel,
        forkserver: SimulatedForkserver,
    ) -> None:
        self.host = host
        self.taskmanager_id = taskmanager_id
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.outputs: dict[PartitionId, None] = {}
        self.runtime: SlotRuntime | None = None
        self._channel = channel
        self._forkserver = forkserver
        self._mailbox = Mailbox()
        self._transport = host.network.transport()
        self._io = SimulatedThreads(host, is_frozen=lambda: self.is_frozen)
        self._snapshots = SimulatedThreads(host, is_snapshot=True, is_frozen=lambda: self.is_frozen)

    @property
    def background_count(self) -> int:
        """Pieces of work that wait for threads, are under way there, or have just ended."""
        return self._io.count + self._snapshots.count + self._mailbox._mail.qsize()

    def _configure(self, configuration: internal_pb2.SlotConfiguration) -> None:
        host, mailbox = self.host, self._mailbox
        config = Configuration.from_mapping(dict(configuration.config))
        store = host.open_store()
        self._exchange = DataExchange(
            config,
            SlotIdentity(
                configuration.job_id,
                configuration.slot_id,
                configuration.host_id,
                configuration.leader_epoch,
                configuration.token,
                configuration.oldest_peer_epoch,
            ),
            mailbox.post,
            host.loop,
            self._transport,
            on_unreachable=self._peer_unreachable,
            spill=SpillRunner(
                Path(configuration.spill_directory),
                configuration.job_id,
                self._io.submit,
                mailbox.post,
            ),
            partition_wait_ms=host.partition_wait_ms,
        )
        self._services = SlotServices(
            config=config,
            clock=host.loop,
            exchange=self._exchange,
            executor=self._io,
            background_executor=self._io,
            snapshot_executor=self._snapshots,
            memory=ManagedMemory(config.taskmanager_memory_managed_bytes),
            work_directory=Path(configuration.work_directory),
            post=mailbox.post,
            report=self._report,
            artifact_paths=dict(configuration.artifact_paths),
            open_store=lambda directory: host.open_savepoint(directory) or store,
            new_name=host.new_name,
        )
        self.runtime = SlotRuntime(
            host.loop,
            mailbox,
            self._exchange,
            self._build,
            self._services.report,
            host.loop.monotonic_ns,
        )
        endpoint = self._exchange.listen(
            configuration.unix_socket_path,
            configuration.tcp_bind_host,
            configuration.tcp_advertised_host,
        )
        self._report(internal_pb2.SlotReport(ready=endpoint))

    def _peer_unreachable(self, peer: internal_pb2.DataEndpoint, reason: str) -> None:
        assert self.runtime is not None
        self.runtime.peer_unreachable(peer, reason)

    def _build(
        self,
        deployment: internal_pb2.TaskDeployment,
        schedule: Callable[[], None],
        deadline_moved: Callable[[], None],
    ) -> Execution:
        return Execution(
            deployment,
            _WatchedDeployment(deployment, self._services, schedule, self._tell),
            report=self._services.report,
            clock=self.host.loop,
            taskmanager_id=self.taskmanager_id,
            post=self._services.post,
            schedule=schedule,
            deadline_moved=deadline_moved,
        )

    def _tell(self, text: str) -> None:
        self.host.tell(self.name, text)

    def _report(self, report: internal_pb2.SlotReport) -> None:
        if self.is_alive:
            copy = internal_pb2.SlotReport()
            copy.CopyFrom(report)
            self.host.take_report(self, copy)
            if copy.HasField("task_event"):
                told, subtask = event_words(copy.task_event)
                self.host.tell(self.name, f"> {subtask} {told}")
            self._channel.report(copy)

    # ------------------------------------------------------------ what the daemon does

    def handle(self, command: internal_pb2.SlotCommand) -> None:
        """A command arrives."""
        if not self.is_alive:
            return
        if command.HasField("configure"):
            self._configure(command.configure)
            return
        if command.HasField("deploy"):
            deployed = command.deploy
            self.outputs |= dict.fromkeys(
                PartitionId(
                    output.edge.id,
                    deployed.attempt.vertex,
                    deployed.attempt.subtask_index,
                    deployed.attempt.attempt,
                )
                for output in deployed.outputs
            )
        self._mailbox.post(lambda: self._carry_out(command))

    def _carry_out(self, command: internal_pb2.SlotCommand) -> None:
        assert self.runtime is not None
        for words in slot_command_words(command):
            self.host.tell(self.name, f"< {words}")
        self.runtime.handle(command)
        if command.HasField("shutdown"):
            self._check_nothing_kept()
            self._end(0)

    def line_ended(self) -> None:
        """The daemon has closed its end, or is gone."""
        if self.is_alive and self.runtime is None:
            self._end(0)
        elif self.is_alive:
            self._mailbox.post(self._stop)

    def _stop(self) -> None:
        if self.is_alive and self.runtime is not None:
            self.runtime.stop()
            self._end(0)

    def _check_nothing_kept(self) -> None:
        """Whatever its attempts kept is accounted for: without them and what they left, nothing is."""
        self._exchange.release_partitions(self.outputs)
        cache = self._exchange._partitions._cache
        is_writing = cache._writes > 0  # what is being written counts until it is
        assert is_writing or not cache.memory_bytes, f"{self.name} keeps {cache.memory_bytes} bytes"
        assert is_writing or not cache.disk_bytes, f"{self.name} counts {cache.disk_bytes} spilled"

    def _end(self, status: int) -> None:
        self.is_alive = False
        if not status:
            self._exchange.close() if self.runtime is not None else None
        self._transport.close()
        self._io.die()
        self._snapshots.die()
        self._forkserver.exited(self._channel, status)
        self.host.slot_ended(self.name)

    def die(self) -> None:
        """Ends like after SIGKILL."""
        if self.is_alive:
            self._end(KILLED)
