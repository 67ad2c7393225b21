"""Where Arrow refuses, or spoils, a number that the result's type does not hold as it is.

Beside a float64 an integer becomes one, rounded where it has more than 53 bits, as in Python; Arrow refuses
those. Times of several zones and units Arrow makes one by their numbers, whatever the units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""


def of_floats(kernel: Apply, types: Sequence[pa.DataType], first: int = 0) -> Apply:
    """The kernel with integers of 64 bits beside a float64 made floats.

    Args:
        kernel: of arguments of these types.
        first: index of the first argument that is a value among values.

    >>> multiply = of_floats(pc.get_function("multiply").call, [pa.int64(), pa.float64()])
    >>> multiply([pa.scalar(2**62 + 1), pa.scalar(0.5)]).as_py() == 2.0**61
    True
    """
    values = types[first:]
    is_mixed = pa.float64() in values and any(map(_is_wide, values))
    return _with_rounded(kernel, first) if is_mixed else kernel


def beside_unsigned(kernel: Apply, types: Sequence[pa.DataType]) -> Apply:
    """The kernel with rows that have a null left out where a uint64 stands beside a signed integer.

    Arrow computes with both as int64, and fails for a uint64 beyond it, also beside a null, which is null.

    >>> add = beside_unsigned(pc.get_function("add").call, [pa.uint64(), pa.int8()])
    >>> add([pa.array([2**63, 1], pa.uint64()), pa.array([None, -1], pa.int8())]).to_pylist()
    [None, 0]
    """
    if not (any(map(pt.is_uint64, types)) and any(map(pt.is_signed_integer, types))):
        return kernel

    def apply(args: list[Any]) -> Any:
        try:
            return kernel(args)
        except pa.ArrowInvalid:
            if any(isinstance(arg, pa.Scalar) for arg in args):
                raise
            left, right = args
            both = pc.and_(pc.is_valid(left), pc.is_valid(right))
            nulls = [pa.scalar(None, arg.type) for arg in args]
            return kernel([pc.if_else(both, a, n) for a, n in zip(args, nulls, strict=True)])

    return apply


def clocks_problem(types: Sequence[pa.DataType]) -> str:
    """Why values of these types are not to be made one type, "" = they may.

    >>> clocks_problem([pa.timestamp("s", "UTC"), pa.timestamp("ms", "UTC")])
    ''
    >>> clocks_problem([pa.timestamp("s", "UTC"), pa.timestamp("ms")])
    "timestamp[s, tz=UTC] and timestamp[ms] are no times of one zone; cast one first: .cast('timestamp[s, tz=UTC]')"
    """
    times = [kind for kind in types if pt.is_timestamp(kind)]
    for one in times[1:]:
        if one.tz != times[0].tz and one.unit != times[0].unit:
            return f"{times[0]} and {one} are no times of one zone; cast one first: .cast('{times[0]}')"
    return ""


def choice_problem(types: Sequence[pa.DataType]) -> str:
    """Why ``choose`` cannot choose by the first of these types among values of the others, "" = it can.

    Arrow gives numbers a common type there, and takes the bytes of anything else as they are.

    >>> choice_problem([pa.int8(), pa.int8(), pa.float64()])
    ''
    >>> choice_problem([pa.int8(), pa.duration("s"), pa.duration("ms")])
    "values of duration[s] and duration[ms] are not chosen among; cast one first: .cast('duration[s]')"
    """
    if not pt.is_integer(types[0]) and not pt.is_null(types[0]):
        return f"it chooses by a number from 0, and {types[0]} is no integer"
    plain = [kind.value_type if pt.is_dictionary(kind) else kind for kind in types[1:]]
    if all(map(_is_plain_number, plain)):
        return ""
    for kind in plain[1:]:
        if kind != plain[0]:
            return f"values of {plain[0]} and {kind} are not chosen among; cast one first: .cast('{plain[0]}')"
    return ""


def _is_plain_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_float32(kind) or pt.is_float64(kind))


def _is_wide(kind: pa.DataType) -> bool:
    return bool(pt.is_int64(kind) or pt.is_uint64(kind))


def _with_rounded(kernel: Apply, first: int) -> Apply:
    cast = pc.get_function("cast").call
    rounded = pc.CastOptions(pa.float64(), allow_float_truncate=True)

    def apply(args: list[Any]) -> Any:
        is_given = [i >= first and _is_wide(arg.type) for i, arg in enumerate(args)]
        pairs = zip(args, is_given, strict=True)
        return kernel([cast([arg], rounded) if wide else arg for arg, wide in pairs])

    return apply
