"""Jobs as plain values: the stable fields of ``--json``, and what people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.client.job_result import JobResult
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.prepared_output import PreparedOutput

_NO_WATERMARK = -(2**63)
_FINAL_WATERMARK = 2**63 - 1


def state_name(state: client_pb2.JobState.ValueType) -> str:
    """``RUNNING`` for ``JOB_STATE_RUNNING``."""
    return client_pb2.JobState.Name(state).removeprefix("JOB_STATE_")


def attempt_state_name(state: client_pb2.AttemptState.ValueType) -> str:
    """``RUNNING`` for ``ATTEMPT_STATE_RUNNING``."""
    return client_pb2.AttemptState.Name(state).removeprefix("ATTEMPT_STATE_")


def summary_fields(summary: client_pb2.JobSummary) -> dict[str, Any]:
    """One job of ``penstock list --json``."""
    return {
        "job_id": summary.job_id,
        "name": summary.name,
        "state": state_name(summary.state),
        "submitted_at_ms": summary.submitted_at_ms,
        "running_at_ms": summary.running_at_ms or None,
        "ended_at_ms": summary.ended_at_ms or None,
        "restarts": summary.restarts,
        "problem": summary.problem or None,
        "restorable_from": summary.restorable_from or None,
    }


TIME_ENDED = (
    "event time had ended before it was taken (stop --drain): for windows, joins and timers of event time all rows that "
    "come from here on are late"
)

OUTPUT_TEXTS: Mapping[str, str] = {
    PreparedOutput.COMMITTED: "output that it covers: committed by the job that it was taken of",
    PreparedOutput.TAKEN_BACK: (
        "output that it covers: taken back by the job that it was taken of, which makes it again; left to that job"
    ),
    PreparedOutput.CLAIMED: "output that it covers: committed by another job that was started from it",
    PreparedOutput.IN_DOUBT: "output that it covers: in doubt",
    PreparedOutput.COMMITTED_HERE: "output that it covers: committed by the job that is started from it",
    PreparedOutput.LEFT: "output that it covers: was in doubt, and is left as it is",
}


def started_fields(started: checkpoint_pb2.StartedFrom) -> dict[str, Any]:
    """What a job was started from, in ``--json`` of ``info``."""
    return {
        "path": started.path,
        "checkpoint_id": started.checkpoint_id,
        "claimed": started.claimed,
        "independent_since_checkpoint_id": started.independent_since_checkpoint_id or None,
        "independent_since_ms": started.independent_since_ms or None,
        "event_time_ended": started.event_time_ended,
        "output": started.output or None,
        "migrated": [
            {
                "operator_uid": one.operator_uid,
                "name": one.name,
                "state": one.state,
                "how": one.how,
            }
            for one in started.migrated_states
        ],
        "dropped": [
            {"operator_uid": one.operator_uid, "name": one.name, "state": one.state or None}
            for one in started.dropped_states
        ],
    }


def started_lines(started: checkpoint_pb2.StartedFrom, *, is_over: bool) -> list[str]:
    """The same for people.

    Args:
        is_over: the job has ended, and has left nothing to start it from again.
    """
    since = started.independent_since_checkpoint_id
    if started.claimed:
        owned = "it belongs to this job"
    elif since:
        owned = f"not needed since checkpoint {since}, {time_of(started.independent_since_ms)}"
    elif is_over:
        owned = "not needed any more: this job has ended"
    else:
        owned = "still needed: this job has completed no checkpoint of its own"
    lines = [f"started from: {started.path} (checkpoint {started.checkpoint_id}); {owned}"]
    if started.event_time_ended:
        lines.append(f"  {TIME_ENDED}")
    if started.output in OUTPUT_TEXTS:
        lines.append(f"  {OUTPUT_TEXTS[started.output]}")
    lines += [
        f"  migrated: state {one.state} of operator {one.name} (uid {one.operator_uid}): {one.how}"
        for one in started.migrated_states
    ]
    lines += [
        f"  left out: {f'state {one.state}' if one.state else 'all state'} of operator {one.name} (uid {one.operator_uid})"
        for one in started.dropped_states
    ]
    return lines


def repeated_fields(repeated: client_pb2.RepeatedOutput) -> dict[str, Any]:
    """Output that may be there twice, in ``--json`` of ``info`` and ``exceptions``."""
    return {
        "from_checkpoint_id": repeated.from_checkpoint_id,
        "to_checkpoint_id": repeated.to_checkpoint_id,
        "files": list(repeated.files),
        "file_count": repeated.file_count,
        "places": list(repeated.places),
        "message": repeated.message,
    }


def repeated_lines(repeated: client_pb2.RepeatedOutput) -> list[str]:
    """The same for people."""
    lines = [f"output may be doubled: {repeated.message}"]
    lines += [f"  {file}" for file in repeated.files]
    more = repeated.file_count - len(repeated.files)
    return [*lines, f"  and {more} more"] if more > 0 else lines


def details_fields(details: client_pb2.JobDetails) -> dict[str, Any]:
    """``penstock info --json``."""
    failure, wait = details.failure, details.slot_wait
    return {
        **summary_fields(details.summary),
        "last_checkpoint_id": details.last_checkpoint_id or None,
        "last_checkpoint_at_ms": details.last_checkpoint_at_ms or None,
        "failed_checkpoints": details.failed_checkpoints,
        "slot_wait": {
            "needed": wait.needed,
            "free": wait.free,
            "total": wait.total,
            "waited_ms": wait.waited_ms,
            "timeout_ms": wait.timeout_ms,
            "drained_taskmanagers": wait.drained_taskmanagers,
        }
        if details.HasField("slot_wait")
        else None,
        "started_from": started_fields(details.started_from)
        if details.HasField("started_from")
        else None,
        "start_again": details.start_again or None,
        "repeated_output": [repeated_fields(one) for one in details.repeated_output],
        "vertices": [_vertex_fields(vertex) for vertex in details.vertices],
        "failure": {
            "error_class": failure.error_class,
            "message": failure.message,
            "vertex": failure.vertex,
            "subtask_index": failure.subtask_index,
            "attempt": failure.attempt,
            "operator": failure.operator,
            "row": failure.row,
            "position": failure.position,
            "traceback": failure.traceback,
            "taskmanager_id": failure.taskmanager_id,
            "timestamp_ms": failure.timestamp_ms,
        }
        if details.HasField("failure")
        else None,
    }


def _vertex_fields(vertex: client_pb2.VertexDetails) -> dict[str, Any]:
    return {
        "id": vertex.id,
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "max_parallelism": vertex.max_parallelism,
        "operators": list(vertex.operators),
        "subtasks": [_subtask_fields(subtask) for subtask in vertex.subtasks],
        "speculative_attempts": [_subtask_fields(rival) for rival in vertex.speculative_attempts],
    }


def _subtask_fields(subtask: client_pb2.SubtaskDetails) -> dict[str, Any]:
    return {
        "subtask_index": subtask.subtask_index,
        "attempt": subtask.attempt,
        "state": attempt_state_name(subtask.state),
        "taskmanager_id": subtask.taskmanager_id,
        "slot_id": subtask.slot_id,
        "metrics": metrics_fields(subtask.metrics),
    }


def metrics_fields(metrics: client_pb2.SubtaskMetrics) -> dict[str, Any]:
    """The counters of a subtask; the watermark is null before there is one and after the end."""
    fields = {field.name: getattr(metrics, field.name) for field in metrics.DESCRIPTOR.fields}
    if fields["watermark_ms"] in (0, _NO_WATERMARK, _FINAL_WATERMARK):
        fields["watermark_ms"] = None
    return fields


LOAD_COLUMNS = ("BUSY", "BACK-PRESSURED", "WATERMARK")


def load_cells(metrics: Sequence[client_pb2.SubtaskMetrics]) -> list[str]:
    """Of subtasks: the part of their time that was work, that was back-pressure, and the least watermark."""
    busy = sum(one.busy_ms for one in metrics)
    back_pressured = sum(one.back_pressured_ms for one in metrics)
    total = busy + back_pressured + sum(one.idle_ms for one in metrics)
    shares = [f"{part / total:.0%}" if total else "" for part in (busy, back_pressured)]
    return [*shares, _watermark_text(min((one.watermark_ms for one in metrics), default=0))]


def _watermark_text(watermark_ms: int) -> str:
    if watermark_ms in (0, _NO_WATERMARK):
        return ""
    if watermark_ms == _FINAL_WATERMARK:
        return "end"
    try:
        return time_of(watermark_ms)
    except (OverflowError, ValueError):  # a time that is none of people's
        return f"{watermark_ms} ms"


def result_fields(result: JobResult, name: str) -> dict[str, Any]:
    """One job of ``penstock run --json``."""
    return {
        "job_id": result.job_id,
        "name": name,
        "status": result.status,
        "duration_s": result.duration.total_seconds(),
        "metrics": result.metrics,
    }


def time_of(timestamp_ms: int) -> str:
    """A time as people read it, "" for none."""
    if not timestamp_ms:
        return ""
    return f"{datetime.fromtimestamp(timestamp_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}Z"


def duration_of(summary: client_pb2.JobSummary, now_ms: int) -> str:
    """How long the job has run or ran."""
    end_ms = summary.ended_at_ms or now_ms
    return f"{max(0, end_ms - summary.submitted_at_ms) / 1000:.1f} s"


def size_of(size_bytes: int) -> str:
    """A size as people read it: "1.5 MB"."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def partition_fields(partition: client_pb2.PartitionDetails) -> dict[str, Any]:
    """One partition of ``penstock partitions --json``."""
    return {
        "taskmanager_id": partition.taskmanager_id or None,
        "job_id": partition.job_id,
        "edge_id": partition.edge_id,
        "vertex": partition.vertex,
        "subtask_index": partition.subtask_index,
        "attempt": partition.attempt,
        "rows": partition.rows,
        "size_bytes": partition.size_bytes,
        "promoted_as": partition.promoted_as or None,
    }
