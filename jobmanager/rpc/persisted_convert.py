"""What outlives its job, between the graphs of the jobs that write and read it and the deployment of their tasks.

A sink that persists becomes an edge without a target: its partitions are blocking, with one subpartition each. A
source that reads them becomes an input edge of type blocking, whose channels lead to partition servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.pb import internal_pb2
from jobmanager.partitions.promoted import PromotedPart
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes, schema_to_bytes, user_schema

_BLOCKING = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING


def persisted_edges(graph: graph_pb2.JobGraph) -> list[graph_pb2.Edge]:
    """The outputs of a job that outlive it."""
    return [
        graph_pb2.Edge(
            id=f"persisted-{vertex.id}-{index}",
            source_vertex=vertex.id,
            source_output=graph_pb2.ChainInput(operator_index=index),
            partitioning=graph_pb2.PARTITIONING_FORWARD,
            partition_type=_BLOCKING,
            schema=schema_to_bytes(user_schema(schema_from_bytes(operator.input_schema))),
        )
        for vertex in graph.vertices
        for index, operator in enumerate(vertex.operators)
        if operator.sink.WhichOneof("kind") == "persist"
    ]


def persisted_sink(graph: graph_pb2.JobGraph, edge: graph_pb2.Edge) -> graph_pb2.PersistSink:
    """The sink behind such an edge."""
    vertex = next(vertex for vertex in graph.vertices if vertex.id == edge.source_vertex)
    return vertex.operators[edge.source_output.operator_index].sink.persist


def persisted_source(vertex: graph_pb2.Vertex) -> graph_pb2.PersistedSource | None:
    """What a vertex reads of an earlier job; None = nothing."""
    source = vertex.operators[0].source
    return source.persisted if source.WhichOneof("kind") == "persisted" else None


def add_persisted_input(
    task: internal_pb2.TaskDeployment,
    parts: Sequence[PromotedPart],
    endpoint_of: Callable[[str], internal_pb2.DataEndpoint],
    shared_directory: str = "",
) -> None:
    """Tells a task where to read its share.

    Args:
        task: of a vertex with a ``persisted_source``.
        parts: its share.
        endpoint_of: the partition server of a TaskManager.
        shared_directory: where those parts lie that no TaskManager holds.
    """
    head = task.vertex.operators[0]
    source = head.source.persisted
    task.inputs.add(
        # The positions of checkpoints name it.
        edge_id=head.uid,
        partition_type=_BLOCKING,
        schema=source.schema,
        channels=[
            internal_pb2.InputChannel(
                producer=endpoint_of(part.taskmanager_id) if part.taskmanager_id else None,
                producer_attempt=internal_pb2.AttemptId(
                    job_id=source.job_id,
                    vertex=part.partition_id.vertex,
                    subtask_index=part.partition_id.subtask_index,
                    attempt=part.partition_id.attempt,
                ),
                edge_id=part.partition_id.edge_id,
                shared_directory="" if part.taskmanager_id else shared_directory,
            )
            for part in parts
        ],
    )
