"""One JobManager's part in a simulated job: the real machine and store code, effects on simulated time.

It does what the shells around the machine do (``JobMasterRunner``, ``JobCheckpointsRunner``): calls to a
TaskManager and to the store go one after the other, answers are events. It can die between any two
events and in the midst of a store call; then it is never heard of again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar, assert_never

from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.dispatcher import job_messages as m
from jobmanager.dispatcher.job_master import JobMaster
from jobmanager.dispatcher.job_options import JobOptions
from jobmanager.dispatcher.job_settings import JobSettings
from jobmanager.dispatcher.job_state import ENDING, JobState
from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.rpc.graph_convert import (
    DeploymentMessages,
    attempt_id,
    cause_of_error,
    endpoint_of,
    partition_id,
    plan_of,
)
from jobmanager.rpc.restore_convert import RestoredTasks, restored_checkpoint, restored_tasks
from jobmanager.scheduler.slots import Slot
from penstock.config import Configuration
from penstock.errors import Fenced, StoreTransient, StreamError, Unrecoverable
from penstock.pb import graph_pb2
from penstock.storage.head import HeadOutcomeUnknown
from tests.support.in_memory_network import SimulatedLoop
from tests.support.simulated_failovers import FailoverAudit
from tests.support.simulated_store import ProcessDied, StoreAccess
from tests.support.simulated_taskmanager import SimulatedTaskManager

Answer = TypeVar("Answer")

_ATTEMPTS_RESERVED_AT_ONCE = 16
_CALL_TIMEOUT_NS = 300_000_000
_CANCELLATION_TIMEOUT_NS = 2_000_000_000
_REGISTRATION_NS = 150_000_000
"""Longer than TaskManagers take to register again."""


class JobManagerHost(Protocol):
    """What a JobManager needs of the simulation."""

    loop: SimulatedLoop
    graph: graph_pb2.JobGraph
    config: Configuration
    failovers: FailoverAudit
    attempts_end: int
    has_noted_commit: bool
    adopted: int

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time."""

    def open_store(self) -> StoreAccess:
        """The checkpoint store, for one more process."""

    def find_taskmanager(self, taskmanager_id: str) -> SimulatedTaskManager | None:
        """A TaskManager that answers this JobManager."""

    def locate(
        self, partitions: Iterable[tuple[str, AttemptKey]]
    ) -> tuple[m.LocatedPartition, ...]:
        """Those that are there, with TaskManagers that have registered."""

    def request_slots(self, count: int) -> None:
        """The job wants slots."""

    def withdraw_request(self) -> None:
        """It wants them no longer."""

    def take_back(self, slots: Iterable[Slot]) -> None:
        """Slots are free again."""

    def publish(self, state: JobState) -> None:
        """The job has a new state."""

    def passed(self, point: str) -> None:
        """Something has happened that a fault may wait for."""

    def start_prepared(self, checkpoint_id: int) -> None:
        """What dead attempts had left in the store is gone."""

    def checkpoint_stored(self) -> None:
        """A checkpoint is complete."""

    def jobmanager_dies(self) -> None:
        """It has died in a store call."""


