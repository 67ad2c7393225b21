"""A checkpoint of a job, as ``JobHandle.checkpoints`` and ``penstock checkpoints`` show it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.pb import client_pb2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        id: counts up within a job.
        status: "PENDING", "COMPLETED" or "FAILED".
        triggered_at_ms: milliseconds since the epoch.
        ended_at_ms: completed or failed; None = it is pending.
        acknowledged_subtasks: of ``total_subtasks``.
        state_bytes: all that it refers to.
        uploaded_bytes: what was written for it.
        start_delay_ms: from the trigger to the barrier, the longest of all subtasks.
        alignment_ms: the longest of all subtasks, like ``sync_ms`` and ``async_ms``.
        aligned_bytes: input that all subtasks together have processed meanwhile.
        sync_ms: the part of the snapshot during which no rows are processed.
        async_ms: the part beside processing.
        failure: why it failed; "" = it has not.
        path: of its manifest; "" = it has none, or it is in the JobManager's memory.
        retained: it is kept and can be restored from.
    """

    id: int
    status: str
    triggered_at_ms: int
    ended_at_ms: int | None
    acknowledged_subtasks: int
    total_subtasks: int
    state_bytes: int
    uploaded_bytes: int
    start_delay_ms: int
    alignment_ms: int
    aligned_bytes: int
    sync_ms: float
    async_ms: int
    failure: str
    path: str
    retained: bool

    @property
    def duration_ms(self) -> int | None:
        """From the trigger to the end; None = it is pending."""
        return None if self.ended_at_ms is None else max(0, self.ended_at_ms - self.triggered_at_ms)


def checkpoint_of(details: client_pb2.CheckpointDetails) -> Checkpoint:
    """What the JobManager says of a checkpoint."""
    status = client_pb2.CheckpointStatus.Name(details.status)
    return Checkpoint(
        id=details.checkpoint_id,
        status=status.removeprefix("CHECKPOINT_STATUS_"),
        triggered_at_ms=details.triggered_at_ms,
        ended_at_ms=details.ended_at_ms or None,
        acknowledged_subtasks=details.acknowledged_subtasks,
        total_subtasks=details.total_subtasks,
        state_bytes=details.state_bytes,
        uploaded_bytes=details.uploaded_bytes,
        start_delay_ms=details.start_delay_ms,
        alignment_ms=details.alignment_ms,
        aligned_bytes=details.aligned_bytes,
        sync_ms=details.sync_ms,
        async_ms=details.async_ms,
        failure=details.failure,
        path=details.path,
        retained=details.retained,
    )
