"""The job graph: what makes one valid, and how it reads.

``validate`` is pure and opens no pickle; the client runs it before it submits, and the JobManager runs it
again on what it is given. Every error names the operator. Checked here is how operators are put
together; ``penstock.graph.operator_checks`` checks each of them by itself, ``penstock.graph.exchange_checks`` what lies
between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.graph.exchange_checks import check_colocation, check_exchanges
from penstock.graph.operator_checks import (
    check_collect_ids,
    check_operator,
    decode_schema,
    files_read,
    grouping_keys,
    has_two_inputs,
    input_schemas,
    is_partial,
    is_spark_operator,
    late_tag,
    operator_where,
    second_keys,
    side_schema,
)
from penstock.graph.persisted import check_persisted
from penstock.graph.placed_rows import PlacedRows
from penstock.graph.plan_text import explain, plan_dict
from penstock.pb import graph_pb2
from penstock.storage.key_groups import MAX_MAX_PARALLELISM

__all__ = ["explain", "plan_dict", "validate"]

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""TaskManagers name files and directories after vertices and edges."""

_FORWARD = graph_pb2.PARTITIONING_FORWARD
_HASH = graph_pb2.PARTITIONING_HASH


def validate(graph: graph_pb2.JobGraph) -> None:
    """Checks that a job graph can run.

    Raises:
        JobRejected: it cannot; the message names the operator.
    """
    vertices = _vertices_by_id(graph)
    _check_ids(graph)
    _check_edges_exist(graph, vertices)
    _check_acyclic(graph, vertices)
    _check_uids(graph)
    artifacts = {artifact.id for artifact in graph.artifacts}
    placed = PlacedRows(graph)
    for vertex in graph.vertices:
        _check_parallelism(vertex)
        _check_chain(vertex, artifacts, placed)
        incoming = [edge for edge in graph.edges if edge.target_vertex == vertex.id]
        _check_inputs(vertex, incoming, placed)
    for edge in graph.edges:
        _check_edge(edge, vertices[edge.source_vertex], vertices[edge.target_vertex])
    check_exchanges(graph)
    check_colocation(graph)
    check_collect_ids(graph)
    check_persisted(graph)
    if not any(_kind(op) == "sink" for vertex in graph.vertices for op in vertex.operators):
        raise JobRejected(
            "the job has no sink: end a stream with .write_parquet(...), .print(), ..."
        )


def commits_output(vertex: graph_pb2.Vertex) -> bool:
    """Whether a sink of it shows what it has written only when it is told to."""
    return any(
        operator.sink.two_phase or operator.sink.WhichOneof("kind") in ("files", "collect")
        for operator in vertex.operators
    )


def _check_ids(graph: graph_pb2.JobGraph) -> None:
    for where, ids in (
        ("a vertex", [vertex.id for vertex in graph.vertices]),
        ("an edge", [edge.id for edge in graph.edges]),
    ):
        for text in ids:
            if _ID.fullmatch(text) is None:
                raise JobRejected(
                    f"{text[:80]!r} cannot be the id of {where}: letters, digits, '.', '_' and '-' "
                    "only, not starting with '.' or '-', 100 at most"
                )


def _vertices_by_id(graph: graph_pb2.JobGraph) -> dict[str, graph_pb2.Vertex]:
    if not graph.vertices:
        raise JobRejected("the job has no operators")
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    if len(vertices) < len(graph.vertices) or "" in vertices:
        raise JobRejected("the ids of the vertices are not unique")
    for vertex in graph.vertices:
        if not vertex.operators:
            raise JobRejected(f"vertex {vertex.id} has no operators")
        if not vertex.slot_group:
            raise JobRejected(f"{operator_where(vertex, 0)}: it has no slot group")
    return vertices


def _check_edges_exist(graph: graph_pb2.JobGraph, vertices: dict[str, graph_pb2.Vertex]) -> None:
    if len({edge.id for edge in graph.edges}) < len(graph.edges):
        raise JobRejected("the ids of the edges are not unique")
    for edge in graph.edges:
        for end in (edge.source_vertex, edge.target_vertex):
            if end not in vertices:
                raise JobRejected(f"edge {edge.id} names vertex {end!r}, which is not in the job")
        source = vertices[edge.source_vertex]
        if not 0 <= edge.source_output.operator_index < len(source.operators):
            raise JobRejected(
                f"edge {edge.id} leaves operator {edge.source_output.operator_index} of vertex "
                f"{source.id}, which has {len(source.operators)}"
            )


