"""The checkpoint coordinator of one job: events in, effects out.

    request or interval -> trigger -> acks -> store, one at a time -> completed -> older ones released

Each checkpoint has until its deadline. What is still being stored then may count or not: it is settled,
which takes until the store answers, and meanwhile none is triggered and whoever waits is told so.

Invariants (``check``):
- a checkpoint completes once, and only after every task that takes part has acknowledged it; tasks that
  had finished before its trigger take no part and are recorded as finished;
- checkpoints complete in the order of their ids: one that completes aborts all older ones under way;
- a savepoint is under way alone;
- none begins while a task is loading; who asks for one then hears why;
- it is registered before those it subsumes are released; the count of a shared file is the number of
  completed checkpoints that are kept and name it;
- a file is deleted only when no kept checkpoint, no checkpoint being stored, no ack of a pending one and
  no last state of a finished task names it (``CheckpointFiles``);
- at most ``max_concurrent`` checkpoints are under way, at most one is being stored or settled, at most one
  ``DeleteFiles`` is under way, and at most one checkpoint is triggered per step;
- each request is answered once;
- an id is used that HEAD has reserved, so that no other leader of the job uses it (``CheckpointIds``).

The checkpoint with which a job is stopped is a checkpoint like others, taken alone as savepoints are; none comes behind it.

A savepoint goes through the same steps, alone: it waits for what is under way, and what comes next waits for it. It
is not registered, kept or counted, and no task builds upon it; files of the job that it refers to stay where they are.

Acks that are late, unknown, doubled or meant for an earlier leader are dropped and counted, and what only they
have uploaded is deleted. What is meant for a later leader is dropped and nothing is deleted: it is that leader's.

A savepoint is taken in the same steps and by itself: nothing else is under way meanwhile. It is not registered, not
kept, not counted, and no task builds upon it; what its directory does not get is the job's, and stays where it is.

A task that is done with all it has to do may finish between trigger and ack. The barrier will then never
reach its consumers, so the checkpoint is void: it is taken again at once with the tasks that are left.

Source: Carbone et al., "State Management in Apache Flink", sections 3.2 and 4.2; Flink,
CheckpointCoordinator and FLIP-147. Flink refuses a request whose checkpoint is subsumed; here it is
answered with the later checkpoint, which holds all that was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, assert_never

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_files import CheckpointFiles, FileReleased
from jobmanager.checkpoint.checkpoint_ids import CheckpointIds
from jobmanager.checkpoint.completed import CompletedCheckpoints
from jobmanager.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    FileRange,
    FileReference,
    SharedKey,
)
from jobmanager.checkpoint.failure_policy import FailurePolicy
from jobmanager.checkpoint.pending import Ack, CheckpointPhase, PendingCheckpoint
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.shared_state_registry import SharedFileMismatch
from jobmanager.checkpoint.statistics import CheckpointRecord, CheckpointStatistics
from jobmanager.checkpoint.steady_time import SteadyTime
from jobmanager.checkpoint.trigger_policy import Request, TriggerPolicy, Turn
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.errors import InvariantViolation, require_invariant
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties
from penstock.storage.savepoint import is_of_savepoint

_STORY_LENGTH: Final = 64
_NAMED_TASKS_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class PendingView:
    """A checkpoint under way, for views.

    Attributes:
        triggered_at_ms: wall-clock time.
        acked: tasks that have acknowledged it, of ``total``.
    """

    checkpoint_id: int
    triggered_at_ms: int
    acked: int
    total: int


class CheckpointCoordinator:
    """Takes the checkpoints of one job.

    Args:
        settings: when they are taken and how many are kept.
        retained: what HEAD names, read back from the manifests.
        next_checkpoint_id: greater than all ids that may have been used; begins a block that is reserved.
        leader_epoch: in whose name it triggers; reports of what others have triggered are not taken.

    Example: an interval after the tasks run, those without producers are told to begin.
        >>> reader, counter = AttemptKey("read", 0, 0), AttemptKey("count", 0, 0)
        >>> tasks = (c.TaskView(reader, ()), c.TaskView(counter, (reader,)))
        >>> settings = CheckpointSettings(interval_ms=100)
        >>> coordinator = CheckpointCoordinator(settings, retained=(), next_checkpoint_id=1)
        >>> coordinator.step(c.TasksStarted(tasks, now_ms=0))
        [CallAt(at_ms=100)]
        >>> [trigger] = [e for e in coordinator.step(c.TimeReached(100)) if isinstance(e, c.TriggerTasks)]
        >>> trigger.checkpoint_id, [str(key) for key in trigger.keys]
        (1, ['read/0 (attempt 0)'])
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        retained: tuple[CompletedCheckpoint, ...],
        next_checkpoint_id: int,
        leader_epoch: int = 0,
    ) -> None:
        self.dropped_events = 0
        """Acks, declines and answers that came too late, twice, or from nobody who was asked."""
        self.fenced_events = 0
        """Acks and declines of what another leader has triggered."""
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._settings = settings
        self._ids = CheckpointIds(next_checkpoint_id)
        self._leader_epoch = leader_epoch
        self._policy = TriggerPolicy(settings)
        self._failures = FailurePolicy(settings.tolerable_failed)
        self._completed = CompletedCheckpoints(retained, settings.retained_max)
        self._statistics = CheckpointStatistics(self._completed.kept)
        self._files = CheckpointFiles()
        self._time = SteadyTime()
        self._now = 0
        self._wall_now = 0
        self._safe_since = 0
        self._tasks: dict[AttemptKey, c.TaskView] = {}
        self._finished: set[AttemptKey] = set()
        self._last: dict[AttemptKey, c.LastState] = {}
        self._loading: set[AttemptKey] = set()
        self._active = False
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ready: deque[int] = deque()
        self._storing: int | None = None
        self._asked_at: int | None = None
        self._is_stopped = any(checkpoint.is_stop for checkpoint in self._completed.kept[-1:])
        """The newest checkpoint has stopped the job: none is to come behind it."""
        self._effects: list[c.CoordinatorEffect] = []
        for checkpoint in self._completed.kept:
            self._files.register(checkpoint)
        latest = self._completed.latest
        if latest is not None and latest.checkpoint_id >= next_checkpoint_id:
            raise InvariantViolation(
                f"checkpoint {latest.checkpoint_id} exists, but the next id is {next_checkpoint_id}"
            )

    # ------------------------------------------------------------ what it says

    @property
    def is_active(self) -> bool:
        """Whether the job's tasks run, so that checkpoints may be taken."""
        return self._active

    @property
    def latest_completed(self) -> CompletedCheckpoint | None:
        """The newest checkpoint that can be restored from."""
        return self._completed.latest

    @property
    def retained(self) -> tuple[CompletedCheckpoint, ...]:
        """All checkpoints that can be restored from, newest last."""
        return self._completed.kept

    @property
    def pending(self) -> tuple[PendingView, ...]:
        """Checkpoints and savepoints under way, oldest first."""
        return tuple(
            PendingView(
                pending.checkpoint_id,
                pending.triggered_at_ms,
                pending.acked_count,
                len(pending.participants),
            )
            for pending in self._pending.values()
        )

    @property
    def store_under_way(self) -> int | None:
        """The checkpoint that is being stored.

        As long as it is not None, ``latest_completed`` may still change: what restores from it waits.
        """
        return self._storing

    @property
    def history(self) -> tuple[CheckpointRecord, ...]:
        """The last checkpoints, the newest first."""
        return self._statistics.records({kept.checkpoint_id for kept in self._completed.kept})

    @property
    def completed_total(self) -> int:
        """Checkpoints that have completed since this was made."""
        return self._statistics.completed_total

    @property
    def failed_total(self) -> int:
        """Checkpoints that have failed since this was made; void ones do not count."""
        return self._failures.failed_total

    @property
    def next_checkpoint_id(self) -> int:
        """The id of the next checkpoint."""
        return self._ids.next_id

    @property
    def undeleted_count(self) -> int:
        """Files that nothing refers to and that are not deleted yet."""
        return self._files.deletions.path_count

    def shared_count(self, identity: SharedKey | FileRange) -> int:
        """How many completed checkpoints name a shared file, or a range without a key."""
        return self._files.registry.count(identity)

    # ------------------------------------------------------------ what it decides

    def step(self, event: c.CoordinatorEvent) -> list[c.CoordinatorEffect]:
        """Takes one event and returns what is to be done, in order.

        Raises:
            InvariantViolation: our bug; carries the last events.
        """
        self.story.append(_told(event))
        self._effects = []
        self._wall_now = event.now_ms
        self._now = self._time.advance(event.now_ms)
        try:
            self._handle(event)
            self._expire()
            self._store_next()
            self._trigger_next()
            self.check_step()
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}; story: {' | '.join(self.story)}") from error
        if paths := self._files.deletions.start(self._now):
            self._effects.append(c.DeleteFiles(paths))
        self._call_at()
        return self._effects

    def _handle(self, event: c.CoordinatorEvent) -> None:
        match event:
            case c.TasksStarted():
                self._start(event.tasks, at_once=event.at_once)
            case c.TasksStopped():
                self._stop()
            case c.TaskFinished():
                self._finish_task(event.key, event.last)
            case c.TaskLoaded():
                self._loading.discard(event.key)
            case c.TimeReached():
                self._asked_at = None
            case c.CheckpointRequested():
                self._request(event)
            case c.AckReceived():
                self._take_ack(event)
            case c.DeclineReceived():
                self._take_decline(event)
            case c.CheckpointStored():
                self._complete(event)
            case c.CheckpointNotStored():
                self._take_not_stored(event)
            case c.StoreOutcomeUnknown():
                self._take_unknown(event)
            case c.IdsReserved() | c.IdsNotReserved():
                self._take_ids(event)
            case c.FilesDeleted():
                self._note_deleted(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ tasks

    def _start(self, tasks: tuple[c.TaskView, ...], *, at_once: bool) -> None:
        if self._active:
            self._stop()
        self._tasks = {task.key: task for task in tasks}
        self._finished = {task.key for task in tasks if task.finished}
        self._loading = {task.key for task in tasks if task.is_loading and not task.finished}
        self._last = {task.key: task.last for task in tasks if task.finished and task.last}
        self._files.hold_last(self._last_references(self._last))
        for task in tasks:
            for producer in task.producers:
                if producer not in self._tasks:
                    raise InvariantViolation(f"{task.key} is fed by {producer}, which is unknown")
        self._active = True
        self._safe_since = self._now
        self._policy.begin(self._now, at_once=at_once)

    def _stop(self) -> None:
        # Tasks stay known: those that go on hear of what is void, and of what completes yet.
        self._active = False
        for pending in list(self._pending.values()):
            if pending.checkpoint_id != self._storing:
                self._abort(pending, c.AbortReason.TASKS_STOPPED, c.AbortReason.TASKS_STOPPED.value)
        self._refuse_queued("the job's tasks were stopped")

    def _last_references(self, keys: Iterable[AttemptKey]) -> list[FileReference]:
        return [file for key in keys if key in self._last for file in self._last[key].references]

    def _finish_task(self, key: AttemptKey, last: c.LastState | None) -> None:
        if key not in self._tasks or key in self._finished:
            self.dropped_events += 1
            return
        self._finished.add(key)
        self._loading.discard(key)
        if last is not None:
            self._last[key] = last
            self._files.hold_last(self._last_references(self._last))
        for pending in list(self._pending.values()):
            if pending.waits_for(key):
                self._abort(
                    pending,
                    c.AbortReason.TASK_FINISHED,
                    f"{key} finished before its barrier came; it is taken again without it",
                )
            else:
                self._trigger_behind(key, pending)

    def _trigger_behind(self, finished: AttemptKey, pending: PendingCheckpoint) -> None:
        """A task that acknowledged after the end of its output has sent no barrier: those it was the
        last to feed may know of none. One who does drops the repetition."""
        targets = tuple(
            key
            for key, task in self._tasks.items()
            if finished in task.producers
            and pending.waits_for(key)
            and self._finished.issuperset(task.producers)
        )
        if targets:
            self._effects.append(
                c.TriggerTasks(
                    pending.checkpoint_id,
                    pending.triggered_at_ms,
                    targets,
                    self._properties(pending.request),
                )
            )

    @property
    def _can_trigger(self) -> bool:
        has_tasks = self._active and len(self._finished) < len(self._tasks)
        is_free = not self._loading and not self._is_stopped and self._unsettled is None
        return has_tasks and is_free

    @property
    def _unsettled(self) -> PendingCheckpoint | None:
        """The checkpoint of which nobody knows whether it is stored."""
        pending = None if self._storing is None else self._pending[self._storing]
        return (
            pending if pending is not None and pending.phase is CheckpointPhase.UNSETTLED else None
        )

    # ------------------------------------------------------------ requests and triggers

    def _request(self, event: c.CheckpointRequested) -> None:
        request = Request(event.request_id, event.properties)
        if request.is_alone:
            request = replace(request, deadline_ms=self._now + self._settings.timeout_ms)
        under_way = (pending.request for pending in self._pending.values())
        if any(
            known.request_id == event.request_id for known in (*self._policy.queued, *under_way)
        ):
            self.dropped_events += 1
        elif not self._active:
            self._refuse(request, c.RequestRefused.NOT_RUNNING)
        elif (unsettled := self._unsettled) is not None:
            self._refuse(request, c.RequestRefused.UNSETTLED, unsettled.unsettled)
        elif self._loading:
            named = ", ".join(map(str, sorted(self._loading)[:_NAMED_TASKS_MAX]))
            more = ", ..." if len(self._loading) > _NAMED_TASKS_MAX else ""
            detail = f"{c.RequestRefused.LOADING.value}: {named}{more}"
            self._refuse(request, c.RequestRefused.LOADING, detail)
        elif (refused := self._policy.add(request)) is not None:
            self._refuse(request, refused)

    def _trigger_next(self) -> None:
        if self._unsettled is not None:
            return
        if not self._can_trigger:
            if not self._loading:
                ended = "all tasks of the job have finished"
                self._refuse_queued("the job has been stopped" if self._is_stopped else ended)
            return
        if not self._ids.are_left:
            self._reserve_ids()
            return
        request = self._policy.take(self._now, len(self._pending), is_saving=self._is_saving)
        if request is None:
            return
        running = [key for key in self._tasks if key not in self._finished]
        targets = tuple(
            key for key in running if self._finished.issuperset(self._tasks[key].producers)
        )
        if not targets:
            raise InvariantViolation("tasks feed each other in a cycle: no barrier can start")
        checkpoint_id = self._ids.take()
        self._pending[checkpoint_id] = PendingCheckpoint(
            checkpoint_id,
            request,
            triggered_at_ms=self._wall_now,
            started_ms=self._now,
            deadline_ms=request.deadline_ms or self._now + self._settings.timeout_ms,
            participants=running,
            finished=tuple(key for key in self._tasks if key in self._finished),
        )
        if not request.is_savepoint:
            self._policy.started(self._now)
            self._statistics.triggered(checkpoint_id, self._wall_now, len(running))
        self._effects.append(
            c.TriggerTasks(checkpoint_id, self._wall_now, targets, self._properties(request))
        )

    @property
    def _is_saving(self) -> bool:
        """Whether what is under way is a savepoint, or stops the job."""
        return any(pending.is_alone for pending in self._pending.values())

    def _properties(self, request: Request) -> CheckpointProperties:
        is_full = request.properties.is_full or not self._settings.is_incremental
        return replace(request.properties, is_full=is_full)

    def _reserve_ids(self) -> None:
        due = self._ids.due_ms()
        if self._storing is None and due is not None and due <= self._now:
            self._ids.is_asked = True
            self._effects.append(c.ReserveIds())

    def _take_ids(self, event: c.IdsReserved | c.IdsNotReserved) -> None:
        if isinstance(event, c.IdsReserved):
            self._ids.reserved(event.end)
            return
        self._ids.not_reserved(self._now)
        for request in self._policy.stop():
            self._refuse(request, c.RequestRefused.NO_ID, event.error)

    def _refuse(self, request: Request, refused: c.RequestRefused, detail: str = "") -> None:
        self._answer(request, 0, refused, detail or refused.value)

    def _refuse_queued(self, detail: str) -> None:
        for request in self._policy.stop():
            self._refuse(request, c.RequestRefused.NOT_RUNNING, detail)

    # ------------------------------------------------------------ acks

    def _take_ack(self, event: c.AckReceived) -> None:
        if event.leader_epoch > self._leader_epoch:
            self.fenced_events += 1
            return
        pending = self._expected(event)
        references = _own_references(event.references)
        if pending is None:
            self._files.stray(references)
            return
        try:
            claims = self._files.claim(event.checkpoint_id, references)
        except SharedFileMismatch as error:
            self._abort(pending, c.AbortReason.STORE_FAILED, f"{event.key}: {error}")
            return
        except FileReleased as error:
            reason = c.AbortReason.OUTDATED if pending.is_alone else c.AbortReason.DECLINED
            self._abort(pending, reason, f"{event.key} {error}")
            return
        pending.acknowledge(event.key, Ack(event.snapshot, claims, event.summary))
        if not pending.is_savepoint:
            self._statistics.acknowledged(event.checkpoint_id, event.summary)
        if pending.phase is CheckpointPhase.READY:
            self._ready.append(event.checkpoint_id)

    def _expected(self, event: c.AckReceived | c.DeclineReceived) -> PendingCheckpoint | None:
        """The checkpoint that waits for this report; None (and counted) where none does."""
        if event.leader_epoch != self._leader_epoch:
            self.fenced_events += 1
            return None
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or not pending.waits_for(event.key):
            self.dropped_events += 1
            return None
        return pending

    def _take_decline(self, event: c.DeclineReceived) -> None:
        pending = self._expected(event)
        if pending is None:
            return
        reason = c.AbortReason.COMPARING if event.is_comparing else c.AbortReason.DECLINED
        self._abort(pending, reason, f"{event.key} declined it: {event.reason}")

    def _expire(self) -> None:
        for request in self._policy.expired(self._now):
            named = ", ".join(map(str, self._pending))
            detail = f"{c.RequestRefused.EXPIRED.value}: checkpoint {named}" if named else ""
            self._refuse(request, c.RequestRefused.EXPIRED, detail)
        for pending in list(self._pending.values()):
            expires = pending.expires_ms
            if expires is None or expires > self._now:
                continue
            late = f"not complete after {self._settings.timeout_ms} ms"
            if pending.phase is CheckpointPhase.STORING:
                self._unsettle(pending, f"{late}: the store does not say whether it has stored it")
                continue
            if pending.phase is CheckpointPhase.READY:
                waits = f"it was acknowledged by all tasks and waits for checkpoint {self._storing} to be"
                self._abort(pending, c.AbortReason.EXPIRED, f"{late}: {waits} stored")
                continue
            missing = pending.missing()
            named = ", ".join(str(key) for key in missing[:_NAMED_TASKS_MAX])
            more = ", ..." if len(missing) > _NAMED_TASKS_MAX else ""
            self._abort(
                pending,
                c.AbortReason.EXPIRED,
                f"{late}: {len(missing)} of {len(pending.participants)} tasks have not acknowledged it: "
                f"{named}{more}",
            )

    # ------------------------------------------------------------ the store

    def _store_next(self) -> None:
        while self._storing is None and self._ready and not self._ids.is_asked:
            pending = self._pending[self._ready.popleft()]
            acks = pending.acks
            left = self._last_references(pending.finished)
            try:
                pending.registration = self._files.plan(
                    [
                        *(claim for _, ack in acks for claim in ack.claims),
                        *self._files.claim(pending.checkpoint_id, tuple(left)),
                    ]
                )
            except SharedFileMismatch as error:
                self._abort(pending, c.AbortReason.STORE_FAILED, str(error))
                continue
            pending.become(CheckpointPhase.STORING)
            self._storing, is_savepoint = pending.checkpoint_id, pending.is_savepoint
            self._effects.append(
                c.StoreCheckpoint(
                    checkpoint_id=pending.checkpoint_id,
                    triggered_at_ms=pending.triggered_at_ms,
                    snapshots=tuple((key, ack.snapshot) for key, ack in acks),
                    finished=pending.finished,
                    replaced=pending.registration.replaced,
                    retained=(
                        () if is_savepoint else self._completed.ids_with(pending.checkpoint_id)
                    ),
                    next_checkpoint_id=0 if is_savepoint else self._ids.end_with_next_store(),
                    state_bytes=pending.summary().state_bytes
                    + sum(reference.location.size_bytes for reference in left),
                    last=tuple(
                        (key, self._last[key].snapshot)
                        for key in pending.finished
                        if key in self._last
                    ),
                    properties=self._properties(pending.request),
                )
            )

    def _take_not_stored(self, event: c.CheckpointNotStored) -> None:
        if self._storing != event.checkpoint_id:
            self.dropped_events += 1
            return
        self._storing = None
        too_large = event.is_too_large
        reason = c.AbortReason.TOO_LARGE if too_large else c.AbortReason.STORE_FAILED
        self._abort(self._pending[event.checkpoint_id], reason, event.error)

    def _take_unknown(self, event: c.StoreOutcomeUnknown) -> None:
        if self._storing != event.checkpoint_id:
            self.dropped_events += 1
        elif self._unsettled is None:
            self._unsettle(self._pending[event.checkpoint_id], event.error)

    def _unsettle(self, pending: PendingCheckpoint, reason: str) -> None:
        """Nobody knows whether it is stored: who waits is not kept waiting until somebody does.

        Who waits for a savepoint is: it may be there, and must not be taken twice.
        """
        pending.become(CheckpointPhase.UNSETTLED)
        pending.unsettled = (
            f"whether checkpoint {pending.checkpoint_id} is stored is not known yet: {reason}"
        )
        self._effects.append(c.SettleCheckpoint(pending.checkpoint_id, reason))
        given_up = () if pending.is_alone else (pending.give_up_request(),)
        for request in (*given_up, *self._policy.stop()):
            self._refuse(request, c.RequestRefused.UNSETTLED, pending.unsettled)

    def _complete(self, event: c.CheckpointStored) -> None:
        if self._storing != event.checkpoint_id:
            self.dropped_events += 1
            return
        self._storing = None
        pending = self._pending.pop(event.checkpoint_id)
        pending.become(CheckpointPhase.COMPLETED)
        if pending.is_savepoint:
            self._complete_savepoint(pending)
            return
        summary = pending.summary()
        checkpoint = CompletedCheckpoint(
            checkpoint_id=event.checkpoint_id,
            triggered_at_ms=pending.triggered_at_ms,
            completed_at_ms=event.now_ms,
            state_bytes=summary.state_bytes,
            manifest_path=event.manifest_path,
            references=(*pending.registration.references, *event.references),
            is_stop=pending.is_stop,
        )
        self._is_stopped = pending.is_stop
        self._ids.stored()
        self._files.register(checkpoint)
        subsumed = self._completed.add(checkpoint)
        self._statistics.completed(checkpoint)
        self._failures.completed()
        self._policy.completed(self._now)
        self._safe_since = self._now
        if keys := self._running(pending.participants):
            self._effects.append(c.NotifyCompleted(event.checkpoint_id, keys))
        self._answer(pending.request, event.checkpoint_id)
        self._effects.append(c.ReportCompleted(checkpoint, summary, self._now - pending.started_ms))
        for older in [other for other in self._pending if other < event.checkpoint_id]:
            self._abort(
                self._pending[older],
                c.AbortReason.SUBSUMED,
                f"checkpoint {event.checkpoint_id} completed first",
                instead=event.checkpoint_id,
            )
        waiting = [
            p.checkpoint_id for p in self._pending.values() if p.phase is CheckpointPhase.WAITING
        ]
        for old in subsumed:
            self._files.release(old, waiting)
        self._files.end(event.checkpoint_id)

    def _complete_savepoint(self, pending: PendingCheckpoint) -> None:
        """Its tasks go on as if there had been none."""
        if keys := self._running(pending.participants):
            self._effects.append(c.NotifySaved(pending.checkpoint_id, keys))
        self._answer(pending.request, pending.checkpoint_id)
        self._files.end(pending.checkpoint_id)

    # ------------------------------------------------------------ ends

    def _abort(
        self,
        pending: PendingCheckpoint,
        reason: c.AbortReason,
        detail: str,
        instead: int | None = None,
    ) -> None:
        checkpoint_id = pending.checkpoint_id
        pending.become(CheckpointPhase.ABORTED)
        del self._pending[checkpoint_id]
        if checkpoint_id in self._ready:
            self._ready.remove(checkpoint_id)
        if pending.is_alone:
            self._abort_alone(pending, reason, detail)
            return
        verdict = self._failures.aborted(reason)
        self._policy.aborted(verdict.failed_in_a_row if reason.counts else 0, self._now)
        self._statistics.failed(checkpoint_id, detail, self._wall_now)
        if keys := self._running(pending.participants):
            self._effects.append(c.NotifyAborted(checkpoint_id, keys))
        if reason is c.AbortReason.TASK_FINISHED:
            self._policy.add_again(pending.request)
        elif instead is not None:
            self._answer(pending.request, instead)
        else:
            self._answer(pending.request, checkpoint_id, c.RequestRefused.ABORTED, detail)
        at_risk_ms = self._now - self._safe_since
        self._effects.append(
            c.ReportAborted(checkpoint_id, reason, detail, verdict.failed_in_a_row, at_risk_ms)
        )
        if verdict.fails_job and self._active:
            self._effects.append(c.FailJob(_too_many(verdict.failed_in_a_row, detail)))
        self._files.end(checkpoint_id)

    def _abort_alone(self, pending: PendingCheckpoint, reason: c.AbortReason, detail: str) -> None:
        """A savepoint, or one that was to stop the job: this says nothing about the health of checkpoints, and
        what was held goes on."""
        checkpoint_id, request = pending.checkpoint_id, pending.request
        behind = request.properties.behind
        if not pending.is_savepoint:
            self._statistics.failed(checkpoint_id, detail, self._wall_now)
        if keys := self._running(pending.participants):
            self._effects.append(c.NotifyAborted(checkpoint_id, keys))
        has_ended_time = behind is BehindBarrier.DRAIN
        is_again = reason in (c.AbortReason.TASK_FINISHED, c.AbortReason.OUTDATED)
        if is_again and not has_ended_time:
            self._policy.add_again(request)
        else:
            is_stop = request.properties.is_stop
            self._effects.append(c.DiscardSavepoint(checkpoint_id, pending.target, is_stop))
            self._answer(request, checkpoint_id, c.RequestRefused.ABORTED, detail)
            if has_ended_time and self._active:
                told = (
                    f"the job was not stopped, and its event time had been ended for that: {detail}"
                )
                self._effects.append(c.FailJob(told, is_free=True))
        self._files.end(checkpoint_id)

    def _answer(
        self,
        request: Request,
        checkpoint_id: int,
        refused: c.RequestRefused | None = None,
        detail: str = "",
    ) -> None:
        if request.turn is not Turn.PERIODIC:
            self._effects.append(
                c.AnswerRequest(request.request_id, checkpoint_id, refused, detail)
            )

    def _running(self, keys: Iterable[AttemptKey]) -> tuple[AttemptKey, ...]:
        return tuple(key for key in keys if key in self._tasks and key not in self._finished)

    def _note_deleted(self, event: c.FilesDeleted) -> None:
        if not self._files.deletions.finished(event.left, self._now):
            self.dropped_events += 1

    # ------------------------------------------------------------ time

    def _call_at(self) -> None:
        dues = [self._files.deletions.due_ms(self._now)]
        dues += [pending.expires_ms for pending in self._pending.values()]
        dues.append(self._policy.expires_ms())
        if self._can_trigger and self._ids.are_left:
            under_way = len(self._pending)
            dues.append(self._policy.due_ms(self._now, under_way, is_saving=self._is_saving))
        elif self._can_trigger and self._storing is None:
            dues.append(self._ids.due_ms())
        due = min((due for due in dues if due is not None), default=None)
        if due is None:
            return
        at_ms = self._time.wall(max(due, self._now))
        if at_ms != self._asked_at:
            self._asked_at = at_ms
            self._effects.append(c.CallAt(at_ms))

    # ------------------------------------------------------------ check

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever there is: run after each step.

        Raises:
            InvariantViolation: one does not hold.
        """
        pending, latest = self._pending, self._completed.latest
        require_invariant(len(pending) <= self._settings.max_concurrent, "too many under way")
        require_invariant(len(self._ready) <= len(pending), "a checkpoint that is over is ready")
        require_invariant(self._storing is None or self._storing in pending, "a lost store")
        require_invariant(
            latest is None or latest.checkpoint_id < self._ids.next_id, "an id is to be used twice"
        )
        require_invariant(
            self._active or not self._policy.queued, "requests wait for tasks that do not run"
        )
        require_invariant(len(pending) <= 1 or not self._is_saving, "a savepoint is not alone")

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: one does not hold.
        """
        self.check_step()
        self._completed.check()
        self._statistics.check()
        kept = self._completed.kept
        self._files.check([checkpoint.checkpoint_id for checkpoint in kept], self._pending)
        require_invariant(
            list(self._pending) == sorted(self._pending), "checkpoints are out of order"
        )
        for checkpoint_id, pending in self._pending.items():
            require_invariant(checkpoint_id < self._ids.next_id, "an id is to be used twice")
            require_invariant(
                not kept or kept[-1].checkpoint_id < checkpoint_id, "one under way is too old"
            )
            require_invariant(
                (checkpoint_id in self._ready) == (pending.phase is CheckpointPhase.READY)
                and (checkpoint_id == self._storing)
                == (pending.phase in (CheckpointPhase.STORING, CheckpointPhase.UNSETTLED)),
                f"checkpoint {checkpoint_id} is {pending.phase.value} in a wrong place",
            )
            require_invariant(
                (pending.acked_count == len(pending.participants))
                == (pending.phase is not CheckpointPhase.WAITING),
                f"checkpoint {checkpoint_id} is {pending.phase.value} with the wrong acks",
            )


def _too_many(failed_in_a_row: int, detail: str) -> str:
    return (
        f"{failed_in_a_row} checkpoints in a row have failed, more than "
        f"execution.checkpointing.tolerable-failed-checkpoints allows; the last one: {detail}"
    )


def _own_references(references: Iterable[FileReference]) -> tuple[FileReference, ...]:
    """Those to files of the job: what was written into a savepoint's directory is the savepoint's."""
    return tuple(one for one in references if not is_of_savepoint(one.location.path))


def _told(event: c.CoordinatorEvent) -> str:
    words = [type(event).__name__]
    words += [
        str(getattr(event, name))
        for name in ("checkpoint_id", "key", "request_id", "now_ms")
        if hasattr(event, name)
    ]
    return " ".join(words)
