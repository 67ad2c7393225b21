"""The checkpoint coordinator of one job: events in, effects out.

    request or interval -> trigger -> acks -> store, one at a time -> completed -> older ones released
    CheckpointRequests     CheckpointsUnderWay                        CheckpointEnds

Each checkpoint has until its deadline. What is still being stored then may count or not: it is settled,
which takes until the store answers, and meanwhile none is triggered and whoever waits is told so.

Invariants (``check``, beside those of its parts):
- a checkpoint completes once, and only after every task that takes part has acknowledged it; tasks that
  had finished before its trigger take no part and are recorded as finished;
- checkpoints complete in the order of their ids;
- the count of a shared file is the number of completed checkpoints that are kept and name it;
- a file is deleted only when no kept checkpoint, no checkpoint being stored, no ack of a pending one and
  no last state of a finished task names it (``CheckpointFiles``);
- at most ``max_concurrent`` checkpoints are under way, at most one is being stored or settled, at most one
  ``DeleteFiles`` is under way, and at most one checkpoint is triggered per step;
- each request is answered once.

The checkpoint with which a job is stopped is a checkpoint like others, taken alone as savepoints are; none comes behind it.
So is the one with which subtasks leave a TaskManager: who leaves and who goes on is said by who runs the job. And so is
one that a savepoint is made of: once it is complete it is the job's newest checkpoint.

A savepoint that is written apart goes through the same steps, alone: it waits for what is under way, and what comes next waits for it. It
is not registered, kept or counted, and no task builds upon it; files of the job that it refers to stay where they are.

Acks that are late, unknown, doubled or meant for an earlier leader are dropped and counted, and what only they
have uploaded is deleted. What is meant for a later leader is dropped and nothing is deleted: it is that leader's.

A task that is done with all it has to do may finish between trigger and ack. The barrier will then never
reach its consumers, so the checkpoint is void: it is taken again at once with the tasks that are left.

Source: Carbone et al., "State Management in Apache Flink", sections 3.2 and 4.2; Flink,
CheckpointCoordinator and FLIP-147. Flink refuses a request whose checkpoint is subsumed; here it is
answered with the later checkpoint, which holds all that was asked for.
"""

from __future__ import annotations

from collections import deque
from typing import Final, assert_never

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ends import CheckpointEnds, own_references
from jobmanager.checkpoint.checkpoint_files import CheckpointFiles, FileReleased
from jobmanager.checkpoint.checkpoint_ids import CheckpointIds
from jobmanager.checkpoint.checkpoint_requests import CheckpointRequests
from jobmanager.checkpoint.checkpoint_stores import CheckpointStores
from jobmanager.checkpoint.checkpoints_under_way import CheckpointsUnderWay, PendingView
from jobmanager.checkpoint.completed import CompletedCheckpoints
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.coordinator_outbox import CoordinatorOutbox
from jobmanager.checkpoint.participating_tasks import ParticipatingTasks, named
from jobmanager.checkpoint.pending import Ack, CheckpointPhase, PendingCheckpoint
from jobmanager.checkpoint.settings import CheckpointSettings
from jobmanager.checkpoint.shared_state_registry import SharedFileMismatch
from jobmanager.checkpoint.statistics import NOTHING_KEPT, CheckpointRecord, KeptCheckpoints
from jobmanager.checkpoint.steady_time import SteadyTime
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.errors import InvariantViolation, require_invariant

