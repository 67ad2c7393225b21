"""Numbers of a job's checkpoints for Prometheus.

Replaced as a whole by the event loop, so that any thread may read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import SnapshotSummary


@dataclass(frozen=True, slots=True)
class CheckpointNumbers:
    """Of one job; calls to its storage since its actor began.

    Attributes:
        last_parts: the longest times and the sums of bytes of the subtasks of the last completed one.
        safe_since_ms: what came before need not be repeated: the trigger of the last completed
            checkpoint, or the job's start; 0 = it has not started, or takes no checkpoints.
        store_calls_given_up: calls to its storage that were waited for in vain.
        store_calls_hanging: those of them that have not returned yet.
        repeated_output: starts from an older checkpoint than one whose output had been committed.
    """

    completed: int = 0
    failed: int = 0
    last_id: int = 0
    last_completed_at_ms: int = 0
    last_duration_ms: int = 0
    last_state_bytes: int = 0
    last_uploaded_bytes: int = 0
    last_parts: SnapshotSummary = field(default_factory=SnapshotSummary)
    safe_since_ms: int = 0
    store_calls_given_up: int = 0
    store_calls_hanging: int = 0
    repeated_output: int = 0


@dataclass(frozen=True, slots=True)
class JobCheckpointNumbers:
    """Of one job that runs, or ended a short while ago.

    Attributes:
        has_ended: nothing of it is at risk any more.
        speculative_attempts: rivals that there have been.
        speculative_attempts_won: those that took the place of the attempt that they ran beside.
        dropped: events that came too late, twice, or from nobody who was asked, by the part that dropped them.
    """

    job_id: str
    name: str
    has_ended: bool
    restarts: int
    speculative_attempts: int
    speculative_attempts_won: int
    restarts_by_region: Mapping[str, int]
    dropped: Mapping[str, int]
    checkpoints: CheckpointNumbers


class CheckpointGauges:
    """Holds the current numbers."""

    def __init__(self) -> None:
        self.numbers = CheckpointNumbers()

    def note_started(self, now_ms: int) -> None:
        """Tasks run; before the first checkpoint all their work is at risk."""
        if not self.numbers.safe_since_ms:
            self.numbers = replace(self.numbers, safe_since_ms=now_ms)

    def note_completed(self, report: c.ReportCompleted) -> None:
        """A checkpoint is complete."""
        checkpoint = report.checkpoint
        self.numbers = replace(
            self.numbers,
            completed=self.numbers.completed + 1,
            last_id=checkpoint.checkpoint_id,
            last_completed_at_ms=checkpoint.completed_at_ms,
            last_duration_ms=report.duration_ms,
            last_state_bytes=checkpoint.state_bytes,
            last_uploaded_bytes=report.summary.uploaded_bytes,
            last_parts=report.summary,
            safe_since_ms=checkpoint.triggered_at_ms,
        )

    def note_repeated(self) -> None:
        """Output that was committed comes again."""
        self.numbers = replace(self.numbers, repeated_output=self.numbers.repeated_output + 1)

    def note_calls(self, given_up: int, hanging: int) -> None:
        """A call to the storage was given up on, or one of these has returned."""
        self.numbers = replace(
            self.numbers, store_calls_given_up=given_up, store_calls_hanging=hanging
        )

    def note_aborted(self, report: c.ReportAborted) -> None:
        """A checkpoint was aborted."""
        if report.reason.counts:
            self.numbers = replace(self.numbers, failed=self.numbers.failed + 1)
