"""From a manifest to what each subtask starts with, and to what the job's machine must know of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from common.done_splits import DoneSplits
from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.dealt_lists import deal, function_uids, is_split
from jobmanager.checkpoint.restored_checkpoint import (
    RestoredCheckpoint,
    RestoredRead,
    RestoredSplit,
)
from jobmanager.checkpoint.restored_operators import restored_operators
from jobmanager.checkpoint.snapshot_convert import last_state_of
from jobmanager.checkpoint.stored_operators import StoredOperators
from jobmanager.graph.deployment import channels_of
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.rpc.graph_convert import plan_of
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.prepared_output import COMMITTABLES

_COLLECTED = "collect"

RestoredTasks = Mapping[SubtaskId, internal_pb2.RestoredTask]


def restored_tasks(
    manifest: checkpoint_pb2.CheckpointManifest,
    graph: graph_pb2.JobGraph,
    alone: Collection[SubtaskId] | None = None,
    rebuilt: Collection[str] = (),
    *,
    is_of_another: bool = False,
    leaves_output: bool = False,
) -> RestoredTasks:
    """The state of each subtask of the job.

    State is found by the uid of its operator, and dealt out by ``state_assignment``. Of a vertex that is what it
    was, subtasks that had finished stay so, edges go on at their rows, and those that had not begun have nothing.

    Args:
        alone: subtasks that begin again while the others run; None = all begin again.
        rebuilt: vertices whose subtasks begin from nothing whatever the checkpoint holds of them.
        is_of_another: it was taken of another job: rows on their way and rows that were collected were that job's,
            and state of operators that are gone is left out.
        leaves_output: of another job: what its sinks had prepared is not committed.

    Raises:
        Unrecoverable: the checkpoint does not fit the job.
    """
    stored = StoredOperators(manifest)
    if is_of_another:
        stored.leave_out(_lists_left(graph, leaves_output=leaves_output))
    else:
        stored.check(graph)
    same: dict[SubtaskId, checkpoint_pb2.SubtaskSnapshot] = {}
    tasks: dict[SubtaskId, internal_pb2.RestoredTask] = {}
    for vertex in graph.vertices:
        old = stored.same_as(vertex)
        for index, task in enumerate(_tasks_of(vertex, stored)):
            subtask = SubtaskId(vertex.id, index)
            snapshot = stored.snapshots.get(SubtaskId(old, index)) if old is not None else None
            if snapshot is not None:
                same[subtask] = snapshot
                task.finished = snapshot.finished
                if not is_of_another:
                    task.inputs.extend(snapshot.inputs)
                    task.outputs.extend(snapshot.outputs)
            if snapshot is not None or (old is None and stored.before(vertex)):
                tasks[subtask] = task
    dealt, given = deal(same, graph, alone, rebuilt)
    uids = {vertex.id: function_uids(vertex) for vertex in graph.vertices}
    ends = {} if is_of_another else _ends_of_finished(plan_of(graph), same)
    for subtask, snapshot in same.items():
        task = tasks[subtask]
        if snapshot.finished:
            _leave(task, snapshot, uids[subtask.vertex] if subtask in given else ())
        for operator in task.operators:
            _add_dealt(operator, dealt.get(subtask, {}).get(operator.operator_uid, []))
        if not task.outputs:
            task.outputs.extend(ends.get(subtask, ()))
    return tasks


def _lists_left(graph: graph_pb2.JobGraph, *, leaves_output: bool) -> dict[str, str]:
    """Lists of another job's sinks that are not restored: operator uid -> name."""
    return {
        operator.uid: _COLLECTED if operator.sink.HasField("collect") else COMMITTABLES
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.WhichOneof("spec") == "sink"
        and (leaves_output or operator.sink.HasField("collect"))
    }


