"""What ends attempts of a job without a report: TaskManagers that are gone, calls that fail, ends that do not come.

Whoever does not know what runs in a slot gives it back, which ends whatever is left there. What such a loss means
for the job is decided where every failure is.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import AttemptState, ExecutionAttempt, SubtaskId
from jobmanager.job.attempt_reports import AttemptReports
from jobmanager.job.groups import STOPPED
from jobmanager.job.job_causes import not_cancelled
from jobmanager.job.job_parts import Dropped, Failed, JobParts, PartEffect
from jobmanager.messages import job_events


class Losses:
    """The losses of one job."""

    def __init__(self, parts: JobParts, reports: AttemptReports) -> None:
        self._parts = parts
        self._reports = reports

    def take_failed_call(self, event: job_events.CallFailed) -> list[PartEffect]:
        """Nobody knows what runs on a TaskManager now."""
        id, lease = event.taskmanager_id, self._parts.lease
        if not lease.uses(id) or event.attempt < lease.since(id):
            return [Dropped()]
        effects = self._given_back(lease.slots_on(id))
        effects += self._parts.speculation.lose_taskmanager(id, event.cause)
        return effects + self._given_up(self._parts.graph.on_taskmanager(id), event.cause)

    def lose_taskmanager(self, event: job_events.TaskManagerGone) -> list[PartEffect]:
        """A TaskManager is gone, and with it whatever ran there."""
        id, parts = event.taskmanager_id, self._parts
        parts.drained.pop(id, None)
        parts.partitions.lose_taskmanager(id)
        parts.lease.lose(id)
        effects: list[PartEffect] = [*parts.speculation.lose_taskmanager(id, event.cause)]
        attempts = parts.graph.on_taskmanager(id)
        return effects + self._given_up(attempts, event.cause, is_free=event.is_planned)

    def lose_kept_rows(self, event: job_events.KeptRowsLost) -> list[PartEffect]:
        """The process of an attempt that has finished has ended."""
        if not self._parts.partitions.lose_attempt(event.key):
            return []
        return self._given_up([], event.cause)

    def lose_replacement(self, event: job_events.RivalNotStarted) -> list[PartEffect]:
        """A rival that is the current attempt by now was perhaps never deployed, unless it is done already."""
        attempt = self._reports.find(event.key)
        if attempt is None:
            return [Dropped()]
        if attempt.reached_end_of_data:
            return []
        effects = self._given_back([attempt.slot_id])
        return effects + self._given_up(self._parts.graph.in_slots([attempt.slot_id]), event.cause)

    def end_overdue(self, event: job_events.CancellationOverdue) -> list[PartEffect]:
        """What a group has cancelled has not ended in time."""
        graph = self._parts.graph
        group = self._parts.groups.find(event.group, *STOPPED)
        if group is None:
            return [Dropped()]
        overdue = graph.give_up(group.subtasks)
        slot_ids = {attempt.slot_id for attempt in overdue}
        effects = self._given_back(slot_ids)
        return effects + self._given_up(graph.in_slots(slot_ids), not_cancelled(overdue))

    def _given_back(self, slot_ids: Iterable[str]) -> list[PartEffect]:
        """Ends slots, and all that their processes hold."""
        ids = frozenset(slot_ids)
        effects = self._parts.lease.give_back(ids)
        self._parts.partitions.lose_slots(ids)
        return [*effects]

    def _given_up(
        self, attempts: list[ExecutionAttempt], cause: FailureCause, *, is_free: bool = False
    ) -> list[PartEffect]:
        """Counts attempts as failed whose end nobody will report, and what is needed and lost with them."""
        effects: list[PartEffect] = []
        failed: set[SubtaskId] = set()
        were_cancelled = [a for a in attempts if a.state is AttemptState.CANCELING]
        for attempt in attempts:
            attempt.become(AttemptState.FAILED)
            if attempt in were_cancelled:
                continue
            survived = self._reports.survived(attempt, cause)
            if survived is None:
                failed.add(attempt.key.subtask)
            else:
                effects += survived
        stopped = self._parts.groups.stopped
        missing = self._parts.partitions.needed_and_missing(stopped)
        failed |= {partition.producer for partition in missing}
        # What is being cancelled may be so for a consequence of what has happened now.
        if were_cancelled or failed - stopped:
            ended = frozenset(attempt.key.subtask for attempt in were_cancelled)
            effects.append(Failed(cause, frozenset(failed), tuple(missing), is_free, ended))
        return effects
