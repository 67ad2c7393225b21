"""Where a second attempt of a slow subtask may run beside the first, and where not, and why.

Two attempts at once are sound where nothing but the one that counts is ever seen: consumers read a partition
only when it is complete, and sinks show nothing before they are told to. Nothing else of the job may live
in the slots: the slot of the attempt that does not count is given up.

Source: FLIP-168, FLIP-281.
"""

from __future__ import annotations

from penstock.exchanges import BLOCKING, exchange_name
from penstock.pb import graph_pb2


def why_not_speculative(graph: graph_pb2.JobGraph) -> dict[str, str]:
    """Vertex -> why its subtasks never have a second attempt beside the first, "" = they may have one."""
    of_job = _why_not_at_all(graph)
    return {vertex.id: of_job or _why_not(vertex) for vertex in graph.vertices}


def _why_not_at_all(graph: graph_pb2.JobGraph) -> str:
    for edge in graph.edges:
        if edge.partition_type != BLOCKING:
            name = exchange_name(edge.partition_type)
            return f"the exchange from {edge.source_vertex} to {edge.target_vertex} is {name}"
    for vertex in graph.vertices:
        if vertex.colocation_group:
            return f"{vertex.id} is colocated as {vertex.colocation_group}"
    return ""


def _why_not(vertex: graph_pb2.Vertex) -> str:
    for operator in vertex.operators:
        if operator.HasField("sink") and not operator.sink.supports_concurrent_attempts:
            return f"sink {operator.name!r} does not support concurrent attempts"
    return ""
