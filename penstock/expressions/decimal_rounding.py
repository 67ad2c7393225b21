"""``round`` and its relatives for decimals, in every mode exact, or refused.

Arrow divides a decimal of more than 64 bits by one of more than 32 wrongly where a word of the quotient has almost only ones: it cuts
4294967295.99999999999999 to 4294967294. So no more digits are cut at once than 32 bits hold; where that cannot be, Python rounds. What is rounded up to a digit more than
the type has is an error; Arrow may give 0 for it where other values follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import (
    ROUND_CEILING,
    ROUND_DOWN,
    ROUND_FLOOR,
    ROUND_HALF_DOWN,
    ROUND_HALF_EVEN,
    ROUND_HALF_UP,
    ROUND_UP,
    Decimal,
)
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.errors import ExpressionError
from penstock.expressions.python_decimals import by_python
from penstock.rows.casting import DIGITS_OF_64_BITS, cast_kernel

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""

ROUNDING = frozenset({"ceil", "floor", "round", "round_binary", "round_to_multiple", "trunc"})
"""Functions of pyarrow.compute that round."""
_HALF = Decimal("0.5")


def _to_odd(number: Decimal) -> Decimal:
    below = number.to_integral_value(ROUND_FLOOR)
    is_tie = number - below == _HALF
    return below + (below % 2 == 0) if is_tie else number.to_integral_value(ROUND_HALF_EVEN)


_WHOLE: Mapping[str, Callable[[Decimal], Decimal]] = {
    "down": lambda number: number.to_integral_value(ROUND_FLOOR),
    "up": lambda number: number.to_integral_value(ROUND_CEILING),
    "towards_zero": lambda number: number.to_integral_value(ROUND_DOWN),
    "towards_infinity": lambda number: number.to_integral_value(ROUND_UP),
    "half_down": lambda number: (number - _HALF).to_integral_value(ROUND_CEILING),
    "half_up": lambda number: (number + _HALF).to_integral_value(ROUND_FLOOR),
    "half_towards_zero": lambda number: number.to_integral_value(ROUND_HALF_DOWN),
    "half_towards_infinity": lambda number: number.to_integral_value(ROUND_HALF_UP),
    "half_to_even": lambda number: number.to_integral_value(ROUND_HALF_EVEN),
    "half_to_odd": _to_odd,
}
"""The whole number that a decimal is rounded to, by mode."""
_WIDEST = 76
_WORD = 1 << 32


def rounding(
    name: str,
    kernel: Apply,
    types: Sequence[pa.DataType],
    given: Mapping[str, Any],
    target: pa.DataType | None = None,
) -> Apply:
    """The kernel of a function of ``ROUNDING``.

    Args:
        name: of the function.
        kernel: of it.
        types: of its arguments.
        given: its options by name.
        target: the type of the result, None = that of the first argument.

    Raises:
        ExpressionError: decimals of this type cannot be rounded so.
    """
    kind = types[0]
    if not pt.is_decimal(kind):
        return kernel
    is_long = kind.precision > DIGITS_OF_64_BITS
    if is_long and name == "round_binary":
        raise ExpressionError(
            f"{name}: a {kind} is rounded to as many digits in all rows only; use round(ndigits=...)"
        )
    multiple, digits = _multiple(name, kind, given)
    if is_long and multiple * 10 ** max(kind.scale - digits, 0) >= _WORD:
        scale = max(digits + 1, 0)
        if multiple * 10 ** (scale + 1 - digits) >= _WORD:
            return _by_python(target or kind, multiple * Decimal(10) ** -digits, given)
        wide, widen = _shortened(kind, scale, len(str(multiple)) + max(-digits, 0))
    elif kind.precision == _WIDEST:
        return _without_zeros(kernel, kind, multiple, digits)
    else:
        is_full = kind.precision >= 38
        wide = pa.decimal256(_WIDEST, kind.scale) if is_full else pa.decimal128(38, kind.scale)
        widen = _cast(wide)
    narrow = _cast(target or kind)
    return lambda args: narrow(kernel([widen(args[0]), *args[1:]]))


def _by_python(kind: pa.DataType, step: Decimal, given: Mapping[str, Any]) -> Apply:
    whole = _WHOLE[given.get("round_mode", "half_to_even")]
    in_python = by_python(kind, lambda number: whole(number / step) * step)
    return lambda args: in_python(args[:1])


def _cast(kind: pa.DataType) -> Callable[[Any], Any]:
    cast, options = pc.get_function("cast").call, pc.CastOptions(kind)
    return lambda value: cast([value], options)


def _multiple(name: str, kind: pa.DataType, given: Mapping[str, Any]) -> tuple[int, int]:
    """What is rounded to multiples of: a number, and how many of its digits are behind the point."""
    if name != "round_to_multiple":
        return 1, given.get("ndigits", 0)
    multiple = given.get("multiple", 1.0)
    multiple = multiple if isinstance(multiple, pa.Scalar) else pa.scalar(multiple)
    _, figures, exponent = multiple.cast(pa.decimal256(_WIDEST, kind.scale)).as_py().as_tuple()
    text = "".join(map(str, figures))
    short = text.rstrip("0")
    return int(short or 0), -exponent - len(text) + len(short)


def _shortened(
    kind: pa.DataType, scale: int, whole_digits: int
) -> tuple[pa.DataType, Callable[[Any], Any]]:
    """Decimals with so many digits behind the point and one more, which says whether there were others: what lies
    between two that are rounded to, or in their middle, still does.

    Args:
        whole_digits: before the point at least: as many as what is rounded to has.
    """
    precision = max(kind.precision - kind.scale + scale, 1)
    width = min(max(precision + 2, scale + 1 + whole_digits), _WIDEST)
    of_bits = pa.decimal128 if width <= 38 else pa.decimal256
    short, wide = of_bits(precision, scale), of_bits(width, scale + 1)
    cut = cast_kernel(kind, short, safe=False)
    again, widen, as_wide = map(_cast, (kind, of_bits(precision + 1, scale + 1), wide))
    more = Decimal(1).scaleb(-scale - 1)
    above, below, none = (
        pa.scalar(number, of_bits(scale + 1, scale + 1)) for number in (more, -more, 0)
    )
    zero = pa.scalar(Decimal(0), kind)

    def shorten(numbers: Any) -> Any:
        found = cut(numbers)
        is_more = pc.not_equal(again(found), numbers)
        away = pc.if_else(pc.less(numbers, zero), below, above)
        return as_wide(pc.add(widen(found), pc.if_else(is_more, away, none)))

    return wide, shorten


def _without_zeros(kernel: Apply, kind: pa.DataType, multiple: int, digits: int) -> Apply:
    if digits > kind.scale or multiple * 10 ** (kind.scale - digits) >= 10**_WIDEST:
        return kernel
    least, zero = (pa.scalar(n * Decimal(10) ** -digits).cast(kind) for n in (multiple, 0))

    def apply(args: list[Any]) -> Any:
        found = kernel(args)
        lost = pc.and_(pc.equal(found, zero), pc.greater_equal(pc.abs(args[0]), least))
        if pc.any(lost, min_count=0).as_py():
            raise pa.ArrowInvalid(f"a result has more digits than {kind}")
        return found

    return apply
