"""Checkpoints as clients see them."""

from __future__ import annotations

from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary
from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.checkpoint.statistics import CheckpointRecord, CheckpointStatus
from jobmanager.job.job_master import JobMaster
from penstock.pb import client_pb2

_STATUS = {
    CheckpointStatus.PENDING: client_pb2.CHECKPOINT_STATUS_PENDING,
    CheckpointStatus.COMPLETED: client_pb2.CHECKPOINT_STATUS_COMPLETED,
    CheckpointStatus.FAILED: client_pb2.CHECKPOINT_STATUS_FAILED,
}
_STATUS_OF = {shown: status for status, shown in _STATUS.items()}


def coordinator_of(master: JobMaster | None) -> CheckpointCoordinator | None:
    """The coordinator of a job; None where it takes no checkpoints or has not begun to."""
    coordinator = master.coordinator if master is not None else None
    return coordinator if isinstance(coordinator, CheckpointCoordinator) else None


def checkpoints_of(master: JobMaster | None, directory: str) -> client_pb2.ListCheckpointsResponse:
    """The last checkpoints of a job, the newest first.

    Args:
        directory: the job's in the checkpoint store; "" = the JobManager's memory.
    """
    coordinator = coordinator_of(master)
    if master is None or coordinator is None:
        return client_pb2.ListCheckpointsResponse()
    return client_pb2.ListCheckpointsResponse(
        checkpoints=[_shown(record, directory) for record in coordinator.history],
        completed_count=coordinator.completed_total,
        failed_count=coordinator.failed_total,
        restored_checkpoint_id=master.restored_checkpoint_id,
    )


def newest_checkpoint(master: JobMaster | None, directory: str) -> str:
    """Where the newest checkpoint lies that can be restored from; "" = there is none on disk."""
    coordinator = coordinator_of(master)
    latest = None if coordinator is None else coordinator.latest_completed
    return f"{directory}/chk-{latest.checkpoint_id}" if latest is not None and directory else ""


def add_last_checkpoint(details: client_pb2.JobDetails, master: JobMaster | None) -> None:
    """The newest checkpoint, and how many have failed."""
    coordinator = coordinator_of(master)
    if coordinator is None:
        return
    details.failed_checkpoints = coordinator.failed_total
    latest = coordinator.latest_completed
    if latest is not None:
        details.last_checkpoint_id = latest.checkpoint_id
        details.last_checkpoint_at_ms = latest.completed_at_ms


def summary_message(summary: SnapshotSummary) -> client_pb2.CheckpointDetails:
    """What a checkpoint took, of no checkpoint yet."""
    return client_pb2.CheckpointDetails(
        state_bytes=summary.state_bytes,
        uploaded_bytes=summary.uploaded_bytes,
        alignment_ms=summary.alignment_ms,
        sync_ms=summary.sync_ms,
        async_ms=summary.async_ms,
        start_delay_ms=summary.start_delay_ms,
        aligned_bytes=summary.aligned_bytes,
    )


def _shown(record: CheckpointRecord, directory: str) -> client_pb2.CheckpointDetails:
    shown = summary_message(record.summary)
    shown.checkpoint_id = record.checkpoint_id
    shown.status = _STATUS[record.status]
    shown.triggered_at_ms, shown.ended_at_ms = record.triggered_at_ms, record.ended_at_ms
    shown.acknowledged_subtasks, shown.total_subtasks = record.acknowledged, record.total
    shown.failure, shown.retained = record.failure, record.retained
    if directory and record.manifest_path:
        shown.path = f"{directory}/{record.manifest_path}"
    return shown


def checkpoint_record(shown: client_pb2.CheckpointDetails, directory: str) -> CheckpointRecord:
    """A checkpoint as another JobManager has shown it.

    Args:
        directory: the job's in the checkpoint store; "" = the JobManager's memory.
    """
    return CheckpointRecord(
        shown.checkpoint_id,
        _STATUS_OF.get(shown.status, CheckpointStatus.FAILED),
        shown.triggered_at_ms,
        shown.ended_at_ms,
        shown.acknowledged_subtasks,
        shown.total_subtasks,
        SnapshotSummary(
            start_delay_ms=shown.start_delay_ms,
            alignment_ms=shown.alignment_ms,
            sync_ms=shown.sync_ms,
            async_ms=shown.async_ms,
            uploaded_bytes=shown.uploaded_bytes,
            state_bytes=shown.state_bytes,
            aligned_bytes=shown.aligned_bytes,
        ),
        shown.failure,
        shown.path.removeprefix(f"{directory}/") if directory else "",
    )