def _check_acyclic(graph: graph_pb2.JobGraph, vertices: dict[str, graph_pb2.Vertex]) -> None:
    waiting = dict.fromkeys(vertices, 0)
    for edge in graph.edges:
        waiting[edge.target_vertex] += 1
    ready = [vertex_id for vertex_id, count in waiting.items() if count == 0]
    done = 0
    while ready:
        vertex_id = ready.pop()
        done += 1
        for edge in graph.edges:
            if edge.source_vertex == vertex_id:
                waiting[edge.target_vertex] -= 1
                if waiting[edge.target_vertex] == 0:
                    ready.append(edge.target_vertex)
    if done < len(vertices):
        cycle = [operator_where(vertices[v], 0) for v, count in waiting.items() if count > 0]
        raise JobRejected(f"the job has a cycle through or behind {'; '.join(cycle)}")


def _check_uids(graph: graph_pb2.JobGraph) -> None:
    seen: dict[str, str] = {}
    for vertex in graph.vertices:
        for index, operator in enumerate(vertex.operators):
            where = operator_where(vertex, index)
            if not operator.uid:
                raise JobRejected(f"{where}: it has no uid")
            if operator.uid in seen:
                raise JobRejected(
                    f"{where}: its uid {operator.uid!r} is also that of {seen[operator.uid]}; a uid "
                    "must be unique within the job"
                )
            seen[operator.uid] = where


def _check_parallelism(vertex: graph_pb2.Vertex) -> None:
    where = operator_where(vertex, 0)
    if not 1 <= vertex.max_parallelism <= MAX_MAX_PARALLELISM:
        raise JobRejected(
            f"{where}: max_parallelism is {vertex.max_parallelism}; it must be from 1 to "
            f"{MAX_MAX_PARALLELISM}"
        )
    if not 1 <= vertex.parallelism <= vertex.max_parallelism:
        raise JobRejected(
            f"{where}: parallelism is {vertex.parallelism}; it must be from 1 to max_parallelism, "
            f"which is {vertex.max_parallelism}: lower the one or raise the other"
        )


def _check_chain(vertex: graph_pb2.Vertex, artifacts: set[str], placed: PlacedRows) -> None:
    for index, operator in enumerate(vertex.operators):
        where = operator_where(vertex, index)
        check_operator(operator, where, artifacts)
        if index == 0:
            continue
        if _kind(operator) == "source":
            raise JobRejected(f"{where}: a source cannot read from another operator")
        if has_two_inputs(operator):
            raise JobRejected(f"{where}: it has two inputs, so it must be the first of its vertex")
        if is_spark_operator(operator):
            raise JobRejected(f"{where}: it runs on Spark, so it must be the first of its vertex")
        if not operator.HasField("input") or not 0 <= operator.input.operator_index < index:
            raise JobRejected(f"{where}: it does not read from an operator before it in its chain")
        parent = vertex.operators[operator.input.operator_index]
        given = _output_schema(parent, operator.input.side_tag, where)
        _check_same_schema(given, decode_schema(operator.input_schema, where), where)
        keys = grouping_keys(operator)
        if keys and not is_partial(operator) and placed.of_input(vertex, index) != keys:
            raise JobRejected(
                f"{where}: it works per key ({', '.join(keys)}), but no exchange brings the rows of a "
                "key together: use .key_by(...) directly before it"
            )
        if keys == () and vertex.parallelism != 1:
            raise JobRejected(f"{where}: it sees all rows, so its parallelism must be 1")


def _check_inputs(
    vertex: graph_pb2.Vertex, edges: list[graph_pb2.Edge], placed: PlacedRows
) -> None:
    where, head = operator_where(vertex, 0), vertex.operators[0]
    if _kind(head) == "source":
        if edges:
            raise JobRejected(f"{where}: a source cannot have an input")
        return
    if not edges and not files_read(head):
        raise JobRejected(f"{where}: it has no input")
    _check_target_inputs(head, edges, where)
    for edge in edges:
        edge_schema = decode_schema(edge.schema, where)
        given = input_schemas(head)[edge.target_input]
        _check_same_schema(edge_schema, decode_schema(given, where), where)
    keys = grouping_keys(head)
    if keys is not None and not is_partial(head):
        first = [edge for edge in edges if not edge.target_input]
        _check_grouped(vertex, keys, first, placed, where)
    if has_two_inputs(head):
        _check_second_input(head, [e for e in edges if e.target_input], placed, where)


