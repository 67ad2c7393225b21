"""Exceptions of a job as clients see them."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from jobmanager.checkpoint.repeated_output import RepeatedOutput
from jobmanager.failover.exceptions_history import ExceptionEntry, subtasks_of
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.rpc.graph_convert import cause_message
from penstock.pb import client_pb2


def exceptions_of(
    entries: Iterable[ExceptionEntry], repeated: Iterable[RepeatedOutput] = ()
) -> client_pb2.ListExceptionsResponse:
    """The last failures of a job, the newest first, and the output that they may have doubled."""
    return client_pb2.ListExceptionsResponse(
        entries=map(_shown, entries), repeated_output=map(repeated_message, repeated)
    )


def exception_entry(shown: client_pb2.ExceptionEntry) -> ExceptionEntry:
    """A failure as another JobManager has shown it."""
    return ExceptionEntry(
        shown_cause(shown.root_cause),
        dict(shown.labels),
        tuple(map(shown_cause, shown.concurrent)),
        shown.concurrent_count,
        subtasks_of(shown.restarted),
        shown.restart_number,
        None if shown.ended_job else shown.delay_ms,
    )


def shown_cause(shown: client_pb2.FailureCause) -> FailureCause:
    """A cause as another JobManager has shown it."""
    return FailureCause(
        error_class=shown.error_class,
        message=shown.message,
        traceback=shown.traceback,
        vertex=shown.vertex,
        subtask_index=shown.subtask_index,
        attempt=shown.attempt,
        operator=shown.operator,
        row=shown.row,
        taskmanager_id=shown.taskmanager_id,
        timestamp_ms=shown.timestamp_ms,
        cause_chain=tuple(shown.cause_chain),
        position=shown.position,
    )


def repeated_message(repeated: RepeatedOutput) -> client_pb2.RepeatedOutput:
    """Output that may be there twice."""
    return client_pb2.RepeatedOutput(
        from_checkpoint_id=repeated.from_checkpoint_id,
        to_checkpoint_id=repeated.to_checkpoint_id,
        files=repeated.files,
        file_count=repeated.file_count,
        places=repeated.places,
        message=str(repeated),
    )


def encode_repeated(repeated: Iterable[RepeatedOutput]) -> bytes:
    """As it is kept for the next JobManager."""
    return exceptions_of((), repeated).SerializeToString()


def decode_repeated(content: bytes) -> list[RepeatedOutput]:
    """Inverse of ``encode_repeated``; nothing of what is damaged: the job goes on without it."""
    try:
        kept = client_pb2.ListExceptionsResponse.FromString(content)
    except DecodeError:
        return []
    return [
        RepeatedOutput(
            one.from_checkpoint_id,
            one.to_checkpoint_id,
            tuple(one.files),
            one.file_count,
            tuple(one.places),
        )
        for one in kept.repeated_output
    ]


def _shown(entry: ExceptionEntry) -> client_pb2.ExceptionEntry:
    return client_pb2.ExceptionEntry(
        root_cause=cause_message(entry.cause),
        labels=entry.labels,
        concurrent=map(cause_message, entry.concurrent),
        concurrent_count=entry.concurrent_count,
        restarted=entry.restarted_ranges,
        restart_number=entry.restart_number,
        delay_ms=entry.delay_ms or 0,
        ended_job=entry.ended_job,
    )
