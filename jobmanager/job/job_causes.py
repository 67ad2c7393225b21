"""Causes and events of a job in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from jobmanager.checkpoint import messages as c
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.execution_attempt import ExecutionAttempt, SubtaskId
from jobmanager.messages import job_events

ENDED_WITH_JOBMANAGER: Final = (
    "the JobManager ended while the job ran, and the job ended with it: submit it again"
)
ENDED_COMMITTING: Final = (
    "the JobManager ended while the job, which took no checkpoints, committed its output: some "
    "of it may be missing, and to run the job again would repeat the rest; remove the output "
    "and submit the job again, or set execution.checkpointing.interval"
)


def of_attempt(attempt: ExecutionAttempt, message: str) -> FailureCause:
    """A cause that the JobManager itself found in an attempt."""
    return FailureCause(
        "TaskFailure",
        f"{attempt.key} on TaskManager {attempt.taskmanager_id}: {message}",
        vertex=attempt.key.vertex,
        subtask_index=attempt.key.subtask_index,
        attempt=attempt.key.attempt,
        taskmanager_id=attempt.taskmanager_id,
    )


def subtask_of(cause: FailureCause) -> SubtaskId | None:
    """Whose failure it is; None = of no subtask."""
    if not cause.vertex or cause.subtask_index < 0:
        return None
    return SubtaskId(cause.vertex, cause.subtask_index)


def no_slots(event: job_events.SlotsRefused) -> FailureCause:
    """Slots did not come in time."""
    drained = f" (not counting {event.drained} that are drained)" if event.drained else ""
    undo = ", take drained ones in use again (penstock drain --undo)" if event.drained else ""
    return FailureCause(
        "NoResourceAvailable",
        f"the job needs {event.needed} slots, but within {event.waited_ms / 1000:g} s "
        f"(slot.request.timeout) only {event.free} of {event.total} slots on "
        f"{event.taskmanagers} TaskManagers{drained} were free: start more TaskManagers{undo}, end other jobs or "
        "lower the parallelism",
    )


def committed_already(cause: FailureCause) -> FailureCause:
    """A failure while output becomes visible, of a job that takes no checkpoints."""
    return replace(
        cause,
        error_class="Unrecoverable",
        message=f"{cause.message} (output had begun to be committed, which a restart would repeat: "
        "set execution.checkpointing.interval to have output committed exactly once)",
    )


def where_damaged(cause: FailureCause, found: Mapping[int, str]) -> FailureCause:
    """Why nothing can be gone on with, and what tasks have found where they tried.

    Args:
        found: what they have said, by checkpoint.

    Example:
        >>> where_damaged(FailureCause("Unrecoverable", "it is damaged"), {7: "state/a is altered"}).message
        'it is damaged (a task has said of 7: state/a is altered)'
    """
    if not found or cause.error_class != "Unrecoverable":
        return cause
    said = "; ".join(f"a task has said of {id}: {text}" for id, text in sorted(found.items()))
    return replace(cause, message=f"{cause.message} ({said})")


def not_promoted(cause: FailureCause) -> FailureCause:
    """What was to outlive the job does not; all of the job's work is done, so nothing begins again."""
    return replace(
        cause,
        error_class="Unrecoverable",
        message=f"what the job persists could not be kept: {cause.message}",
    )


def not_cancelled(overdue: Iterable[ExecutionAttempt]) -> FailureCause:
    """Slots were given back because something in them did not end: the rest of them ends with it."""
    names = ", ".join(str(attempt.key) for attempt in overdue)
    return FailureCause(
        "TaskFailure",
        f"its slot was given back, since {names} had not ended within task.cancellation.timeout",
    )


def lost_inputs(missing: Iterable[KeptOutput]) -> FailureCause:
    """Processes have ended, and with them what others were to read."""
    names = ", ".join(sorted(f"{p.edge_id} of {p.producer}" for p in missing))
    return FailureCause("PartitionUnavailable", f"the process that kept {names} has ended")


