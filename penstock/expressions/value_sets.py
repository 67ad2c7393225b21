"""What ``is_in`` and ``index_in`` look for, in the type of the column that is searched.

A value is found where ``==`` finds it. One that the column's type does not have, a moment within a day
among dates or half of one among integers, is in no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.expressions.literals import (
    adopt,
    array_of_scalars,
    literal_scalar,
    written_decimal,
)
from penstock.expressions.moments import is_moment, nanoseconds, of_nanoseconds

SEARCHES = frozenset({"is_in", "index_in"})
"""Functions that have a value set."""
Positions = list[int] | None
"""Where values stand among others, None = they are all of these."""

_SEARCHED_FLOATS = (pa.float32(), pa.float64())


def adopted_values(values: pa.Array, searched: pa.DataType) -> tuple[pa.Array, Positions]:
    """The values that a row of the column may have, in its type.

    Returns:
        The values, and where they stand among those that were given.

    Raises:
        TypeError: they are of a type that the column is not compared with.

    >>> found, positions = adopted_values(pa.array([0.5, 7.0]), pa.int8())
    >>> found.to_pylist(), positions
    ([7], [1])
    """
    kind = searched.value_type if pt.is_dictionary(searched) else searched
    adopted = [_held(adopt(value, kind), kind) for value in values]
    # What the column's type cannot hold is in no row.
    kept = [i for i, v in enumerate(adopted) if v.type == kind or not _are_exact(kind, v.type)]
    positions = kept if len(kept) < len(adopted) else None
    adopted = [adopted[i] for i in kept]
    if all(value.type == kind for value in adopted):
        values = array_of_scalars(adopted, kind)
    elif not _are_compared(kind, values.type):
        raise TypeError(f"a {searched} is not compared with values of type {values.type}")
    return (_of_one_form(values) if values.type in _SEARCHED_FLOATS else values), positions


def search_kernel(
    name: str, search: Callable[..., Any], options: Any, values: pa.Array, positions: Positions
) -> Callable[[list[Any]], Any]:
    """The search of rows among values.

    Args:
        name: of ``SEARCHES``.
        search: the function of pyarrow.compute.
        options: with the values, as that wants them.
        values: in the type of the column.
        positions: where they stand among those that were given.
    """

    def find(arguments: list[Any]) -> Any:
        sought = arguments[0]
        # Arrow compares bits: zeros are equal here, and every NaN is one.
        found = search(
            [_of_one_form(sought) if sought.type in _SEARCHED_FLOATS else sought], options
        )
        return found if given is None else _taken(given, found)

    given = None
    if name == "index_in":
        given = None if positions is None else pa.array(positions, pa.int32())
        return find
    if values.null_count:
        return find
    unknown = pa.scalar(None, pa.bool_())
    return lambda arguments: pc.if_else(pc.is_valid(arguments[0]), find(arguments), unknown)


def _taken(positions: pa.Array, found: Any) -> Any:
    if isinstance(found, pa.Scalar):
        return positions[found.as_py()] if found.is_valid else found
    return positions.take(found)


def _of_one_form(values: Any) -> Any:
    nan = pa.scalar(math.nan, values.type)
    return pc.add(pc.if_else(pc.is_nan(values), nan, values), pa.scalar(0.0, values.type))


def _are_compared(kind: pa.DataType, values: pa.DataType) -> bool:
    try:
        pc.equal(pa.nulls(1, kind), pa.nulls(1, values))
    except (pa.ArrowException, TypeError):
        return False
    return True


def _are_exact(kind: pa.DataType, values: pa.DataType) -> bool:
    """Whether both are times, or numbers: they are compared without rounding."""
    classes = (is_moment, pt.is_duration, pt.is_time, _is_number)
    return any(is_class(kind) and is_class(values) for is_class in classes)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind))


def _held(value: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    """The same number or time as a value of the type, if it has one; else as it was."""
    if value.type == kind or not value.is_valid or not _are_exact(kind, value.type):
        return value
    if pt.is_temporal(kind):
        found = of_nanoseconds(nanoseconds(value), kind)
        return value if found is None else found
    number = value.as_py()
    if pt.is_floating(kind) and isinstance(number, Decimal):
        found = pa.scalar(float(number), kind)
        return found if found.as_py() == number else value
    if pt.is_decimal(kind) and isinstance(number, float):
        return written_decimal(value, kind)
    if pt.is_decimal(kind):
        try:
            return pa.scalar(Decimal(number), kind)
        except pa.ArrowInvalid:
            return value
    if pt.is_integer(kind) and not isinstance(number, int) and _is_whole(number):
        whole = int(number)
        return adopt(literal_scalar(whole), kind) if -(2**63) <= whole < 2**64 else value
    return value


def _is_whole(number: float | Decimal) -> bool:
    return number == (number.to_integral_value() if isinstance(number, Decimal) else number // 1)
