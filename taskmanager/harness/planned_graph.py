"""The job graph as a harness runs it, and what a snapshot of it says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.pb import checkpoint_pb2, graph_pb2


def with_passes(
    graph: graph_pb2.JobGraph, inputs: Sequence[str], output: str
) -> graph_pb2.JobGraph:
    """The graph with operators that pass everything on in the place of its inputs and its output."""
    found = graph_pb2.JobGraph()
    found.CopyFrom(graph)
    for operator in (operator for vertex in found.vertices for operator in vertex.operators):
        if operator.uid in inputs:
            operator.input_schema = operator.output_schema
        elif operator.uid == output:
            operator.output_schema = operator.input_schema
        else:
            continue
        getattr(operator, "pass").SetInParent()  # a keyword in Python
    return found


def in_order(graph: graph_pb2.JobGraph) -> list[graph_pb2.Vertex]:
    """The vertices, producers first."""
    sources: Mapping[str, set[str]] = {
        vertex.id: {edge.source_vertex for edge in graph.edges if edge.target_vertex == vertex.id}
        for vertex in graph.vertices
    }
    waiting, ordered, done = list(graph.vertices), [], set[str]()
    while waiting:
        vertex = next(each for each in waiting if sources[each.id] <= done)
        waiting.remove(vertex)
        ordered.append(vertex)
        done.add(vertex.id)
    return ordered


def feeds_what_is_loaded_first(graph: graph_pb2.JobGraph, uid: str) -> bool:
    """Whether rows of an operator get to an input that is read whole before another one."""
    rest = [v.id for v in graph.vertices if any(operator.uid == uid for operator in v.operators)]
    seen = set[str]()
    while rest:
        current = rest.pop()
        for edge in graph.edges:
            if edge.source_vertex == current and edge.load_first:
                return True
            if edge.source_vertex == current and edge.target_vertex not in seen:
                seen.add(edge.target_vertex)
                rest.append(edge.target_vertex)
    return False


def fingerprint(vertex: graph_pb2.Vertex) -> checkpoint_pb2.VertexFingerprint:
    """What a manifest says of a vertex."""
    return checkpoint_pb2.VertexFingerprint(
        id=vertex.id,
        name=vertex.name,
        parallelism=vertex.parallelism,
        max_parallelism=vertex.max_parallelism,
        operators=[
            checkpoint_pb2.OperatorFingerprint(uid=operator.uid, name=operator.name)
            for operator in vertex.operators
        ],
    )
