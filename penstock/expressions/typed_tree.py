"""An expression over a schema, node by node with its type: for who computes it elsewhere than in Arrow.

Literals have taken on the type of what stands beside them, and what depends on no column is a constant, exactly as in
``compiled``, from which the types come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.expressions.compiled import bound, bound_call
from penstock.expressions.expression import Call, Cast, Column, Expr


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """A column of the stream."""

    name: str
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class TypedConstant:
    """What depends on no column."""

    value: pa.Scalar

    @property
    def type(self) -> pa.DataType:
        """Type of the value."""
        return self.value.type


@dataclass(frozen=True, slots=True)
class TypedCast:
    """A change of type; ``is_safe``: any loss is an error."""

    argument: TypedExpression
    type: pa.DataType
    is_safe: bool


@dataclass(frozen=True, slots=True)
class TypedCall:
    """An operator or a function, by its resolved name."""

    function: str
    arguments: tuple[TypedExpression, ...]
    options: Mapping[str, Any]
    type: pa.DataType


TypedExpression = TypedColumn | TypedConstant | TypedCast | TypedCall


def typed(expression: Expr, schema: pa.Schema) -> TypedExpression:
    """The tree of an expression, with the type of each node.

    Raises:
        ExpressionError: as ``Expr.type``.

    Example: the literal is of the column's type.
        >>> from penstock.expressions import col
        >>> tree = typed(col("n") + 2, pa.schema([("n", pa.int8())]))
        >>> tree.type, tree.arguments[1].value
        (DataType(int8), <pyarrow.Int8Scalar: 2>)
    """
    kind, constant = bound(expression, schema)
    if constant is not None:
        return TypedConstant(constant)
    if isinstance(expression, Column):
        return TypedColumn(expression._name, kind)
    if isinstance(expression, Cast):
        return TypedCast(typed(expression._argument, schema), kind, expression._safe)
    assert isinstance(expression, Call), "literals are constants"
    arguments, options = bound_call(expression, schema)
    children = tuple(
        TypedConstant(value) if value is not None else typed(child, schema)
        for child, value in zip(expression._arguments, arguments, strict=True)
    )
    return TypedCall(expression._function, children, options, kind)
