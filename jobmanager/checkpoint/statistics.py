"""The last checkpoints of a job and their numbers, for people.

Invariants (``check``): at most ``HISTORY_MAX`` records but for pending ones; a record that has ended does
not change.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint, SnapshotSummary
from jobmanager.checkpoint.pending import summarize
from penstock.errors import InvariantViolation

HISTORY_MAX: Final = 50


class CheckpointStatus(Enum):
    """How a checkpoint has ended, if it has."""

    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint.

    Attributes:
        triggered_at_ms: wall-clock time.
        ended_at_ms: wall-clock time; 0 = it is pending.
        acknowledged: subtasks that have acknowledged it, of ``total``.
        summary: the largest times and the sums of bytes of the acks so far.
        failure: why it failed; "" = it has not.
        manifest_path: "" = it has none.
        retained: it can be restored from.
    """

    checkpoint_id: int
    status: CheckpointStatus
    triggered_at_ms: int
    ended_at_ms: int = 0
    acknowledged: int = 0
    total: int = 0
    summary: SnapshotSummary = field(default_factory=SnapshotSummary)
    failure: str = ""
    manifest_path: str = ""
    retained: bool = False


@dataclass(frozen=True, slots=True)
class KeptCheckpoints:
    """What an earlier JobManager tells of a job's checkpoints.

    Attributes:
        records: those that have ended.
        completed_total: all that have completed.
        failed_total: all that have failed.
    """

    records: tuple[CheckpointRecord, ...] = ()
    completed_total: int = 0
    failed_total: int = 0


NOTHING_KEPT: Final = KeptCheckpoints()


class CheckpointStatistics:
    """History of checkpoints.

    Args:
        found: completed checkpoints of earlier runs, oldest first.
        kept: what is known of these and of others.
    """

    def __init__(
        self,
        found: Collection[CompletedCheckpoint] = (),
        kept: KeptCheckpoints = NOTHING_KEPT,
    ) -> None:
        self._records: dict[int, CheckpointRecord] = {}
        self.completed_total = kept.completed_total
        for checkpoint in found:
            self._records[checkpoint.checkpoint_id] = CheckpointRecord(
                checkpoint_id=checkpoint.checkpoint_id,
                status=CheckpointStatus.COMPLETED,
                triggered_at_ms=checkpoint.triggered_at_ms,
                ended_at_ms=checkpoint.completed_at_ms,
                summary=SnapshotSummary(state_bytes=checkpoint.state_bytes),
                manifest_path=checkpoint.manifest_path,
            )
        for record in kept.records:
            found_one = self._records.get(record.checkpoint_id)
            # HEAD says what is complete.
            if found_one is None or record.status is CheckpointStatus.COMPLETED:
                self._records[record.checkpoint_id] = record
        self._trim()

    def records(self, retained_ids: Collection[int]) -> tuple[CheckpointRecord, ...]:
        """All records, the newest first.

        Args:
            retained_ids: checkpoints that can be restored from.
        """
        return tuple(
            replace(record, retained=record.checkpoint_id in retained_ids)
            for record in sorted(self._records.values(), key=_id_of, reverse=True)
        )

    def triggered(self, checkpoint_id: int, triggered_at_ms: int, total: int) -> None:
        """A checkpoint has started with so many participants."""
        self._records[checkpoint_id] = CheckpointRecord(
            checkpoint_id, CheckpointStatus.PENDING, triggered_at_ms, total=total
        )
        self._trim()

    def acknowledged(self, checkpoint_id: int, summary: SnapshotSummary) -> None:
        """A subtask has acknowledged it."""
        record = self._records[checkpoint_id]
        self._records[checkpoint_id] = replace(
            record,
            acknowledged=record.acknowledged + 1,
            summary=summarize((record.summary, summary)),
        )

    def completed(self, checkpoint: CompletedCheckpoint) -> None:
        """It is complete."""
        self.completed_total += 1
        self._end(
            checkpoint.checkpoint_id,
            status=CheckpointStatus.COMPLETED,
            ended_at_ms=checkpoint.completed_at_ms,
            manifest_path=checkpoint.manifest_path,
        )

    def failed(self, checkpoint_id: int, failure: str, ended_at_ms: int) -> None:
        """It was aborted."""
        self._end(
            checkpoint_id,
            status=CheckpointStatus.FAILED,
            failure=failure,
            ended_at_ms=ended_at_ms,
        )

    def check(self) -> None:
        """Checks the invariants.

        Raises:
            InvariantViolation: the history is too long.
        """
        ended = [r for r in self._records.values() if r.status is not CheckpointStatus.PENDING]
        if len(ended) > HISTORY_MAX:
            raise InvariantViolation(f"{len(ended)} checkpoints in the history")

    def _end(self, checkpoint_id: int, **changes: object) -> None:
        record = self._records[checkpoint_id]
        if record.status is not CheckpointStatus.PENDING:
            raise InvariantViolation(f"checkpoint {checkpoint_id} ends twice")
        self._records[checkpoint_id] = replace(record, **changes)  # type: ignore[arg-type]
        self._trim()

    def _trim(self) -> None:
        ended = sorted(
            checkpoint_id
            for checkpoint_id, record in self._records.items()
            if record.status is not CheckpointStatus.PENDING
        )
        for checkpoint_id in ended[: max(0, len(self._records) - HISTORY_MAX)]:
            del self._records[checkpoint_id]


def _id_of(record: CheckpointRecord) -> int:
    return record.checkpoint_id
