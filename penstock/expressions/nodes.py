"""The steps of an expression in a job graph: each behind what it is computed from, the whole last (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pb import graph_pb2


def nodes_of(expression: graph_pb2.Expression) -> Sequence[graph_pb2.Expression]:
    """Its steps; graphs that earlier versions have stored have them inside each other."""
    if expression.nodes:
        return expression.nodes
    inside = [*expression.call.arguments]
    if expression.cast.HasField("argument"):
        inside.append(expression.cast.argument)
    return [*(node for each in inside for node in nodes_of(each)), expression]


def argument_count(node: graph_pb2.Expression) -> int:
    """How many of the values before it a step is computed from."""
    if node.HasField("cast"):
        return 1
    return node.call.argument_count or len(node.call.arguments)


def plain_column(expression: graph_pb2.Expression) -> str:
    """The column that an expression is, "" where it computes something."""
    nodes = nodes_of(expression)
    return nodes[0].column if len(nodes) == 1 else ""
