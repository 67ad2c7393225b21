"""What a job came to: its result, or the error that it ended with."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from penstock.client.job_metrics import job_metrics
from penstock.errors import JobCanceled, JobFailed
from penstock.pb import client_pb2


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: "FINISHED"; of a detached job what it was when it was left.
        duration: from RUNNING to the end.
        metrics: see ``JobHandle.metrics``.
    """

    job_id: str
    status: str
    duration: dt.timedelta
    metrics: dict[str, Any] = field(repr=False)


def state_name(details: client_pb2.JobDetails) -> str:
    """The job's state as a word."""
    return client_pb2.JobState.Name(details.summary.state).removeprefix("JOB_STATE_")


def job_failed(details: client_pb2.JobDetails) -> JobFailed:
    """The error of a failed job, with everything a person needs to find the cause."""
    cause, summary = details.failure, details.summary
    lines = [
        f"job {summary.name!r} ({summary.job_id}) failed: {cause.error_class}: {cause.message}"
    ]
    if cause.vertex:
        where = f"operator {cause.operator!r}, " if cause.operator else ""
        names = [f" ({v.name})" for v in details.vertices if v.id == cause.vertex]
        vertex = f"vertex {cause.vertex}{''.join(names)}"
        lines.append(f"  at {where}{vertex}, subtask {cause.subtask_index}")
    if cause.position:
        lines.append(f"  position: {cause.position}")
    if cause.row:
        lines.append(f"  row: {cause.row}")
    if cause.traceback:
        lines.append(cause.traceback.rstrip())
    if details.start_again:
        lines.append(f"to start it again from its newest checkpoint: {details.start_again}")
    return JobFailed(
        "\n".join(lines),
        job_id=summary.job_id,
        cause=cause.error_class,
        vertex=cause.vertex,
        subtask_index=cause.subtask_index if cause.vertex else -1,
        operator=cause.operator,
        row=cause.row,
        position=cause.position,
        user_traceback=cause.traceback,
    )


def job_result(details: client_pb2.JobDetails) -> JobResult:
    """What is known of a job, ended or not."""
    summary = details.summary
    started_ms = summary.running_at_ms or summary.submitted_at_ms
    duration_ms = max(0, summary.ended_at_ms - started_ms) if summary.ended_at_ms else 0
    return JobResult(
        job_id=summary.job_id,
        status=state_name(details),
        duration=dt.timedelta(milliseconds=duration_ms),
        metrics=job_metrics(details),
    )


def result_of(details: client_pb2.JobDetails) -> JobResult:
    """The result of a job that has ended.

    Raises:
        JobFailed: it failed.
        JobCanceled: it was cancelled.
    """
    if details.summary.state == client_pb2.JOB_STATE_FAILED:
        raise job_failed(details)
    if details.summary.state == client_pb2.JOB_STATE_CANCELED:
        summary = details.summary
        raise JobCanceled(f"job {summary.name!r} ({summary.job_id}) was cancelled")
    return job_result(details)
