"""What TaskManagers tell of the attempts that an earlier JobManager has deployed, as the machine of a job knows it."""

from __future__ import annotations

from common.pb import internal_pb2
from jobmanager.checkpoint.snapshot_convert import last_state_of
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.slot import Slot
from jobmanager.messages import job_events
from jobmanager.rpc.graph_convert import attempt_key, cause_of, endpoint_of, split_of


def found_attempt(
    held: internal_pb2.HeldAttempt, taskmanager_id: str, incarnation: str, now_ms: int
) -> job_events.FoundAttempt:
    """One attempt, on a TaskManager that has registered."""
    key, state = attempt_key(held.attempt), AttemptState(held.state)
    said: list[job_events.SideLoaded | job_events.EndOfDataReported] = []
    if held.side_loaded:
        said.append(job_events.SideLoaded(key))
    if held.end_of_data:
        said.append(job_events.EndOfDataReported(key))
    return job_events.FoundAttempt(
        key=key,
        slot=Slot(held.endpoint.slot_id, taskmanager_id, incarnation),
        endpoint=endpoint_of(held.endpoint),
        leader_epoch=held.leader_epoch,
        state=state,
        failure=cause_of(held.failure, key, now_ms) if state is AttemptState.FAILED else None,
        last=last_state_of(held.last_states) if state is AttemptState.FINISHED else None,
        restored_from=held.checkpoint_id,
        reads=frozenset(
            (read.edge_id, AttemptKey(read.vertex, read.subtask_index, read.attempt))
            for read in held.reads
        ),
        found=tuple(
            job_events.SplitsReported(
                key, found.operator_uid, tuple(map(split_of, found.splits)), found.final
            )
            for found in held.found
        ),
        given=tuple(
            job_events.GivenSplits(given.operator_uid, tuple(map(split_of, given.splits)))
            for given in held.given
        ),
        said=tuple(said),
        is_complete=not held.is_incomplete,
        savepoint_id=held.savepoint_id,
        beside=held.beside if held.HasField("beside") else None,
        commits=held.commits,
        sent_rows=held.sent_rows,
    )
