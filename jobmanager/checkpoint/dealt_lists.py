"""The split lists of subtasks that had finished before a checkpoint, dealt out to those that go on from it.

A finished subtask is opened no more, so what it held would be seen by nobody. Its items go to the subtasks of its
vertex that had not finished, in order, and no two of these get numbers that differ by more than one.

What is made again from the first row on is dealt nothing, since nothing is restored there: it begins as it began the
first time, whatever has become of its siblings meanwhile, or it could not write the same rows again.

Invariants: an item is dealt once: to all that had not finished, where all of them begin again from the checkpoint,
else to none, and it stays with the finished subtask; only lists of user functions are dealt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from jobmanager.checkpoint import state_assignment
from jobmanager.checkpoint.restored_operators import list_of, run_of
from jobmanager.checkpoint.state_assignment import ItemRun
from jobmanager.graph.execution_attempt import SubtaskId
from penstock.pb import checkpoint_pb2, graph_pb2

Lists = list[checkpoint_pb2.OperatorStateSnapshot]
DealtLists = dict[SubtaskId, dict[str, Lists]]
"""Receiver -> operator uid -> what it gets besides its own."""


def deal(
    snapshots: Mapping[SubtaskId, checkpoint_pb2.SubtaskSnapshot],
    graph: graph_pb2.JobGraph,
    alone: Collection[SubtaskId] | None,
    rebuilt: Collection[str] = (),
) -> tuple[DealtLists, frozenset[SubtaskId]]:
    """Deals out the split lists of finished subtasks.

    Args:
        alone: subtasks that begin again while the others run; None = all begin again.
        rebuilt: vertices whose subtasks begin from nothing whatever a checkpoint holds of them.

    Returns:
        Who gets what, and whose lists have been dealt out.
    """
    dealt: DealtLists = {}
    given: set[SubtaskId] = set()
    for vertex in graph.vertices:
        if vertex.id in rebuilt:
            continue
        subtasks = [SubtaskId(vertex.id, index) for index in range(vertex.parallelism)]
        known = [subtask for subtask in subtasks if subtask in snapshots]
        receivers = [subtask for subtask in known if not snapshots[subtask].finished]
        if not receivers or (alone is not None and not set(receivers) <= set(alone)):
            continue
        finished = [subtask for subtask in known if snapshots[subtask].finished]
        uids = function_uids(vertex)
        operators = [
            operator
            for subtask in finished
            for operator in snapshots[subtask].operators
            if operator.operator_uid in uids
        ]
        _deal_operators(operators, receivers, dealt)
        given.update(finished)
    return dealt, frozenset(given)


def function_uids(vertex: graph_pb2.Vertex) -> frozenset[str]:
    """The operators of a vertex whose lists are those of user functions."""
    return frozenset(op.uid for op in vertex.operators if op.WhichOneof("spec") == "process")


def is_split(held: checkpoint_pb2.OperatorStateSnapshot) -> bool:
    """Whether each item belongs to one subtask."""
    return held.redistribution == checkpoint_pb2.REDISTRIBUTION_SPLIT


def _deal_operators(
    operators: Iterable[checkpoint_pb2.OperatorSnapshot],
    receivers: Sequence[SubtaskId],
    dealt: DealtLists,
) -> None:
    runs: dict[tuple[str, str], list[ItemRun[checkpoint_pb2.OperatorStateSnapshot]]] = {}
    for operator in operators:
        for held in filter(is_split, operator.lists):
            runs.setdefault((operator.operator_uid, held.name), []).append(run_of(held))
    for (uid, _), own in runs.items():
        for receiver, shares in zip(
            receivers, state_assignment.deal(own, len(receivers)), strict=True
        ):
            dealt.setdefault(receiver, {}).setdefault(uid, []).extend(map(list_of, shares))
