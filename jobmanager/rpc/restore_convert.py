"""From a manifest to what each subtask starts with, and to what the job's machine must know of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.pb import internal_pb2
from jobmanager.dispatcher import job_messages as m
from jobmanager.graph.execution_attempt import SubtaskId
from penstock.errors import Unrecoverable
from penstock.pb import checkpoint_pb2, graph_pb2

RestoredTasks = Mapping[SubtaskId, internal_pb2.RestoredTask]


def restored_tasks(
    manifest: checkpoint_pb2.CheckpointManifest, graph: graph_pb2.JobGraph
) -> RestoredTasks:
    """The state of each subtask of the job.

    The graph is the one the checkpoint was taken of, so each subtask gets its own snapshot back, and
    of union lists those of all subtasks. Those that had not begun have none.

    Raises:
        Unrecoverable: there is a snapshot of a subtask that is not there: the manifest belongs to
            another graph.
    """
    snapshots = {
        SubtaskId(snapshot.vertex, snapshot.subtask_index): snapshot
        for snapshot in manifest.subtasks
    }
    wanted = {
        SubtaskId(vertex.id, index)
        for vertex in graph.vertices
        for index in range(vertex.parallelism)
    }
    foreign = sorted(snapshots.keys() - wanted)
    if foreign:
        raise Unrecoverable(
            f"checkpoint {manifest.checkpoint_id} does not fit the job, which has no subtasks "
            f"{', '.join(map(str, foreign[:10]))}"
        )
    unions = _unions(manifest.subtasks)
    return {
        subtask: internal_pb2.RestoredTask(
            checkpoint_id=manifest.checkpoint_id,
            finished=snapshot.finished,
            operators=[
                _restored_operator(
                    operator, unions.get((subtask.vertex, operator.operator_uid), [])
                )
                for operator in snapshot.operators
            ],
            inputs=snapshot.inputs,
            outputs=snapshot.outputs,
        )
        for subtask, snapshot in snapshots.items()
    }


def restored_checkpoint(checkpoint_id: int, tasks: RestoredTasks) -> m.RestoredCheckpoint:
    """What the machine of the job must know of it."""
    return m.RestoredCheckpoint(
        checkpoint_id,
        finished=frozenset(subtask for subtask, task in tasks.items() if task.finished),
        splits=tuple(
            m.RestoredSplit(
                subtask.vertex,
                operator.operator_uid,
                subtask.subtask_index,
                split.id,
                split.size,
                split.done,
            )
            for subtask, task in tasks.items()
            for operator in task.operators
            for split in operator.splits
        ),
        reads=tuple(
            m.RestoredRead(subtask, read.edge_id, read.index, read.producer_attempt, read.rows)
            for subtask, task in tasks.items()
            for read in task.inputs
        ),
        subtasks=frozenset(tasks),
    )


def _unions(
    snapshots: Iterable[checkpoint_pb2.SubtaskSnapshot],
) -> dict[tuple[str, str], list[checkpoint_pb2.OperatorStateSnapshot]]:
    """(vertex, operator uid) -> the union lists of all its subtasks, in order."""
    found: dict[tuple[str, str], list[checkpoint_pb2.OperatorStateSnapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda one: (one.vertex, one.subtask_index)):
        for operator in snapshot.operators:
            own = found.setdefault((snapshot.vertex, operator.operator_uid), [])
            own += (one for one in operator.lists if _is_union(one))
    return found


def _is_union(state: checkpoint_pb2.OperatorStateSnapshot) -> bool:
    return state.redistribution == checkpoint_pb2.REDISTRIBUTION_UNION


def _restored_operator(
    operator: checkpoint_pb2.OperatorSnapshot,
    unions: list[checkpoint_pb2.OperatorStateSnapshot],
) -> internal_pb2.RestoredOperator:
    return internal_pb2.RestoredOperator(
        operator_uid=operator.operator_uid,
        keyed=[operator.keyed] if operator.HasField("keyed") else [],
        lists=[*(one for one in operator.lists if not _is_union(one)), *unions],
        splits=operator.splits,
    )
