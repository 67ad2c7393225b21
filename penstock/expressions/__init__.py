"""Expressions over columns: ``col("price") * 0.908 > 100``."""

from penstock.expressions.compiled import BadRow, CompiledExpression, evaluate_each
from penstock.expressions.data_types import data_type
from penstock.expressions.expression import Expr, col, fn, lit, when

__all__ = [
    "BadRow",
    "CompiledExpression",
    "Expr",
    "col",
    "data_type",
    "evaluate_each",
    "fn",
    "lit",
    "when",
]
