"""Where a second attempt of a slow subtask may run beside the first, and where not, and why.

Two attempts at once are sound where nothing but the one that counts is ever seen: consumers read a partition
only when it is complete, and sinks show nothing before they are told to. The slot of the attempt that does not
count is given up, so no slot of the job may keep rows that others are still to read.

Source: FLIP-168, FLIP-281.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.graph.exchanges import BLOCKING, PIPELINED, exchange_name
from penstock.graph.operator_checks import is_spark_operator
from penstock.pb import graph_pb2


def why_not_speculative(graph: graph_pb2.JobGraph) -> dict[str, str]:
    """Vertex -> why its subtasks never have a second attempt beside the first, "" = they may have one."""
    of_job = _exchange_that_is_not(graph.edges, (BLOCKING, PIPELINED))
    return {vertex.id: of_job or _why_not(vertex, graph.edges) for vertex in graph.vertices}


def _exchange_that_is_not(edges: Iterable[graph_pb2.Edge], types: Collection[int]) -> str:
    for edge in edges:
        if edge.partition_type not in types:
            name = exchange_name(edge.partition_type)
            return f"the exchange from {edge.source_vertex} to {edge.target_vertex} is {name}"
    return ""


def _why_not(vertex: graph_pb2.Vertex, edges: Iterable[graph_pb2.Edge]) -> str:
    own = [edge for edge in edges if vertex.id in (edge.source_vertex, edge.target_vertex)]
    if reason := _exchange_that_is_not(own, (BLOCKING,)):
        return reason
    if vertex.colocation_group:
        return f"it is colocated as {vertex.colocation_group}"
    for operator in vertex.operators:
        if is_spark_operator(operator):
            return f"{operator.name!r} runs on Spark, which has second attempts of its own"
        if operator.HasField("sink") and not operator.sink.supports_concurrent_attempts:
            return f"sink {operator.name!r} does not support concurrent attempts"
    return ""
