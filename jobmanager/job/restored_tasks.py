"""From a manifest to what each subtask starts with, and to what the job's machine must know of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.dealt_lists import deal, function_uids, is_split
from jobmanager.checkpoint.restored_checkpoint import (
    RestoredCheckpoint,
    RestoredRead,
    RestoredSplit,
)
from jobmanager.checkpoint.snapshot_convert import last_state_of
from jobmanager.graph.deployment import producers_of
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.rpc.graph_convert import plan_of
from penstock.errors import Unrecoverable
from penstock.pb import checkpoint_pb2, graph_pb2

RestoredTasks = Mapping[SubtaskId, internal_pb2.RestoredTask]


def restored_tasks(
    manifest: checkpoint_pb2.CheckpointManifest,
    graph: graph_pb2.JobGraph,
    alone: Collection[SubtaskId] | None = None,
    rebuilt: Collection[str] = (),
) -> RestoredTasks:
    """The state of each subtask of the job.

    The graph is the one the checkpoint was taken of, so each subtask gets its own snapshot back, of
    union lists those of all subtasks, and of split lists a share of what finished subtasks held. Those that had
    not begun have none.

    Args:
        alone: subtasks that begin again while the others run; None = all begin again.
        rebuilt: vertices whose subtasks begin from nothing whatever the checkpoint holds of them.

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
    dealt, given = deal(snapshots, graph, alone, rebuilt)
    uids = {vertex.id: function_uids(vertex) for vertex in graph.vertices}
    ends = _ends_of_finished(plan_of(graph), snapshots)
    return {
        subtask: internal_pb2.RestoredTask(
            checkpoint_id=manifest.checkpoint_id,
            finished=snapshot.finished,
            operators=[
                _left_operator(
                    operator,
                    is_dealt=subtask in given and operator.operator_uid in uids[subtask.vertex],
                )
                if snapshot.finished
                else _restored_operator(
                    operator,
                    unions.get((subtask.vertex, operator.operator_uid), []),
                    dealt.get(subtask, {}).get(operator.operator_uid, []),
                )
                for operator in snapshot.operators
            ],
            inputs=snapshot.inputs,
            outputs=snapshot.outputs or ends.get(subtask, ()),
        )
        for subtask, snapshot in snapshots.items()
    }


def _ends_of_finished(
    plan: JobPlan, snapshots: Mapping[SubtaskId, checkpoint_pb2.SubtaskSnapshot]
) -> dict[SubtaskId, list[checkpoint_pb2.ChannelPosition]]:
    """Where subtasks stopped writing that had finished before the checkpoint, and so could not say it.

    They had finished because their consumers had read everything: what these had taken was all.
    """
    ends: dict[SubtaskId, list[checkpoint_pb2.ChannelPosition]] = {}
    for edge in plan.edges:
        producers = plan.vertex(edge.source).parallelism
        consumers = plan.vertex(edge.target).parallelism
        for index in range(consumers):
            snapshot = snapshots.get(SubtaskId(edge.target, index))
            reads = snapshot.inputs if snapshot is not None else ()
            rows = {read.index: read.rows for read in reads if read.edge_id == edge.id}
            for producer, subpartition in producers_of(
                edge.partitioning, producers, consumers, index
            ):
                if producer in rows:
                    ends.setdefault(SubtaskId(edge.source, producer), []).append(
                        checkpoint_pb2.ChannelPosition(
                            edge_id=edge.id, index=subpartition, rows=rows[producer]
                        )
                    )
    return {
        subtask: own
        for subtask, own in ends.items()
        if subtask in snapshots and snapshots[subtask].finished
    }


def restored_checkpoint(
    checkpoint_id: int, tasks: RestoredTasks, graph: graph_pb2.JobGraph
) -> RestoredCheckpoint:
    """What the machine of the job must know of it."""
    uids = {vertex.id: function_uids(vertex) for vertex in graph.vertices}
    return RestoredCheckpoint(
        checkpoint_id,
        finished=frozenset(subtask for subtask, task in tasks.items() if task.finished),
        splits=tuple(
            RestoredSplit(
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
            RestoredRead(subtask, read.edge_id, read.index, read.producer_attempt, read.rows)
            for subtask, task in tasks.items()
            for read in task.inputs
        ),
        subtasks=frozenset(tasks),
        left=tuple(
            (subtask, left)
            for subtask, task in tasks.items()
            if task.finished and (left := _left_by(task, uids[subtask.vertex])) is not None
        ),
    )


def _left_by(task: internal_pb2.RestoredTask, uids: Collection[str]) -> c.LastState | None:
    return last_state_of(
        checkpoint_pb2.OperatorSnapshot(operator_uid=operator.operator_uid, lists=operator.lists)
        for operator in task.operators
        if operator.operator_uid in uids and operator.lists
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
    dealt: list[checkpoint_pb2.OperatorStateSnapshot],
) -> internal_pb2.RestoredOperator:
    return internal_pb2.RestoredOperator(
        operator_uid=operator.operator_uid,
        keyed=[operator.keyed] if operator.HasField("keyed") else [],
        lists=[*(one for one in operator.lists if not _is_union(one)), *dealt, *unions],
        splits=operator.splits,
    )


def _left_operator(
    operator: checkpoint_pb2.OperatorSnapshot, *, is_dealt: bool
) -> internal_pb2.RestoredOperator:
    """What a finished subtask goes on holding: its own, but for what has been dealt out."""
    return internal_pb2.RestoredOperator(
        operator_uid=operator.operator_uid,
        keyed=[operator.keyed] if operator.HasField("keyed") else [],
        lists=[one for one in operator.lists if not (is_dealt and is_split(one))],
        splits=operator.splits,
    )
