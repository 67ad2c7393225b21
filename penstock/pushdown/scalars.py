"""Expressions in Spark's SQL, with the values that they have here.

A text grows with what is used twice in it; past a limit the expression is refused, and the user splits it into columns.
"""

from __future__ import annotations

from typing import assert_never

import pyarrow as pa

from penstock.expressions import Expr
from penstock.expressions.typed_tree import (
    TypedCall,
    TypedCast,
    TypedColumn,
    TypedConstant,
    TypedExpression,
    typed,
)
from penstock.pushdown.casts import change_of_type
from penstock.pushdown.comparisons import COMPARISONS, comparison
from penstock.pushdown.functions import FUNCTIONS, case_when, check_computed
from penstock.pushdown.sql_text import NotCompiledError, constant, plain_kind, quoted
from penstock.pushdown.values import Value

TEXT_MAX = 50_000
_OF_ANY_TYPE = frozenset({"is_null", "is_valid"})
_NAMES = {
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}


def scalar_sql(expression: Expr, schema: pa.Schema) -> str:
    """An expression over a stream's columns.

    Raises:
        NotCompiledError: something in it does not compile; the message names it.

    Example: division goes down.
        >>> from penstock.expressions import col
        >>> scalar_sql(col("a") > 5, pa.schema([("a", pa.int32())]))
        '(`a` > CAST(5 AS INT))'
    """
    return _value(typed(expression, schema)).text


def _value(tree: TypedExpression) -> Value:
    match tree:
        case TypedColumn(name, kind):
            value = Value(quoted(name), plain_kind(kind))
        case TypedConstant(scalar):
            value = Value(constant(scalar), plain_kind(scalar.type), scalar)
        case TypedCast(argument, kind, is_safe):
            given = _value(argument)
            value = Value(change_of_type(given, kind, is_safe=is_safe), plain_kind(kind))
        case TypedCall():
            value = Value(_call(tree), plain_kind(tree.type))
        case _:
            assert_never(tree)
    if len(value.text) > TEXT_MAX:
        raise NotCompiledError(
            "an expression that is too long for Spark as it has to be written there; compute parts of it "
            "by .with_columns(...) first"
        )
    return value


def _call(tree: TypedCall) -> str:
    name = _NAMES.get(tree.function, tree.function)
    if name == "case_when":
        return _case(tree)
    if name not in FUNCTIONS and name not in COMPARISONS:
        raise NotCompiledError(f"the function {tree.function!r}")
    values = [_value(argument) for argument in tree.arguments]
    try:
        if name in COMPARISONS:
            left, right = values
            return comparison(name, left, right)
        if name not in _OF_ANY_TYPE:
            for value in values:
                check_computed(value)
        return FUNCTIONS[name](values, plain_kind(tree.type), tree.options)
    except NotCompiledError as error:
        raise NotCompiledError(f"the function {tree.function!r} with {error}") from error


def _case(tree: TypedCall) -> str:
    choice, *rest = tree.arguments
    if not isinstance(choice, TypedCall) or choice.function != "make_struct":
        raise NotCompiledError(
            "the function 'case_when' of a column; write ps.when(condition, value)"
        )
    conditions = [_value(condition) for condition in choice.arguments]
    values = [_value(value) for value in rest]
    count = len(conditions)
    otherwise = values[count] if len(values) > count else None
    return case_when(conditions, values[:count], otherwise, tree.type)
