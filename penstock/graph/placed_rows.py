"""By which keys the rows lie at every place of a job graph: what makes an operator per key right.

Rows lie by keys behind a hash exchange, and stay so where operators leave the key columns alone and rows
do not move. It is worked out from the graph itself, so that the JobManager need not believe a client.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.expressions.nodes import plain_column
from penstock.graph.operator_checks import late_tag
from penstock.pb import graph_pb2

Keys = tuple[str, ...]

_KEPT_BY = ("filter", "event_time", "pass")
_ROW_FUNCTIONS = (graph_pb2.ROW_FUNCTION_KIND_FILTER, graph_pb2.ROW_FUNCTION_KIND_KEY)


class PlacedRows:
    """The keys of each edge and of each operator's input; () = none.

    Args:
        graph: vertices in topological order; what comes earlier than its producer counts as lying anyhow.
    """

    def __init__(self, graph: graph_pb2.JobGraph) -> None:
        self._edges: dict[str, Keys] = {}
        self._inputs: dict[tuple[str, int], Keys] = {}
        vertices = {vertex.id: vertex for vertex in graph.vertices}
        leaving: dict[str, list[graph_pb2.Edge]] = {}
        entering: dict[str, list[graph_pb2.Edge]] = {}
        for edge in graph.edges:
            leaving.setdefault(edge.source_vertex, []).append(edge)
            entering.setdefault(edge.target_vertex, []).append(edge)
        for vertex in graph.vertices:
            first = [e for e in entering.get(vertex.id, ()) if not e.target_input]
            self._inputs[vertex.id, 0] = _common(self._edges.get(e.id, ()) for e in first)
            for index, operator in enumerate(vertex.operators[1:], start=1):
                chained = operator.input
                self._inputs[vertex.id, index] = self._behind(
                    vertex, chained.operator_index, chained.side_tag
                )
            for edge in leaving.get(vertex.id, ()):
                self._edges[edge.id] = self._of_edge(edge, vertex, vertices[edge.target_vertex])

    def of_edge(self, edge: graph_pb2.Edge) -> Keys:
        """By what the rows lie in the subtasks of the vertex that the edge feeds."""
        return self._edges.get(edge.id, ())

    def of_input(self, vertex: graph_pb2.Vertex, index: int) -> Keys:
        """By what the rows lie that an operator of a vertex reads, by its first input."""
        return self._inputs.get((vertex.id, index), ())

    def _of_edge(
        self, edge: graph_pb2.Edge, source: graph_pb2.Vertex, target: graph_pb2.Vertex
    ) -> Keys:
        if edge.partitioning == graph_pb2.PARTITIONING_HASH:
            return tuple(edge.key_columns)
        stays = edge.partitioning == graph_pb2.PARTITIONING_FORWARD and (
            (source.parallelism, source.max_parallelism)
            == (target.parallelism, target.max_parallelism)
        )
        output = edge.source_output
        return self._behind(source, output.operator_index, output.side_tag) if stays else ()

    def _behind(self, vertex: graph_pb2.Vertex, index: int, tag: str) -> Keys:
        if not 0 <= index < len(vertex.operators):
            return ()
        keys = self._inputs.get((vertex.id, index), ())
        return keys if _keeps(vertex.operators[index], keys, tag) else ()


def _keeps(operator: graph_pb2.Operator, keys: Keys, tag: str) -> bool:
    """Whether the rows of an output have the key columns as they came in."""
    kind = operator.WhichOneof("spec")
    if tag:
        return tag in (late_tag(operator), operator.on_error.tag) and kind not in (
            "process",
            "window_function",
        )
    if kind == "project":
        same = {
            column.name
            for column in operator.project.columns
            if plain_column(column.expression) == column.name
        }
        return same.issuperset(keys)
    if kind == "row_function":
        return operator.row_function.kind in _ROW_FUNCTIONS
    return kind in _KEPT_BY


def _common(given: Iterable[Keys]) -> Keys:
    """What all have in common: the same keys, or none."""
    different = set(given)
    return different.pop() if len(different) == 1 else ()
