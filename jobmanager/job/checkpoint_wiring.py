"""Between the machine of a job and its checkpoint coordinator.

Feeds the coordinator what it must know of the tasks, keeps reports of stale attempts from it, and takes
its wishes apart: what tasks are told, what the machine does itself, and what the shell does. A job whose
every task has finished or waits gets a final checkpoint, whose completion lets the waiting ones commit.

Invariants: the coordinator sees tasks only between ``started`` and ``stopped``; one final checkpoint is
asked for at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.owed_commits import OwedCommits
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.graph.deployment import producers_of
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import Exchange
from jobmanager.job.source_splits import SourceSplits
from jobmanager.messages import job_effects, job_events
from penstock.errors import InvariantViolation
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties

_FINAL_RETRY_DELAY_MS = 1_000
_AT_THE_END = CheckpointProperties(behind=BehindBarrier.END)


CoordinatorFactory = Callable[[tuple[CompletedCheckpoint, ...], int], CheckpointCoordinator]
"""Makes the coordinator from the retained checkpoints and the next checkpoint id."""


WiredEffect = job_effects.JobEffect | c.FailJob | c.MoveTasks


class CheckpointWiring:
    """The checkpoints of one job.

    Args:
        make: makes the coordinator once HEAD is known.
    """

    def __init__(self, make: CoordinatorFactory, graph: ExecutionGraph) -> None:
        self._make = make
        self._graph = graph
        self._coordinator: CheckpointCoordinator | None = None
        self._runs = False
        self._final_request = ""
        self._restored_id: int | None = None
        self._owed = OwedCommits()
        self._last: dict[SubtaskId, c.LastState] = {}
        """Of finished subtasks that hold anything."""
        self.stale_reports = 0

    @property
    def coordinator(self) -> CheckpointCoordinator | None:
        """For views, and for what is newer than what a restart found; None before HEAD has been claimed."""
        return self._coordinator

    def open(self, prepared: job_events.StartPrepared) -> None:
        """HEAD is known. What a coordinator still waits for then, it is told when that is settled."""
        if self._coordinator is None:
            self._coordinator = self._make(prepared.retained, prepared.next_checkpoint_id)

    @property
    def runs(self) -> bool:
        """Whether the coordinator knows of tasks that run."""
        return self._runs

    # ------------------------------------------------------------ what tasks do

    def started(
        self, splits: SourceSplits, now_ms: int, *, at_once: bool = False
    ) -> list[WiredEffect]:
        """Every task that has begun runs or has finished; the others take no part.

        Args:
            at_once: the first checkpoint is due now.
        """
        self._runs, self._final_request = True, ""
        restored_id, self._restored_id = self._restored_id, None
        loading = self._graph.plan.loading
        tasks = tuple(
            c.TaskView(
                attempt.key,
                tuple(_producers(self._graph, attempt.key)),
                finished=attempt.state is AttemptState.FINISHED,
                last=self._last.get(attempt.key.subtask),
                is_loading=attempt.key.vertex in loading and not attempt.has_loaded,
            )
            for attempt in self._graph.current()
            if attempt.state is not AttemptState.CREATED
        )
        committed = _reported(self._owed.started())
        return committed + self._step(c.TasksStarted(tasks, now_ms, at_once, restored_id), splits)

    def stopped(self, splits: SourceSplits, now_ms: int) -> list[WiredEffect]:
        """Tasks are being cancelled, or all have finished."""
        if not self._runs:
            return []
        self._runs, self._final_request = False, ""
        return self._step(c.TasksStopped(now_ms), splits)

    def restored(self, restored: RestoredCheckpoint | None, moving: Iterable[SubtaskId]) -> None:
        """Subtasks begin again from a checkpoint: those that had finished hold what it says."""
        known = restored or RestoredCheckpoint(0)
        self._restored_id = known.checkpoint_id
        moving = tuple(moving)
        self._owed.restored(known.checkpoint_id, moving)
        for subtask in (*moving, *known.finished):
            self._last.pop(subtask, None)
        self._last.update(known.left)

    def finished(
        self, key: AttemptKey, last: c.LastState | None, splits: SourceSplits, now_ms: int
    ) -> list[WiredEffect]:
        """An attempt has finished; before ``started`` it is told there."""
        self._last.pop(key.subtask, None)
        if last is not None:
            self._last[key.subtask] = last
        committed = _reported(self._owed.finished(key.subtask))
        if not self._runs:
            return committed
        return committed + self._step(c.TaskFinished(key, now_ms, last), splits)

    def loaded(self, key: AttemptKey, splits: SourceSplits, now_ms: int) -> list[WiredEffect]:
        """An attempt has read the side that it reads first; before ``started`` it is told there."""
        return self._step(c.TaskLoaded(key, now_ms), splits) if self._runs else []

    def request_final(self, splits: SourceSplits, now_ms: int) -> list[WiredEffect]:
        """Every attempt has finished or waits; harmless to repeat."""
        if self._final_request:
            return []
        self._final_request = f"final of attempt {self._graph.attempt}"
        request = c.CheckpointRequested(self._final_request, now_ms, _AT_THE_END)
        return self._step(request, splits)

    def retry_final(self) -> None:
        """The pause after a final checkpoint that failed is over: the next may be requested."""
        self._final_request = ""

    # ------------------------------------------------------------ what the outside says

    def take(self, event: job_events.CheckpointEvent, splits: SourceSplits) -> list[WiredEffect]:
        """An event for the coordinator, of a task, a user, the store or the clock."""
        if isinstance(event, job_events.OutputCommitted):
            # Also of one in whose place another has begun: what it has committed it has.
            return _reported(self._owed.committed(event.key.subtask, event.checkpoint_id))
        if isinstance(event, c.AckReceived | c.DeclineReceived) and not self._is_current(event.key):
            self.stale_reports += 1
            return []
        waits_to_load = not self._runs and self._graph.waits_to_load
        if isinstance(event, c.CheckpointRequested) and waits_to_load:
            return [c.AnswerRequest(event.request_id, 0, c.RequestRefused.LOADING, self._awaited())]
        if isinstance(event, c.CheckpointRequested) and event.properties.target:
            exchange = self._exchange_under_way()
            if exchange:
                refused = c.RequestRefused.BLOCKING_EXCHANGE
                return [c.AnswerRequest(event.request_id, 0, refused, exchange)]
        if isinstance(event, c.CheckpointStored):
            splits.completed(event.done)
        if self._coordinator is None:
            if isinstance(event, c.CheckpointRequested):
                return [c.AnswerRequest(event.request_id, 0, c.RequestRefused.NOT_RUNNING)]
            raise InvariantViolation(f"{type(event).__name__} came before the job was prepared")
        return self._step(event, splits)

    def go_on(self, moved: c.MoveTasks) -> list[WiredEffect]:
        """Those of these tasks that run hear that what they hold behind is complete."""
        return self._send(c.NotifyCompleted(moved.checkpoint_id, moved.keys))

    def _awaited(self) -> str:
        """Why checkpoints wait where what reads something first has not begun."""
        plan, unstarted = self._graph.plan, self._graph.unstarted
        waiting = {subtask.vertex for subtask in unstarted}
        exchanges = [
            f"the blocking exchange {edge.id} ({edge.source} -> {edge.target})"
            for edge in plan.edges
            if edge.exchange is Exchange.BLOCKING and edge.target in waiting
        ]
        why = f": {' and '.join(exchanges)} must be complete first" if exchanges else ""
        return f"{c.RequestRefused.LOADING.value}{why}"

    def _exchange_under_way(self) -> str:
        """A blocking exchange that has not been read to its end; "" = none is.

        What of it is to be read yet lies in partitions of this job's scope, which nobody can start from.
        """
        plan = self._graph.plan
        for edge in plan.edges:
            readers = range(plan.vertex(edge.target).parallelism)
            if edge.exchange is Exchange.BLOCKING and any(
                self._graph.current_of(SubtaskId(edge.target, index)).state
                is not AttemptState.FINISHED
                for index in readers
            ):
                return (
                    f"the blocking exchange {edge.id} ({edge.source} -> {edge.target}) has not been read to "
                    "its end, and no savepoint holds rows of an exchange: try again when it has"
                )
        return ""

    def _is_current(self, key: AttemptKey) -> bool:
        attempt = self._graph.find_current(key)
        return (
            self._coordinator is not None
            and attempt is not None
            and attempt.state in (AttemptState.RUNNING, AttemptState.FINISHED)
        )

    # ------------------------------------------------------------ what the coordinator wants

    def _step(self, event: c.CoordinatorEvent, splits: SourceSplits) -> list[WiredEffect]:
        if self._coordinator is None:
            raise InvariantViolation("tasks ran before HEAD was claimed")
        wired: list[WiredEffect] = []
        for effect in self._coordinator.step(event):
            wired += self._wire(effect, splits)
        return wired

    def _wire(self, effect: c.CoordinatorEffect, splits: SourceSplits) -> list[WiredEffect]:
        match effect:
            case c.TriggerTasks() | c.NotifyCompleted() | c.NotifySaved() | c.NotifyAborted():
                return self._send(effect)
            case c.StoreCheckpoint():
                done = tuple(
                    (key, uid, ids)
                    for key in effect.finished
                    for uid, ids in splits.done_by(key.subtask)
                )
                return [job_effects.WriteManifest(effect, done, splits.done)]
            case c.FailJob() | c.MoveTasks():
                return [effect]
            case c.ReportCompleted() if effect.committers:
                owing = [key.subtask for key in effect.committers if self._commits(key)]
                committed = self._owed.expect(effect.checkpoint.checkpoint_id, owing)
                return [effect, *_reported(committed)]
            case c.AnswerRequest(request_id) if request_id == self._final_request:
                if effect.refused is None:
                    return []
                due = job_events.FinalCheckpointDue(self._graph.attempt)
                return [job_effects.PostLater(_FINAL_RETRY_DELAY_MS, due)]
            case c.AnswerRequest(request_id) if request_id.startswith("final of attempt "):
                return []  # of an attempt that is over
            case _:
                return [effect]

    def _commits(self, key: AttemptKey) -> bool:
        """Whether a task, or who begins in its place, has yet to commit what a checkpoint covers that is complete now."""
        current = self._graph.current_of(key.subtask)
        if current.state is AttemptState.FINISHED:
            return False
        return current.key == key or current.state is not AttemptState.RUNNING

    def _send(self, told: c.CheckpointCommand) -> list[WiredEffect]:
        by_taskmanager: dict[str, list[AttemptKey]] = {}
        for key in told.keys:
            attempt = self._graph.find_current(key)
            if attempt is not None and attempt.state is AttemptState.RUNNING:
                by_taskmanager.setdefault(attempt.taskmanager_id, []).append(key)
        return [
            job_effects.SendCommands(id, (replace(told, keys=tuple(keys)),))
            for id, keys in by_taskmanager.items()
        ]


def _reported(committed_id: int | None) -> list[WiredEffect]:
    return [] if committed_id is None else [job_effects.ReportCommitted(committed_id)]


def _producers(graph: ExecutionGraph, key: AttemptKey) -> list[AttemptKey]:
    """Who sends it barriers: complete partitions hold none."""
    producers: dict[AttemptKey, None] = {}
    for edge in graph.plan.edges:
        if edge.target != key.vertex or edge.exchange is Exchange.BLOCKING:
            continue
        pairs = producers_of(
            edge.partitioning,
            graph.plan.vertex(edge.source).parallelism,
            graph.plan.vertex(edge.target).parallelism,
            key.subtask_index,
        )
        for index, _ in pairs:
            producers[graph.current_of(SubtaskId(edge.source, index)).key] = None
    return list(producers)
