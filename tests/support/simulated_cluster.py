"""A whole job in one process on simulated time: JobMaster, slots, exchange, checkpoints; one seed decides.

Everything is the real thing but time, threads, sockets and the disk: the machines of the job and of its
checkpoints, the store's code, the mailbox loop of each slot stepped with ``run_one``, the data exchange
over a network in memory. The seed chooses who goes next, how long messages take, how they are cut and
what dies. "Nothing left to wake" is a failure; so is a job that has not ended long after the last fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pyarrow as pa

from common.pb import internal_pb2
from jobmanager.checkpoint import checkpoint_store_runner
from jobmanager.dispatcher import job_messages as m
from jobmanager.dispatcher.job_settings import job_settings
from jobmanager.dispatcher.job_state import JobState
from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.graph.job_plan import JobPlan
from jobmanager.rpc.graph_convert import endpoint_of, event_of, plan_of
from jobmanager.scheduler.placement import slots_needed
from jobmanager.scheduler.slots import Slot
from penstock.config import Configuration
from penstock.pb import client_pb2, graph_pb2
from taskmanager.network.connection_pool import PARTITION_WAIT_MS
from taskmanager.task.lifecycle import TERMINAL
from taskmanager.task.slot_runtime import SlotRuntime
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop
from tests.support.simulated_failovers import FailoverAudit
from tests.support.simulated_faults import Fault, Faults, Trigger
from tests.support.simulated_jobmanager import SimulatedJobManager, results_taken
from tests.support.simulated_partition_server import SimulatedPartitionServer
from tests.support.simulated_slot import SimulatedSlot
from tests.support.simulated_store import AuditedStore, StoreAccess
from tests.support.simulated_taskmanager import SimulatedTaskManager

_STEPS_MAX = 2_000_000
_TIME_MAX_MS = 100_000
_SHORT_WAIT_MS = 10_000
_SLOW_STEP_NS = 5_000_000
_HEARTBEAT_TIMEOUT_NS = 100_000_000
_SLOW_CALL_NS = 1_000_000_000
_ORPHANS_AFTER_NS = 1_500_000_000
_DISK_FULL_NS = 200_000_000
_FROZEN_MAX_NS = 300_000_000


_T = TypeVar("_T")


class SimulatedCluster:
    """Runs one job.

    Attributes:
        rows: what its collect sinks brought back, by collect id.
        story: what happened, for whoever looks into a seed.
        orphan_checks: how often the store was seen at rest and compared with what HEAD names.
        adopted: subtasks that a JobManager has not had run again, since they were done before it.
        failovers: what failures have restarted.
        processed_at_restart: how many rows functions had processed when something was restarted last.
        has_noted_commit: a job without checkpoints is at its one commit.
    """

    def __init__(
        self,
        graph: graph_pb2.JobGraph,
        seed: int,
        config: Configuration | None = None,
        artifact_paths: dict[str, str] | None = None,
        *,
        faults: Faults | None = None,
        taskmanagers: int = 1,
        work_directory: Path = Path("/nonexistent"),
    ) -> None:
        self.random = random.Random(seed)
        self.loop = SimulatedLoop()
        self.rows: dict[str, list[pa.RecordBatch]] = {}
        self.failure: client_pb2.FailureCause | None = None
        self.states: list[JobState] = []
        self.story: list[str] = []
        self.orphan_checks = 0
        self.graph = graph
        self.config = config or Configuration()
        self.artifact_paths = artifact_paths or {}
        self.work_directory = work_directory
        # Where it is as long as in reality, whoever depends on it is stuck.
        self.partition_wait_ms = PARTITION_WAIT_MS if seed % 4 else _SHORT_WAIT_MS
        self.network = InMemoryNetwork(self.loop.call_later, self.loop.monotonic_ns, seed)
        self.audited = AuditedStore()
        self.attempts_end = 0
        self.leader_epoch = 1
        self.jobmanager_deaths = 0
        self.slot_deaths = 0
        self.taskmanager_losses = 0
        self.adopted = 0
        self._failed_calls_before = 0
        self.restored_from_checkpoint = 0
        self._plan: JobPlan = plan_of(graph)
        self._settings = job_settings(self.config)
        self._faults = faults or Faults()
        self._line_free_at_ns: dict[str, int] = {}
        self.is_cancelled = False
        self.has_noted_commit = False
        self.failovers = FailoverAudit(
            self._plan, FailoverStrategyName(self.config.failover_strategy), self._restarting
        )
        self._commit_fails = False
        self._function_raises = False
        self._processed = 0
        self.processed_at_restart = 0
        self.has_leftovers = False
        self._changes_checked = 0
        self._wanted_slots = 0
        self._free: dict[str, Slot] = {}
        self._registered: set[str] = set()
        self._notice_loss: dict[str, Callable[[], None]] = {}
        self._given_up: list[SimulatedTaskManager] = []
        """Lost, though their processes live: frozen, or awake again and not yet at their end."""
        self._incarnations = 0
        needed = slots_needed(self._plan)
        self._slots_each = -(-needed // taskmanagers) + (1 if faults else 0)
        self._taskmanagers: dict[str, SimulatedTaskManager] = {}
        for index in range(taskmanagers):
            self._start_taskmanager(f"tm{index}")
        self._jobmanager = self._new_jobmanager(is_recovered=False)
        self._jobmanager.tell(m.JobStarted())

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self.states[-1]

    @property
    def cause(self) -> FailureCause | None:
        """Why the job has failed, as its JobManager sees it."""
        return self._jobmanager.master.failure

    def run(self) -> None:
        """Runs until the job has ended; fails when nothing is left to wake before that."""
        with (
            mock.patch.object(checkpoint_store_runner, "_SWAP_PAUSE_S", 0.0),
            self.failovers.watching(),
        ):
            for _ in range(_STEPS_MAX):
                if self._jobmanager.is_done:
                    self._check_nothing_held()
                    return
                self._check_store_at_rest()
                assert self._run_one(), f"nothing left to wake: {self._outlook()}"
                assert self.loop.now_ms() < _TIME_MAX_MS, f"the job is stuck: {self._outlook()}"
        raise AssertionError(f"still busy after {_STEPS_MAX} steps: {self._outlook()}")

    def _check_nothing_held(self) -> None:
        """Some time after the end of the job no TaskManager has anything of it."""
        self._run_for(_SLOW_CALL_NS)
        if self._calls_failed or not self._jobmanager.is_alive:
            # Slots and partitions of a job that has ended: heartbeats name them.
            for taskmanager in self._taskmanagers.values():
                taskmanager.end_all()
                taskmanager.release(())
        self._run_for(_ORPHANS_AFTER_NS)
        for taskmanager in self._taskmanagers.values():
            assert not taskmanager.processes, f"{taskmanager.name} still runs slots of the job"
            held = taskmanager.held()
            assert not held, f"{taskmanager.name} still holds {held} of the job"

    @property
    def _calls_failed(self) -> bool:
        return self._failed_calls_before + self._jobmanager.failed_calls > 0

    def _run_for(self, duration_ns: int) -> None:
        """Goes on for a time, as long as there is anything to do."""
        end_ns = self.loop.monotonic_ns() + duration_ns
        while self.loop.monotonic_ns() < end_ns and self._run_one():
            pass

    def _outlook(self) -> str:
        return f"{[state.name for state in self.states]}; {self._jobmanager.master.story}"

    def _run_one(self) -> bool:
        """One step of a slot or of the network, drawn by the seed; else time moves on."""
        self.passed("step")
        runtimes: list[SlotRuntime | SimulatedPartitionServer] = [
            slot.runtime
            for slot in (*self._processes(), *_processes_of(self._given_up))
            if slot.is_alive and not slot.is_frozen
        ]
        runtimes += [
            taskmanager.server
            for taskmanager in self._taskmanagers.values()
            if taskmanager.server.is_alive
        ]
        turns: list[Callable[[], bool]] = [runtime.run_one for runtime in runtimes]
        self.random.shuffle(turns)
        if self.random.random() < 0.3 and self._run_event(before_ns=_SLOW_STEP_NS):
            return True
        if any(turn() for turn in turns):
            return True
        deadlines = [runtime.next_deadline_ms() for runtime in runtimes]
        deadline_ms = min((at for at in deadlines if at is not None), default=None)
        if deadline_ms is None:
            return self.loop.run_one()
        wait_ns = max(deadline_ms * 1_000_000 - self.loop.monotonic_ns(), 1_000_000)
        if not self._run_event(before_ns=wait_ns):
            self.loop.advance(wait_ns)
        return True

    def _run_event(self, before_ns: int) -> bool:
        """Runs the next event where it is due within a time; else nothing."""
        at_ns = self.loop.next_at_ns
        if at_ns is None or at_ns - self.loop.monotonic_ns() > before_ns:
            return False
        return self.loop.run_one()

    # -- time

    def draw(self, choices: int) -> int:
        """A number below ``choices``."""
        return self.random.randrange(choices)

    def later(self, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time."""
        self.loop.call_later(self.random.randrange(1_000, 5_000_000), action)

    def in_order(self, line: str, action: Callable[[], None]) -> None:
        """Runs an action at a drawn time, behind all that was sent on the same line before."""
        earliest_ns = max(self._line_free_at_ns.get(line, 0), self.loop.monotonic_ns())
        arrives_ns = earliest_ns + self.random.randrange(1_000, 2_000_000)
        self._line_free_at_ns[line] = arrives_ns
        self.loop.call_later(arrives_ns - self.loop.monotonic_ns(), action)

    def background_delay_ns(self, is_snapshot: bool) -> int:
        """How long work waits for a thread."""
        longest_ns = self._faults.snapshot_pause_max_ns if is_snapshot else 5_000_000
        return self.random.randrange(1_000, longest_ns)

    # -- the job as it is published

    def publish(self, state: JobState) -> None:
        """The job has a new state."""
        self.states.append(state)
        self._tell_story(state.name)
        self.passed(state.name)

    def _tell_story(self, text: str) -> None:
        self.story.append(f"{self.loop.monotonic_ns() / 1e6:.3f} {text}")

    # -- slots

    def _start_taskmanager(self, taskmanager_id: str) -> None:
        self._incarnations += 1
        started = SimulatedTaskManager(self, taskmanager_id, self._incarnations, self._slots_each)
        self._taskmanagers[taskmanager_id] = started
        self._register(started)

    def _register(self, taskmanager: SimulatedTaskManager) -> None:
        """The TaskManager offers its slots to the JobManager, empty."""
        self._registered.add(taskmanager.name)
        self._free |= {slot.slot_id: slot for slot in taskmanager.slots}
        self._grant()

    def find_taskmanager(self, taskmanager_id: str) -> SimulatedTaskManager | None:
        """A TaskManager that answers this JobManager."""
        found = self._taskmanagers.get(taskmanager_id)
        return found if found is not None and found.name in self._registered else None

    def locate(
        self, partitions: Iterable[tuple[str, AttemptKey]]
    ) -> tuple[m.LocatedPartition, ...]:
        """Those that are there, with TaskManagers that have registered."""
        return tuple(
            m.LocatedPartition(
                taskmanager.taskmanager_id, endpoint_of(taskmanager.server.endpoint), edge_id, key
            )
            for edge_id, key in partitions
            for taskmanager in self._taskmanagers.values()
            if taskmanager.name in self._registered
            and taskmanager.holds(edge_id, key.vertex, key.subtask_index, key.attempt)
        )

    def _processes(self) -> list[SimulatedSlot]:
        return _processes_of(self._taskmanagers.values())

    def request_slots(self, count: int) -> None:
        """The job wants slots."""
        self._wanted_slots = count
        self._grant()

    def withdraw_request(self) -> None:
        """It wants them no longer."""
        self._wanted_slots = 0

    def take_back(self, slots: Iterable[Slot]) -> None:
        """Slots are free again."""
        current = {
            slot.slot_id: slot
            for taskmanager in self._taskmanagers.values()
            if taskmanager.name in self._registered
            for slot in taskmanager.slots
        }
        self._free |= {slot.slot_id: slot for slot in slots if current.get(slot.slot_id) == slot}
        self._grant()

    def _grant(self) -> None:
        if not self._wanted_slots or len(self._free) < self._wanted_slots:
            return
        granted = self.random.sample(sorted(self._free), self._wanted_slots)
        self._wanted_slots = 0
        slots = tuple(self._free.pop(slot_id) for slot_id in granted)
        self._post(m.SlotsGranted(slots))

    def _post(self, event: m.JobEvent) -> None:
        """What the cluster tells the JobManager's actor of the job, in order."""
        jobmanager = self._jobmanager
        self.in_order(f"inbox {jobmanager.leader_epoch}", lambda: jobmanager.tell(event))

    # -- reports

    def take_report(self, slot: SimulatedSlot, report: internal_pb2.SlotReport) -> None:
        """A slot has sent something to its daemon."""
        if report.WhichOneof("report") == "task_event":
            event = report.task_event
            kind: str = event.WhichOneof("event") or ""
            if kind == "state_changed":
                kind = client_pb2.AttemptState.Name(event.state_changed.state)
                kind = kind.removeprefix("ATTEMPT_STATE_")
                if event.state_changed.state in TERMINAL and slot.background_count:
                    self.has_leftovers = True  # nobody hears of snapshots of who has ended
            self.passed(kind)
        taskmanager = self._taskmanagers.get(slot.taskmanager_id)
        if taskmanager is not None:  # else it has been given up
            self.in_order(f"from {slot.name}", lambda: taskmanager.take_report(slot, report))

    def take_task_event(
        self, taskmanager: SimulatedTaskManager, event: internal_pb2.TaskEvent
    ) -> None:
        """A daemon's report reaches the JobManager; those of dead attempts are its affair."""
        if taskmanager.name not in self._registered:
            return
        if event.HasField("peer_unreachable"):
            self._probe(event.peer_unreachable.peer)
            return
        changed = event.state_changed
        if changed.HasField("failure"):
            self.failure = changed.failure
            self._tell_story(
                f"{event.attempt.vertex}/{event.attempt.subtask_index} failed: "
                f"{changed.failure.message}"
            )
        known = event_of(event, self.loop.now_ms())
        if known is not None:
            self._jobmanager.tell(known)

    def take_results(self, slot: SimulatedSlot, results: internal_pb2.SlotResults) -> None:
        """Rows of a collect sink come in."""
        with pa.ipc.open_stream(results.chunk.arrow) as reader:
            self.rows.setdefault(results.collect_id, []).extend(reader)
        self._taskmanagers[slot.taskmanager_id].results_taken(slot, results_taken(results))

    # -- checkpoints

    def open_store(self) -> StoreAccess:
        """The checkpoint store, for one more process."""
        opened = StoreAccess(self.audited, self.random)
        opened.failure_rate = self._faults.slot_store_failures
        return opened

    def start_prepared(self, checkpoint_id: int) -> None:
        """What dead attempts had left in the store is gone; what the living leave is still to come."""
        self.restored_from_checkpoint += checkpoint_id > 0
        self.has_leftovers = bool(self._given_up) or any(
            process.is_alive for process in self._processes()
        )

    def slot_ended(self) -> None:
        """What a slot process has uploaded may never be acknowledged."""
        self.has_leftovers = True

    def checkpoint_stored(self) -> None:
        """A checkpoint is complete."""
        head = self.audited.head()
        kept = [retained.checkpoint_id for retained in head.retained] if head is not None else []
        self._tell_story(f"stored: {kept}")

    def _check_store_at_rest(self) -> None:
        """Nothing is in the store but what HEAD leads to, once nobody has anything to do with it."""
        if (
            self.audited.changes == self._changes_checked
            or not self._jobmanager.is_at_rest
            or self.states[-1:] != [JobState.RUNNING]
        ):
            return
        now_ns = self.loop.monotonic_ns()
        if (
            self.has_leftovers
            or any(process.background_count for process in self._processes())
            or any(
                free_at_ns > now_ns
                for line, free_at_ns in self._line_free_at_ns.items()
                if line.startswith("from ")
            )
        ):
            return
        self._changes_checked = self.audited.changes
        self.orphan_checks += 1
        orphans = sorted(self.audited.paths() - self.audited.named())
        assert not orphans, f"nothing refers to {orphans}"

    # -- faults

    def passed(self, point: str) -> None:
        """Something has happened that a fault may wait for."""
        for trigger in self._faults.passed(point):
            self.loop.call_later(trigger.pause_ns, partial(self._strike, trigger))

    def _strike(self, trigger: Trigger) -> None:
        if self._jobmanager.master.ended:
            return
        self._tell_story(f"fault: {trigger.fault.value}")
        match trigger.fault:
            case Fault.SLOT_DIES:
                self._slot_dies()
            case Fault.TASKMANAGER_LOST:
                self._lose_taskmanager()
            case Fault.JOBMANAGER_DIES:
                self.jobmanager_dies()
            case Fault.JOBMANAGER_DIES_IN_STORE:
                self._jobmanager.store.calls_left = self.draw(8)
            case Fault.CALL_FAILS:
                self._jobmanager.next_call_fails = self.random.choice(("unheard", "unanswered"))
            case Fault.CHECKPOINT_REQUESTED:
                self._jobmanager.request_checkpoint()
            case Fault.COMMIT_FAILS:
                self._commit_fails = True
            case Fault.TASK_RAISES:
                self._function_raises = True
            case Fault.PARTITION_SERVER_DIES:
                for taskmanager in self._any(self._taskmanagers.values()):
                    taskmanager.server_dies()
            case Fault.CONNECTION_BREAKS:
                for link in self._any(link for link in self.network.links if link.is_open):
                    link.break_off()
            case Fault.REPORTS_DELAYED:
                for taskmanager in self._any(self._taskmanagers.values()):
                    self._line_free_at_ns[f"from {taskmanager.name}"] = (
                        self.loop.monotonic_ns() + self.draw(_HEARTBEAT_TIMEOUT_NS)
                    )
            case Fault.REPORTS_REPEATED:
                for taskmanager in self._any(self._taskmanagers.values()):
                    taskmanager.repeat_reports()
            case Fault.DISK_FULL:
                for taskmanager in self._any(self._taskmanagers.values()):
                    self._fill_disk(taskmanager)
            case Fault.HOST_FREEZES:
                self._freeze_taskmanager()
            case Fault.CANCELLED:
                self.is_cancelled = True
                self._jobmanager.tell(m.CancelRequested())

    def _restarting(self, what: str) -> None:
        self._tell_story(what)
        self.processed_at_restart = self._processed

    def _any(self, candidates: Iterable[_T]) -> list[_T]:
        """One of them, or none where there is none."""
        listed = list(candidates)
        return [self.random.choice(listed)] if listed else []

    def _fill_disk(self, taskmanager: SimulatedTaskManager) -> None:
        taskmanager.set_spill_allowed(is_allowed=False)
        self.loop.call_later(
            self.draw(_DISK_FULL_NS),
            lambda: taskmanager.set_spill_allowed(is_allowed=True),
        )

    def processing(self) -> None:
        """A function processes a row.

        Raises:
            ValueError: it cannot, this time.
        """
        self.passed("row")
        self._processed += 1
        if self._function_raises:
            self._function_raises = False
            raise ValueError("the simulated function fails, this once")

    def committing(self) -> None:
        """A sink is at a commit.

        Raises:
            OSError: the system that it writes to does not answer.
        """
        self.passed("commit")
        if self._commit_fails:
            self._commit_fails = False
            raise OSError("the simulated system does not answer")

    def _slot_dies(self) -> None:
        alive = [process for process in self._processes() if process.is_alive]
        if alive:
            process = self.random.choice(alive)
            self._tell_story(f"{process.name} dies")
            self.slot_deaths += 1
            self._taskmanagers[process.taskmanager_id].slot_dies(process.slot_id)

    def _lose_taskmanager(self) -> None:
        if not self._taskmanagers:
            return
        lost = self.random.choice(list(self._taskmanagers.values()))
        self._tell_story(f"{lost.name} dies")
        lost.die()
        self._miss(lost)

    def _freeze_taskmanager(self) -> None:
        """A host stands still, for ever or for some time; its TaskManager is given up. What wakes up goes on
        for a while with what is not its work any more."""
        if not self._taskmanagers:
            return
        frozen = self.random.choice(list(self._taskmanagers.values()))
        self._tell_story(f"{frozen.name} freezes")
        self._given_up.append(frozen)
        for process in frozen.processes.values():
            process.is_frozen = True

        def wake() -> None:
            self._tell_story(f"{frozen.name} goes on")
            for process in frozen.processes.values():
                process.is_frozen = False

        self._miss(frozen)
        if self.draw(2):
            asleep_ns = self.draw(_FROZEN_MAX_NS)
            self.loop.call_later(asleep_ns, wake)
            self.loop.call_later(asleep_ns + self.draw(_HEARTBEAT_TIMEOUT_NS), frozen.die)

    def _miss(self, lost: SimulatedTaskManager) -> None:
        """A TaskManager is silent from now on; some time later it is lost, and then another one comes."""
        self.taskmanager_losses += 1
        del self._taskmanagers[lost.taskmanager_id]
        for slot in lost.slots:
            if self._free.get(slot.slot_id) == slot:
                del self._free[slot.slot_id]

        def noticed() -> None:
            if lost.name in self._registered:
                self._registered.discard(lost.name)
                cause = FailureCause("TaskManagerLost", f"{lost.taskmanager_id} is silent")
                self._post(m.TaskManagerLost(lost.taskmanager_id, cause))

        def back() -> None:
            noticed()
            self._start_taskmanager(lost.taskmanager_id)

        self._notice_loss[lost.name] = noticed
        self.loop.call_later(self.draw(_HEARTBEAT_TIMEOUT_NS), noticed)
        self.loop.call_later(self.draw(2 * _HEARTBEAT_TIMEOUT_NS), back)

    def _probe(self, peer: internal_pb2.DataEndpoint) -> None:
        """A process cannot be reached: its TaskManager is asked whether it lives."""
        for name, notice in self._notice_loss.items():
            if peer.unix_path.startswith(f"/{name}-"):
                notice()

    def jobmanager_dies(self) -> None:
        """The JobManager dies; its successor goes on with the job, and the slots end some time."""
        if not self._jobmanager.is_alive:
            return
        if self.has_noted_commit:
            return  # its successor would not go on with the job
        self._tell_story("the JobManager dies")
        self._failed_calls_before += self._jobmanager.failed_calls + 1
        self._jobmanager.is_alive = False
        self.jobmanager_deaths += 1
        if self._jobmanager.master.ended:  # its successor knows that
            self.has_leftovers = True
            return
        self._registered.clear()
        self._free.clear()
        self._wanted_slots = 0
        self.loop.call_later(self.draw(50_000_000), self._take_over)

    def _new_jobmanager(self, *, is_recovered: bool) -> SimulatedJobManager:
        made = SimulatedJobManager(
            self, self._settings, self.leader_epoch, is_recovered=is_recovered
        )
        made.store.failure_rate = self._faults.jobmanager_store_failures
        made.store.lost_answer_rate = self._faults.lost_answers
        return made

    def _take_over(self) -> None:
        self.leader_epoch += 1
        self._tell_story(f"the JobManager of epoch {self.leader_epoch} takes over")
        self.failovers.begin_again()
        self._restarting("everything begins again")
        self._jobmanager = self._new_jobmanager(is_recovered=True)
        for taskmanager in list(self._taskmanagers.values()):
            self.loop.call_later(
                self.draw(50_000_000),
                partial(self._register_again, taskmanager),
            )
        self._jobmanager.tell(m.JobStarted())
        if self.is_cancelled:
            self._jobmanager.tell(m.CancelRequested())

    def _register_again(self, taskmanager: SimulatedTaskManager) -> None:
        if taskmanager.is_alive and taskmanager.name not in self._registered:
            taskmanager.end_all()
            self._register(taskmanager)


def _processes_of(taskmanagers: Iterable[SimulatedTaskManager]) -> list[SimulatedSlot]:
    return [process for taskmanager in taskmanagers for process in taskmanager.processes.values()]
