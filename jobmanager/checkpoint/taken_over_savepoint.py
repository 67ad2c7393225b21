"""A savepoint that a job has claimed as a checkpoint of that job, whose files lie in the job's own directory.

It is registered like others then: its files are counted, built upon, and go when nothing names them.

Invariants: each file of the savepoint has one place in the directory, by its own name, however often it is copied; it
stays the checkpoint of the job that it was taken of, so that nothing of that job's exchanges is read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.pb import checkpoint_pb2
from penstock.storage.checkpoint_properties import PLAIN
from penstock.storage.manifest import properties_message
from penstock.storage.snapshot_files import SHARED_DIRECTORY


@dataclass(frozen=True, slots=True)
class TakenOverSavepoint:
    """What becomes of it.

    Attributes:
        manifest: of the checkpoint.
        copied: by path in the savepoint the path in the job's directory.
    """

    manifest: checkpoint_pb2.CheckpointManifest
    copied: dict[str, str]


def take_over(savepoint: checkpoint_pb2.CheckpointManifest) -> TakenOverSavepoint:
    """The checkpoint that a savepoint becomes.

    Example: what is inline stays so.
        >>> savepoint = checkpoint_pb2.CheckpointManifest(job_id="original", checkpoint_id=7)
        >>> operator = savepoint.subtasks.add(vertex="count").operators.add(operator_uid="counts")
        >>> file = operator.keyed.files.add(name="a", handle={"path": "state/7-count-0-0-u", "size_bytes": 9})
        >>> file = operator.keyed.files.add(name="b", handle={"inline": b"few", "size_bytes": 3})
        >>> taken = take_over(savepoint)
        >>> taken.copied
        {'state/7-count-0-0-u': 'shared/7-count-0-0-u'}
        >>> [file.handle.path for file in taken.manifest.subtasks[0].operators[0].keyed.files]
        ['shared/7-count-0-0-u', '']
    """
    manifest = checkpoint_pb2.CheckpointManifest()
    manifest.CopyFrom(savepoint)
    manifest.properties.CopyFrom(properties_message(PLAIN))
    copied: dict[str, str] = {}
    for handle in _handles(manifest):
        if handle.path:
            own = f"{SHARED_DIRECTORY}/{handle.path.rpartition('/')[2]}"
            copied[handle.path], handle.path = own, own
    return TakenOverSavepoint(manifest, copied)


def _handles(
    manifest: checkpoint_pb2.CheckpointManifest,
) -> Iterator[checkpoint_pb2.StateHandle]:
    for subtask in manifest.subtasks:
        for operator in subtask.operators:
            for file in operator.keyed.files:
                yield file.handle
            for held in operator.lists:
                yield held.handle
    for done in manifest.done_splits:
        yield from done.chunks
