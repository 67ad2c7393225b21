"""Snapshots, manifests and HEAD as the coordinator's words, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint, SnapshotSummary
from jobmanager.graph.execution_attempt import SubtaskId
from penstock.pb import checkpoint_pb2
from penstock.storage.manifest import (
    SharedIdentity,
    StoredRange,
    StoredReference,
    properties_of,
    references,
    snapshot_references,
)


def references_of(snapshot: checkpoint_pb2.SubtaskSnapshot) -> tuple[StoredReference, ...]:
    """Every range of a file that a snapshot refers to; inline state is none."""
    return tuple(snapshot_references(snapshot))


def last_state_of(operators: Iterable[checkpoint_pb2.OperatorSnapshot]) -> c.LastState | None:
    """What a finished subtask goes on holding; None = nothing."""
    snapshot = checkpoint_pb2.SubtaskSnapshot(operators=operators)
    return c.LastState(snapshot, references_of(snapshot)) if snapshot.operators else None


def summary_of(metrics: checkpoint_pb2.CheckpointMetrics) -> SnapshotSummary:
    """The numbers of a snapshot."""
    return SnapshotSummary(
        start_delay_ms=metrics.start_delay_ms,
        alignment_ms=metrics.alignment_ms,
        sync_ms=metrics.sync_ms,
        async_ms=metrics.async_ms,
        uploaded_bytes=metrics.uploaded_bytes,
        state_bytes=metrics.state_bytes,
        aligned_bytes=metrics.aligned_bytes,
    )


def completed_of(
    retained: checkpoint_pb2.RetainedCheckpoint,
    manifest: checkpoint_pb2.CheckpointManifest,
    *,
    is_own: bool = True,
) -> CompletedCheckpoint:
    """A checkpoint that HEAD names."""
    return CompletedCheckpoint(
        checkpoint_id=retained.checkpoint_id,
        triggered_at_ms=retained.triggered_at_ms,
        completed_at_ms=retained.completed_at_ms,
        state_bytes=retained.state_bytes,
        manifest_path=retained.manifest_path,
        references=references(manifest),
        is_stop=is_own and properties_of(manifest.properties).is_stop,
        finished=frozenset(
            SubtaskId(one.vertex, one.subtask_index)
            for one in manifest.subtasks
            if is_own and one.finished
        ),
    )


def with_replaced(
    snapshot: checkpoint_pb2.SubtaskSnapshot, replaced: Mapping[SharedIdentity, StoredRange]
) -> checkpoint_pb2.SubtaskSnapshot:
    """The snapshot with the locations that count in the place of its own."""
    if not replaced:
        return snapshot
    copy = checkpoint_pb2.SubtaskSnapshot()
    copy.CopyFrom(snapshot)
    for operator in copy.operators:
        for file in operator.keyed.files:
            key = SharedIdentity(
                operator.operator_uid, copy.subtask_index, operator.keyed.instance, file.name
            )
            location = replaced.get(key) if file.shared and file.handle.path else None
            if location is not None:
                file.handle.path = location.path
                file.handle.offset = location.offset
                file.handle.size_bytes = location.size_bytes
                file.handle.checksum = location.checksum
    return copy


def finished_snapshot(
    vertex: str,
    subtask_index: int,
    done_splits: Iterable[tuple[str, Iterable[str]]],
    last_states: Iterable[checkpoint_pb2.OperatorSnapshot] = (),
) -> checkpoint_pb2.SubtaskSnapshot:
    """The snapshot of a subtask that had done all its work.

    Args:
        subtask_index: within the vertex.
        done_splits: of a source: operator uid, and the splits it has read.
        last_states: of its collect sinks and functions.
    """
    return checkpoint_pb2.SubtaskSnapshot(
        vertex=vertex,
        subtask_index=subtask_index,
        finished=True,
        operators=[
            *(
                checkpoint_pb2.OperatorSnapshot(
                    operator_uid=uid,
                    splits=[checkpoint_pb2.SplitSnapshot(id=id, done=True) for id in ids],
                )
                for uid, ids in done_splits
            ),
            *last_states,
        ],
    )