def inputs_gone(checkpoint_id: int, reader: SubtaskId, producer: SubtaskId) -> FailureCause:
    """A checkpoint refers to rows that are not there any more."""
    return FailureCause(
        "Unrecoverable",
        f"{reader} cannot go on from checkpoint {checkpoint_id}: it had read a part of what {producer} "
        "had written to a blocking exchange, which is lost, and the rows that would come instead need "
        "not be the same ones: declare the operators in front of it deterministic, or submit the job again",
    )


def not_begun_again(*, has_committed: bool) -> FailureCause:
    """Another JobManager has led, nothing that the job had deployed is left, and it is not run a second time."""
    reason = ENDED_COMMITTING if has_committed else ENDED_WITH_JOBMANAGER
    return FailureCause("Unrecoverable", reason)


def begun_again(reason: str) -> FailureCause:
    """Another JobManager has led, and nothing of the job goes on from there.

    Args:
        reason: why what runs cannot; "" = nothing runs.
    """
    why = reason or "no TaskManager that has registered since runs anything of it"
    return FailureCause(
        "JobManagerLost",
        f"the JobManager that ran the job has ended, and {why}: the job begins again, from its newest checkpoint if it "
        "has one, which the restart strategy does not count",
    )


def not_taken_over(gone: Sequence[SubtaskId], broken: Sequence[SubtaskId]) -> FailureCause:
    """Another JobManager has led, and not all that it had deployed goes on.

    Args:
        gone: what no TaskManager runs any more.
        broken: all that begins again.
    """
    if gone:
        named, more = ", ".join(map(str, gone[:5])), ", ..." if len(gone) > 5 else ""
        return FailureCause(
            "TaskManagerLost",
            f"no TaskManager that has registered since another JobManager led runs {named}{more}",
        )
    return being_restarted(str(broken[0]))


def collected_rows_lost(sinks: Sequence[SubtaskId], *, begins_again: bool) -> FailureCause:
    """Rows were on their way to a client when their JobManager ended.

    Args:
        sinks: that had sent some.
        begins_again: these are made again.
    """
    named, more = ", ".join(map(str, sinks[:5])), ", ..." if len(sinks) > 5 else ""
    told = (
        "they begin again, which is no failure"
        if begins_again
        else "the job has no restart strategy, so it ends: submit it again"
    )
    return FailureCause(
        "CollectedRowsLost",
        f"rows of collect() that {named}{more} had sent were held by the JobManager that led before, and are lost "
        f"with it: {told}",
    )


def being_restarted(what: str = "the job") -> FailureCause:
    """It goes on with a restart that an earlier JobManager had begun."""
    return FailureCause(
        "TaskFailure", f"{what} was being restarted when another JobManager took over"
    )


def quarantine_cause(error: BaseException, now_ms: int) -> FailureCause:
    """What the user is told when the job's own actor has crashed."""
    return FailureCause(
        "Unrecoverable",
        f"the JobManager gave this job up because of an error of its own: {_in_one_line(error)}; the "
        "JobManager's log has the story (job.quarantined)",
        timestamp_ms=now_ms,
    )


def _in_one_line(error: BaseException) -> str:
    """An exception in one line; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def told(event: job_events.JobEvent) -> str:
    """An event in short, for the story: splits' payloads and snapshots are not part of it."""
    match event:
        case job_events.SplitsReported():
            ids = ", ".join(split.id for split in event.splits[:3])
            return f"SplitsReported({event.key}, {len(event.splits)} splits: {ids}, {event.final})"
        case job_events.StartPrepared():
            restored = event.restored.checkpoint_id if event.restored is not None else None
            return f"StartPrepared(attempt {event.attempt}, checkpoint {restored})"
        case job_events.AttemptsFound():
            return f"AttemptsFound({len(event.found)} attempts, {event.reason!r})"
        case c.AckReceived():
            return f"AckReceived({event.key}, checkpoint {event.checkpoint_id})"
        case _:
            return repr(event)[:500]
