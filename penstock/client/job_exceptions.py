"""Failures of a job, as ``JobHandle.exceptions`` and ``penstock exceptions`` show them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.pb import client_pb2


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure.

    Attributes:
        error_class: name of the class of ``penstock.errors`` that it is.
        traceback: of the user's code; "" = none of it raised.
        cause_chain: classes of what was raised and of what caused that, the outermost first.
        vertex: id of the vertex; "" = it belongs to none.
        subtask_index: -1 = it belongs to no subtask.
        attempt: execution attempt of that subtask.
        operator: that it happened in; "" = it is not known.
        row: the offending row as text; "" = there is none.
        position: file and row, or rows, that were being processed; "" = it is not known.
        taskmanager_id: where it happened; "" = in the JobManager.
        timestamp_ms: milliseconds since the epoch.
    """

    error_class: str
    message: str
    traceback: str
    cause_chain: tuple[str, ...]
    vertex: str
    subtask_index: int
    attempt: int
    operator: str
    row: str
    position: str
    taskmanager_id: str
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class JobException:
    """A failure of a job and what came of it.

    Attributes:
        root_cause: of it all.
        labels: of the root cause, by the JobManager's failure enrichers: ``type`` and others.
        concurrent: failures that joined the same restart, the first ones.
        concurrent_count: all that joined.
        restarted: subtasks that were restarted because of it: ``"v1/0..3"``.
        restart_number: restarts of the job so far, this one included.
        delay_ms: from the failure to the restart; None = there was none, the job ended.
    """

    root_cause: Failure
    labels: dict[str, str]
    concurrent: tuple[Failure, ...]
    concurrent_count: int
    restarted: tuple[str, ...]
    restart_number: int
    delay_ms: int | None

    @property
    def ended_job(self) -> bool:
        """There was no restart: the job ended."""
        return self.delay_ms is None


def exception_of(entry: client_pb2.ExceptionEntry) -> JobException:
    """What the JobManager says of a failure and what came of it."""
    return JobException(
        root_cause=failure_of(entry.root_cause),
        labels=dict(entry.labels),
        concurrent=tuple(map(failure_of, entry.concurrent)),
        concurrent_count=entry.concurrent_count,
        restarted=tuple(entry.restarted),
        restart_number=entry.restart_number,
        delay_ms=None if entry.ended_job else entry.delay_ms,
    )


def failure_of(cause: client_pb2.FailureCause) -> Failure:
    """What the JobManager says of a failure."""
    return Failure(
        error_class=cause.error_class,
        message=cause.message,
        traceback=cause.traceback,
        cause_chain=tuple(cause.cause_chain),
        vertex=cause.vertex,
        subtask_index=cause.subtask_index if cause.vertex else -1,
        attempt=cause.attempt,
        operator=cause.operator,
        row=cause.row,
        position=cause.position,
        taskmanager_id=cause.taskmanager_id,
        timestamp_ms=cause.timestamp_ms,
    )
