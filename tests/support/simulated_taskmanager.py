"""A TaskManager on simulated time: what its daemon does for the JobManager, with real attempt tables.

Reports of a slot reach the daemon in the order they were sent, and those of a daemon the JobManager;
between slots and between daemons there is no order. The daemon hears of a slot's death some time
after it. What slots spill lies in a real directory, which is gone with the TaskManager.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from common.pb import internal_pb2
from jobmanager.scheduler.slots import Slot
from penstock.errors import TaskFailure
from penstock.partition_id import PartitionId
from penstock.pb.client_pb2 import (
    ATTEMPT_STATE_CANCELED,
    ATTEMPT_STATE_FAILED,
    FailureCause,
)
from taskmanager.daemon.held_partitions import partition_id_of
from taskmanager.partitions.sealed_store import SealedStore, remove_partition
from taskmanager.partitions.spill_layout import INDEX_NAME, partition_directory
from taskmanager.slots.attempt_table import AttemptKey, key_of, state_event
from tests.support.simulated_partition_server import ServerHost, SimulatedPartitionServer
from tests.support.simulated_slot import SimulatedSlot, SlotHost

_SERVER_BACKOFF_NS = 100_000_000
_LOOK_INTERVAL_NS = 1_000_000_000
_REPORTS_AT_ONCE = 5


class TaskManagerHost(SlotHost, ServerHost, Protocol):
    """What a TaskManager needs of the simulation."""

    leader_epoch: int

    def in_order(self, line: str, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time, behind what was sent on the line before."""

    def draw(self, choices: int) -> int:
        """A number below ``choices``."""

    def take_task_event(
        self, taskmanager: SimulatedTaskManager, event: internal_pb2.TaskEvent
    ) -> None:
        """The daemon's report reaches the JobManager."""

    def take_results(self, slot: SimulatedSlot, results: internal_pb2.SlotResults) -> None:
        """Rows of a collect sink come in."""


