"""What is traced of one job: it looks at what its machine has heard and wants done, and changes nothing (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jobmanager.job.checkpoint_spans import CheckpointSpans
from jobmanager.job.job_master import JobMaster
from jobmanager.job.recovery_spans import RecoverySpans
from jobmanager.messages import job_effects, job_events
from jobmanager.messages.job_state import JobState
from jobmanager.traces.span import ReportSpan, Span, Value

_MESSAGE_MAX = 200
_ON_ITS_WAY = (JobState.CREATED, JobState.RUNNING, JobState.RESTARTING)


class JobTrace:
    """See the module.

    Args:
        report: takes spans.
        master: the machine of the job.
        facts: of the job, which each of its spans carries.
        is_recovered: an earlier JobManager has run it.
    """

    def __init__(
        self,
        report: ReportSpan,
        master: JobMaster,
        facts: dict[str, Value],
        *,
        is_recovered: bool,
    ) -> None:
        self._report = report
        self._master = master
        self._facts = facts
        self._checkpoints = CheckpointSpans()
        self._recoveries = RecoverySpans("takeover" if is_recovered else "start")

    def note(
        self,
        event: job_events.JobEvent,
        effects: Iterable[job_effects.JobEffect],
        now_ms: int,
    ) -> None:
        """An event has been taken in, and this is what has come of it."""
        for span in self._checkpoints.step(event, effects, now_ms):
            self._tell(span)
        master, recoveries = self._master, self._recoveries
        if master.ended:
            self._tell(recoveries.end(now_ms, self._result(), f"the job ended {master.state.name}"))
        elif master.state in _ON_ITS_WAY:
            entries = master.exceptions.entries
            failed_ms = entries[0].cause.timestamp_ms if entries else 0
            phases = {group.phase for group in master.groups}
            self._tell(recoveries.look(phases, now_ms, failed_ms, self._result()))

    def _tell(self, span: Span | None) -> None:
        if span is not None:
            self._report(replace(span, attributes={**self._facts, **span.attributes}))

    def _result(self) -> dict[str, Value]:
        master = self._master
        facts: dict[str, Value] = {
            "penstock.attempt": master.attempt,
            "penstock.restarts": master.restarts,
            "penstock.restored_checkpoint_id": master.restored_checkpoint_id,
        }
        entries = master.exceptions.entries
        if entries and self._recoveries.is_of_failure:
            cause = entries[0].cause
            facts |= {
                "penstock.failure.class": cause.error_class,
                "penstock.failure.message": cause.message[:_MESSAGE_MAX],
                "penstock.failure.vertex": cause.vertex,
                "penstock.failure.subtask": cause.subtask_index,
                "penstock.failure.taskmanager_id": cause.taskmanager_id,
                "penstock.restarted_subtasks": len(entries[0].restarted),
            }
        return facts
