"""What a checkpoint is made of, as the coordinator knows it: files that snapshots refer to, and totals (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from jobmanager.graph.execution_attempt import SubtaskId
from penstock.storage.manifest import StoredReference


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """Numbers of one subtask's snapshot, for statistics."""

    start_delay_ms: int = 0
    alignment_ms: int = 0
    sync_ms: float = 0.0
    async_ms: int = 0
    uploaded_bytes: int = 0
    state_bytes: int = 0
    aligned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint that can be restored from.

    Attributes:
        references: every file range it refers to, after the registry's rewriting.
        manifest_path: relative to the job's directory.
        is_stop: the job was stopped with it: whoever restores it only commits and ends.
        finished: subtasks of this job that have done all their work for whoever restores it.
    """

    checkpoint_id: int
    triggered_at_ms: int
    completed_at_ms: int
    state_bytes: int
    manifest_path: str
    references: tuple[StoredReference, ...]
    is_stop: bool = False
    finished: frozenset[SubtaskId] = frozenset()