class SimulatedTaskManager:
    """One incarnation of a TaskManager."""

    def __init__(
        self, host: TaskManagerHost, taskmanager_id: str, incarnation: int, slot_count: int
    ) -> None:
        self._host = host
        self.taskmanager_id = taskmanager_id
        self.name = f"{taskmanager_id}.{incarnation}"
        self.is_alive = True
        self.slots = tuple(
            Slot(f"{taskmanager_id}/{index}", taskmanager_id, self.name)
            for index in range(slot_count)
        )
        self.processes: dict[str, SimulatedSlot] = {}
        self.unheard: set[SimulatedSlot] = set()
        """Dead processes whose end the daemon has not noticed."""
        self._closed: set[AttemptKey] = set()
        self._started = 0
        self._last_reports: list[internal_pb2.TaskEvent] = []
        self.spill_directory = host.work_directory / self.name / "spill"
        self._sealed = SealedStore(self.spill_directory)
        self.server = SimulatedPartitionServer(host, self.name, self.spill_directory)

    # -- what the JobManager asks for

    def allocate(self, slot_ids: Iterable[str]) -> internal_pb2.AllocateSlotsResponse:
        """Starts slot processes where there are none."""
        return internal_pb2.AllocateSlotsResponse(
            endpoints=[self._endpoint(slot_id) for slot_id in slot_ids],
            partition_endpoint=self.server.endpoint,
        )

    def _endpoint(self, slot_id: str) -> internal_pb2.DataEndpoint:
        known = self.processes.get(slot_id)
        if known is not None:
            return known.endpoint
        self._started += 1
        name = f"{self.name}-{slot_id}-{self._started}"
        process = SimulatedSlot(
            self._host,
            slot_id,
            self.taskmanager_id,
            name,
            self._host.leader_epoch,
            self.spill_directory,
        )
        self.processes[slot_id] = process
        return process.listen()

    def deploy(self, tasks: Iterable[internal_pb2.TaskDeployment]) -> None:
        """Starts attempts; what cannot be started is reported FAILED."""
        for task in tasks:
            if key_of(task.attempt) in self._closed:
                continue
            process = self.processes.get(task.slot_id)
            if process is None:
                self._closed.add(key_of(task.attempt))
                cause = FailureCause(
                    error_class=TaskFailure.__name__, message=f"{task.slot_id} has no process"
                )
                self._report(state_event(task.attempt, ATTEMPT_STATE_FAILED, cause))
            elif process.attempts.deployed(task.attempt):
                self._send(process, internal_pb2.SlotCommand(deploy=task))

    def cancel(self, attempts: Iterable[internal_pb2.AttemptId], *, is_final: bool) -> None:
        """Cancels attempts; one that never came is CANCELED at once."""
        for attempt in attempts:
            process = self._process_of(attempt)
            if process is not None:
                if process.attempts.cancelled(attempt):
                    cancel = internal_pb2.CancelAttempt(attempt=attempt, is_final=is_final)
                    self._send(process, internal_pb2.SlotCommand(cancel=cancel))
            elif key_of(attempt) not in self._closed:
                self._closed.add(key_of(attempt))
                self._report(state_event(attempt, ATTEMPT_STATE_CANCELED))

    def send_commands(self, commands: Iterable[internal_pb2.TaskCommand]) -> None:
        """Passes commands on."""
        for command in commands:
            process = self._process_of(command.attempt)
            if process is not None and not process.attempts.is_terminal(command.attempt):
                self._send(process, internal_pb2.SlotCommand(task_command=command))

    def free(self, slot_ids: Iterable[str]) -> None:
        """Ends slot processes, one way or another."""
        for slot_id in slot_ids:
            process = self.processes.get(slot_id)
            if process is not None:
                if self._host.draw(2):
                    process.stop()
                else:
                    process.die()
                self._note_end(process, "it was freed", is_asked_for=True)

    # -- what finished attempts have left

    def release(self, partitions: Sequence[internal_pb2.PartitionId]) -> None:
        """Drops partitions; none named = all that are complete."""
        release = internal_pb2.ReleasePartitions(job_id="job", partitions=partitions)
        if partitions:
            for process in self.processes.values():
                self._send(process, internal_pb2.SlotCommand(release_partitions=release))
            chosen = [partition_id_of(partition) for partition in partitions]
        else:
            chosen = [held[1] for held in self._sealed.held()]
        self._sealed.release("job", chosen)
        self.server.forget()

    def holds(self, edge_id: str, vertex: str, subtask_index: int, attempt: int) -> bool:
        """Whether it has a complete partition."""
        wanted = PartitionId(edge_id, vertex, subtask_index, attempt)
        return any(held[1] == wanted for held in self._sealed.held())

    def held(self) -> list[str]:
        """Files in the spill directory."""
        root = self.spill_directory
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def _look(self) -> None:
        """Removes what nobody finishes: it is not complete, and its writer has ended."""
        writing = {
            partition_directory(self.spill_directory, "job", partition_id)
            for process in self.processes.values()
            for partition_id in process.outputs
        }
        for path in self.spill_directory.glob("*/*/part=*"):
            if not (path / INDEX_NAME).exists() and path not in writing:
                remove_partition(path)

    def server_dies(self) -> None:
        """The partition server dies, and is started again some time later."""
        if self.server.is_alive:
            self.server.die()
            self._host.loop.call_later(
                self._host.draw(_SERVER_BACKOFF_NS),
                lambda: self.server.start() if self.is_alive else None,
            )

    def set_spill_allowed(self, *, is_allowed: bool) -> None:
        """Tells every slot whether it may write to the disk."""
        pressure = internal_pb2.SpillPressure(stop=not is_allowed)
        for process in self.processes.values():
            self._send(process, internal_pb2.SlotCommand(spill_pressure=pressure))

    # -- its slots

    def _process_of(self, attempt: internal_pb2.AttemptId) -> SimulatedSlot | None:
        for process in self.processes.values():
            if process.attempts.contains(attempt):
                return process
        return None

    def _send(self, process: SimulatedSlot, command: internal_pb2.SlotCommand) -> None:
        self._host.in_order(f"to {process.name}", lambda: process.handle(command))

    def take_report(self, process: SimulatedSlot, report: internal_pb2.SlotReport) -> None:
        """A report arrives from a slot that the daemon still listens to."""
        if not self.is_alive or self.processes.get(process.slot_id) is not process:
            return
        kind = report.WhichOneof("report")
        if kind == "task_event" and process.attempts.observe(report.task_event):
            self._report(report.task_event)
        elif kind == "results":
            self._host.take_results(process, report.results)

    def results_taken(self, process: SimulatedSlot, taken: internal_pb2.ResultsTaken) -> None:
        """Rows of a collect sink have arrived."""
        self._send(process, internal_pb2.SlotCommand(results_taken=taken))

    def slot_dies(self, slot_id: str) -> None:
        """A process dies; what it had sent arrives, or is lost from some report on."""
        process = self.processes[slot_id]
        process.die()
        self.unheard.add(process)

        def noticed() -> None:
            self.unheard.discard(process)
            self._note_end(process, "it was killed by SIGKILL", is_asked_for=False)

        if self._host.draw(2):
            noticed_on = f"from {process.name}"  # behind all that it had sent
        else:
            noticed_on = f"end of {process.name}"
        self._host.in_order(noticed_on, noticed)

    def _note_end(self, process: SimulatedSlot, cause: str, *, is_asked_for: bool) -> None:
        if self.processes.get(process.slot_id) is not process:
            return
        del self.processes[process.slot_id]
        events = process.attempts.process_ended(
            cause, self.taskmanager_id, self._host.loop.now_ms(), is_asked_for=is_asked_for
        )
        self._closed.update(process.attempts.attempt_keys())
        for event in events:
            self._report(event)
        self._host.loop.call_later(
            self._host.draw(_LOOK_INTERVAL_NS), lambda: self._look() if self.is_alive else None
        )

    def end_all(self) -> None:
        """All slot processes end with the JobManager that had them started."""
        for slot_id in list(self.processes):
            self.free([slot_id])

    def die(self) -> None:
        """The TaskManager is gone, and with it its slots."""
        self.is_alive = False
        for process in self.processes.values():
            process.die()
        self.server.die()
        shutil.rmtree(self.spill_directory, ignore_errors=True)

    def _report(self, event: internal_pb2.TaskEvent) -> None:
        self._last_reports = [*self._last_reports[1 - _REPORTS_AT_ONCE :], event]
        self._host.in_order(f"from {self.name}", lambda: self._host.take_task_event(self, event))

    def repeat_reports(self) -> None:
        """The answer to its last call is lost, so it reports the same again, in the same order."""
        for event in list(self._last_reports):
            self._report(event)
