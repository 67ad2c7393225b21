"""What attempts report, and what follows from it for what they write, read and hold.

A report for an attempt that is unknown, neither current nor a rival, or already further is dropped and counted.
"""

from __future__ import annotations

from dataclasses import replace

from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    REPORTABLE,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.job.failover import ALL
from jobmanager.job.job_causes import of_attempt
from jobmanager.job.job_parts import Dropped, Failed, JobParts, PartEffect
from jobmanager.messages import job_events

_DAMAGED = ("StoreCorrupt", "StoreNotFound")
"""A task that fails so has found the checkpoint damaged that it goes on from: another one is tried."""


class AttemptReports:
    """Takes the reports of one job's attempts."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts

    def find(self, key: AttemptKey) -> ExecutionAttempt | None:
        """The attempt, current or a rival, that a report is about; None = it is stale."""
        attempt = self._parts.graph.find(key)
        return attempt if attempt is not None and attempt.state in ON_TASKMANAGER else None

    def take(self, event: job_events.AttemptReported) -> list[PartEffect]:
        """An attempt has come to another state."""
        attempt = self.find(event.key)
        if attempt is None or event.state not in REPORTABLE or not attempt.can_become(event.state):
            return [Dropped()]
        was_cancelled = attempt.state is AttemptState.CANCELING
        was_starting = attempt.is_starting
        attempt.become(event.state)
        if event.state is AttemptState.FAILED:
            cause = event.failure or of_attempt(attempt, "it failed without a cause")
            survived = self.survived(attempt, cause, misses_input=event.missing is not None)
            if survived is not None:
                return survived
            failure = self._failure(attempt, cause, event, was_starting=was_starting)
            return [replace(failure, was_cancelled=was_cancelled)]
        if event.state is AttemptState.CANCELED and not was_cancelled:
            # Nobody asked for it.
            cause = of_attempt(attempt, "its TaskManager cancelled it")
            survived = self.survived(attempt, cause)
            return [Failed(cause, frozenset([event.key.subtask]))] if survived is None else survived
        if event.state is AttemptState.FINISHED:
            return self._finished(attempt, event)
        return []

    def _finished(
        self, attempt: ExecutionAttempt, event: job_events.AttemptReported
    ) -> list[PartEffect]:
        parts = self._parts
        effects: list[PartEffect] = [*parts.speculation.done(attempt, parts.now_ms)]
        attempt.written = event.written
        parts.partitions.produced(attempt)
        effects += parts.partitions.release_unneeded(parts.groups.stopped)
        if parts.wiring is not None:
            effects += parts.wiring.finished(event.key, event.last, parts.splits, parts.now_ms)
        return effects

    def survived(
        self, attempt: ExecutionAttempt, cause: FailureCause, *, misses_input: bool = False
    ) -> list[PartEffect] | None:
        """Another attempt does the work of one that is over before its time; None = none does."""
        effects = self._parts.speculation.survive(attempt, cause, misses_input=misses_input)
        return None if effects is None else [*effects]

    def _failure(
        self,
        attempt: ExecutionAttempt,
        cause: FailureCause,
        event: job_events.AttemptReported,
        *,
        was_starting: bool,
    ) -> Failed:
        """An attempt has failed: this concerns itself, or all where their checkpoint is damaged.

        Args:
            was_starting: it had not got its state yet. What fails so later has had it, and is counted.
        """
        parts = self._parts
        failed: frozenset[SubtaskId] | None = frozenset([attempt.key.subtask])
        damaged = attempt.restored_from if cause.error_class in _DAMAGED else 0
        if damaged:
            parts.unusable[damaged] = cause.message
            if damaged == parts.restored_checkpoint_id:
                # Others hold what follows the damaged checkpoint, and not what follows an older one.
                failed = ALL
        is_free = bool(damaged) and was_starting
        missing = tuple(self._blamed(event))
        return Failed(cause, failed, missing, is_free=is_free, goes_back=failed is ALL)

    def _blamed(self, event: job_events.AttemptReported) -> list[KeptOutput]:
        """The partition that a consumer could not read, unless it has been replaced meanwhile, is none that
        is kept (then both are of one region), or is another job's; and what has gone with it.
        """
        parts, missing, reader = self._parts, event.missing, event.key.vertex
        if missing is None or not parts.plan.has_edge(missing.edge_id, reader):
            return []
        partition = KeptOutput(missing.edge_id, missing.producer.subtask)
        if not parts.partitions.is_kept(partition):
            return []
        is_current = parts.partitions.miss(partition, missing.producer.attempt)
        return parts.partitions.gone_with(partition, event.key.subtask) if is_current else []

    def take_side_loaded(self, key: AttemptKey) -> list[PartEffect]:
        """An attempt has read the side that it reads first."""
        parts, attempt = self._parts, self.find(key)
        if attempt is None:
            return [Dropped()]
        attempt.has_loaded = True
        return (
            [] if parts.wiring is None else [*parts.wiring.loaded(key, parts.splits, parts.now_ms)]
        )

    def take_end_of_data(self, event: job_events.EndOfDataReported) -> list[PartEffect]:
        """An attempt has read all its input."""
        parts, attempt = self._parts, self.find(event.key)
        if attempt is None or attempt.reached_end_of_data:
            return [Dropped()]
        attempt.reached_end_of_data, attempt.written = True, event.written
        effects = parts.speculation.done(attempt, parts.now_ms)
        parts.partitions.produced(attempt)
        return [*effects]

    def take_splits(self, event: job_events.SplitsReported) -> list[PartEffect]:
        """Subtask 0 of a source has discovered splits."""
        parts, attempt = self._parts, self.find(event.key)
        assigner = parts.splits.assigner(event.key.vertex, event.operator_uid)
        if attempt is None:
            return [Dropped()]
        if assigner is None or event.key.subtask_index != 0:
            message = f"reported splits of {event.operator_uid!r}, which is no source it speaks for"
            return [Failed(of_attempt(attempt, message), frozenset([event.key.subtask]))]
        if attempt.state is AttemptState.CANCELING or assigner.is_final:
            return [Dropped()]
        return parts.sent(parts.splits.assign(event, parts.graph))
