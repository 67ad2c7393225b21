"""What a checkpoint is made of, as the coordinator knows it: files that snapshots refer to, and totals (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedKey:
    """Identity of a shared file: what one backend instance calls it."""

    operator_uid: str
    subtask_index: int
    instance: str
    name: str


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where bytes lie in the store (never inline ones).

    Attributes:
        path: relative to the job's directory; several ranges may lie in one file.
    """

    path: str
    offset: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FileReference:
    """A file range that a snapshot refers to; ``key`` is None where no other checkpoint may."""

    key: SharedKey | None
    location: FileRange


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
    """

    checkpoint_id: int
    triggered_at_ms: int
    completed_at_ms: int
    state_bytes: int
    manifest_path: str
    references: tuple[FileReference, ...]
    is_stop: bool = False
