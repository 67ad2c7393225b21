"""A whole cluster in one process on simulated time, with one job; one seed decides.

Everything is the real thing but time, threads, sockets, processes and the disk of checkpoints: both daemons as
their ``main`` puts them together, on an event loop of their own each (``SimulatedEventLoop``), gRPC's
stubs, servicers and interceptors (``SimulatedRpc``), the mailbox loop of each slot stepped with ``run_one``,
the data exchange over a network in memory. The seed chooses who goes next, how long messages take, how they are
cut and what dies. A job that has not ended long after the last fault is a failure; so is an assertion anywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from google.protobuf.message import Message

from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.job_plan import JobPlan
from jobmanager.messages import job_events
from jobmanager.messages.job_state import JobState
from jobmanager.rpc.graph_convert import plan_of
from penstock.config import Configuration
from penstock.local.embedded import slots_needed
from penstock.pb import client_pb2, graph_pb2
from penstock.storage.checkpoint_properties import SavepointFormat
from taskmanager.network.connection_pool import PARTITION_WAIT_MS
from taskmanager.task.lifecycle import TERMINAL
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop
from tests.support.simulated_event_loop import SimulatedEventLoop
from tests.support.simulated_failovers import FailoverAudit
from tests.support.simulated_faults import Fault, Faults, Trigger
from tests.support.simulated_groups import GroupAudit
from tests.support.simulated_jobmanager import SimulatedJobManager
from tests.support.simulated_messages import call_words
from tests.support.simulated_rpc import Call, SimulatedRpc
from tests.support.simulated_savepoints import SimulatedSavepoints, Wish
from tests.support.simulated_slot import SimulatedSlot
from tests.support.simulated_store import AuditedStore, Countdown, StoreAccess, StoreWeather
from tests.support.simulated_taskmanager import JOBMANAGER_PORT, SimulatedTaskManager
from tests.support.simulated_watch import watching
from tests.support.story_columns import Moment

_STEPS_MAX = 4_000_000
_TIME_MAX_MS = 300_000
_SHORT_WAIT_MS = 10_000
_SLOW_STEP_NS = 5_000_000
_BACK_AFTER_MAX_NS = 300_000_000
_CLEAN_AFTER_NS = 60_000_000_000
_DISK_FULL_NS = 3_000_000_000
_FROZEN_MAX_NS = 3_000_000_000
_SETTINGS = {
    "jobmanager.metrics.port": -1,
    "security.open-loopback": True,
    "heartbeat.interval": "100ms",
    "heartbeat.timeout": "1s",
    "rpc.timeout": "1s",
    "task.cancellation.timeout": "2s",
}

JOB_ID = "0" * 31 + "1"

_T = TypeVar("_T")


class SimulatedCluster:
    """Runs one job.

    Attributes:
        rows: what its collect sinks brought back, by collect id.
        has_lost_rows: a JobManager has died with some of them.
        is_submitted: a JobManager has told the client that it has the job.
        story: what happened, for whoever looks into a seed; ``story_columns`` draws it.
        orphan_checks: how often the store was seen at rest and compared with what HEAD names.
        savepoints: that users have asked for.
        aborted: checkpoints, by the reason.
        resumed: jobs that have gone on from a savepoint of it.
        adopted: subtasks that a JobManager has not had run again, since they were done before it and were read on where nothing ran any more.
        failovers: what failures have restarted.
        groups: how far its subtasks are, together.
        processed_at_restart: how many rows functions had processed when something was restarted last.
        on_restart: called when something is.
        has_noted_commit: a job without checkpoints is at its one commit.
    """

    def __init__(
        self,
        graph: graph_pb2.JobGraph,
        seed: int,
        config: Configuration | None = None,
        *,
        faults: Faults | None = None,
        taskmanagers: int = 1,
        work_directory: Path,
        time_max_ms: int = _TIME_MAX_MS,
        job_id: str = JOB_ID,
    ) -> None:
        self._time_max_ms = time_max_ms
        self.random = random.Random(seed)
        self.loop = SimulatedLoop()
        self.pids = itertools.count(100_000)
        self._names = itertools.count(1)
        self.rows: dict[str, list[pa.RecordBatch]] = {}
        self.has_lost_rows = False
        self.is_submitted = False
        self.failure: client_pb2.FailureCause | None = None
        self.states: list[JobState] = []
        self.story: list[Moment] = []
        self.orphan_checks = 0
        self.graph = graph_pb2.JobGraph()
        self.graph.CopyFrom(graph)
        del self.graph.artifacts[:]  # all processes have the code in common
        self.config = (config or Configuration()).merged(_SETTINGS)
        self.work_directory = work_directory
        # Where it is as long as in reality, whoever depends on it is stuck.
        self.partition_wait_ms = PARTITION_WAIT_MS if seed % 4 else _SHORT_WAIT_MS
        self.network = InMemoryNetwork(self.loop.call_later, self.loop.monotonic_ns, seed)
        self.rpc = SimulatedRpc(self)
        self.audited = AuditedStore(self.broke)
        self.job_id = job_id
        self.savepoints = SimulatedSavepoints(
            self, job_id, f"{work_directory}/savepoints", head_id=self._head_id
        )
        self.jobmanager_deaths = 0
        self.jobmanager_stops = 0
        self.slot_deaths = 0
        self.taskmanager_losses = 0
        self.adopted = 0
        self.resumed = 0
        self.aborted: collections.Counter[str] = collections.Counter()
        self.restored_from_checkpoint = 0
        self.checkpoints_stored = 0
        self.unanswered_calls = 0
        self._plan: JobPlan = plan_of(graph)
        self._faults = faults or Faults()
        self._line_free_at_ns: dict[str, int] = {}
        self.is_cancelled = False
        self.has_noted_commit = False
        self.groups = GroupAudit(self.loop.now_ms)
        self.failovers = FailoverAudit(
            self._plan,
            FailoverStrategyName(self.config.failover_strategy),
            self._restarting,
            self.groups,
            self.config.restart_strategy_fixed_delay_delay_ms
            if self.config.restart_strategy_type == "fixed-delay"
            else None,
        )
        self._broken: BaseException | None = None
        self._next_call_fails = ""
        self._repeats_report = False
        self._reports_free_at_ns = 0
        self._commit_fails = False
        self._rows_that_raise = 0
        self._processed = 0
        self.processed_at_restart = 0
        self.on_restart: Callable[[], None] = lambda: None
        self.has_leftovers = False
        self._unsure_puts_swept = 0
        self._changes_checked = 0
        self._given_up: list[SimulatedTaskManager] = []
        """Lost, though their processes live: frozen, or awake again and not yet at their end."""
        self._incarnations = 0
        self._dead: list[SimulatedEventLoop] = []
        needed = slots_needed(self.graph)
        self._slots_each = -(-needed // taskmanagers) + (1 if faults else 0)
        self._taskmanagers: dict[str, SimulatedTaskManager] = {}
        self._jobmanagers = 1
        self._jobmanager = SimulatedJobManager(self, "JobManager")
        for index in range(taskmanagers):
            self._start_taskmanager(f"tm{index}")

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self.states[-1]

    @property
    def cause(self) -> FailureCause | None:
        """Why the job has failed, as its JobManager sees it."""
        record = self._jobmanager.record
        return None if record is None else record.failure

    def run(self) -> None:
        """Runs until the job has ended, and all that it leaves has been cleaned up."""
        with watching(self):
            try:
                self._run_until(lambda: self._jobmanager.is_done, self._check_store_at_rest)
                self._check_everything_is_gone()
            finally:
                self._unwind()

    def _run_until(self, is_done: Callable[[], bool], look: Callable[[], None]) -> None:
        for _ in range(_STEPS_MAX * self._time_max_ms // _TIME_MAX_MS):
            if is_done():
                return
            look()
            assert self._run_one(), f"nothing left to wake: {self._outlook()}"
            assert self.loop.now_ms() < self._time_max_ms, f"the job is stuck: {self._outlook()}"
            if self._broken is not None:
                raise self._broken
        raise AssertionError(f"still busy after {_STEPS_MAX} steps: {self._outlook()}")

    def _check_everything_is_gone(self) -> None:
        """Some time after the end of the job nobody has anything of it, and everybody was answered."""
        self._faults = Faults()
        until_ns = self.loop.monotonic_ns() + _CLEAN_AFTER_NS

        def is_over() -> bool:
            return not self._left() or self.loop.monotonic_ns() > until_ns

        self._run_until(is_over, lambda: None)
        left = self._left()
        assert not left, f"a minute after the end of the job is left: {left}"

    def _left(self) -> list[str]:
        """What there is of the job after its end."""
        left = [f"process {process.name}" for process in self._processes()]
        left += [f"daemon {taskmanager.name}" for taskmanager in self._given_up]
        for taskmanager in self._taskmanagers.values():
            left += [f"{taskmanager.name}: {path}" for path in taskmanager.held()]
        left += [f"request {number}" for number in self._jobmanager.unanswered]
        left += [f"request {asked.operation_id}" for asked in self.savepoints.unanswered]
        if not self._jobmanager.is_done:
            left.append("the job")
        stored = self.audited.paths()
        if self.state is JobState.FAILED:  # its checkpoints stay
            stored -= self.audited.named()
        return left + [f"stored {path}" for path in sorted(stored)]

    def _unwind(self) -> None:
        """Ends all daemons, so that nothing of them runs when they are collected."""
        for taskmanager in (*self._taskmanagers.values(), *self._given_up):
            taskmanager.die()
            self._dead.append(taskmanager.loop)
        self._taskmanagers, self._given_up = {}, []
        if self._jobmanager.is_alive:
            self._jobmanager.die()
        self._dead.append(self._jobmanager.loop)
        for loop in self._dead:
            loop.unwind()

    def broke(self, error: BaseException) -> None:
        """A check has failed, or something has ended that should not."""
        self._broken = self._broken or error

    def quarantined(self, error: Exception) -> None:
        """The job's actor has crashed."""
        self.broke(error)

    def _outlook(self) -> str:
        runner = self._jobmanager.runner
        story = [] if runner is None else runner.story()
        return f"{[state.name for state in self.states]}; {story}"

    def _run_one(self) -> bool:
        """One step of a slot or of the network, drawn by the seed; else time moves on."""
        self.passed("step")
        runtimes = [
            slot.runtime
            for slot in self._processes()
            if slot.runtime is not None and not slot.is_frozen
        ]
        servers = [
            server
            for taskmanager in (*self._taskmanagers.values(), *self._given_up)
            for server in taskmanager.living_servers
            if not server.is_frozen
        ]
        turns: list[Callable[[], bool]] = [one.run_one for one in (*runtimes, *servers)]
        self.random.shuffle(turns)
        if self.random.random() < 0.3 and self._run_event(before_ns=_SLOW_STEP_NS):
            return True
        if any(turn() for turn in turns):
            return True
        deadlines = [one.next_deadline_ms() for one in (*runtimes, *servers)]
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
        self._tell_of_job(state.name)
        self.passed(state.name)

    def tell(self, process: str, text: str) -> None:
        """Something has happened to a process; "" = to nobody in particular."""
        self.story.append(Moment(self.loop.monotonic_ns(), process, text))

    def _head_id(self) -> int:
        newest = self.audited.newest()
        return 0 if newest is None else newest.checkpoint_id

    def _tell_of_job(self, text: str) -> None:
        self.tell(self._jobmanager.name, text)

    def happened(self, event: job_events.JobEvent) -> None:
        """The job's machine has taken an event."""
        match event:
            case job_events.StartPrepared():
                checkpoint = event.restored
                self.restored_from_checkpoint += checkpoint is not None and (
                    checkpoint.checkpoint_id > 0
                )
                # What dead attempts had left is gone; what the living leave is still to come.
                self.has_leftovers = bool(self._given_up or self._processes())
                self._unsure_puts_swept = self.audited.unsure_puts
            case c.CheckpointStored():
                self.checkpoints_stored += 1
                head = self.audited.head()
                kept = head.retained if head is not None else ()
                self._tell_of_job(f"HEAD has {[retained.checkpoint_id for retained in kept]}")
                if (newest := self.audited.newest()) is not None:
                    self.savepoints.look_at_head(newest)
            case c.CheckpointNotStored():
                self.has_leftovers = True
            case _:
                pass

    # -- TaskManagers

    def _start_taskmanager(self, taskmanager_id: str) -> None:
        self._incarnations += 1
        made = SimulatedTaskManager(self, taskmanager_id, self._incarnations, self._slots_each)
        self._taskmanagers[taskmanager_id] = made
        self.tell(made.name, "starts")

    def _processes(self) -> list[SimulatedSlot]:
        taskmanagers = (*self._taskmanagers.values(), *self._given_up)
        return [process for taskmanager in taskmanagers for process in taskmanager.processes]

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

    # -- calls

    def call_made(self, sender: str, call: Call) -> None:
        """A daemon calls another one."""
        for words in call_words(*call):
            self.tell(sender, f"> {words}")

    def call_arrives(self, receiver: str, address: str, call: Call) -> str:
        """A call is about to arrive; returns "", or how it fails."""
        way = self._way_of(address, call)
        for words in call_words(*call):
            self.tell(receiver, f"< ({way}) {words}" if way else f"< {words}")
        return way

    def _way_of(self, address: str, call: Call) -> str:
        name, request = call
        if address.endswith(f":{JOBMANAGER_PORT}"):
            return self._report_arrives(name, request)
        if isinstance(request, internal_pb2.SendTaskCommandsRequest):
            for command in request.commands:
                self.passed(command.WhichOneof("command") or "")
        way, self._next_call_fails = self._next_call_fails, ""
        self.unanswered_calls += bool(way)
        return way

    def _report_arrives(self, name: str, request: Message) -> str:
        if not isinstance(request, internal_pb2.ReportTaskEventsRequest):
            return ""
        for event in request.events:
            if event.state_changed.HasField("failure"):
                self.failure = event.state_changed.failure
        if self.loop.monotonic_ns() < self._reports_free_at_ns:
            return "unheard"
        if self._repeats_report:
            self._repeats_report = False
            return "unanswered"
        return ""

    # -- checkpoints

    def open_store(self) -> StoreAccess:
        """The checkpoint store, for one more process."""
        return StoreAccess(self.audited, self.random, lambda: self._faults.slot_store)

    def open_savepoint(self, uri: str) -> StoreAccess | None:
        """The directory of a savepoint, for one more process; None = it is none."""
        if not self.savepoints.is_one(uri):
            return None
        return self.savepoints.open(uri, lambda: self._faults.slot_store)

    def open_jobmanager_savepoint(self, uri: str, countdown: Countdown) -> StoreAccess:
        """The same, for one more call of a JobManager."""
        return self.savepoints.open(uri, lambda: self._faults.jobmanager_store, countdown)

    def new_name(self) -> str:
        """What nothing else in the simulation is called; the same in every run of a seed."""
        return f"{next(self._names):012x}"

    def open_jobmanager_store(self) -> StoreAccess:
        """The same, for one more JobManager."""
        return StoreAccess(self.audited, self.random, lambda: self._faults.jobmanager_store)

    def slot_ended(self, name: str) -> None:
        """What a slot process has uploaded may never be acknowledged."""
        self.tell(name, "has ended")
        self.has_leftovers = True

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
            or self.audited.unsure_puts > self._unsure_puts_swept
            or not all(taskmanager.has_reported for taskmanager in self._taskmanagers.values())
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

    def change_weather(self, slots: StoreWeather, jobmanager: StoreWeather) -> None:
        """The store treats everybody otherwise from now on."""
        self.tell("", f"store: {slots} for slots, {jobmanager} for the JobManager")
        self._faults = dataclasses.replace(
            self._faults, slot_store=slots, jobmanager_store=jobmanager
        )

    def strike(self, fault: Fault) -> None:
        """Something goes wrong now."""
        self._strike(Trigger(fault, "", 0, 0))

    @property
    def is_over(self) -> bool:
        """The job has ended."""
        return self._jobmanager.has_ended_job

    def _strike(self, trigger: Trigger) -> None:
        if self._jobmanager.has_ended_job:
            return
        self.tell("", f"fault: {trigger.fault.value}")
        match trigger.fault:
            case Fault.SLOT_DIES:
                self._slot_dies()
            case Fault.REGIONS_FAIL:
                self._regions_fail()
            case Fault.ALL_FAIL:
                self._jobmanager.fail_job()
            case Fault.TASKMANAGER_LOST:
                self._lose_taskmanager()
            case Fault.JOBMANAGER_DIES:
                self.jobmanager_dies()
            case Fault.JOBMANAGER_DIES_IN_STORE:
                self._jobmanager.store.countdown.left = self.draw(8)
            case Fault.CALL_FAILS:
                self._next_call_fails = self.random.choice(("unheard", "unanswered"))
            case Fault.CHECKPOINT_REQUESTED:
                self._jobmanager.request_checkpoint()
            case Fault.SAVEPOINT_REQUESTED:
                self._ask(Wish.SAVEPOINT)
            case Fault.STOP_REQUESTED:
                self._ask(Wish.STOP)
            case Fault.DRAIN_REQUESTED:
                self._ask(Wish.DRAIN)
            case Fault.COMMIT_FAILS:
                self._commit_fails = True
            case Fault.TASK_RAISES:
                self._rows_that_raise = 1
            case Fault.PARTITION_SERVER_DIES:
                servers = [s for t in self._taskmanagers.values() for s in t.living_servers]
                for server in self._any(servers):
                    server.die()
            case Fault.CONNECTION_BREAKS:
                for link in self._any(link for link in self.network.links if link.is_open):
                    link.break_off()
            case Fault.REPORTS_DELAYED:
                self._reports_free_at_ns = self.loop.monotonic_ns() + self.draw(500_000_000)
            case Fault.REPORTS_REPEATED:
                self._repeats_report = True
            case Fault.DISK_FULL:
                for taskmanager in self._any(self._taskmanagers.values()):
                    self._fill_disk(taskmanager)
            case Fault.HOST_FREEZES:
                self._freeze_taskmanager()
            case Fault.CANCELLED:
                self.is_cancelled = True
                self._jobmanager.cancel_job(is_stored_at_once=bool(trigger.point))
            case Fault.JOBMANAGER_STOPS:
                if self._jobmanager.is_alive:
                    self._jobmanager.stop()
            case Fault.TASKMANAGER_STOPS:
                self._stop_taskmanager()

    def _ask(self, wish: Wish) -> None:
        """A user wants a savepoint; now and then the answer gets lost, and the same is asked for again."""
        asked = self.savepoints.wish(wish, self.random.choice(tuple(SavepointFormat)))
        for _ in range(self.random.choice((1, 1, 2))):
            self._jobmanager.ask(asked)

    def _restarting(self, what: str) -> None:
        self._tell_of_job(what)
        self.processed_at_restart = self._processed
        self.on_restart()

    def _any(self, candidates: Iterable[_T]) -> list[_T]:
        """One of them, or none where there is none."""
        listed = list(candidates)
        return [self.random.choice(listed)] if listed else []

    def _fill_disk(self, taskmanager: SimulatedTaskManager) -> None:
        taskmanager.is_disk_full = True

        def has_room() -> None:
            taskmanager.is_disk_full = False

        self.loop.call_later(self.draw(_DISK_FULL_NS), has_room)

    def processing(self) -> None:
        """A function processes a row.

        Raises:
            ValueError: it cannot, this time.
        """
        self.passed("row")
        self._processed += 1
        if self._rows_that_raise:
            self._rows_that_raise -= 1
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
        for process in self._any(self._processes()):
            self._end_slot(process)

    def _regions_fail(self) -> None:
        """Two slots or more die at once, or functions in several raise: what failed is in several regions."""
        processes = self._processes()
        if self.draw(3):
            for process in self.random.sample(processes, min(len(processes), 2 + self.draw(2))):
                self._end_slot(process)
        else:
            self._rows_that_raise = 2 + self.draw(2)

    def _end_slot(self, process: SimulatedSlot) -> None:
        self.tell(process.name, "dies")
        self.slot_deaths += 1
        process.die()

    def _lose_taskmanager(self) -> None:
        for lost in self._any(self._taskmanagers.values()):
            self.tell(lost.name, "dies")
            lost.die()
            self._replace(lost)

    def _stop_taskmanager(self) -> None:
        """Somebody ends a TaskManager, which says goodbye."""
        for stopping in self._any(self._taskmanagers.values()):
            self.tell(stopping.name, "is told to end")
            stopping.stop()
            self._given_up.append(stopping)
            self._replace(stopping)

    def _freeze_taskmanager(self) -> None:
        """A host stands still, for ever or for some time; its TaskManager is given up. What wakes up goes on
        for a while with what is not its work any more."""
        for frozen in self._any(self._taskmanagers.values()):
            self.tell(frozen.name, "freezes")
            self._given_up.append(frozen)
            frozen.freeze(is_frozen=True)

            def wake(frozen: SimulatedTaskManager = frozen) -> None:
                self.tell(frozen.name, "goes on")
                frozen.freeze(is_frozen=False)

            asleep_ns = self.draw(_FROZEN_MAX_NS)
            if self.draw(2):
                self.loop.call_later(asleep_ns, wake)
                asleep_ns += self.draw(_FROZEN_MAX_NS)
            self.loop.call_later(asleep_ns, frozen.die)
            self._replace(frozen)

    def _replace(self, lost: SimulatedTaskManager) -> None:
        """A TaskManager is gone or ends; some time later another one comes."""
        self.taskmanager_losses += 1
        del self._taskmanagers[lost.taskmanager_id]
        self._dead.append(lost.loop)

        def come_back() -> None:
            if lost.is_alive:  # its name is taken
                self.loop.call_later(self.draw(_BACK_AFTER_MAX_NS), come_back)
                return
            self._given_up = [one for one in self._given_up if one is not lost]
            self._start_taskmanager(lost.taskmanager_id)

        self.loop.call_later(self.draw(_BACK_AFTER_MAX_NS), come_back)

    def jobmanager_dies(self) -> None:
        """The JobManager dies; its successor goes on with the job."""
        if not self._jobmanager.is_alive:
            return
        self._tell_of_job("dies")
        self.jobmanager_deaths += 1
        self._jobmanager.die()
        self._succeed()

    def jobmanager_stopped(self) -> None:
        """It has ended as it was told to."""
        self._tell_of_job("has ended")
        self.jobmanager_stops += 1
        self._succeed()

    def _succeed(self) -> None:
        self._dead.append(self._jobmanager.loop)
        self.loop.call_later(self.draw(50_000_000), self._take_over)

    def _take_over(self) -> None:
        self._jobmanagers += 1
        self._jobmanager = SimulatedJobManager(self, f"JobManager.{self._jobmanagers}")
        self.failovers.begin_again()
        self._restarting("takes over: everything begins again")
