"""Something that was asked of a job under an id, as ``JobHandle.operation`` and ``penstock operation`` show it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.store_names import whole_name

FORMATS = {
    "native": checkpoint_pb2.SAVEPOINT_FORMAT_NATIVE,
    "canonical": checkpoint_pb2.SAVEPOINT_FORMAT_CANONICAL,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that somebody has asked for and that takes its time.

    Attributes:
        id: chosen by who asked.
        kind: "CHECKPOINT", "SAVEPOINT" or "STOP" of a job, "DRAIN" of a TaskManager.
        status: "IN_PROGRESS", "COMPLETED" or "FAILED".
        path: of a savepoint: the directory that it is, or is to be; "" = it has none.
        failure: why it failed; "" = it has not.
        checkpoint_id: what was taken; None = nothing yet.
        uploaded: of a savepoint: it lies in another store than the job's checkpoints, so all was written anew.
        taskmanager_id: of a drain; "" = it is none.
        progress: what it waits for; "" = it does not say.
    """

    id: str
    kind: str
    status: str
    path: str
    failure: str
    checkpoint_id: int | None
    uploaded: bool
    taskmanager_id: str = ""
    progress: str = ""


def operation_of(details: client_pb2.OperationDetails) -> Operation:
    """What the JobManager says of an operation."""
    kind = client_pb2.OperationKind.Name(details.kind)
    status = client_pb2.OperationStatus.Name(details.status)
    return Operation(
        id=details.operation_id,
        kind=kind.removeprefix("OPERATION_KIND_"),
        status=status.removeprefix("OPERATION_STATUS_"),
        path=details.path,
        failure=details.message,
        checkpoint_id=details.checkpoint_id or None,
        uploaded=details.uploaded,
        taskmanager_id=details.taskmanager_id,
        progress=details.progress,
    )


def whole_directory(directory: str | os.PathLike[str] | None) -> str:
    """The name of a directory as every process understands it; "" = the configured one."""
    if directory is None or not os.fspath(directory):
        return ""
    return whole_name(directory)
