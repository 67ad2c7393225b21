"""Inputs that are read first, whole: what has to wait for them, and that nothing waits for itself.

An operator that loads a broadcast side, or a history (``planner.history``), first leaves its other inputs unread meanwhile. Whatever feeds
these over pipelined exchanges is held back as far as its sources. Where what is read first needs any of that, or needs an operator that another
such wait holds back, in a circle, nobody would ever go on: then the other input gets an exchange that keeps its
rows, so that its producers go on.

In streaming mode nothing is read over a blocking exchange: what writes one does all its work again after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.errors import JobRejected
from penstock.graph.exchange_checks import endless_source
from penstock.graph.exchanges import BLOCKING, CACHING, PIPELINED, exchange_name
from penstock.graph.operator_checks import operator_where
from penstock.pb import graph_pb2

_HOLDING_BACK = (PIPELINED, graph_pb2.RESULT_PARTITION_TYPE_CACHING_MEMORY)


def settle_loading(graph: graph_pb2.JobGraph, said: Collection[str], *, is_batch: bool) -> None:
    """Marks the edges that wait, and has those keep their rows that would wait for themselves.

    Args:
        said: edges whose type the user has chosen.
        is_batch: the job runs in batch mode.

    Raises:
        JobRejected: what is read first has no end, or an edge must be of another type than the user has chosen.
    """
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    first = {(edge.target_vertex, edge.target_input) for edge in graph.edges if edge.load_first}
    readers = list(dict.fromkeys(edge.target_vertex for edge in graph.edges if edge.load_first))
    for edge in graph.edges:
        edge.waits = edge.target_vertex in readers and not edge.load_first
        edge.follows = edge.waits and (edge.target_vertex, edge.target_input) in first
        if edge.load_first:
            _check_bounded(graph, vertices, edge)
            if edge.partition_type == BLOCKING and not is_batch:
                if edge.id in said:
                    raise JobRejected(_blocking_refusal(vertices, edge))
                edge.partition_type = CACHING
    while (reader := _in_circle(graph, readers)) is not None:
        for edge in graph.edges:
            if edge.target_vertex == reader and edge.waits and edge.partition_type in _HOLDING_BACK:
                if edge.id in said:
                    raise JobRejected(_refusal(vertices, edge))
                edge.partition_type = BLOCKING if is_batch else CACHING


def _check_bounded(
    graph: graph_pb2.JobGraph, vertices: dict[str, graph_pb2.Vertex], edge: graph_pb2.Edge
) -> None:
    endless = endless_source(graph, vertices[edge.source_vertex])
    if endless is None:
        return
    where = operator_where(vertices[edge.target_vertex], 0)
    if edge.partitioning != graph_pb2.PARTITIONING_BROADCAST or not edge.target_input:
        raise JobRejected(
            f"{where}: it unites a stream with one behind a blocking exchange, which is history and read whole first, and "
            f"that never ends: source {endless!r} reads without end. Read a bounded source there, or leave "
            ".exchange('blocking') out"
        )
    raise JobRejected(
        f"{where}: its broadcast side is to be read whole first "
        f"(load_first), and it never ends: source {endless!r} reads without end. Read a bounded source "
        "there, or use .broadcast(load_first=False): then rows of both inputs come in any order"
    )


def _in_circle(graph: graph_pb2.JobGraph, readers: Iterable[str]) -> str | None:
    """A reader that waits for itself, over others or directly; None = there is none."""
    held = {reader: _held_back(graph, reader) for reader in readers}
    needed = {reader: _needed(graph, reader) for reader in readers}
    waits_for = {
        reader: {other for other in held if held[other] & needed[reader]} for reader in needed
    }
    for reader, direct in waits_for.items():
        seen, rest = set[str](), list(direct)
        while rest:
            current = rest.pop()
            if current not in seen:
                seen.add(current)
                rest += waits_for[current]
        if reader in seen and held[reader]:
            return reader
    return None


def _held_back(graph: graph_pb2.JobGraph, reader: str) -> frozenset[str]:
    """The vertices that cannot go on while a reader leaves its other input unread."""
    first = (e for e in graph.edges if e.target_vertex == reader and e.waits)
    held = {edge.source_vertex for edge in first if edge.partition_type in _HOLDING_BACK}
    return _upstream(graph, held, over=_HOLDING_BACK)


def _needed(graph: graph_pb2.JobGraph, reader: str) -> frozenset[str]:
    """The vertices that must get on for a reader to have its side: the reader as well."""
    sides = {e.source_vertex for e in graph.edges if e.target_vertex == reader and e.load_first}
    return _upstream(graph, sides) | {reader}


def _upstream(
    graph: graph_pb2.JobGraph,
    vertices: Iterable[str],
    over: Collection[graph_pb2.ResultPartitionType.ValueType] | None = None,
) -> frozenset[str]:
    """Vertices and all that feeds them, over edges of some types (None = of any)."""
    found, rest = set[str](), list(vertices)
    while rest:
        current = rest.pop()
        if current in found:
            continue
        found.add(current)
        rest += (
            edge.source_vertex
            for edge in graph.edges
            if edge.target_vertex == current and (over is None or edge.partition_type in over)
        )
    return frozenset(found)


def _blocking_refusal(vertices: dict[str, graph_pb2.Vertex], edge: graph_pb2.Edge) -> str:
    source = vertices[edge.source_vertex]
    name = source.operators[edge.source_output.operator_index].name
    return (
        f"{operator_where(vertices[edge.target_vertex], 0)}: its broadcast side {name!r} is read whole first (load_first), "
        "so a blocking exchange adds nothing but that the side is made again after a restart: use "
        f".exchange('caching') on {name!r}, or leave .exchange(...) out"
    )


def _refusal(vertices: dict[str, graph_pb2.Vertex], edge: graph_pb2.Edge) -> str:
    source = vertices[edge.source_vertex]
    name = source.operators[edge.source_output.operator_index].name
    return (
        f"{operator_where(vertices[edge.target_vertex], 0)}: it reads another input whole first (load_first), and "
        f"what holds the rows of {name!r} back meanwhile holds that one back too, so nothing would ever go on. "
        f"Use .exchange('caching') or 'blocking' on {name!r} instead of "
        f"{exchange_name(edge.partition_type)!r}, or leave .exchange(...) out"
    )
