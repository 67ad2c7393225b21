"""What a job was started from, as HEAD keeps it and ``penstock info`` shows it."""

from __future__ import annotations

from penstock.graph.output_in_doubt import OutputDecision, fate_of_output
from penstock.graph.restore_check import RestoreCheck
from penstock.pb import checkpoint_pb2
from penstock.storage.restore_point import RestorePoint


def started_from(
    point: RestorePoint, check: RestoreCheck, output: OutputDecision, *, path: str, is_claimed: bool
) -> checkpoint_pb2.StartedFrom:
    """What is kept of a start.

    Args:
        path: as the job was told it.
        is_claimed: it belongs to the job from now on.

    Raises:
        StoreTransient: it cannot be read now.
    """
    return checkpoint_pb2.StartedFrom(
        path=path,
        checkpoint_id=point.manifest.checkpoint_id,
        is_savepoint=point.is_savepoint,
        claimed=is_claimed,
        dropped_states=[
            checkpoint_pb2.DroppedState(operator_uid=one.uid, name=one.operator, state=one.state)
            for one in check.dropped
        ],
        migrated_states=[
            checkpoint_pb2.MigratedState(
                operator_uid=one.uid, name=one.operator, state=one.state, how=one.reason
            )
            for one in check.migrated
        ],
        event_time_ended=point.has_ended_time,
        output=fate_of_output(point, output),
    )