def _check_target_inputs(head: graph_pb2.Operator, edges: list[graph_pb2.Edge], where: str) -> None:
    """An operator with several inputs reads from all, every other one from its only one."""
    wanted = set(range(len(input_schemas(head)))) - files_read(head)
    found = {edge.target_input for edge in edges}
    if found != wanted:
        raise JobRejected(
            f"{where}: it has {len(wanted)} input{'s'[: len(wanted) - 1]}, but edges feed the inputs "
            f"{', '.join(map(str, sorted(found)))}"
        )


def _check_grouped(
    vertex: graph_pb2.Vertex,
    keys: tuple[str, ...],
    edges: list[graph_pb2.Edge],
    placed: PlacedRows,
    where: str,
) -> None:
    if not keys:
        if vertex.parallelism != 1:
            raise JobRejected(
                f"{where}: without key_by one subtask sees all rows, so its parallelism must be 1, "
                f"not {vertex.parallelism}"
            )
        return
    for edge in edges:
        if placed.of_edge(edge) != keys:
            raise JobRejected(
                f"{where}: it works per key ({', '.join(keys)}), but edge {edge.id} does not bring the "
                "rows of a key together: use .key_by(...) directly before it"
            )


def _check_second_input(
    head: graph_pb2.Operator, edges: list[graph_pb2.Edge], placed: PlacedRows, where: str
) -> None:
    keys = second_keys(head)
    for edge in edges:
        if keys == () and edge.partitioning != graph_pb2.PARTITIONING_BROADCAST:
            raise JobRejected(
                f"{where}: its second input must reach all its subtasks: connect(rules.broadcast())"
            )
        if keys and placed.of_edge(edge) != keys:
            raise JobRejected(
                f"{where}: its second input must be routed by ({', '.join(keys)}), and edge {edge.id} "
                "is not: use .key_by(...) on it"
            )


def _check_edge(edge: graph_pb2.Edge, source: graph_pb2.Vertex, target: graph_pb2.Vertex) -> None:
    where = operator_where(target, 0)
    producer = source.operators[edge.source_output.operator_index]
    producer_where = operator_where(source, edge.source_output.operator_index)
    if _kind(producer) == "sink":
        raise JobRejected(f"{producer_where}: nothing can read from a sink")
    schema = decode_schema(edge.schema, where)
    given = _output_schema(producer, edge.source_output.side_tag, producer_where)
    _check_same_schema(given, schema, where)
    if edge.partitioning == _FORWARD and source.parallelism != target.parallelism:
        raise JobRejected(
            f"{where}: edge {edge.id} is forward, but its producer has parallelism "
            f"{source.parallelism} and its consumer {target.parallelism}"
        )
    if (edge.partitioning == _HASH) != bool(edge.key_columns):
        raise JobRejected(f"{where}: a hash edge needs key columns, and only a hash edge has them")
    for key in edge.key_columns:
        if key not in schema.names:
            raise JobRejected(
                f"{where}: there is no key column {key!r}; the columns are {', '.join(schema.names)}"
            )


def _output_schema(producer: graph_pb2.Operator, tag: str, where: str) -> pa.Schema:
    if not tag:
        return decode_schema(producer.output_schema, where)
    known = {producer.on_error.tag, late_tag(producer)} - {""}
    if tag not in known and not _emits_any_tag(producer):
        raise JobRejected(
            f"{where}: operator {producer.name!r} has no side output {tag!r}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return side_schema(producer, decode_schema(producer.input_schema, where), tag)


def _emits_any_tag(operator: graph_pb2.Operator) -> bool:
    process = graph_pb2.WINDOW_FUNCTION_KIND_PROCESS
    if _kind(operator) == "window_function":
        return operator.window_function.kind == process
    return _kind(operator) == "process"


def _check_same_schema(given: pa.Schema, wanted: pa.Schema, where: str) -> None:
    if not given.equals(wanted):
        raise JobRejected(
            f"{where}: it expects ({_columns(wanted)}), but what comes is ({_columns(given)})"
        )


def _columns(fields: Iterable[pa.Field]) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in fields)


def _kind(operator: graph_pb2.Operator) -> str | None:
    return operator.WhichOneof("spec")
