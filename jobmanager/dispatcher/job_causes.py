"""Causes and events of a job in words."""

from __future__ import annotations

from jobmanager.checkpoint import messages as c
from jobmanager.dispatcher import job_messages as m
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import ExecutionAttempt, SubtaskId


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


def no_slots(event: m.SlotsRefused) -> FailureCause:
    """Slots did not come in time."""
    return FailureCause(
        "NoResourceAvailable",
        f"the job needs {event.needed} slots, but within {event.waited_ms / 1000:g} s "
        f"(slot.request.timeout) only {event.free} of {event.total} slots on "
        f"{event.taskmanagers} TaskManagers were free: start more TaskManagers, end other jobs or "
        "lower the parallelism",
    )


def told(event: m.JobEvent) -> str:
    """An event in short, for the story: splits' payloads and snapshots are not part of it."""
    match event:
        case m.SplitsReported():
            ids = ", ".join(split.id for split in event.splits[:3])
            return f"SplitsReported({event.key}, {len(event.splits)} splits: {ids}, {event.final})"
        case m.StartPrepared():
            restored = event.restored.checkpoint_id if event.restored is not None else None
            return f"StartPrepared(attempt {event.attempt}, checkpoint {restored})"
        case c.AckReceived():
            return f"AckReceived({event.key}, checkpoint {event.checkpoint_id})"
        case _:
            return repr(event)[:500]
