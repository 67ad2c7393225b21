"""What HEAD says next: with another checkpoint, of what a job is started from, and when its end has begun.

Invariants: HEAD names a checkpoint that it is told to keep and has named before, and the one that is added, last;
ids that are reserved are never given back; since when a job depends on nothing but itself is said once.

Example: a checkpoint takes the place of those that are not kept.
    >>> from jobmanager.checkpoint import messages as c
    >>> order = c.StoreCheckpoint(
    ...     7, 10, snapshots=(), finished=(), replaced=(), retained=(7,), next_checkpoint_id=24, state_bytes=5
    ... )
    >>> before = checkpoint_pb2.CheckpointHead(next_checkpoint_id=23, retained=[{"checkpoint_id": 6}])
    >>> after = head_with(before, order, "chk-7/manifest-1", now_ms=20)
    >>> [kept.manifest_path for kept in after.retained], after.next_checkpoint_id
    (['chk-7/manifest-1'], 24)
"""

from __future__ import annotations

from collections.abc import Collection

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from penstock.pb import checkpoint_pb2
from penstock.storage.manifest import references


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
    oldest = min(one.checkpoint_id for one in head.retained)
    del head.open_savepoints[:]
    head.open_savepoints.extend(one for one in last.open_savepoints if one.checkpoint_id > oldest)
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


def head_opened(
    last: checkpoint_pb2.CheckpointHead, path: str, checkpoint_id: int
) -> checkpoint_pb2.CheckpointHead:
    """HEAD that says that a savepoint may be there from now on, whose output none of its checkpoints commits.

    >>> head = head_opened(checkpoint_pb2.CheckpointHead(), "/saved", 6)
    >>> [(one.path, one.checkpoint_id) for one in head_opened(head, "/saved", 8).open_savepoints]
    [('/saved', 8)]
    """
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    del head.open_savepoints[:]
    head.open_savepoints.extend(one for one in last.open_savepoints if one.path != path)
    head.open_savepoints.add(path=path, checkpoint_id=checkpoint_id)
    return head


def head_marked(
    last: checkpoint_pb2.CheckpointHead, damaged: Collection[int]
) -> checkpoint_pb2.CheckpointHead:
    """HEAD that says of which checkpoints tasks could not restore their state.

    >>> head = checkpoint_pb2.CheckpointHead()
    >>> for id in (6, 7):
    ...     _ = head.retained.add(checkpoint_id=id)
    >>> [one.is_damaged for one in head_marked(head, (7,)).retained]
    [False, True]
    """
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    for one in head.retained:
        one.is_damaged = one.is_damaged or one.checkpoint_id in damaged
    return head


def head_taken_over(
    last: checkpoint_pb2.CheckpointHead, manifest: checkpoint_pb2.CheckpointManifest, path: str
) -> checkpoint_pb2.CheckpointHead:
    """HEAD of a job that begins with what it has claimed, once all files of that are its own."""
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    head.started_from.taken_over = True
    del head.retained[:]
    head.retained.add(
        checkpoint_id=manifest.checkpoint_id,
        manifest_path=path,
        triggered_at_ms=manifest.triggered_at_ms,
        completed_at_ms=manifest.completed_at_ms,
        state_bytes=sum(one.location.size_bytes for one in references(manifest)),
    )
    return head


def head_emptied(last: checkpoint_pb2.CheckpointHead) -> checkpoint_pb2.CheckpointHead:
    """HEAD of a job that is over for good: nothing is named any more."""
    head = checkpoint_pb2.CheckpointHead()
    head.CopyFrom(last)
    del head.retained[:]
    return head
