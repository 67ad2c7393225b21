"""The operations of a job as they are kept for the next JobManager (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from jobmanager.job.job_operation import JobOperation, OperationKind, OperationStatus
from penstock.errors import StreamError


def encode_operations(operations: Iterable[JobOperation]) -> bytes:
    """All that must not be forgotten of them."""
    return json.dumps([_kept(one) for one in operations]).encode()


def decode_operations(content: bytes) -> list[JobOperation]:
    """Inverse of ``encode_operations``.

    Raises:
        StreamError: they are damaged.
    """
    try:
        return [_read(one) for one in json.loads(content or b"[]")]
    except (ValueError, KeyError, TypeError) as error:
        raise StreamError(
            f"the operations in the job's record are damaged: {error!r}; "
            f"savepoints that were under way are not gone on with"
        ) from error


def _kept(operation: JobOperation) -> dict[str, object]:
    return {
        "operation_id": operation.operation_id,
        "kind": operation.kind.value,
        "path": operation.path,
        "wanted": operation.wanted,
        "format": operation.format,
        "status": operation.status.value,
        "message": "" if operation.error is None else str(operation.error),
        "checkpoint_id": operation.checkpoint_id,
        "is_uploaded": operation.is_uploaded,
        "is_taken_back": operation.is_taken_back,
    }


def _read(kept: dict[str, object]) -> JobOperation:
    message = str(kept["message"])
    operation = JobOperation(
        operation_id=str(kept["operation_id"]),
        kind=OperationKind(kept["kind"]),
        path=str(kept["path"]),
        wanted=str(kept["wanted"]),
        format=str(kept.get("format", "")),
        status=OperationStatus(kept["status"]),
        error=StreamError(message) if message else None,
        checkpoint_id=int(str(kept["checkpoint_id"])),
        is_uploaded=bool(kept["is_uploaded"]),
        is_taken_back=bool(kept["is_taken_back"]),
    )
    if operation.status is not OperationStatus.IN_PROGRESS:
        operation.has_ended.set()
    return operation
