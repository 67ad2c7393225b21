"""A whole job in one process on simulated time: JobMaster, slots, exchange; one seed decides the order.

Everything is the real thing but time, threads and sockets: the JobMaster's machine, the mailbox loop
of each slot stepped with ``run_one``, the data exchange over a network in memory. The seed chooses
who goes next, how long messages take and how they are cut. "Nothing left to wake" is a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pyarrow as pa

from common.pb import internal_pb2
from jobmanager.dispatcher import job_messages as m
from jobmanager.dispatcher.job_master import JobMaster
from jobmanager.dispatcher.job_state import JobState
from jobmanager.rpc.graph_convert import DeploymentMessages, endpoint_of, event_of, plan_of
from jobmanager.scheduler.slots import Slot
from penstock.config import Configuration
from penstock.pb import client_pb2, graph_pb2
from taskmanager.network.exchange import DataExchange, SlotIdentity
from taskmanager.task.deployment import Deployment, SlotServices
from taskmanager.task.execution import Execution
from taskmanager.task.mailbox import Mailbox
from taskmanager.task.slot_runtime import SlotRuntime
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop

_TASKMANAGER = "tm"
_STEPS_MAX = 2_000_000


class _SimulatedExecutor(Executor):
    """Runs background work at a later simulated time."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._cluster.later(lambda: future.set_result(fn(*args, **kwargs)))
        return future


class SimulatedCluster:
    """Runs one job; ``rows`` are what its collect sinks brought back, by collect id."""

    def __init__(
        self,
        graph: graph_pb2.JobGraph,
        seed: int,
        config: Configuration | None = None,
        artifact_paths: dict[str, str] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.loop = SimulatedLoop()
        self.rows: dict[str, list[pa.RecordBatch]] = {}
        self.failure: client_pb2.FailureCause | None = None
        self._config = config or Configuration()
        self._artifact_paths = artifact_paths or {}
        self._network = InMemoryNetwork(self.loop.call_later, self.loop.monotonic_ns, seed)
        self._messages = DeploymentMessages("job", graph, 1)
        self._master = JobMaster(plan_of(graph))
        self._slots: dict[str, SlotRuntime] = {}
        self._endpoints: dict[str, internal_pb2.DataEndpoint] = {}
        self.states: list[JobState] = []
        self._line_free_at_ns: dict[str, int] = {}
        self._tell(m.JobStarted())

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self.states[-1]

    def run(self) -> None:
        """Runs until the job has ended; fails when nothing is left to wake before that."""
        for _ in range(_STEPS_MAX):
            if self._master.ended:
                return
            assert self._run_one(), f"nothing left to wake in state {self.states}"
        raise AssertionError(f"still {self.state} after {_STEPS_MAX} steps")

    def _run_one(self) -> bool:
        """One step of a slot or of the network, drawn by the seed; else time moves on."""
        turns: list[Callable[[], bool]] = [slot.run_one for slot in self._slots.values()]
        self.random.shuffle(turns)
        if self.random.random() < 0.3 and self.loop.run_one():
            return True
        if any(turn() for turn in turns) or self.loop.run_one():
            return True
        deadlines = [slot.next_deadline_ms() for slot in self._slots.values()]
        if not deadlines or self.loop.now_ms() > 3_600_000:
            return False
        self.loop.advance(max(min(deadlines) - self.loop.now_ms(), 1) * 1_000_000)
        return True

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time."""
        self.loop.call_later(self.random.randrange(1_000, 5_000_000), action)

    def _in_order(self, line: str, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time, behind all that was sent on the same line before."""
        earliest_ns = max(self._line_free_at_ns.get(line, 0), self.loop.monotonic_ns())
        arrives_ns = earliest_ns + self.random.randrange(1_000, 2_000_000)
        self._line_free_at_ns[line] = arrives_ns
        self.loop.call_later(arrives_ns - self.loop.monotonic_ns(), action)

    # -- JobMaster

    def _tell(self, event: m.JobEvent) -> None:
        for effect in self._master.step(event):
            self._master.check()
            self._carry_out(effect)

    def _carry_out(self, effect: m.JobEffect) -> None:
        match effect:
            case m.PublishState(state):
                self.states.append(state)
            case m.RequestSlots(count):
                slots = tuple(
                    Slot(f"slot-{index}", _TASKMANAGER, "incarnation") for index in range(count)
                )
                self.later(lambda: self._tell(m.SlotsGranted(slots)))
            case m.AllocateSlots(_, slot_ids):
                endpoints = tuple(endpoint_of(self._start_slot(slot_id)) for slot_id in slot_ids)
                self.later(lambda: self._tell(m.SlotsAllocated(_TASKMANAGER, endpoints)))
            case m.DeployTasks(_, tasks):
                for task in tasks:
                    message = self._messages.task(task)
                    self._command(task.slot_id, internal_pb2.SlotCommand(deploy=message))
            case m.SendCommands(_, commands):
                for command in self._messages.commands(commands):
                    self._broadcast(internal_pb2.SlotCommand(task_command=command))
            case m.CancelTasks(_, keys):
                for key in keys:
                    attempt = internal_pb2.AttemptId(
                        job_id="job",
                        vertex=key.vertex,
                        subtask_index=key.subtask_index,
                        attempt=key.attempt,
                    )
                    self._broadcast(internal_pb2.SlotCommand(cancel=attempt))
            case _:
                pass  # slots end with the simulation

    # -- slots

    def _start_slot(self, slot_id: str) -> internal_pb2.DataEndpoint:
        mailbox = Mailbox()
        exchange = DataExchange(
            self._config,
            SlotIdentity(job_id="job", slot_id=slot_id, host_id="host", leader_epoch=1, token=""),
            mailbox.post,
            self.loop,
            self._network.transport(),
        )
        services = SlotServices(
            config=self._config,
            clock=self.loop,
            exchange=exchange,
            executor=_SimulatedExecutor(self),
            post=mailbox.post,
            report=lambda report: self._in_order(
                f"from {slot_id}", lambda: self._take_report(slot_id, report)
            ),
            artifact_paths=self._artifact_paths,
        )

        def build(
            deployment: internal_pb2.TaskDeployment, schedule: Callable[[], None]
        ) -> Execution:
            return Execution(
                deployment,
                Deployment(deployment, services, schedule),
                report=services.report,
                clock=self.loop,
                taskmanager_id=_TASKMANAGER,
                post=services.post,
                schedule=schedule,
            )

        self._slots[slot_id] = SlotRuntime(self.loop, mailbox, exchange, build, services.report)
        return exchange.listen(f"/{slot_id}", "", "")

    def _command(self, slot_id: str, command: internal_pb2.SlotCommand) -> None:
        self._in_order(f"to {slot_id}", lambda: self._slots[slot_id].handle(command))

    def _broadcast(self, command: internal_pb2.SlotCommand) -> None:
        for slot_id in self._slots:
            self._command(slot_id, command)

    def _take_report(self, slot_id: str, report: internal_pb2.SlotReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "task_event":
            changed = report.task_event.state_changed
            if changed.HasField("failure"):
                self.failure = changed.failure
            event = event_of(report.task_event, self.loop.now_ms())
            if event is not None:
                self._tell(event)
        elif kind == "results":
            results = report.results
            with pa.ipc.open_stream(results.chunk.arrow) as reader:
                self.rows.setdefault(results.collect_id, []).extend(reader)
            taken = internal_pb2.ResultsTaken(
                attempt=results.attempt,
                collect_id=results.collect_id,
                sequence=results.chunk.sequence,
            )
            self._command(slot_id, internal_pb2.SlotCommand(results_taken=taken))
