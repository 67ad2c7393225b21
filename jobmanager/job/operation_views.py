"""Operations as clients see them."""

from __future__ import annotations

from jobmanager.job.job_operation import JobOperation, OperationKind, OperationStatus
from penstock.pb import client_pb2

_KIND = {
    OperationKind.CHECKPOINT: client_pb2.OPERATION_KIND_CHECKPOINT,
    OperationKind.SAVEPOINT: client_pb2.OPERATION_KIND_SAVEPOINT,
    OperationKind.STOP: client_pb2.OPERATION_KIND_STOP,
    OperationKind.DRAIN: client_pb2.OPERATION_KIND_DRAIN,
}
_STATUS = {
    OperationStatus.IN_PROGRESS: client_pb2.OPERATION_STATUS_IN_PROGRESS,
    OperationStatus.COMPLETED: client_pb2.OPERATION_STATUS_COMPLETED,
    OperationStatus.FAILED: client_pb2.OPERATION_STATUS_FAILED,
}


def operation_message(job_id: str, operation: JobOperation) -> client_pb2.OperationDetails:
    """One operation, as it stands; ``job_id`` is "" for a drain."""
    is_drain = operation.kind is OperationKind.DRAIN
    return client_pb2.OperationDetails(
        job_id=job_id,
        operation_id=operation.operation_id,
        kind=_KIND[operation.kind],
        status=_STATUS[operation.status],
        path="" if is_drain else operation.path,
        taskmanager_id=operation.path if is_drain else "",
        progress=operation.progress,
        message="" if operation.error is None else str(operation.error),
        checkpoint_id=operation.checkpoint_id,
        uploaded=operation.is_uploaded,
    )
