"""The manifest of a checkpoint or savepoint, put together from what its tasks have acknowledged.

Invariants: one snapshot per subtask, in the order of vertices and indexes; what another copy of a shared file
counts for names that copy; of a savepoint no positions in exchanges, which whoever starts from it numbers anew. So
there is no savepoint of rows that would come twice without these (``rows_ahead``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.rows_ahead import rows_ahead
from jobmanager.checkpoint.snapshot_convert import finished_snapshot, with_replaced
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.graph.job_plan import JobPlan
from penstock.errors import JobRejected
from penstock.graph.fingerprint import exchanges, fingerprint
from penstock.graph.rows_left_behind import rows_twice
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.manifest import properties_message

DoneNames = Iterable[tuple[AttemptKey, str, tuple[str, ...]]]
LastStates = Mapping[SubtaskId, Iterable[checkpoint_pb2.OperatorSnapshot]]


class ManifestComposer:
    """Puts the manifests of one job together.

    Args:
        leader_epoch: in whose name.
        version: of Penstock.
        plan: of the job, where each row counts once; None = some may count twice after a restart.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        leader_epoch: int,
        version: str,
        plan: JobPlan | None,
    ) -> None:
        self._job_id = job_id
        self._plan = plan
        self._job_name = graph.name
        self._fingerprint = fingerprint(graph)
        self._exchanges = exchanges(graph)
        self._leader_epoch = leader_epoch
        self._version = version

    def compose(
        self,
        wanted: c.StoreCheckpoint,
        done_splits: DoneNames,
        last_states: LastStates,
        now_ms: int,
    ) -> checkpoint_pb2.CheckpointManifest:
        """The manifest of a checkpoint or savepoint.

        Args:
            wanted: by the coordinator; its snapshots are ``SubtaskSnapshot`` messages.
            done_splits: what finished source subtasks have read.
            last_states: of the collect sinks of finished subtasks.
            now_ms: when it is complete.

        Raises:
            JobRejected: it is a savepoint, and would have rows twice.
        """
        replaced = dict(wanted.replaced)
        done: dict[AttemptKey, list[tuple[str, tuple[str, ...]]]] = {}
        for key, uid, ids in done_splits:
            done.setdefault(key, []).append((uid, ids))
        subtasks = []
        held: dict[AttemptKey, Sequence[checkpoint_pb2.OperatorSnapshot]] = {}
        for key, last in wanted.last:
            assert isinstance(last, checkpoint_pb2.SubtaskSnapshot), "what was reported"
            held[key] = last.operators
        for _, snapshot in wanted.snapshots:
            assert isinstance(snapshot, checkpoint_pb2.SubtaskSnapshot), "what was acknowledged"
            subtasks.append(with_replaced(snapshot, replaced))
        subtasks += (
            finished_snapshot(
                key.vertex,
                key.subtask_index,
                done.get(key, ()),
                [*last_states.get(key.subtask, ()), *held.get(key, ())],
            )
            for key in wanted.finished
        )
        subtasks.sort(key=lambda snapshot: (snapshot.vertex, snapshot.subtask_index))
        manifest = checkpoint_pb2.CheckpointManifest(
            job_id=self._job_id,
            job_name=self._job_name,
            checkpoint_id=wanted.checkpoint_id,
            leader_epoch=self._leader_epoch,
            triggered_at_ms=wanted.triggered_at_ms,
            completed_at_ms=now_ms,
            vertices=self._fingerprint,
            subtasks=subtasks,
            penstock_version=self._version,
            properties=properties_message(wanted.properties),
            edges=self._exchanges,
        )
        ahead = {} if self._plan is None else rows_ahead(self._plan, subtasks)
        for edge in manifest.edges:
            edge.ahead = ahead.get(edge.id, "")
        if wanted.properties.is_savepoint:
            _leave_positions(manifest)
        return manifest


def as_savepoint(
    manifest: checkpoint_pb2.CheckpointManifest,
) -> checkpoint_pb2.CheckpointManifest:
    """The savepoint that holds what this checkpoint does.

    Raises:
        JobRejected: it would have rows twice.
    """
    saved = checkpoint_pb2.CheckpointManifest()
    saved.CopyFrom(manifest)
    saved.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    _leave_positions(saved)
    return saved


def _leave_positions(saved: checkpoint_pb2.CheckpointManifest) -> None:
    for problem in rows_twice(saved):
        raise JobRejected(problem)
    for snapshot in saved.subtasks:
        del snapshot.inputs[:]
        del snapshot.outputs[:]
