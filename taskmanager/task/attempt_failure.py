"""What ends an attempt, told to the JobManager: class, message, traceback, row, chain of causes."""

from __future__ import annotations

import traceback

from common.cause_chain import cause_chain, public_class
from common.pb import internal_pb2
from penstock.errors import PartitionUnavailable, StreamError, TaskFailure
from penstock.pb import client_pb2
from taskmanager.user_code.user_failure import error_text

_TEXT_LENGTH_MAX = 16_384


def cause_of(
    error: BaseException, attempt: internal_pb2.AttemptId, taskmanager_id: str, now_ms: int
) -> client_pb2.FailureCause:
    """What an attempt has failed with, as a person reads it."""
    is_ours = isinstance(error, StreamError)
    text = "" if is_ours else "".join(traceback.format_exception(error))
    return client_pb2.FailureCause(
        error_class=public_class(_origin(error))
        if isinstance(error, StreamError)
        else "TaskFailure",
        message=readable(str(error) if is_ours else error_text(error)),
        traceback=readable(error.user_traceback if isinstance(error, TaskFailure) else text),
        vertex=attempt.vertex,
        subtask_index=attempt.subtask_index,
        attempt=attempt.attempt,
        operator=error.operator if isinstance(error, TaskFailure) else "",
        row=readable(error.row if isinstance(error, TaskFailure) else ""),
        position=readable(error.position if isinstance(error, TaskFailure) else ""),
        taskmanager_id=taskmanager_id,
        timestamp_ms=now_ms,
        cause_chain=map(readable, cause_chain(error)),
    )


def readable(text: str) -> str:
    """Text that can be sent: valid Unicode, with the middle left out where it is very long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _TEXT_LENGTH_MAX:
        return text
    half = _TEXT_LENGTH_MAX // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters left out) ...\n{text[-half:]}"


def _origin(error: StreamError) -> StreamError:
    """Of a failure that only names the operator, the error of ours that came out of it."""
    cause = error.__cause__
    return cause if type(error) is TaskFailure and isinstance(cause, StreamError) else error


def missing_partition(error: BaseException) -> internal_pb2.PartitionId | None:
    """What an attempt has failed for want of."""
    origin = _origin(error) if isinstance(error, StreamError) else error
    if not isinstance(origin, PartitionUnavailable) or origin.partition is None:
        return None
    partition = origin.partition
    return internal_pb2.PartitionId(
        edge_id=partition.edge_id,
        vertex=partition.vertex,
        subtask_index=partition.subtask_index,
        attempt=partition.attempt,
    )
