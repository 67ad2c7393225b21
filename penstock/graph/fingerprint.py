"""What a manifest says of the graph that it belongs to."""

from __future__ import annotations

from penstock.graph.state_meaning import declaration
from penstock.pb import checkpoint_pb2, graph_pb2


def exchanges(graph: graph_pb2.JobGraph) -> list[checkpoint_pb2.EdgeFingerprint]:
    """What a manifest says of the exchanges of the graph it belongs to."""
    return [
        checkpoint_pb2.EdgeFingerprint(
            id=edge.id,
            source_vertex=edge.source_vertex,
            target_vertex=edge.target_vertex,
            blocking=edge.partition_type == graph_pb2.RESULT_PARTITION_TYPE_BLOCKING,
        )
        for edge in graph.edges
    ]


def fingerprint(graph: graph_pb2.JobGraph) -> list[checkpoint_pb2.VertexFingerprint]:
    """What a manifest says of the graph it belongs to."""
    return [
        checkpoint_pb2.VertexFingerprint(
            id=vertex.id,
            name=vertex.name,
            parallelism=vertex.parallelism,
            max_parallelism=vertex.max_parallelism,
            operators=[
                checkpoint_pb2.OperatorFingerprint(
                    uid=operator.uid,
                    uid_is_generated=operator.uid_is_generated,
                    name=operator.name,
                    kind=operator.WhichOneof("spec") or "",
                    input_schema=operator.input_schema,
                    output_schema=operator.output_schema,
                    declared=declaration(operator),
                )
                for operator in vertex.operators
            ],
        )
        for vertex in graph.vertices
    ]
