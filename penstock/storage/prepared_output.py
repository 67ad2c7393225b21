"""What has become of the output that sinks had prepared in a savepoint or a checkpoint.

Beside its manifest a savepoint says what the job that it was taken of has done with it; where it says nothing, only the
user knows.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Final

from penstock.errors import StoreCorrupt
from penstock.pb import checkpoint_pb2
from penstock.storage.object_store import ObjectStore
from penstock.storage.output_claim import OutputClaim, OutputUse, read_claim
from penstock.storage.savepoint import COMMITTED_PATH, OUTPUT_PATH, TAKEN_BACK_PATH

COMMITTABLES: Final = "committables"
"""The list in which sinks keep what is prepared."""


class PreparedOutput(StrEnum):
    """What has become of it, or becomes of it where a job is started from there."""

    NONE = ""
    """Nothing was prepared."""
    COMMITTED = "committed"
    """The job that it was taken of has committed it."""
    TAKEN_BACK = "taken-back"
    """That job has gone back behind it before it had committed, and makes it again, or one that goes on from there."""
    CLAIMED = "claimed"
    """A job that was started from it commits it."""
    IN_DOUBT = "in-doubt"
    """Nothing says whether that job has committed it."""
    COMMITTED_HERE = "committed-here"
    """The job that is started commits it."""
    LEFT = "left"
    """It was in doubt, and the job that is started leaves it as it is."""


def has_prepared_output(manifest: checkpoint_pb2.CheckpointManifest) -> bool:
    """Whether sinks have prepared output that a checkpoint was to commit."""
    sinks = {
        operator.uid
        for vertex in manifest.vertices
        for operator in vertex.operators
        if operator.kind == "sink"
    }
    return any(
        held.name == COMMITTABLES and (held.items or held.HasField("handle"))
        for subtask in manifest.subtasks
        for operator in subtask.operators
        if operator.operator_uid in sinks
        for held in operator.lists
    )


def savepoint_output(
    manifest: checkpoint_pb2.CheckpointManifest, store: ObjectStore, beside: Collection[str]
) -> PreparedOutput:
    """What has become of what a savepoint covers.

    Args:
        store: its directory.
        beside: names of the objects there.

    Raises:
        StoreTransient: it cannot be read now.
    """
    if COMMITTED_PATH in beside:
        return PreparedOutput.COMMITTED
    if TAKEN_BACK_PATH in beside:
        return PreparedOutput.TAKEN_BACK
    if (claim := claim_beside(store, beside)) is not None:
        is_taken_back = claim.use is OutputUse.TAKES_BACK
        return PreparedOutput.TAKEN_BACK if is_taken_back else PreparedOutput.CLAIMED
    return PreparedOutput.IN_DOUBT if has_prepared_output(manifest) else PreparedOutput.NONE


def claim_beside(store: ObjectStore, beside: Collection[str]) -> OutputClaim | None:
    """Which job publishes it, as far as that is said, and can be understood.

    Args:
        store: the directory of the savepoint.
        beside: names of the objects there.

    Raises:
        StoreTransient: it cannot be read now.
    """
    if OUTPUT_PATH not in beside:
        return None
    try:
        return read_claim(store)
    except StoreCorrupt:
        return None
