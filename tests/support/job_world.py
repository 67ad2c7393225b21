"""A cluster, a store and a clock around the machine of one job, for random interleavings.

It answers effects with the events that could come back, in any order but where one inbox or one lane keeps
them in order, mixed with failures and losses. It knows the truth: which attempts run, which slot process
they run in, which partitions exist; and asserts at each deployment, release and notice what must hold.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from typing_extensions import override

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint, SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.restored_checkpoint import (
    RestoredCheckpoint,
    RestoredRead,
    RestoredSplit,
)
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.failover.failover_strategy import FailoverStrategyName
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.failover.restart_settings import FixedDelay, RestartSettings
from jobmanager.graph.deployment import ChannelPlan, Endpoint, TaskPlan
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.job_master import JobMaster
from jobmanager.job.job_options import JobOptions
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import ENDING, JobState
from penstock.connectors.source import Split

CAUSE = FailureCause("TaskFailure", "it broke")
LOST = FailureCause("TaskManagerLost", "it is gone")
_SPLITS = tuple(Split(f"s{number}", size=1) for number in range(5))
_SLOTS_PER_TASKMANAGER = 3

Partition = tuple[str, AttemptKey]


def drawn_plan(draw: random.Random) -> JobPlan:
    """A plan of two to four vertices."""
    vertices: list[VertexPlan] = []
    edges: list[EdgePlan] = []
    for number in range(draw.randint(2, 4)):
        name = f"v{number}"
        earlier = draw.sample(vertices, min(len(vertices), draw.choice([0, 1, 1, 1, 2])))
        colocation = "g" if draw.random() < 0.15 else ""
        sources = () if earlier else ("src",)
        vertex = VertexPlan(name, draw.randint(1, 3), "default", sources, colocation)
        for source in earlier:
            kinds = [p for p in Partitioning if p is not Partitioning.FORWARD]
            if source.parallelism == vertex.parallelism:
                kinds += [Partitioning.FORWARD] * 4
            claim = draw.randint(0, 2)
            edges.append(
                EdgePlan(
                    f"{source.id}>{name}",
                    source.id,
                    name,
                    draw.choice(kinds),
                    draw.choice(list(Exchange)),
                    is_deterministic=claim > 0,
                    is_reproducible=claim > 1,
                )
            )
        vertices.append(vertex)
    return JobPlan(tuple(vertices), tuple(edges))


@dataclass
class Task:
    """An attempt on a TaskManager.

    Attributes:
        reads: edge, index of the producer -> whose attempt's rows it reads.
        open_checkpoints: whose barrier it has seen, and of which it has not heard what became of them.
        notified: newest checkpoint that it knows to be complete.
        has_finished: it had done all its work in the checkpoint that it goes on from.
        is_deaf: something that it was to be told has not reached it; the job will hear of that.
    """

    key: AttemptKey
    slot_id: str
    reads: dict[tuple[str, int], AttemptKey]
    restored_from: int
    splits: set[str]
    knows_all_splits: bool = False
    has_reported_splits: bool = False
    state: AttemptState = AttemptState.DEPLOYING
    done: bool = False
    is_stuck: bool = False
    is_deaf: bool = False
    open_checkpoints: set[int] = field(default_factory=set)
    notified: int = 0
    acked: int = 0
    has_finished: bool = False


class _WatchedCoordinator(CheckpointCoordinator):
    """Says which tasks it knows."""

    participants: frozenset[AttemptKey] = frozenset()

    @override
    def step(self, event: c.CoordinatorEvent) -> list[c.CoordinatorEffect]:
        if isinstance(event, c.TasksStarted):
            self.participants = frozenset(task.key for task in event.tasks)
        return super().step(event)


class World:
    """Everything around one job.

    Args:
        seed: of all that is drawn.
        mishaps: probability that something goes wrong.
        attempts: restarts that the job may make.
        checkpoints: whether it takes them.
    """

    def __init__(self, seed: int, mishaps: float, attempts: int, *, checkpoints: bool) -> None:
        self.random = random.Random(seed)
        self.mishaps = mishaps
        self.takes_checkpoints = checkpoints
        self.plan = self._drawn_plan()
        self.regions = RegionGraph(self.plan)
        strategy = self.random.choice(
            [FailoverStrategyName.REGION] * 4 + [FailoverStrategyName.FULL]
        )
        self.is_full = strategy is FailoverStrategyName.FULL
        self.coordinator: _WatchedCoordinator | None = None
        restart = RestartSettings(FixedDelay(attempts, 500))
        self.master = JobMaster(self.plan, self._options(restart, strategy))
        self.now_ms = 1_000_000
        self.inbox: list[job_events.JobEvent] = [job_events.JobStarted()]
        self.loose: list[job_events.JobEvent] = []
        self.timers: list[job_events.JobEvent] = []
        self.call_at_ms = 0
        self.published: list[JobState] = []
        # slots
        self.incarnations = dict.fromkeys("abc", 1)
        self.down: set[str] = set()
        self.free = [slot for name in self.incarnations for slot in self._slots(name)]
        self.held: set[Slot] = set()
        self.freed: Counter[Slot] = Counter()
        self.lost: set[Slot] = set()
        self.granted: set[Slot] = set()
        self.processes: dict[str, int] = {}
        self._process_count = 0
        # tasks
        self.tasks: dict[AttemptKey, Task] = {}
        self.used: set[AttemptKey] = set()
        self.finished: set[AttemptKey] = set()
        self.partitions: dict[Partition, str] = {}
        """Complete ones -> the slot process, or for blocking ones the TaskManager, that has them."""
        self.known: set[Partition] = set()
        """Complete ones that the job has heard of, and not heard to be gone."""
        self.finished_splits: dict[SubtaskId, set[str]] = {}
        self.commits: Counter[AttemptKey] = Counter()
        # checkpoints
        self.snapshots: dict[int, dict[SubtaskId, Task]] = {}
        self.frozen: dict[int, RestoredCheckpoint] = {}
        self.head: list[int] = []
        """Checkpoints that are kept, the newest last."""
        self.damaged: set[int] = set()
        self.restored: RestoredCheckpoint | None = None
        self.partial_restarts = 0
        self.released_early = 0

    def _drawn_plan(self) -> JobPlan:
        return drawn_plan(self.random)

    def _options(self, restart: RestartSettings, strategy: FailoverStrategyName) -> JobOptions:
        make = self._make_coordinator if self.takes_checkpoints else None
        return JobOptions(restart, strategy, make)

    def _make_coordinator(
        self, retained: tuple[CompletedCheckpoint, ...], next_id: int
    ) -> CheckpointCoordinator:
        self.coordinator = _WatchedCoordinator(
            CheckpointSettings(interval_ms=1_000, retained_max=self.random.randint(1, 2)),
            retained=retained,
            next_checkpoint_id=next_id,
        )
        return self.coordinator

    def _slots(self, name: str) -> list[Slot]:
        incarnation = f"{name}{self.incarnations[name]}"
        return [Slot(f"{name}-{i}", name, incarnation) for i in range(_SLOTS_PER_TASKMANAGER)]

    # ------------------------------------------------------------ one event after the other

    def deliver(self, event: job_events.JobEvent) -> None:
        """Gives the machine an event and does what it wants."""
        self._note_delivery(event)
        before = {a.key.subtask: a.state for a in self.master.graph.current()}
        effects = self.master.step(event, self.now_ms)
        self._check_cancelled(event, before, effects)
        for effect in effects:
            self.perform(effect)
        self.master.check()

    def _note_delivery(self, event: job_events.JobEvent) -> None:
        match event:
            case job_events.TaskManagerGone(name):
                self.down.discard(name)
                self.incarnations[name] += 1
                self.free = [slot for slot in self.free if slot.taskmanager_id != name]
                self.free += self._slots(name)
                self.known &= self.partitions.keys()
            case job_events.EndOfDataReported(key) | job_events.AttemptReported(
                key, AttemptState.FINISHED
            ):
                self.known |= {partition for partition in self.partitions if partition[1] == key}
            case _:
                pass

    def _check_cancelled(
        self,
        event: job_events.JobEvent,
        before: dict[SubtaskId, AttemptState],
        effects: Iterable[job_effects.JobEffect],
    ) -> None:
        """Nobody whom a failure does not concern is cancelled."""
        if self.master.state in ENDING or self.is_full:
            return
        cancelled = {
            key.subtask for e in effects if isinstance(e, job_effects.CancelTasks) for key in e.keys
        }
        if not cancelled or isinstance(event, job_events.FailureRequested):
            return
        if not isinstance(event, job_events.AttemptReported) or event.missing is not None:
            return
        closure = self._concerned({event.key.subtask}, before)
        assert cancelled <= closure, (event, sorted(cancelled - closure))
        if cancelled < {s for s, state in before.items() if state is AttemptState.RUNNING}:
            self.partial_restarts += 1

    def _concerned(
        self, failed: set[SubtaskId], before: dict[SubtaskId, AttemptState]
    ) -> set[SubtaskId]:
        """The least set that the rules allow, applied one subtask and channel at a time."""
        concerned = set(failed)
        ends = {AttemptState.FAILED, AttemptState.CANCELED}
        while True:
            more = {s for one in concerned for s in self.regions.region_of(one).subtasks}
            other_rows = self._reads_changed(concerned, order=False)
            other_order = self._reads_changed(concerned, order=True)
            for subtask in concerned:
                for group in self.regions.read_by(subtask):
                    more |= {
                        p for p in group.producers if not self._is_readable(group.edge, p, before)
                    }
                for group in self.regions.written_by(subtask):
                    edge = group.edge
                    if (
                        edge.exchange is not Exchange.BLOCKING
                        and edge.is_reproducible
                        and subtask not in other_order
                    ):
                        continue
                    if (
                        edge.exchange is Exchange.BLOCKING
                        and edge.is_deterministic
                        and subtask not in other_rows
                        and before[subtask] not in ends
                        and subtask not in failed
                        and self._is_readable(edge, subtask, before)
                    ):
                        continue
                    more |= set(group.consumers)
            if more <= concerned:
                return concerned
            concerned |= more

    def _reads_changed(self, concerned: set[SubtaskId], *, order: bool) -> set[SubtaskId]:
        """Those that may get other rows than before, or (``order``) the same in another order."""
        changed: set[SubtaskId] = set()
        while True:
            more = set(changed)
            for reader in concerned:
                own = self.regions.region_of(reader).subtasks
                for group in self.regions.read_by(reader):
                    promised = group.edge.is_reproducible if order else group.edge.is_deterministic
                    made_again = [p for p in group.producers if p in concerned and p not in own]
                    if any(not promised or producer in changed for producer in made_again):
                        more |= own
            if more == changed:
                return changed
            changed = more

    def _is_readable(
        self, edge: EdgePlan, producer: SubtaskId, before: dict[SubtaskId, AttemptState]
    ) -> bool:
        state = before[producer]
        if state is AttemptState.FINISHED:
            return (edge.id, self.master.graph.current_of(producer).key) in self.known
        return state not in (AttemptState.FAILED, AttemptState.CANCELED)

    def turn(self) -> bool:
        """One event; False when the job has ended, or can do nothing more."""
        choices: list[job_events.JobEvent] = [*self.inbox[:1], *self.loose, *self._progress()]
        if self._mishap():
            self._disturb()
        elif choices:
            self._take(self.random.choice(choices))
        elif self.timers:
            self.deliver(self.timers.pop(self.random.randrange(len(self.timers))))
        elif (stuck := self._unfed()) is not None:
            self._fail_for_input(stuck)
        elif self.call_at_ms and not self.master.ended:
            self.now_ms, self.call_at_ms = max(self.now_ms, self.call_at_ms), 0
            self.deliver(c.TimeReached(self.now_ms))
        else:
            return False
        self.now_ms += 1
        return not self.master.ended

    def drain(self) -> None:
        """Delivers what is still on its way."""
        while self.inbox or self.loose or self.timers:
            self.deliver((self.inbox or self.loose or self.timers).pop(0))

    def _take(self, event: job_events.JobEvent) -> None:
        if event in self.inbox[:1]:
            self.inbox.pop(0)
        elif event in self.loose:
            self.loose.remove(event)
            if self._mishap() and isinstance(event, job_events.AttemptReported):
                self.loose.append(event)  # it comes twice
        else:
            self._advance(event)
        self.deliver(event)

    def _mishap(self) -> bool:
        return self.random.random() < self.mishaps

    # ------------------------------------------------------------ what tasks do

    def _progress(self) -> list[job_events.JobEvent]:
        events: list[job_events.JobEvent] = []
        for key, task in self.tasks.items():
            if task.is_stuck:
                continue
            vertex = self.plan.vertex(key.vertex)
            if task.state is not AttemptState.RUNNING:
                events.append(job_events.AttemptReported(key, AttemptState.RUNNING))
            elif vertex.source_uids and not task.has_reported_splits and key.subtask_index == 0:
                events.append(job_events.SplitsReported(key, "src", _SPLITS, True))
            elif not task.done and self._has_read_all(task):
                if self._waits_for_commit(key):
                    events.append(job_events.EndOfDataReported(key))
                else:
                    events.append(job_events.AttemptReported(key, AttemptState.FINISHED))
        return events

    def _waits_for_commit(self, key: AttemptKey) -> bool:
        is_leaf = all(edge.source != key.vertex for edge in self.plan.edges)
        return self.takes_checkpoints or is_leaf

    def _has_read_all(self, task: Task) -> bool:
        if self.plan.vertex(task.key.vertex).source_uids and not task.knows_all_splits:
            return False
        return all(self._is_read(edge, producer) for (edge, _), producer in task.reads.items())

    def _is_read(self, edge_id: str, producer: AttemptKey) -> bool:
        """Whether a reader that is connected to this attempt has got all of it."""
        edge = self.regions.exchange_of(edge_id)
        if edge.exchange is Exchange.PIPELINED:
            task = self.tasks.get(producer)
            return producer in self.finished or (task is not None and task.done)
        return (edge_id, producer) in self.partitions

    def _advance(self, event: job_events.JobEvent) -> None:
        """What an attempt itself has just done."""
        match event:
            case job_events.AttemptReported(key, AttemptState.FINISHED):
                self._end_data(self.tasks[key])
                self._finish(key)
            case job_events.AttemptReported(key, state):
                self.tasks[key].state = state
            case job_events.SplitsReported(key):
                self.tasks[key].has_reported_splits = True
            case job_events.EndOfDataReported(key):
                self._end_data(self.tasks[key])

    def _end_data(self, task: Task) -> None:
        task.done = True
        for edge in self.plan.edges:
            if edge.source == task.key.vertex and edge.exchange is not Exchange.PIPELINED:
                is_blocking = edge.exchange is Exchange.BLOCKING
                where = self._taskmanager(task.slot_id) if is_blocking else task.slot_id
                self.partitions[edge.id, task.key] = where

    def _finish(self, key: AttemptKey) -> None:
        task = self.tasks.pop(key)
        self.finished.add(key)
        self.finished_splits[key.subtask] = task.splits

    def _taskmanager(self, slot_id: str) -> str:
        return slot_id[0]

    def _end_task(self, key: AttemptKey) -> None:
        """It is over without having finished: what it had cached goes with it."""
        task = self.tasks.pop(key)
        for edge_id, producer in list(self.partitions):
            if producer == key and self.partitions[edge_id, producer] == task.slot_id:
                del self.partitions[edge_id, producer]

    def _end_process(self, slot_id: str) -> list[AttemptKey]:
        self.processes.pop(slot_id, None)
        died = [key for key, task in self.tasks.items() if task.slot_id == slot_id]
        for key in died:
            self._end_task(key)
        self.partitions = {p: where for p, where in self.partitions.items() if where != slot_id}
        return died

    def _unfed(self) -> tuple[Task, str, AttemptKey] | None:
        """A task that waits for rows which never come."""
        for task in self.tasks.values():
            if task.state is not AttemptState.RUNNING or task.done or task.is_stuck:
                continue
            for (edge_id, _), producer in task.reads.items():
                if not self._is_read(edge_id, producer) and producer not in self.tasks:
                    return task, edge_id, producer
        return None

    def _fail_for_input(self, unfed: tuple[Task, str, AttemptKey]) -> None:
        task, edge_id, producer = unfed
        cause = FailureCause("PartitionUnavailable", f"{edge_id} of {producer} is not there")
        missing = job_events.MissingPartition(edge_id, producer)
        self._end_task(task.key)
        self.deliver(job_events.AttemptReported(task.key, AttemptState.FAILED, cause, missing))

    # ------------------------------------------------------------ what goes wrong

    def _disturb(self) -> None:
        kind = self.random.choice(
            ["lose", "process", "fail", "fail", "user", "stale", "overdue", "user"]
        )
        if kind == "lose":
            self._lose(self.random.choice(list(self.incarnations)))
        elif kind == "process" and self.processes:
            for key in self._end_process(self.random.choice(sorted(self.processes))):
                self.loose.append(job_events.AttemptReported(key, AttemptState.FAILED, CAUSE))
        elif kind == "fail" and self.tasks:
            key = self.random.choice(list(self.tasks))
            self._end_task(key)
            self.deliver(job_events.AttemptReported(key, AttemptState.FAILED, CAUSE))
        elif kind == "user":
            self.deliver(c.CheckpointRequested(str(self.now_ms), self.now_ms))
        elif kind == "stale" and self.used:
            key = self.random.choice(sorted(self.used))
            if key not in self.tasks and key not in self.finished:
                self.deliver(job_events.AttemptReported(key, AttemptState.RUNNING))
        elif kind == "overdue" and self.timers:
            self.deliver(self.timers.pop(0))

    def _lose(self, name: str) -> None:
        if name in self.down:
            return
        self.down.add(name)
        for slot_id in [slot for slot in self.processes if slot[0] == name]:
            self._end_process(slot_id)
        self.partitions = {p: where for p, where in self.partitions.items() if where != name}
        gone = {slot for slot in self.held if slot.taskmanager_id == name}
        self.lost |= gone
        self.held -= gone
        self.free = [slot for slot in self.free if slot.taskmanager_id != name]
        self.inbox.append(job_events.TaskManagerGone(name, LOST))

    # ------------------------------------------------------------ effects

    def perform(self, effect: job_effects.JobEffect) -> None:
        """Does what the machine wants, or lets it go wrong."""
        match effect:
            case job_effects.PrepareStart():
                self._prepare(effect)
            case job_effects.RequestSlots(count, group):
                self._request(count, group)
            case job_effects.AllocateSlots(name, slot_ids, call):
                if self._call(name):
                    for slot_id in slot_ids:
                        if slot_id not in self.processes:
                            self._process_count += 1
                            self.processes[slot_id] = self._process_count
                    endpoints = tuple(Endpoint(s, str(self.processes[s])) for s in slot_ids)
                    partitions = Endpoint("", name)
                    self.loose.append(job_events.SlotsAllocated(name, endpoints, call, partitions))
            case job_effects.DeployTasks(name, tasks, from_nothing):
                for task in tasks:
                    self._check_deployment(task, from_nothing)
                if self._call(name):
                    for task in tasks:
                        self._deploy(task, from_nothing)
            case job_effects.SendCommands(name, commands):
                if self._call(name):
                    for command in commands:
                        for key in job_effects.receivers(command):
                            self._obey(key, command)
            case job_effects.CancelTasks(name, keys):
                if self._call(name):
                    for key in keys:
                        self._cancel(key)
            case job_effects.AwaitCancellation(group):
                self.timers.append(job_events.CancellationOverdue(group))
            case job_effects.FreeSlots(slots):
                for slot in slots:
                    self._free(slot)
            case job_effects.ReleasePartitions(_, partitions):
                for partition in partitions:
                    self._release(partition)
            case job_effects.ReleaseOutputs(outputs):
                self._release_outputs(outputs)
            case job_effects.NoteCommit():
                self.inbox.append(job_events.CommitNoted())
            case job_effects.PublishState(state):
                self.published.append(state)
            case job_effects.PostLater(delay_ms, event):
                if isinstance(event, job_events.RestartDue):
                    assert event not in self.timers, "one for each group"
                self.now_ms += delay_ms
                self.timers.append(event)
            case job_effects.WriteManifest():
                self._store(effect.stored)
            case c.DeleteFiles():
                self.loose.append(c.FilesDeleted((), self.now_ms))
            case c.CallAt(at_ms):
                self.call_at_ms = at_ms
            case _:
                pass

    def _call(self, name: str) -> bool:
        """Whether the TaskManager does what is asked of it; a failed call may have been heard."""
        fails = name in self.down or self._mishap()
        if fails:
            self.loose.append(job_events.CallFailed(name, CAUSE, self.master.attempt))
        is_heard = name not in self.down and (not fails or self.random.random() < 0.5)
        if not is_heard:
            for task in self.tasks.values():
                if self._taskmanager(task.slot_id) == name:
                    task.is_deaf = True
        return is_heard

    def _request(self, count: int, group: int) -> None:
        if self._mishap() or len(self.free) < count:
            self.inbox.append(job_events.SlotsRefused(count, 9, len(self.free), 3, 100, group))
            return
        slots = tuple(self.random.sample(self.free, count))
        self.free = [slot for slot in self.free if slot not in slots]
        self.held |= set(slots)
        self.granted |= set(slots)
        self.inbox.append(job_events.SlotsGranted(slots, group))

    def _free(self, slot: Slot) -> None:
        self.freed[slot] += 1
        if slot not in self.held:
            assert slot in self.lost, f"{slot} is freed, and the job does not have it"
            return
        self.held.remove(slot)
        self._end_process(slot.slot_id)
        # The pool knows slots by name and incarnation; here each grant is a slot of its own.
        self.incarnations.setdefault(slot.taskmanager_id, 1)
        self.free.append(Slot(slot.slot_id, slot.taskmanager_id, f"{slot.incarnation}+"))

    def _check_deployment(self, task: TaskPlan, from_nothing: frozenset[SubtaskId]) -> None:
        assert task.attempt not in self.used, "a number is used once"
        self.used.add(task.attempt)
        older = [key for key in self.tasks if key.subtask == task.attempt.subtask]
        assert self._may_begin_beside(task, older), f"{older} may run when {task.attempt} begins"
        subtask = task.attempt.subtask
        region = self.regions.region_of(subtask)
        has_finished = (
            self.restored is not None and subtask in self.restored.finished - from_nothing
        )
        for edge in task.inputs:
            kind = self.regions.exchange_of(edge.edge_id).exchange
            if has_finished and kind is Exchange.BLOCKING:
                continue  # it reads nothing there
            for channel in edge.channels:
                producer = channel.producer_attempt
                current = self.master.graph.current_of(producer.subtask)
                assert current.key == producer, "the newest attempt is read"
                assert current.state is not AttemptState.CREATED
                if kind is Exchange.BLOCKING and producer.subtask not in region.subtasks:
                    assert (edge.edge_id, producer) in self.known, "complete before it is read"
                assert channel.producer.host_id, "it listens somewhere"

    def _may_begin_beside(self, task: TaskPlan, older: list[AttemptKey]) -> bool:
        return not older

    def _deploy(self, plan: TaskPlan, from_nothing: frozenset[SubtaskId]) -> None:
        key, restored = plan.attempt, self.restored
        subtask = key.subtask
        if restored is None or subtask in from_nothing or subtask not in restored.subtasks:
            restored = None
        splits = {
            split.split_id
            for split in (restored.splits if restored is not None else ())
            if SubtaskId(split.vertex, split.subtask_index) == subtask
        }
        if plan.slot_id not in self.processes:  # it has died meanwhile
            self.loose.append(job_events.AttemptReported(key, AttemptState.FAILED, CAUSE))
            return
        task = Task(
            key,
            plan.slot_id,
            {
                (edge.edge_id, channel.producer_attempt.subtask_index): channel.producer_attempt
                for edge in plan.inputs
                for channel in edge.channels
            },
            restored.checkpoint_id if restored is not None else 0,
            splits,
        )
        task.notified = task.restored_from
        self.tasks[key] = task
        if restored is not None and subtask in restored.finished:
            task.reads, task.has_finished = {}, True
            task.knows_all_splits = task.has_reported_splits = True

    def _obey(self, key: AttemptKey, command: job_effects.Command | c.CheckpointCommand) -> None:
        task = self.tasks.get(key)
        if task is None:
            return
        match command:
            case job_effects.AddSplits(_, _, splits, final):
                ids = [split.id for split in splits]
                assert task.splits.isdisjoint(ids), "nobody is told twice"
                task.splits |= set(ids)
                task.knows_all_splits |= final
            case job_effects.ReplaceProducer():
                self._replace(task, command.edge_id, command.channel)
            case c.TriggerTasks(checkpoint_id):
                self._snapshot(checkpoint_id)
            case c.NotifyCompleted(checkpoint_id):
                task.notified = checkpoint_id
                task.open_checkpoints -= set(range(checkpoint_id + 1))
                snapshot = self.snapshots[checkpoint_id].get(key.subtask)
                if task.done and snapshot is not None and snapshot.done:
                    self._finish(key)
                    self.loose.append(job_events.AttemptReported(key, AttemptState.FINISHED))
            case c.NotifyAborted(checkpoint_id):
                task.open_checkpoints.discard(checkpoint_id)
            case job_effects.CommitOutput():
                assert not self.takes_checkpoints
                assert all(a.done_or_waiting for a in self.master.graph.current())
                self.commits[key] += 1
                self._finish(key)
                self.loose.append(job_events.AttemptReported(key, AttemptState.FINISHED))

    def _replace(self, task: Task, edge_id: str, channel: ChannelPlan) -> None:
        producer = channel.producer_attempt
        assert task.reads.get((edge_id, producer.subtask_index)) != producer
        if not task.restored_from and (edge_id, producer.subtask_index) not in task.reads:
            raise AssertionError("it reads nothing there")
        task.reads[edge_id, producer.subtask_index] = producer
        new = self.tasks.get(producer)
        if new is not None and task.acked >= new.restored_from and not task.is_deaf:
            assert task.notified >= new.restored_from, "it knows from where the new one sends"

    def _cancel(self, key: AttemptKey) -> None:
        task = self.tasks.get(key)
        if task is None:
            return
        if self._mishap():
            task.is_stuck = True
            return
        self._end_task(key)
        self.loose.append(job_events.AttemptReported(key, AttemptState.CANCELED))

    def _that_count(self) -> Iterable[Task]:
        return self.tasks.values()

    def _release(self, partition: Partition) -> None:
        self.partitions.pop(partition, None)
        self.known.discard(partition)
        edge_id, producer = partition
        is_kept_in_slot = self.regions.exchange_of(edge_id).exchange is not Exchange.BLOCKING
        if is_kept_in_slot and self.master.graph.current_of(producer.subtask).key != producer:
            return  # who reads it waits for the attempt that takes its place
        for task in self._that_count():
            reads = task.reads.get((edge_id, producer.subtask_index)) == producer
            assert not reads, f"{task.key} reads what is released"

    # ------------------------------------------------------------ checkpoints

    def _prepare(self, effect: job_effects.PrepareStart) -> None:
        if self._mishap():
            self.inbox.append(job_events.StartNotPrepared(effect.attempt, CAUSE))
            return
        if len(self._usable) > 1 and self._mishap():
            self.damaged.add(self._usable[-1])
        newest = self._usable[-1] if self._usable else 0
        self.restored = self.frozen.get(newest)
        self.inbox.append(
            job_events.StartPrepared(
                effect.attempt, self.restored, (), max(self.frozen, default=0) + 1
            )
        )

    @property
    def _usable(self) -> list[int]:
        return [id for id in self.head if id not in self.damaged]

    def _release_outputs(self, outputs: Collection[KeptOutput]) -> None:
        """Whichever checkpoint is restored, nobody makes or reads them again."""
        for id in self._usable:
            finished = self.frozen[id].finished
            for one in outputs:
                assert one.producer in finished, (one, id)
                assert finished.issuperset(self.regions.consumers_of(one)), (one, id)
        lying = [p for p in self.partitions if KeptOutput(p[0], p[1].subtask) in outputs]
        for partition in lying:
            if not self._mishap():  # else its TaskManager has not heard
                self._release(partition)
                self.released_early += 1

    def _snapshot(self, checkpoint_id: int) -> None:
        """Every task that takes part acknowledges."""
        if checkpoint_id in self.snapshots:
            return
        assert self.coordinator is not None
        taken = self.snapshots[checkpoint_id] = {}
        for key, task in self.tasks.items():
            if key not in self.coordinator.participants or task.state is not AttemptState.RUNNING:
                continue
            assert task.is_deaf or not task.open_checkpoints, (
                f"{key} never heard of {task.open_checkpoints}"
            )
            task.open_checkpoints.add(checkpoint_id)
            task.acked = checkpoint_id
            taken[key.subtask] = Task(
                key,
                "",
                dict(task.reads),
                0,
                set(task.splits),
                done=task.done,
                has_finished=task.has_finished,
            )
            ack = c.AckReceived(key, checkpoint_id, object(), (), SnapshotSummary(), self.now_ms)
            self.loose.append(replace(ack, has_finished=task.has_finished))

    def _store(self, stored: c.StoreCheckpoint) -> None:
        id = stored.checkpoint_id
        if self._mishap():
            self.inbox.append(c.CheckpointNotStored(id, "disk full", self.now_ms))
            return
        taken = {key.subtask: self.snapshots[id][key.subtask] for key, _ in stored.snapshots}
        finished = frozenset(key.subtask for key in stored.finished)
        before = self.frozen[self._usable[-1]].subtasks if self._usable else frozenset()
        assert before <= taken.keys() | finished, "nothing that a checkpoint held is forgotten"
        self.head = [*(kept for kept in self.head if kept in stored.retained), id]
        splits = {s: task.splits for s, task in taken.items()}
        splits |= {s: self.finished_splits.get(s, set()) for s in finished}
        finished |= {s for s, task in taken.items() if task.has_finished}
        self.frozen[id] = RestoredCheckpoint(
            id,
            finished,
            tuple(
                RestoredSplit(s.vertex, "src", s.subtask_index, split, 1, done=s in finished)
                for s, own in sorted(splits.items())
                for split in sorted(own)
            ),
            tuple(
                RestoredRead(s, edge_id, index, producer.attempt, 1)
                for s, task in taken.items()
                for (edge_id, index), producer in task.reads.items()
            ),
            finished | taken.keys(),
        )
        self.inbox.append(c.CheckpointStored(id, f"chk-{id}/manifest", self.now_ms))
