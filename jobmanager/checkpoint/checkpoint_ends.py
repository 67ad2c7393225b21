"""How checkpoints and savepoints end: complete, or aborted, and what both do to others, to files and to who waits.

Invariants: a checkpoint is registered before those it subsumes are released; one that completes aborts all older ones
under way, which are answered with it; of a savepoint nothing is registered, kept or counted.
What a task writes for a savepoint that was given up meanwhile is removed as its ack comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_files import CheckpointFiles
from jobmanager.checkpoint.checkpoint_ids import CheckpointIds
from jobmanager.checkpoint.checkpoint_requests import CheckpointRequests
from jobmanager.checkpoint.checkpoints_under_way import CheckpointsUnderWay
from jobmanager.checkpoint.completed import CompletedCheckpoints
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.coordinator_outbox import CoordinatorOutbox
from jobmanager.checkpoint.failure_policy import FailurePolicy
from jobmanager.checkpoint.participating_tasks import ParticipatingTasks
from jobmanager.checkpoint.pending import CheckpointPhase, PendingCheckpoint
from jobmanager.checkpoint.statistics import CheckpointStatistics, KeptCheckpoints
from jobmanager.checkpoint.steady_time import SteadyTime
from jobmanager.graph.execution_attempt import AttemptKey
from penstock.storage.checkpoint_properties import BehindBarrier
from penstock.storage.manifest import StoredReference
from penstock.storage.savepoint import is_of_savepoint

_GIVEN_UP_MAX = 32
"""Of so many savepoints files that come late are known; each is asked for by somebody, and has its deadline."""


class CheckpointEnds:
    """Ends them.

    Args:
        tolerable_failed: so many in a row may fail; -1 = any number.
        kept: what an earlier JobManager tells of them.
        completed: what can be restored from.
        files: of all of them.
        ids: of the job's checkpoints.
        under_way: what has begun.
        requests: what has not.
        outbox: takes what is to be done.
        time: of the step.

    Attributes:
        failures: how many have failed.
        statistics: the last ones.
        safe_since_ms: steady time; work since then is at risk.
    """

    def __init__(
        self,
        tolerable_failed: int,
        kept: KeptCheckpoints,
        completed: CompletedCheckpoints,
        files: CheckpointFiles,
        ids: CheckpointIds,
        tasks: ParticipatingTasks,
        under_way: CheckpointsUnderWay,
        requests: CheckpointRequests,
        outbox: CoordinatorOutbox,
        time: SteadyTime,
    ) -> None:
        self.failures = FailurePolicy(tolerable_failed, kept.failed_total)
        self.statistics = CheckpointStatistics(completed.kept, kept)
        self.safe_since_ms = 0
        self._completed = completed
        self._files = files
        self._ids = ids
        self._tasks = tasks
        self._under_way = under_way
        self._requests = requests
        self._outbox = outbox
        self._time = time
        self._awaited: dict[int, tuple[str, set[AttemptKey]]] = {}
        """Directories of savepoints that were given up, and who has not acknowledged them, by their checkpoint ids."""

    def complete(self, pending: PendingCheckpoint, event: c.CheckpointStored) -> None:
        """One is stored."""
        self._under_way.end(pending)
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
            finished=pending.restored_as_finished,
        )
        self._requests.is_stopped = pending.is_stop
        self._ids.stored()
        self._files.register(checkpoint)
        subsumed = self._completed.add(checkpoint)
        self.statistics.completed(checkpoint)
        self.failures.completed()
        if pending.is_saved:  # those that fail hold no other back
            self._requests.policy.started(pending.started_ms)
        self._requests.policy.completed(self._time.now_ms)
        self.safe_since_ms = self._time.now_ms
        subsumes = [one for one in self._under_way if one.checkpoint_id < event.checkpoint_id]
        is_awaited = not pending.is_move and any(
            one.request.request_id for one in (pending, *subsumes)
        )
        if keys := self._tasks.running_of(pending.participants):
            self._outbox.add(
                c.MoveTasks(event.checkpoint_id, keys)
                if pending.is_move
                else c.NotifyCompleted(event.checkpoint_id, keys, is_awaited)
            )
        committers = self._tasks.unfinished_of(pending.participants) if is_awaited else ()
        duration_ms = self._time.now_ms - pending.started_ms
        self._outbox.add(c.ReportCompleted(checkpoint, summary, duration_ms, committers))
        self._outbox.answer(pending.request, event.checkpoint_id)
        for older in subsumes:
            self.abort(
                older,
                c.AbortReason.SUBSUMED,
                f"checkpoint {event.checkpoint_id} completed first",
                instead=event.checkpoint_id,
            )
        waiting = [p.checkpoint_id for p in self._under_way if p.phase is CheckpointPhase.WAITING]
        for old in subsumed:
            self._files.release(old, waiting)
        self._files.end(event.checkpoint_id)

    def abort(
        self,
        pending: PendingCheckpoint,
        reason: c.AbortReason,
        detail: str,
        instead: int | None = None,
    ) -> None:
        """One will not be complete.

        Args:
            pending: it.
            detail: the same for people.
            instead: the later one that holds all that was asked for; None = none does.
        """
        checkpoint_id = pending.checkpoint_id
        pending.become(CheckpointPhase.ABORTED)
        self._under_way.end(pending)
        if pending.is_alone:
            self._abort_alone(pending, reason, detail)
            return
        verdict = self.failures.aborted(reason)
        self._requests.policy.aborted(
            verdict.failed_in_a_row if reason.counts else 0, self._time.now_ms
        )
        self.statistics.failed(checkpoint_id, detail, self._time.wall_now_ms)
        if keys := self._tasks.running_of(pending.participants):
            self._outbox.add(c.NotifyAborted(checkpoint_id, keys))
        if reason is c.AbortReason.TASK_FINISHED:
            self._requests.add_again(pending.request)
        elif instead is not None:
            self._outbox.answer(pending.request, instead)
        else:
            self._outbox.answer(pending.request, checkpoint_id, c.RequestRefused.ABORTED, detail)
        at_risk_ms = self._time.now_ms - self.safe_since_ms
        self._outbox.add(
            c.ReportAborted(checkpoint_id, reason, detail, verdict.failed_in_a_row, at_risk_ms)
        )
        if verdict.fails_job and self._tasks.are_active:
            self._outbox.add(c.FailJob(_too_many(verdict.failed_in_a_row, detail)))
        self._files.end(checkpoint_id)

    def _abort_alone(self, pending: PendingCheckpoint, reason: c.AbortReason, detail: str) -> None:
        """A savepoint, or one behind which the job holds: this says nothing about the health of checkpoints, and
        what was held goes on."""
        checkpoint_id, request = pending.checkpoint_id, pending.request
        if pending.target:
            self._awaited[checkpoint_id] = pending.target, set(pending.missing())
            if len(self._awaited) > _GIVEN_UP_MAX:
                del self._awaited[min(self._awaited)]
        behind = request.properties.behind
        if not pending.is_savepoint:
            self.statistics.failed(checkpoint_id, detail, self._time.wall_now_ms)
        if keys := self._tasks.running_of(pending.participants):
            self._outbox.add(c.NotifyAborted(checkpoint_id, keys))
        has_ended_time = behind is BehindBarrier.DRAIN
        is_again = reason in (c.AbortReason.TASK_FINISHED, c.AbortReason.OUTDATED)
        if is_again and not has_ended_time and self._under_way.unsettled is None:
            self._requests.add_again(request)
        else:
            if pending.target:
                is_stop = request.properties.is_stop
                self._outbox.add(c.DiscardSavepoint(checkpoint_id, pending.target, is_stop))
            self._outbox.answer(request, checkpoint_id, c.RequestRefused.ABORTED, detail)
            if has_ended_time:
                told = (
                    f"the job was not stopped, and its event time had been ended for that: {detail}"
                )
                self._outbox.add(c.FailJob(told, is_free=True))
        self._files.end(checkpoint_id)

    def take_late(self, event: c.AckReceived) -> None:
        """An ack that nobody waits for: what only it names goes."""
        named = [reference.location.path for reference in event.references]
        self._files.stray(own_references(event.references))
        target, missing = self._awaited.get(event.checkpoint_id, ("", set()))
        if event.key in missing and (files := tuple(filter(is_of_savepoint, named))):
            self._outbox.add(c.DiscardSavepoint(event.checkpoint_id, target, files=files))

    def _complete_savepoint(self, pending: PendingCheckpoint) -> None:
        """Its tasks go on as if there had been none."""
        if keys := self._tasks.running_of(pending.participants):
            self._outbox.add(c.NotifySaved(pending.checkpoint_id, keys))
        self._outbox.answer(pending.request, pending.checkpoint_id)
        self._files.end(pending.checkpoint_id)


def own_references(references: Iterable[StoredReference]) -> tuple[StoredReference, ...]:
    """Those to files of the job: what was written into a savepoint's directory is the savepoint's."""
    return tuple(one for one in references if not is_of_savepoint(one.location.path))


def _too_many(failed_in_a_row: int, detail: str) -> str:
    return (
        f"{failed_in_a_row} checkpoints in a row have failed, more than "
        f"execution.checkpointing.tolerable-failed-checkpoints allows; the last one: {detail}"
    )
