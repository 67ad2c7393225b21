"""Aggregates that a job gets when it is started from state of the job without them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.pb import checkpoint_pb2, graph_pb2


def mark_added(graph: graph_pb2.JobGraph, manifest: checkpoint_pb2.CheckpointManifest) -> None:
    """Has every aggregate say since when it is there (``Aggregate.since``), in both phases of an aggregation.

    Example: a mean is new beside a count that has been there from the beginning.
        >>> def counted(*names: str) -> graph_pb2.Operator:
        ...     operator = graph_pb2.Operator(uid="u")
        ...     for name in names:
        ...         operator.window_aggregate.aggregates.add(name=name, function="count")
        ...     return operator
        >>> manifest = checkpoint_pb2.CheckpointManifest()
        >>> _ = manifest.vertices.add().operators.add(uid="u", declared=counted("n"))
        >>> graph = graph_pb2.JobGraph(vertices=[graph_pb2.Vertex(operators=[counted("m", "n")])])
        >>> mark_added(graph, manifest)
        >>> [one.since for one in graph.vertices[0].operators[0].window_aggregate.aggregates]
        [1, 0]

    Args:
        graph: is changed.
        manifest: of what it is started from.
    """
    stored = {one.uid: one.declared for vertex in manifest.vertices for one in vertex.operators}
    for vertex in graph.vertices:
        for operator in vertex.operators:
            spec = _spec(operator)
            before = None if spec is None else _spec(stored.get(operator.uid, graph_pb2.Operator()))
            if spec is None or before is None or spec.phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
                continue
            since = {one.name: one.since for one in before.aggregates}
            now = max(since.values(), default=0) + 1
            for aggregate in spec.aggregates:
                aggregate.since = since.get(aggregate.name, now)
            for partial in _partials(graph, vertex, operator):
                for aggregate, final in zip(partial.aggregates, spec.aggregates, strict=True):
                    aggregate.since = final.since


def _partials(
    graph: graph_pb2.JobGraph, vertex: graph_pb2.Vertex, final: graph_pb2.Operator
) -> Iterator[graph_pb2.WindowAggregateSpec | graph_pb2.RunningAggregateSpec]:
    """The partial phases in front of the exchanges to a final one."""
    spec = _spec(final)
    sources = {edge.source_vertex for edge in graph.edges if edge.target_vertex == vertex.id}
    for source in (one for one in graph.vertices if one.id in sources):
        for operator in source.operators:
            partial = _spec(operator)
            if (
                spec is not None
                and partial is not None
                and partial.phase == graph_pb2.AGGREGATION_PHASE_PARTIAL
                and operator.name == final.name
                and list(partial.keys) == list(spec.keys)
                and [one.name for one in partial.aggregates]
                == [one.name for one in spec.aggregates]
            ):
                yield partial


def _spec(
    operator: graph_pb2.Operator,
) -> graph_pb2.WindowAggregateSpec | graph_pb2.RunningAggregateSpec | None:
    kind = operator.WhichOneof("spec")
    if kind == "window_aggregate":
        return operator.window_aggregate
    return operator.running_aggregate if kind == "running_aggregate" else None