class SimulatedJobManager:
    """One leader's work on the job."""

    def __init__(
        self,
        host: JobManagerHost,
        settings: JobSettings,
        leader_epoch: int,
        *,
        is_recovered: bool,
    ) -> None:
        self._host = host
        self.leader_epoch = leader_epoch
        self.is_alive = True
        self.next_call_fails = ""
        self.failed_calls = 0
        self.is_store_unsure = False
        """An upload or a manifest may be left that only the next ``prepare`` sweeps."""
        checkpoints = settings.checkpoints
        self.store = host.open_store()
        self._runner = (
            None
            if checkpoints is None
            else CheckpointStoreRunner(
                "job",
                host.graph,
                self.store,
                leader_epoch=leader_epoch,
                version="simulated",
                now_ms=host.loop.now_ms,
            )
        )

        def coordinator(
            retained: tuple[c.CompletedCheckpoint, ...], next_id: int
        ) -> CheckpointCoordinator:
            assert checkpoints is not None
            made = CheckpointCoordinator(checkpoints, retained=retained, next_checkpoint_id=next_id)
            self.coordinators.append(made)
            return made

        self.coordinators: list[CheckpointCoordinator] = []
        options = JobOptions(
            restart=settings.restart,
            failover_strategy=FailoverStrategyName(host.config.failover_strategy),
            coordinator=None if checkpoints is None else coordinator,
            first_attempt=host.attempts_end if is_recovered else 0,
            is_recovered=is_recovered,
        )
        self.master = JobMaster(plan_of(host.graph), options)
        self._messages = DeploymentMessages(
            "job",
            host.graph,
            leader_epoch,
            takes_checkpoints=checkpoints is not None,
            checkpoint_directory="/simulated" if checkpoints is not None else "",
        )
        self.unanswered: set[str] = set()
        self._answered: set[str] = set()
        self._restored: RestoredTasks = {}
        self._lanes: dict[str, deque[Callable[[], None]]] = {}
        self._timer_number = 0
        self._overdue_number = 0

    @property
    def is_done(self) -> bool:
        """The job has ended here and all is cleaned up."""
        return self.master.ended and not (self.is_alive and self._lanes)

    @property
    def is_at_rest(self) -> bool:
        """No call, checkpoint or deletion is under way, and none is to be repeated."""
        if not self.is_alive or self._lanes or self.is_store_unsure or not self.coordinators:
            return False
        coordinator = self.coordinators[-1]
        return not coordinator.pending and not coordinator.undeleted_count

    def tell(self, event: m.JobEvent) -> None:
        """Something has happened."""
        if not self.is_alive:
            return
        effects = self.master.step(event, self._host.loop.now_ms())
        self.master.check()
        for coordinator in self.coordinators[-1:]:
            coordinator.check()
        for effect in effects:
            if not self.is_alive:
                return
            self._perform(effect)

    def request_checkpoint(self) -> None:
        """A user asks for a checkpoint; ``unanswered`` has who waits."""
        request_id = f"request {len(self._answered) + len(self.unanswered)}"
        self.unanswered.add(request_id)
        self.tell(c.CheckpointRequested(request_id, self._host.loop.now_ms()))

    # ------------------------------------------------------------ effects

    def _perform(self, effect: m.JobEffect) -> None:
        host = self._host
        match effect:
            case m.RequestSlots(count):
                host.request_slots(count)
            case m.WithdrawRequest():
                host.withdraw_request()
            case m.AllocateSlots(taskmanager_id, slot_ids, call):
                self._call(
                    taskmanager_id,
                    lambda taskmanager: taskmanager.allocate(slot_ids),
                    lambda answer: self.tell(
                        m.SlotsAllocated(
                            taskmanager_id,
                            tuple(map(endpoint_of, answer.endpoints)),
                            call,
                            endpoint_of(answer.partition_endpoint),
                        )
                    ),
                )
            case m.DeployTasks(taskmanager_id, tasks, from_nothing):
                host.failovers.deployed([task.attempt for task in tasks])
                coordinator = self.master.coordinator
                first_checkpoint_id = 0 if coordinator is None else coordinator.next_checkpoint_id
                deployments = [
                    self._messages.task(
                        task,
                        None
                        if task.attempt.subtask in from_nothing
                        else self._restored.get(task.attempt.subtask),
                        first_checkpoint_id,
                    )
                    for task in tasks
                ]
                self._call(taskmanager_id, lambda taskmanager: taskmanager.deploy(deployments))
            case m.SendCommands(taskmanager_id, commands):
                messages = self._messages.commands(commands)
                self._call(taskmanager_id, lambda taskmanager: taskmanager.send_commands(messages))
                for message in messages:
                    host.passed(message.WhichOneof("command") or "")
            case m.CancelTasks(taskmanager_id, keys, is_final):
                if self.master.state not in ENDING:
                    host.failovers.cancelled(keys)
                attempts = [attempt_id("job", key) for key in keys]
                self._call(
                    taskmanager_id,
                    lambda taskmanager: taskmanager.cancel(attempts, is_final=is_final),
                )
            case m.AwaitCancellation():
                self._overdue_number += 1
                number, overdue = self._overdue_number, m.CancellationOverdue(self.master.attempt)
                host.loop.call_later(
                    _CANCELLATION_TIMEOUT_NS,
                    lambda: self.tell(overdue) if number == self._overdue_number else None,
                )
            case m.FreeSlots(slots):
                self._free(slots)
            case m.NoteCommit():
                self._in_lane("store", self._note_commit)
            case m.ReleasePartitions(taskmanager_id, partitions):
                released = [partition_id(*partition) for partition in partitions]
                self._call(
                    taskmanager_id,
                    lambda taskmanager: taskmanager.release(released),
                    failed=_told_when_a_heartbeat_names_them,
                )
            case m.LocatePartitions():
                self._locate(effect, host.loop.monotonic_ns() + _REGISTRATION_NS)
            case m.PublishState(state):
                host.publish(state)
            case m.PostLater(delay_ms, event):
                host.loop.call_later(delay_ms * 1_000_000, lambda: self.tell(event))
            case m.PrepareStart():
                self._in_lane("store", lambda: self._prepare(effect))
            case m.StoreCheckpoint():
                self._in_lane("store", lambda: self._store_checkpoint(effect))
            case m.DiscardCheckpoints():
                self._in_lane("store", self._discard)
            case c.DeleteFiles(paths):
                self._in_lane("deletions", lambda: self._delete(paths))
            case c.CallAt(at_ms):
                self._call_at(at_ms)
            case c.AnswerRequest(request_id):
                self.unanswered.remove(request_id)
                self._answered.add(request_id)
            case c.ReportAborted() | c.ReportCompleted() | c.SettleCheckpoint() | m.SweepOutput():
                pass
            case _:
                assert_never(effect)
        host.passed(type(effect).__name__)

    def _in_lane(self, name: str, action: Callable[[], None]) -> None:
        """Runs actions of a lane one after the other, each at a drawn time."""

        def begin() -> None:
            action()
            self._end_of_action(name)

        self._begin_in_lane(name, begin)

    def _begin_in_lane(self, name: str, begin: Callable[[], None]) -> None:
        """The same for what takes time: the lane waits for ``_end_of_action``."""
        lane = self._lanes.setdefault(name, deque())
        lane.append(begin)
        if len(lane) == 1:
            self._host.later(lambda: self._begin_next(name))

    def _begin_next(self, name: str) -> None:
        if not self.is_alive:
            return
        try:
            self._lanes[name][0]()
        except ProcessDied:
            self._host.jobmanager_dies()

    def _end_of_action(self, name: str) -> None:
        lane = self._lanes[name]
        lane.popleft()
        if lane:
            self._host.later(lambda: self._begin_next(name))
        else:
            del self._lanes[name]

    def _call(
        self,
        taskmanager_id: str,
        action: Callable[[SimulatedTaskManager], Answer],
        answered: Callable[[Answer], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        attempt = self.master.attempt

        def fail() -> None:
            self.failed_calls += 1
            if failed is not None:
                failed()
            else:
                cause = FailureCause("RpcTimeout", f"{taskmanager_id} does not answer")
                self.tell(m.CallFailed(taskmanager_id, cause, attempt))
            self._end_of_action(taskmanager_id)

        def call() -> None:
            taskmanager = self._host.find_taskmanager(taskmanager_id)
            way, self.next_call_fails = self.next_call_fails, ""
            if taskmanager is None or way == "unheard":
                self._host.loop.call_later(_CALL_TIMEOUT_NS, fail)
                return
            answer = action(taskmanager)
            if way:
                self._host.loop.call_later(_CALL_TIMEOUT_NS, fail)
                return

            def end() -> None:
                if answered is not None:
                    answered(answer)
                self._end_of_action(taskmanager_id)

            self._host.later(end)

        self._begin_in_lane(taskmanager_id, call)

    def _locate(self, effect: m.LocatePartitions, until_ns: int) -> None:
        """Looks for partitions until all are found, or everybody has registered who lives."""
        located = self._host.locate(effect.partitions)
        is_settled = self._host.loop.monotonic_ns() >= until_ns
        if len(located) == len(effect.partitions) or is_settled:
            self._host.later(lambda: self._adopt(m.PartitionsLocated(effect.attempt, located)))
        elif self.is_alive:
            self._host.later(lambda: self._locate(effect, until_ns))

    def _adopt(self, event: m.PartitionsLocated) -> None:
        before = self.master.graph.started
        self.tell(event)
        finished = self.master.graph.in_state(AttemptState.FINISHED)
        self._host.adopted += len(finished - before)

    def _free(self, slots: tuple[Slot, ...]) -> None:
        taskmanager_id = slots[0].taskmanager_id

        def free(taskmanager: SimulatedTaskManager) -> None:
            if slots[0].incarnation == taskmanager.name:
                taskmanager.free([slot.slot_id for slot in slots])
                self._host.take_back(slots)

        def again() -> None:  # its heartbeat names them
            self._host.loop.call_later(_CALL_TIMEOUT_NS, lambda: self._free(slots))

        self._call(taskmanager_id, free, failed=again)

    # ------------------------------------------------------------ the store

    def _note_commit(self) -> None:
        self._host.has_noted_commit = True
        self.tell(m.CommitNoted())

    def _prepare(self, effect: m.PrepareStart) -> None:
        now_ms = self._host.loop.now_ms()
        try:
            event = self._prepared(effect)
        except Fenced as error:
            cause = cause_of_error(Unrecoverable(str(error)), now_ms)
            self.tell(m.StartNotPrepared(effect.attempt, cause))
        except StreamError as error:
            self.tell(m.StartNotPrepared(effect.attempt, cause_of_error(error, now_ms)))
        else:
            self.is_store_unsure = False
            self._host.start_prepared(event.restored.checkpoint_id if event.restored else 0)
            self.tell(event)

    def _prepared(self, effect: m.PrepareStart) -> m.StartPrepared:
        attempt = effect.attempt
        if attempt >= self._host.attempts_end:
            self._host.attempts_end = attempt + _ATTEMPTS_RESERVED_AT_ONCE
        self._restored = {}
        if self._runner is None:
            return m.StartPrepared(attempt)
        found = self._runner.prepare(effect.unusable, alone=effect.subtasks)
        restored = None
        if found.newest is not None:
            self._restored = restored_tasks(found.newest, self._host.graph, effect.subtasks)
            restored = restored_checkpoint(
                found.newest.checkpoint_id, self._restored, self._host.graph
            )
        return m.StartPrepared(attempt, restored, found.retained, found.next_checkpoint_id)

    def _store_checkpoint(self, effect: m.StoreCheckpoint) -> None:
        assert self._runner is not None
        now_ms = self._host.loop.now_ms()
        failures = self.store.failures
        try:
            event = self._runner.store(effect.stored, effect.done_splits)
        except Fenced as error:
            self.tell(m.FailureRequested(cause_of_error(Unrecoverable(str(error)), now_ms)))
        except HeadOutcomeUnknown as error:
            self.is_store_unsure = True
            checkpoint_id = effect.stored.checkpoint_id
            self._in_lane("store", lambda: self._settle(checkpoint_id))
            self.tell(c.StoreOutcomeUnknown(checkpoint_id, str(error), now_ms))
        else:
            self.is_store_unsure |= self.store.failures > failures
            self.tell(event)
            self._host.passed(type(event).__name__)
            if isinstance(event, c.CheckpointStored) and self.is_alive:
                self._host.checkpoint_stored()

    def _settle(self, checkpoint_id: int) -> None:
        """Finds out what has become of a checkpoint, however often the store fails meanwhile."""
        assert self._runner is not None
        if self.master.ended:
            return
        try:
            event = self._runner.settle(checkpoint_id)
        except StoreTransient:
            self._in_lane("store", lambda: self._settle(checkpoint_id))
        except StreamError as error:
            cause = cause_of_error(Unrecoverable(str(error)), self._host.loop.now_ms())
            self.tell(m.FailureRequested(cause))
        else:
            self.tell(event)
            if isinstance(event, c.CheckpointStored) and self.is_alive:
                self._host.checkpoint_stored()

    def _delete(self, paths: tuple[str, ...]) -> None:
        assert self._runner is not None
        self.tell(self._runner.delete(paths))

    def _discard(self) -> None:
        if self._runner is not None:
            with contextlib.suppress(StreamError):  # what is left is told by ``is_store_unsure``
                self._runner.discard()

    def _call_at(self, at_ms: int) -> None:
        self._timer_number += 1
        number = self._timer_number

        def due() -> None:
            if number == self._timer_number:
                self.tell(c.TimeReached(self._host.loop.now_ms()))

        delay_ms = max(0, at_ms - self._host.loop.now_ms())
        self._host.loop.call_later(delay_ms * 1_000_000, due)


def _told_when_a_heartbeat_names_them() -> None:
    """A call to release partitions has failed: they are released at the end of the job, if not before."""


def results_taken(results: internal_pb2.SlotResults) -> internal_pb2.ResultsTaken:
    """The answer to rows of a collect sink."""
    return internal_pb2.ResultsTaken(
        attempt=results.attempt, collect_id=results.collect_id, sequence=results.chunk.sequence
    )