def _tasks_of(vertex: graph_pb2.Vertex, stored: StoredOperators) -> list[internal_pb2.RestoredTask]:
    """What the subtasks of a vertex would begin with if none had finished."""
    before = stored.before(vertex)
    tasks = [
        internal_pb2.RestoredTask(
            checkpoint_id=stored.checkpoint_id,
            finished=bool(before) and all(snapshot.finished for snapshot in before),
        )
        for _ in range(vertex.parallelism)
    ]
    for spec in vertex.operators:
        held = stored.held_by(spec.uid)
        if not any(held):
            continue
        restored = restored_operators(
            spec.uid, spec.name, held, vertex.parallelism, vertex.max_parallelism
        )
        for task, operator in zip(tasks, restored, strict=True):
            task.operators.append(operator)
    return tasks


def _leave(
    task: internal_pb2.RestoredTask,
    snapshot: checkpoint_pb2.SubtaskSnapshot,
    given: Collection[str],
) -> None:
    """What a finished subtask goes on holding: its own, but for lists of operators that were dealt out."""
    del task.operators[:]
    for operator in snapshot.operators:
        is_given = operator.operator_uid in given
        task.operators.add(
            operator_uid=operator.operator_uid,
            keyed=[operator.keyed] if operator.HasField("keyed") else [],
            lists=[one for one in operator.lists if not (is_given and is_split(one))],
            splits=operator.splits,
        )


def _add_dealt(
    operator: internal_pb2.RestoredOperator, dealt: list[checkpoint_pb2.OperatorStateSnapshot]
) -> None:
    """Puts what is dealt to a subtask behind its own, before what every subtask gets."""
    if dealt:
        own = list(operator.lists)
        unions = [one for one in own if _is_union(one)]
        del operator.lists[:]
        operator.lists.extend([*(one for one in own if not _is_union(one)), *dealt, *unions])


def _ends_of_finished(
    plan: JobPlan, snapshots: Mapping[SubtaskId, checkpoint_pb2.SubtaskSnapshot]
) -> dict[SubtaskId, list[checkpoint_pb2.ChannelPosition]]:
    """Where subtasks stopped writing that had finished before the checkpoint, and so could not say it.

    They had finished because their consumers had read everything: what these had taken was all.
    """
    read = {
        (subtask, one.edge_id, one.index): one.rows
        for subtask, snapshot in snapshots.items()
        for one in snapshot.inputs
    }
    ends: dict[SubtaskId, list[checkpoint_pb2.ChannelPosition]] = {}
    for edge, consumer, producer, subpartition in channels_of(plan):
        rows = read.get((consumer, edge.id, producer.subtask_index))
        if rows is not None:
            ends.setdefault(producer, []).append(
                checkpoint_pb2.ChannelPosition(edge_id=edge.id, index=subpartition, rows=rows)
            )
    return {
        subtask: own
        for subtask, own in ends.items()
        if subtask in snapshots and snapshots[subtask].finished
    }


def restored_checkpoint(
    checkpoint_id: int,
    tasks: RestoredTasks,
    graph: graph_pb2.JobGraph,
    done: Mapping[str, DoneSplits] = MappingProxyType({}),
) -> RestoredCheckpoint:
    """What the machine of the job must know of it.

    Args:
        done: what of sources has been read to its end, by operator uid.
    """
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
        done=tuple(
            c.SourceDone(vertex.id, operator.uid, done[operator.uid])
            for vertex in graph.vertices
            for operator in vertex.operators
            if operator.uid in done
        ),
    )


def _left_by(task: internal_pb2.RestoredTask, uids: Collection[str]) -> c.LastState | None:
    return last_state_of(
        checkpoint_pb2.OperatorSnapshot(operator_uid=operator.operator_uid, lists=operator.lists)
        for operator in task.operators
        if operator.operator_uid in uids and operator.lists
    )


def _is_union(state: checkpoint_pb2.OperatorStateSnapshot) -> bool:
    return state.redistribution == checkpoint_pb2.REDISTRIBUTION_UNION
