"""What is told of the checkpoints of one job: numbers for each that ends, and a line in the log, of failures in a row one for each
reason."""

from __future__ import annotations

import structlog

from common.outage_log import OutageLog
from jobmanager.checkpoint import messages as c
from jobmanager.job.checkpoint_gauges import CheckpointGauges


class CheckpointReportsRunner:
    """Tells of them.

    Attributes:
        ended_id: of the newest that has completed or been aborted since.
    """

    def __init__(self, job_id: str, gauges: CheckpointGauges) -> None:
        self._gauges = gauges
        self.ended_id = 0
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)
        self._failures = OutageLog(
            self._log, "checkpoint.aborted", "checkpoint.completed_again", "warning"
        )

    def note_unsettled(self, effect: c.SettleCheckpoint) -> None:
        """Nobody knows yet whether one is stored."""
        self._log.warning(
            "checkpoint.unsettled", checkpoint_id=effect.checkpoint_id, reason=effect.reason
        )

    def note_aborted(self, effect: c.ReportAborted) -> None:
        """One was aborted."""
        self._gauges.note_aborted(effect)
        self.ended_id = max(self.ended_id, effect.checkpoint_id)
        facts = {
            "checkpoint_id": effect.checkpoint_id,
            "reason": effect.reason.value,
            "detail": effect.detail,
            "failed_in_a_row": effect.failed_in_a_row,
            "at_risk_ms": effect.at_risk_ms,
        }
        if effect.reason.counts:
            self._failures.failed(effect.reason.value, **facts)
        else:
            self._log.info("checkpoint.aborted", **facts)

    def note_completed(self, effect: c.ReportCompleted) -> None:
        """One is complete."""
        self._gauges.note_completed(effect)
        checkpoint_id = effect.checkpoint.checkpoint_id
        self.ended_id = max(self.ended_id, checkpoint_id)
        self._failures.worked(checkpoint_id=effect.checkpoint.checkpoint_id)
        self._log.info(
            "checkpoint.completed",
            checkpoint_id=effect.checkpoint.checkpoint_id,
            duration_ms=effect.duration_ms,
            size_bytes=effect.checkpoint.state_bytes,
            uploaded_bytes=effect.summary.uploaded_bytes,
            alignment_ms=effect.summary.alignment_ms,
            sync_ms=effect.summary.sync_ms,
        )
