"""Comparisons of numbers and times: exact for every pair of types.

Arrow compares an integer with a float as floats, and a signed with an unsigned integer as signed ones,
and fails on values that do not survive that (2**53 + 1, 2**63). Those are compared here by their sign:
that of ``left - right``, as if it were computed without a limit. A decimal beside a float is one that is no
float, as in Python; Arrow makes it the nearest. So are times of different units, of which
Arrow makes the coarser ones finer, and fails where that has no room for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.expressions.division import floor_divide
from penstock.expressions.moments import is_moment, resolution
from penstock.rows.casting import cast_kernel

COMPARISONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
"""Operators, and the functions of Arrow that they mean."""


def comparison_kernel(function: str, types: Sequence[pa.DataType]) -> Callable[[list[Any]], Any]:
    """How two values of these types are compared."""
    direct = pc.get_function(function).call
    left, right = types
    if pt.is_integer(left) and pt.is_floating(right):
        return lambda args: _compare(direct, args, _against_float)
    if pt.is_floating(left) and pt.is_integer(right):
        return lambda args: _compare(direct, args, lambda a, b: pc.negate(_against_float(b, a)))
    if pt.is_signed_integer(left) and pt.is_uint64(right):
        return lambda args: _compare(direct, args, _against_unsigned)
    if pt.is_uint64(left) and pt.is_signed_integer(right):
        return lambda args: _compare(direct, args, lambda a, b: pc.negate(_against_unsigned(b, a)))
    if pt.is_decimal(left) and pt.is_floating(right):
        nearest = cast_kernel(left, pa.float64(), safe=False)
        return lambda args: direct(_signs(args, lambda a, b: _against_binary(a, b, nearest)))
    if pt.is_floating(left) and pt.is_decimal(right):
        nearest = cast_kernel(right, pa.float64(), safe=False)
        return lambda args: direct(
            _signs(args, lambda a, b: pc.negate(_against_binary(b, a, nearest)))
        )
    finer = _ratio(left, right)
    if finer > 1:
        return lambda args: _compare(direct, args, lambda a, b: _against_finer(a, b, finer))
    finer = _ratio(right, left)
    if finer > 1:
        return lambda args: _compare(
            direct, args, lambda a, b: pc.negate(_against_finer(b, a, finer))
        )
    return direct


def _compare(
    direct: Callable[[list[Any]], Any], args: list[Any], sign: Callable[[Any, Any], Any]
) -> Any:
    try:
        return direct(args)
    except pa.ArrowInvalid:  # a value outside of what the common type holds exactly
        return direct(_signs(args, sign))


def _signs(args: list[Any], sign: Callable[[Any, Any], Any]) -> list[Any]:
    """What is compared in the place of the arguments: the sign of their difference, null where one is, and 0."""
    left, right = args
    both = pc.and_(pc.is_valid(left), pc.is_valid(right))
    known = pc.if_else(both, sign(left, right), pa.scalar(None, pa.float64()))
    return [known, pa.scalar(0.0)]


def _against_float(integer: Any, number: Any) -> Any:
    """Sign of ``integer - number``; NaN where the number is NaN."""
    kind = pa.uint64() if pt.is_uint64(integer.type) else pa.int64()
    low, high = (0.0, 2.0**64) if pt.is_uint64(kind) else (-(2.0**63), 2.0**63)
    integer, number = pc.cast(integer, kind), pc.cast(number, pa.float64())
    whole = pc.floor(number)
    is_inside = pc.and_(pc.greater_equal(whole, low), pc.less(whole, high))
    same_kind = pc.cast(pc.if_else(is_inside, whole, 0.0), kind)
    fraction = pc.if_else(pc.greater(number, whole), -1.0, 0.0)
    near = _sign(integer, same_kind, fraction)
    far = pc.if_else(
        pc.greater(number, 0.0), -1.0, pc.if_else(pc.less(number, 0.0), 1.0, float("nan"))
    )
    return pc.if_else(is_inside, near, far)


def _against_unsigned(signed: Any, unsigned: Any) -> Any:
    """Sign of ``signed - unsigned``."""
    is_negative = pc.less(signed, 0)
    natural = pc.cast(pc.if_else(is_negative, pa.scalar(0, signed.type), signed), pa.uint64())
    return pc.if_else(is_negative, -1.0, _sign(natural, unsigned, 0.0))


def _against_binary(decimal: Any, number: Any, nearest: Callable[[Any], Any]) -> Any:
    """Sign of ``decimal - number``; NaN where the number is NaN.

    The float nearest to a decimal is on the same side of every other float as the decimal itself.
    """
    number, near = pc.cast(number, pa.float64()), nearest(decimal)
    sign, is_near = _sign(near, number, 0.0), pc.fill_null(pc.equal(near, number), False)
    if isinstance(is_near, pa.Scalar):
        if is_near.as_py():
            sign = pa.scalar(_python_sign(decimal.as_py(), number.as_py()))
    elif is_near.true_count and isinstance(decimal, pa.Scalar):
        sign = pc.if_else(is_near, _python_sign(decimal.as_py(), near.as_py()), sign)
    elif is_near.true_count:
        signs = _signs_of_nearest(decimal.filter(is_near), nearest)
        sign = pc.replace_with_mask(sign, is_near, signs)
    return pc.if_else(pc.is_nan(number), float("nan"), sign)


def _signs_of_nearest(decimals: Any, nearest: Callable[[Any], Any]) -> Any:
    """Sign of each decimal less the float nearest to it; Python settles each number once."""
    if decimals.type.bit_width < 128:
        decimals = pc.cast(decimals, pa.decimal128(decimals.type.precision, decimals.type.scale))
    coded = decimals.dictionary_encode()
    numbers = coded.dictionary
    signs = map(_python_sign, numbers.to_pylist(), nearest(numbers).to_pylist())
    return pa.array(list(signs), pa.float64()).take(coded.indices)


def _python_sign(left: Decimal, right: float) -> float:
    return float((left > right) - (left < right))


def _ratio(coarse: pa.DataType, fine: pa.DataType) -> int:
    """How many units of the one time are one of the other, 0 = they are none that are compared."""
    for is_class in (is_moment, pt.is_duration):
        if is_class(coarse) and is_class(fine):
            return resolution(coarse) // resolution(fine)
    return 0


def _against_finer(coarse: Any, fine: Any, ratio: int) -> Any:
    """Sign of ``coarse - fine``, of which the one counts so many units of the other."""
    coarse, fine = _count(coarse), _count(fine)
    whole = floor_divide([fine.type, pa.int64()])([fine, pa.scalar(ratio, pa.int64())])
    is_more = pc.not_equal(pc.multiply(whole, ratio), fine)
    return _sign(coarse, whole, pc.if_else(is_more, -1.0, 0.0))


def _count(time: Any) -> Any:
    if pt.is_date32(time.type):
        time = pc.cast(time, pa.int32())
    return pc.cast(time, pa.int64())


def _sign(left: Any, right: Any, equal: Any) -> Any:
    """1, -1, or what stands for equal."""
    return pc.if_else(pc.greater(left, right), 1.0, pc.if_else(pc.less(left, right), -1.0, equal))
