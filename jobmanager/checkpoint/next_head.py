"""What HEAD says next: with another checkpoint, of what a job is started from, and when its end has begun.

Invariants: HEAD names a checkpoint that it is told to keep and has named before, and the one that is added, last;
ids that are reserved are never given back; since when a job depends on nothing but itself is said once.
"""

from __future__ import annotations

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from penstock.pb import checkpoint_pb2


def head_with(
    last: checkpoint_pb2.CheckpointHead, wanted: c.StoreCheckpoint, path: str, now_ms: int
) -> checkpoint_pb2.CheckpointHead:
    """HEAD once a checkpoint is stored, whose manifest lies at ``path``."""
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    del head.retained[:]
    head.retained.extend(
        retained
        for retained in last.retained
        if retained.checkpoint_id in wanted.retained
        and retained.checkpoint_id != wanted.checkpoint_id
    )
    head.retained.add(
        checkpoint_id=wanted.checkpoint_id,
        manifest_path=path,
        triggered_at_ms=wanted.triggered_at_ms,
        completed_at_ms=now_ms,
        state_bytes=wanted.state_bytes,
    )
    head.next_checkpoint_id = max(last.next_checkpoint_id, wanted.next_checkpoint_id)
    started = head.started_from
    if head.HasField("started_from") and not started.independent_since_checkpoint_id:
        started.independent_since_checkpoint_id = wanted.checkpoint_id
        started.independent_since_ms = now_ms
    return head


def head_started(
    last: checkpoint_pb2.CheckpointHead, started: checkpoint_pb2.StartedFrom
) -> checkpoint_pb2.CheckpointHead:
    """HEAD of a job that begins with a checkpoint or savepoint of another one: its own ids go on behind that."""
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    behind = started.checkpoint_id + 1 + IDS_RESERVED_AT_ONCE
    head.next_checkpoint_id = max(head.next_checkpoint_id, behind)
    head.started_from.CopyFrom(started)
    return head


def head_emptied(last: checkpoint_pb2.CheckpointHead) -> checkpoint_pb2.CheckpointHead:
    """HEAD of a job that is over for good: nothing is named any more."""
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    del head.retained[:]
    return head
