"""Where Arrow refuses, or spoils, a number that the result's type does not hold as it is.

Beside a float64 an integer becomes one, rounded where it has more than 53 bits, as in Python; Arrow refuses
those. A decimal that is rounded up to a digit more than its type has is an error; Arrow may give 0 for it
where other values follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""

ROUNDING = frozenset({"ceil", "floor", "round", "round_binary", "round_to_multiple", "trunc"})
"""Functions of pyarrow.compute that round."""
_WIDEST = 76


def of_floats(kernel: Apply, types: Sequence[pa.DataType], first: int = 0) -> Apply:
    """The kernel with integers of 64 bits beside a float64 made floats.

    Args:
        kernel: of arguments of these types.
        types: of the arguments.
        first: index of the first argument that is a value among values.

    >>> multiply = of_floats(pc.get_function("multiply").call, [pa.int64(), pa.float64()])
    >>> multiply([pa.scalar(2**62 + 1), pa.scalar(0.5)]).as_py() == 2.0**61
    True
    """
    values = types[first:]
    is_mixed = pa.float64() in values and any(map(_is_wide, values))
    return _with_rounded(kernel, first) if is_mixed else kernel


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


def rounding(kernel: Apply, types: Sequence[pa.DataType]) -> Apply:
    """The kernel of a function of ``ROUNDING``, which refuses what does not fit the type any more."""
    given = types[0]
    if not pt.is_decimal(given) or given.precision == _WIDEST:
        return kernel
    widened = pc.CastOptions(pa.decimal256(_WIDEST, given.scale))
    narrowed = pc.CastOptions(given)
    cast = pc.get_function("cast").call
    return lambda args: cast([kernel([cast(args[:1], widened), *args[1:]])], narrowed)