_STORY_LENGTH: Final = 64


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
        kept: KeptCheckpoints = NOTHING_KEPT,
    ) -> None:
        self.dropped_events = 0
        """Acks, declines and answers that came too late, twice, or from nobody who was asked."""
        self.fenced_events = 0
        """Acks and declines of what another leader has triggered."""
        self.story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._settings = settings
        self._leader_epoch = leader_epoch
        self._asked_at: int | None = None
        self._time = SteadyTime()
        self._outbox = CoordinatorOutbox()
        self._ids = CheckpointIds(next_checkpoint_id)
        self._files = CheckpointFiles()
        self._tasks = ParticipatingTasks()
        self._under_way = CheckpointsUnderWay()
        self._completed = CompletedCheckpoints(retained, settings.retained_max)
        self._requests = CheckpointRequests(
            settings,
            self._ids,
            self._tasks,
            self._under_way,
            self._outbox,
            self._time,
            is_stopped=any(checkpoint.is_stop for checkpoint in self._completed.kept[-1:]),
        )
        self._ends = CheckpointEnds(
            settings.tolerable_failed,
            kept,
            self._completed,
            self._files,
            self._ids,
            self._tasks,
            self._under_way,
            self._requests,
            self._outbox,
            self._time,
        )
        self._stores = CheckpointStores(
            self._completed,
            self._files,
            self._ids,
            self._tasks,
            self._under_way,
            self._requests,
            self._ends,
            self._outbox,
        )
        for checkpoint in self._completed.kept:
            self._files.register(checkpoint)
            require_invariant(checkpoint.checkpoint_id < next_checkpoint_id, "the next id is new")

    # ------------------------------------------------------------ what it says

    @property
    def is_active(self) -> bool:
        """Whether the job's tasks run, so that checkpoints may be taken."""
        return self._tasks.are_active

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
        return self._under_way.views()

    @property
    def history(self) -> tuple[CheckpointRecord, ...]:
        """The last checkpoints, the newest first."""
        return self._ends.statistics.records({kept.checkpoint_id for kept in self._completed.kept})

    @property
    def completed_total(self) -> int:
        """Checkpoints that have completed."""
        return self._ends.statistics.completed_total

    @property
    def failed_total(self) -> int:
        """Checkpoints that have failed; void ones do not count."""
        return self._ends.failures.failed_total

    @property
    def next_checkpoint_id(self) -> int:
        """The id of the next checkpoint."""
        return self._ids.next_id

    # ------------------------------------------------------------ what it decides

    def step(self, event: c.CoordinatorEvent) -> list[c.CoordinatorEffect]:
        """Takes one event and returns what is to be done, in order.

        Raises:
            InvariantViolation: our bug; carries the last events.
        """
        self.story.append(_told(event))
        self._time.advance(event.now_ms)
        try:
            self._handle(event)
            self._requests.expire()
            self._expire()
            self._stores.begin_next()
            self._trigger_next()
            self.check_step()
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}; story: {' | '.join(self.story)}") from error
        if paths := self._files.deletions.start(self._time.now_ms):
            self._outbox.add(c.DeleteFiles(paths))
        self._call_at()
        return self._outbox.take()

    def _handle(self, event: c.CoordinatorEvent) -> None:
        match event:
            case c.TasksStarted():
                self._start(event)
            case c.TasksStopped():
                self._stop()
            case c.TaskFinished():
                self._finish_task(event.key, event.last)
            case c.TaskLoaded():
                self._tasks.loaded(event.key)
            case c.TimeReached():
                self._asked_at = None
            case c.CheckpointRequested():
                self._note_dropped(self._requests.add(event))
            case c.AckReceived():
                self._take_ack(event)
            case c.DeclineReceived():
                self._take_decline(event)
            case c.CheckpointStored():
                self._note_dropped(self._stores.take_stored(event))
            case c.CheckpointNotStored():
                self._note_dropped(self._stores.take_not_stored(event))
            case c.StoreOutcomeUnknown():
                self._note_dropped(self._stores.take_unknown(event))
            case c.IdsReserved() | c.IdsNotReserved():
                self._requests.take_ids(event)
            case c.FilesDeleted():
                left, now_ms = event.left, self._time.now_ms
                self._note_dropped(self._files.deletions.finished(left, now_ms))
            case _:
                assert_never(event)

    def _note_dropped(self, is_taken: bool) -> None:
        self.dropped_events += not is_taken

    # ------------------------------------------------------------ tasks

    def _start(self, event: c.TasksStarted) -> None:
        if self._tasks.are_active:
            self._stop()
        self._tasks.start(event.tasks)
        latest = self._completed.latest
        if event.restored_id is not None and latest and event.restored_id < latest.checkpoint_id:
            self._requests.is_stopped = False  # they have gone back behind what had stopped the job
        self._files.hold_last(self._tasks.last_references())
        self._ends.safe_since_ms = self._time.now_ms
        self._requests.policy.begin(self._time.now_ms, at_once=event.at_once)

    def _stop(self) -> None:
        self._tasks.are_active = False
        for pending in self._under_way:
            if pending.checkpoint_id != self._under_way.storing:
                reason = c.AbortReason.TASKS_STOPPED
                self._ends.abort(pending, reason, reason.value)
        self._requests.refuse_queued(c.RequestRefused.NOT_RUNNING, "the job's tasks were stopped")

    def _finish_task(self, key: AttemptKey, last: c.LastState | None) -> None:
        if not self._tasks.finish(key, last):
            self.dropped_events += 1
            return
        if last is not None:
            self._files.hold_last(self._tasks.last_references())
        for pending in self._under_way:
            if pending.waits_for(key):
                self._ends.abort(
                    pending,
                    c.AbortReason.TASK_FINISHED,
                    f"{key} finished before its barrier came; it is taken again without it",
                )
            else:
                self._trigger_behind(key, pending)

    def _trigger_behind(self, finished: AttemptKey, pending: PendingCheckpoint) -> None:
        """A task that acknowledged after the end of its output has sent no barrier: those it was the
        last to feed may know of none. One who does drops the repetition."""
        if targets := self._tasks.beginning_behind(finished, pending.waits_for):
            self._outbox.add(
                c.TriggerTasks(
                    pending.checkpoint_id,
                    pending.triggered_at_ms,
                    targets,
                    self._requests.properties(pending.request),
                )
            )

    # ------------------------------------------------------------ triggers

    def _trigger_next(self) -> None:
        request = self._requests.take()
        if request is None:
            return
        targets = self._tasks.beginning()
        if not targets:
            raise InvariantViolation("tasks feed each other in a cycle: no barrier can start")
        checkpoint_id, running = self._ids.take(), self._tasks.running()
        now_ms, wall_now_ms = self._time.now_ms, self._time.wall_now_ms
        self._under_way.add(
            PendingCheckpoint(
                checkpoint_id,
                request,
                triggered_at_ms=wall_now_ms,
                started_ms=now_ms,
                deadline_ms=request.deadline_ms or now_ms + self._settings.timeout_ms,
                participants=running,
                finished=self._tasks.finished(),
            )
        )
        if not request.is_savepoint:
            if not request.properties.is_saved:
                self._requests.policy.started(now_ms)
            self._ends.statistics.triggered(checkpoint_id, wall_now_ms, len(running))
        self._outbox.add(
            c.TriggerTasks(checkpoint_id, wall_now_ms, targets, self._requests.properties(request))
        )

    # ------------------------------------------------------------ acks

    def _take_ack(self, event: c.AckReceived) -> None:
        if event.leader_epoch > self._leader_epoch:
            self.fenced_events += 1
            return
        pending = self._expected(event)
        if pending is None:
            self._ends.take_late(event)
            return
        try:
            claims = self._files.claim(event.checkpoint_id, own_references(event.references))
        except SharedFileMismatch as error:
            self._ends.abort(pending, c.AbortReason.STORE_FAILED, f"{event.key}: {error}")
            return
        except FileReleased as error:
            reason = c.AbortReason.OUTDATED if pending.is_alone else c.AbortReason.DECLINED
            self._ends.abort(pending, reason, f"{event.key} {error}")
            return
        pending.acknowledge(
            event.key, Ack(event.snapshot, claims, event.summary, event.has_finished)
        )
        if not pending.is_savepoint:
            self._ends.statistics.acknowledged(event.checkpoint_id, event.summary)
        if pending.phase is CheckpointPhase.READY:
            self._under_way.add_ready(event.checkpoint_id)

    def _expected(self, event: c.AckReceived | c.DeclineReceived) -> PendingCheckpoint | None:
        """The checkpoint that waits for this report; None (and counted) where none does."""
        if event.leader_epoch != self._leader_epoch:
            self.fenced_events += 1
            return None
        pending = self._under_way.find(event.checkpoint_id)
        if pending is None or not pending.waits_for(event.key):
            self.dropped_events += 1
            return None
        return pending

    def _take_decline(self, event: c.DeclineReceived) -> None:
        pending = self._expected(event)
        if pending is None:
            return
        reason = c.AbortReason.COMPARING if event.is_comparing else c.AbortReason.DECLINED
        self._ends.abort(pending, reason, f"{event.key} declined it: {event.reason}")

    def _expire(self) -> None:
        for pending in self._under_way:
            expires = pending.expires_ms
            if expires is None or expires > self._time.now_ms:
                continue
            late = f"not complete after {self._settings.timeout_ms} ms"
            if pending.phase is CheckpointPhase.STORING:
                self._stores.unsettle(
                    pending, f"{late}: the store does not say whether it has stored it"
                )
                continue
            if pending.phase is CheckpointPhase.READY:
                waits = f"it was acknowledged by all tasks and waits for checkpoint {self._under_way.storing} to be"
                self._ends.abort(pending, c.AbortReason.EXPIRED, f"{late}: {waits} stored")
                continue
            missing = pending.missing()
            self._ends.abort(
                pending,
                c.AbortReason.EXPIRED,
                f"{late}: {len(missing)} of {len(pending.participants)} tasks have not acknowledged it: "
                f"{named(missing)}",
            )

    # ------------------------------------------------------------ time

    def _call_at(self) -> None:
        now_ms = self._time.now_ms
        dues = [self._files.deletions.due_ms(now_ms), *self._under_way.expiring_ms()]
        dues += self._requests.due_ms()
        due = min((due for due in dues if due is not None), default=None)
        if due is None:
            return
        at_ms = self._time.wall(max(due, now_ms))
        if at_ms != self._asked_at:
            self._asked_at = at_ms
            self._outbox.add(c.CallAt(at_ms))

    # ------------------------------------------------------------ check

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever there is: run after each step.

        Raises:
            InvariantViolation: one does not hold.
        """
        latest = self._completed.latest
        self._under_way.check_step(self._settings.max_concurrent)
        require_invariant(
            latest is None or latest.checkpoint_id < self._ids.next_id, "an id is to be used twice"
        )
        require_invariant(
            self._tasks.are_active or not self._requests.policy.queued,
            "requests wait for tasks that do not run",
        )

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: one does not hold.
        """
        self.check_step()
        self._completed.check()
        self._ends.statistics.check()
        kept = [checkpoint.checkpoint_id for checkpoint in self._completed.kept]
        self._files.check(kept, self._under_way.ids)
        self._under_way.check(kept[-1] if kept else 0, self._ids.next_id)


def _told(event: c.CoordinatorEvent) -> str:
    words = [type(event).__name__]
    words += [
        str(getattr(event, name))
        for name in ("checkpoint_id", "key", "request_id", "now_ms")
        if hasattr(event, name)
    ]
    return " ".join(words)
