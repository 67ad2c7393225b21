"""Expressions as protobuf. A message from outside is checked as strictly as what a user writes."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import ExpressionError
from penstock.expressions import calls
from penstock.expressions.call_options import (
    array_from_bytes,
    array_to_bytes,
    options_from_json,
    options_to_json,
)
from penstock.expressions.expression import Call, Cast, Column, Expr, Literal
from penstock.expressions.literals import array_of_scalars
from penstock.expressions.nodes import argument_count, nodes_of
from penstock.expressions.operators import OPERATORS
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes, schema_to_bytes

OPTIONS_MAX = 4 << 20
"""Characters that one function's options may have, also where daemons take messages."""


def to_proto(expression: Expr) -> graph_pb2.Expression:
    """The expression as a message."""
    pending, found = [expression], []
    while pending:  # the whole, then what it is computed from, the last first
        part = pending.pop()
        found.append(_node(part))
        pending += part._children()
    return graph_pb2.Expression(nodes=reversed(found))


def _node(expression: Expr) -> graph_pb2.Expression:
    if isinstance(expression, Column):
        return graph_pb2.Expression(column=expression._name)
    if isinstance(expression, Literal):
        array = array_of_scalars([expression._scalar], expression._scalar.type)
        return graph_pb2.Expression(literal=graph_pb2.Literal(arrow=array_to_bytes(array)))
    if isinstance(expression, Cast):
        type_ = schema_to_bytes(pa.schema([("value", expression._target)]))
        return graph_pb2.Expression(cast=graph_pb2.Cast(type=type_, safe=expression._safe))
    if isinstance(expression, Call):
        options = options_to_json(expression._options)
        if len(options) > OPTIONS_MAX:
            raise ExpressionError(
                f"{expression}: the values in it take {len(options):,} characters, at most {OPTIONS_MAX:,} travel "
                "with an expression. Join with a stream that has them as rows, or broadcast it"
            )
        return graph_pb2.Expression(
            call=graph_pb2.Call(
                function=expression._function,
                argument_count=len(expression._arguments),
                options_json=options,
            )
        )
    raise ExpressionError(f"{type(expression).__name__} is no expression")


def from_proto(message: graph_pb2.Expression) -> Expr:
    """The expression of a message."""
    values: list[Expr] = []
    for node in nodes_of(message):
        count = argument_count(node)
        if count > len(values):
            raise ExpressionError(f"{count} values are taken where {len(values)} are")
        arguments = tuple(values[len(values) - count :])
        values[len(values) - count :] = [_from_node(node, arguments)]
    if len(values) != 1:
        raise ExpressionError(f"the message holds {len(values)} expressions, not one")
    return values[0]


def _from_node(node: graph_pb2.Expression, arguments: tuple[Expr, ...]) -> Expr:
    kind = node.WhichOneof("node")
    if kind == "column":
        return Column(node.column)
    if kind == "literal":
        array = array_from_bytes(node.literal.arrow)
        if len(array) != 1:
            raise ExpressionError(f"a literal holds one value, got {len(array)}")
        return Literal(array[0])
    if kind == "cast":
        try:
            target = schema_from_bytes(node.cast.type).field(0).type
        except (pa.ArrowException, IndexError, OSError) as e:
            raise ExpressionError(f"the type of a cast cannot be read: {e}") from e
        return Cast(arguments[0], target, node.cast.safe)
    if kind == "call":
        return _call_of(node.call, arguments)
    raise ExpressionError("the message holds a node without a kind")


def _call_of(message: graph_pb2.Call, arguments: tuple[Expr, ...]) -> Expr:
    options = options_from_json(message.options_json)
    if message.function in OPERATORS:
        expected = 1 if message.function in ("neg", "abs", "~") else 2
        if len(arguments) != expected or options:
            raise ExpressionError(
                f"the operator {message.function!r} takes {expected} arguments, got {len(arguments)}"
            )
        return Call(message.function, arguments)
    name = calls.resolve_name(message.function)
    inputs, chosen = calls.split_arguments(name, arguments, options)
    return Call(name, tuple(inputs), chosen)
