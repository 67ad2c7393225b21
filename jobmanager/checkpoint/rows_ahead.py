"""Rows that a consumer has taken in and that their producer is still to make again, after a failure.

Where rows are kept, a consumer that has read its producer to the end goes on when that is lost, and does not read what
it makes again for others. A job that goes on from a checkpoint of that time knows where each of them was. Whoever
else starts from it does not, and would have those rows twice.

Not with at-least-once: what a consumer has read behind a barrier is in its state, and may count twice anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jobmanager.graph.deployment import channels_of
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from penstock.pb import checkpoint_pb2


def rows_ahead(
    plan: JobPlan, subtasks: Iterable[checkpoint_pb2.SubtaskSnapshot]
) -> Mapping[str, str]:
    """Exchanges of a checkpoint with such rows: id -> of whom they are.

    Example: b has read five rows, and a has made three of them again.
        >>> from jobmanager.graph.job_plan import EdgePlan, Exchange, Partitioning, VertexPlan
        >>> edge = EdgePlan("e0", "a", "b", Partitioning.HASH, Exchange.CACHING)
        >>> plan = JobPlan((VertexPlan("a", 1), VertexPlan("b", 1)), (edge,))
        >>> def snapshots(made, read):
        ...     position = checkpoint_pb2.ChannelPosition
        ...     yield checkpoint_pb2.SubtaskSnapshot(vertex="a", outputs=[position(edge_id="e0", rows=made)])
        ...     yield checkpoint_pb2.SubtaskSnapshot(vertex="b", inputs=[position(edge_id="e0", rows=read)])
        >>> rows_ahead(plan, snapshots(made=3, read=5))
        {'e0': 'b/0 has read 5 rows of a/0, which has made 3 of them again after a failure'}
        >>> rows_ahead(plan, snapshots(made=5, read=5))
        {}
    """
    snapshots = {SubtaskId(one.vertex, one.subtask_index): one for one in subtasks}
    made = {
        (subtask, output.edge_id, output.index): output.rows
        for subtask, snapshot in snapshots.items()
        for output in snapshot.outputs
    }
    read = {
        (subtask, one.edge_id, one.index): one.rows
        for subtask, snapshot in snapshots.items()
        for one in snapshot.inputs
    }
    found: dict[str, str] = {}
    for edge, consumer, producer, subpartition in channels_of(plan):
        rows = read.get((consumer, edge.id, producer.subtask_index), 0)
        again = made.get((producer, edge.id, subpartition), 0)
        has_ended = producer in snapshots and snapshots[producer].finished
        if rows > again and not has_ended:
            found[edge.id] = (
                f"{consumer} has read {rows} rows of {producer}, which has made {again} of them again after a failure"
            )
    return found
