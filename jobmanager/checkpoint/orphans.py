"""Which objects in a job's directory nobody will ever name: what dead attempts have left.

Every name says for which checkpoint it was written. What was written for one that has ended, and that no
retained checkpoint refers to, is an orphan; what is written for a later one may be of attempts that run, and
what has no such name was written by nobody who is known here. What a subtask leaves as it finishes is written
for no checkpoint and named by all that come: there the number of the attempt decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jobmanager.graph.execution_attempt import SubtaskId
from penstock.storage.manifest import parse_done_splits_path, parse_manifest_path
from penstock.storage.snapshot_files import parse_snapshot_file_name


def orphans(
    present: Iterable[str],
    kept: Collection[str],
    ended_id: int,
    alone: Collection[SubtaskId] | None,
    first_attempt: int,
) -> list[str]:
    """Those of the paths that can be removed.

    Args:
        kept: what retained checkpoints refer to.
        ended_id: this checkpoint and all before it have ended.
        alone: the only subtasks whose attempts are known to be dead; None = all are.
        first_attempt: of these, attempts with smaller numbers are dead.
    """
    return [
        path
        for path in present
        if path not in kept
        and _is_of_ended(path, ended_id, first_attempt)
        and _is_of_dead(path, alone)
    ]


def _is_of_ended(path: str, ended_id: int, first_attempt: int) -> bool:
    name = parse_snapshot_file_name(path)
    if name is not None and name.checkpoint_id == 0:
        return name.attempt < first_attempt
    checkpoint_id = _checkpoint_id(path)
    return checkpoint_id is not None and checkpoint_id <= ended_id


def _is_of_dead(path: str, alone: Collection[SubtaskId] | None) -> bool:
    if alone is None or parse_manifest_path(path) or parse_done_splits_path(path) is not None:
        return True
    name = parse_snapshot_file_name(path)
    return name is not None and SubtaskId(name.vertex, name.subtask_index) in alone


def _checkpoint_id(path: str) -> int | None:
    manifest = parse_manifest_path(path)
    if manifest is not None:
        return manifest[0]
    done = parse_done_splits_path(path)
    if done is not None:
        return done
    name = parse_snapshot_file_name(path)
    return None if name is None else name.checkpoint_id
