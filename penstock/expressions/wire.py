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
from penstock.expressions.operators import OPERATORS
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes, schema_to_bytes


def to_proto(expression: Expr) -> graph_pb2.Expression:
    """The expression as a message."""
    if isinstance(expression, Column):
        return graph_pb2.Expression(column=expression._name)
    if isinstance(expression, Literal):
        array = array_of_scalars([expression._scalar], expression._scalar.type)
        return graph_pb2.Expression(literal=graph_pb2.Literal(arrow=array_to_bytes(array)))
    if isinstance(expression, Cast):
        schema = pa.schema([("value", expression._target)])
        return graph_pb2.Expression(
            cast=graph_pb2.Cast(
                argument=to_proto(expression._argument),
                type=schema_to_bytes(schema),
                safe=expression._safe,
            )
        )
    if isinstance(expression, Call):
        return graph_pb2.Expression(
            call=graph_pb2.Call(
                function=expression._function,
                arguments=map(to_proto, expression._arguments),
                options_json=options_to_json(expression._options),
            )
        )
    raise ExpressionError(f"{type(expression).__name__} is no expression")


def from_proto(message: graph_pb2.Expression) -> Expr:
    """The expression of a message."""
    kind = message.WhichOneof("node")
    if kind == "column":
        return Column(message.column)
    if kind == "literal":
        array = array_from_bytes(message.literal.arrow)
        if len(array) != 1:
            raise ExpressionError(f"a literal holds one value, got {len(array)}")
        return Literal(array[0])
    if kind == "cast":
        try:
            target = schema_from_bytes(message.cast.type).field(0).type
        except (pa.ArrowException, IndexError, OSError) as e:
            raise ExpressionError(f"the type of a cast cannot be read: {e}") from e
        return Cast(from_proto(message.cast.argument), target, message.cast.safe)
    if kind == "call":
        return _call_from_proto(message.call)
    raise ExpressionError("the message holds no expression")


def _call_from_proto(message: graph_pb2.Call) -> Expr:
    arguments = tuple(map(from_proto, message.arguments))
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
