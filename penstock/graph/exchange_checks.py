"""Checks of what lies between the vertices of a job graph: types of exchanges, colocation."""

from __future__ import annotations

from penstock.errors import JobRejected
from penstock.graph.exchanges import BLOCKING, CACHING, exchange_name, is_known
from penstock.graph.operator_checks import decode_schema, is_narrowing, is_partial, operator_where
from penstock.pb import graph_pb2
from penstock.storage.parquet_types import parquet_misfit


def check_exchanges(graph: graph_pb2.JobGraph) -> None:
    """Checks that every exchange can do what its type says.

    Raises:
        JobRejected: the type is unknown, or what must be complete before it is read never will be.
    """
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    for edge in graph.edges:
        source = vertices[edge.source_vertex]
        where = operator_where(source, edge.source_output.operator_index)
        if not is_known(edge.partition_type):
            raise JobRejected(
                f"{where}: edge {edge.id} has the unknown type {edge.partition_type}: client and "
                "JobManager are of different versions"
            )
        _check_spill_format(edge, where)
        if edge.partition_type != BLOCKING:
            continue
        endless = endless_source(graph, source)
        if endless is not None:
            declared = _declared_operator(source, edge.source_output.operator_index)
            raise JobRejected(
                f"{operator_where(source, declared)}: its output is read over a blocking exchange, so it "
                f"must be complete first, and it never is: source {endless!r} reads without end. Use "
                f".exchange('caching') (or 'pipelined') on {source.operators[declared].name!r}, "
                "or where it has none: execution.exchange.default"
            )


def _check_spill_format(edge: graph_pb2.Edge, where: str) -> None:
    if edge.spill_format == graph_pb2.SPILL_FORMAT_UNSPECIFIED:
        return
    if edge.spill_format not in graph_pb2.SpillFormat.values():
        raise JobRejected(
            f"{where}: edge {edge.id} asks for files of the unknown format {edge.spill_format}: client and "
            "JobManager are of different versions"
        )
    if edge.partition_type not in (BLOCKING, CACHING):
        raise JobRejected(
            f"{where}: edge {edge.id} asks for a format of its files, and has none: it is "
            f"{exchange_name(edge.partition_type)!r}"
        )
    if edge.spill_format == graph_pb2.SPILL_FORMAT_PARQUET:
        misfit = parquet_misfit(decode_schema(edge.schema, where))
        if misfit is not None:
            raise JobRejected(
                f"{where}: what reads its rows needs Parquet files: {misfit}; give the column another type "
                "before, or leave it out"
            )


def check_colocation(graph: graph_pb2.JobGraph) -> None:
    """Checks that the vertices of a colocation group can share slots subtask by subtask.

    Raises:
        JobRejected: they differ in parallelism or slot group.
    """
    first: dict[str, graph_pb2.Vertex] = {}
    for vertex in graph.vertices:
        if not vertex.colocation_group:
            continue
        other = first.setdefault(vertex.colocation_group, vertex)
        for what, call, mine, theirs in (
            ("parallelism", "parallelism(n)", vertex.parallelism, other.parallelism),
            ("slot group", "slot_group(s)", vertex.slot_group, other.slot_group),
        ):
            if mine != theirs:
                raise JobRejected(
                    f"{operator_where(vertex, 0)}: it is colocated with {operator_where(other, 0)} as "
                    f"{vertex.colocation_group!r}, but its {what} is {mine} and the other's {theirs}: "
                    f"give both the same with .{call}, or leave .colocate(...) out"
                )


def _declared_operator(vertex: graph_pb2.Vertex, index: int) -> int:
    """The job's own operator in front of an exchange, before what the planner has put between them."""
    while is_partial(vertex.operators[index]) or is_narrowing(vertex.operators[index]):
        index = vertex.operators[index].input.operator_index
    return index


def endless_source(graph: graph_pb2.JobGraph, vertex: graph_pb2.Vertex) -> str | None:
    """An unbounded source in front of a vertex, or in it."""
    waiting, seen = [vertex.id], {vertex.id}
    vertices = {each.id: each for each in graph.vertices}
    while waiting:
        current = vertices[waiting.pop()]
        head = current.operators[0]
        if head.WhichOneof("spec") == "source" and not head.source.bounded:
            return head.name
        for edge in graph.edges:
            if edge.target_vertex == current.id and edge.source_vertex not in seen:
                seen.add(edge.source_vertex)
                waiting.append(edge.source_vertex)
    return None
