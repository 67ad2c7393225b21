"""Decimals row by row in Python, for what Arrow has wrong or not at all."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, DecimalException, DivisionUndefined, localcontext
from itertools import repeat
from typing import Any

import pyarrow as pa

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""
_PYTHON_DIGITS = 400
"""More than a quotient of two decimals needs to be told from a whole number."""


def by_python(kind: pa.DataType, function: Callable[..., Decimal]) -> Apply:
    """What a function gives for decimals, as a decimal of that type; null where one is.

    Arrow's own division of decimals of 256 bits, by which it rounds them as well, is off by one for some of them.

    >>> floor = by_python(pa.decimal256(40, 2), lambda number: number // 1)
    >>> floor([pa.scalar(Decimal("7.50"), pa.decimal256(40, 2))]).as_py()
    Decimal('7.00')
    """

    def apply(args: list[Any]) -> Any:
        rows = max(1 if isinstance(arg, pa.Scalar) else len(arg) for arg in args)
        if any(not isinstance(arg, pa.Scalar) and not len(arg) for arg in args):
            rows = 0
        columns = [
            repeat(arg.as_py(), rows) if isinstance(arg, pa.Scalar) else arg.to_pylist()
            for arg in args
        ]
        try:
            with localcontext(prec=_PYTHON_DIGITS):
                found = [
                    None if None in row else function(*map(Decimal, row))
                    for row in zip(*columns, strict=True)
                ]
        except (ZeroDivisionError, DecimalException) as error:
            raise pa.ArrowInvalid(_why(error)) from error
        try:
            array = pa.array(found, kind)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(
                f"a result does not fit in precision {kind.precision} of {kind}"
            ) from error
        return array[0] if all(isinstance(arg, pa.Scalar) for arg in args) else array

    return apply


def _why(error: ArithmeticError) -> str:
    undefined = error.args and DivisionUndefined in error.args[0]
    is_by_zero = isinstance(error, ZeroDivisionError) or undefined
    return "divide by zero" if is_by_zero else "a result has more digits than can be counted"
