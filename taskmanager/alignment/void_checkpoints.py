"""Which checkpoints a task is told to give up (pure)."""

from __future__ import annotations

from typing import Final

from common.pb import internal_pb2

_RANGE_MAX: Final = 1_024
"""Whoever takes a job over voids what its predecessor may have begun; the predecessor has told of all but the last."""


def void_ids(aborted: internal_pb2.CheckpointAborted) -> range:
    """The ids that a command voids.

    Example: one checkpoint, or all of a range.
        >>> list(void_ids(internal_pb2.CheckpointAborted(checkpoint_id=7)))
        [7]
        >>> list(void_ids(internal_pb2.CheckpointAborted(checkpoint_id=7, first_checkpoint_id=5)))
        [5, 6, 7]
    """
    last = aborted.checkpoint_id
    first = aborted.first_checkpoint_id or last
    return range(max(first, last - _RANGE_MAX + 1), last + 1)
