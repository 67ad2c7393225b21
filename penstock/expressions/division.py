"""Division: ``/`` is true division, ``//`` rounds down and ``%`` has the sign of the divisor, as in Python.

A duration by an integer is the nearest one of its unit, the even one of two, as in Python. Integers refuse a zero, floats by zero stay IEEE's (infinite or NaN). The least integer ``% -1`` is 0,
although its quotient does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, ROUND_FLOOR, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.expressions.decimal_rounding import rounding
from penstock.expressions.literals import array_of_scalars
from penstock.expressions.python_decimals import by_python

Apply = Callable[[list[Any]], Any]
"""Arrow arrays or scalars in, an array or scalar out."""
_DIGITS_OF_INTEGERS = {8: 3, 16: 5, 32: 10}
_DIGITS_MAX = 76
_WRONG_FROM = 0xFFFF_FFF0
"""Arrow takes the greatest word of 32 bits for one of the quotient, and then up to three less, where it goes wrong (``decimal_rounding``)."""


def true_divide(types: Sequence[pa.DataType]) -> Apply:
    """``/`` for arguments of these types: float64 for integers."""
    divide = pc.get_function("divide").call
    if pt.is_duration(types[0]) and pt.is_integer(types[1]):
        return lambda args: _nearest_duration(args[0], args[1])
    if any(map(pt.is_decimal, types)) and not any(map(pt.is_floating, types)):
        kind = _quotient_type(types)
        digit = Decimal(1).scaleb(-kind.scale)
        exactly = by_python(kind, lambda a, b: (a / b).quantize(digit, ROUND_DOWN))
        return exactly if pt.is_decimal256(kind) else _of_right_words(divide, exactly)
    if not all(pt.is_integer(t) or pt.is_boolean(t) for t in types):
        return divide
    to_float = pc.CastOptions(pa.float64(), allow_float_truncate=True)
    cast = pc.get_function("cast").call
    return lambda args: divide([cast([arg], to_float) for arg in args])


def floor_divide(types: Sequence[pa.DataType]) -> Apply:
    """``//`` for arguments of these types."""
    if all(map(pt.is_unsigned_integer, types)):
        return pc.get_function("divide_checked").call
    if all(map(pt.is_integer, types)):
        return lambda args: _floor_quotient(args[0], args[1])
    kind = _quotient_type(types)
    if pt.is_floating(kind):
        return _of_floats(np.floor_divide, kind)
    if any(map(pt.is_null, types)):
        return true_divide(types)
    if kind.precision == kind.scale:  # no digit for the -1 that a quotient of less than nothing is
        kind = _quotient_with_a_digit_more(kind)
    return _floor_of_decimals(types, kind)


def modulo(types: Sequence[pa.DataType]) -> Apply:
    """``%`` for arguments of these types."""
    if all(map(pt.is_integer, types)):
        return _unsigned_modulo if all(map(pt.is_unsigned_integer, types)) else _signed_modulo
    kind = _quotient_type(types)
    if pt.is_floating(kind):
        return _of_floats(np.mod, kind)
    if any(map(pt.is_null, types)):
        return true_divide(types)
    try:
        rest = _rest_type(types, kind)
    except ValueError:  # on its way there are more digits than 128 bits have
        return by_python(_short_rest_type(types), lambda a, b: a - b * _floor_of(a, b))
    wider = kind
    try:  # what is rounded down may have a digit more, and the rest none
        wider = pa.decimal128(kind.precision + 1, kind.scale)
        _rest_type(types, wider)
    except ValueError:
        wider = kind
    floor, cast = _floor_of_decimals(types, wider), pc.get_function("cast").call
    fitting = pc.CastOptions(rest)
    return lambda args: cast([pc.subtract(args[0], pc.multiply(floor(args), args[1]))], fitting)


def _quotient_with_a_digit_more(kind: pa.DataType) -> pa.DataType:
    """The same where there are no more digits: then what is less than nothing is refused as it comes."""
    if kind.precision == _DIGITS_MAX:
        return kind
    of_bits = pa.decimal128 if kind.precision < 38 else pa.decimal256
    return of_bits(kind.precision + 1, kind.scale)


def _rest_type(types: Sequence[pa.DataType], quotient: pa.DataType) -> pa.DataType:
    dividend, divisor = (pa.nulls(1, kind) for kind in types)
    return pc.subtract(dividend, pc.multiply(pa.nulls(1, quotient), divisor)).type


def _short_rest_type(types: Sequence[pa.DataType]) -> pa.DataType:
    """As many digits before the point as the divisor has, and as many behind it as either."""
    (_, scale), (precision, divisor_scale) = map(_digits_of, types)
    more = max(scale - divisor_scale, 0)
    of_bits = pa.decimal128 if precision + more <= 38 else pa.decimal256
    return of_bits(precision + more, divisor_scale + more)


def _digits_of(kind: pa.DataType) -> tuple[int, int]:
    """All digits of a number, and those behind the point."""
    if pt.is_decimal(kind):
        return kind.precision, kind.scale
    return _DIGITS_OF_INTEGERS.get(kind.bit_width, 20), 0


def _quotient_type(types: Sequence[pa.DataType]) -> pa.DataType:
    kind = pc.divide(*(pa.nulls(1, kind) for kind in types)).type
    if pt.is_duration(kind):
        raise TypeError(f"{types[0]} is divided by / only, which gives the nearest one")
    return kind


def _floor_of_decimals(types: Sequence[pa.DataType], kind: pa.DataType) -> Apply:
    """The quotient rounded down. Arrow cuts quotients towards zero at a scale that may be too short to tell
    -1.00001 from -1, unless the dividend has as many digits behind the point as the divisor, or is given them.

    >>> digits = pa.decimal128(5, 0), pa.decimal128(5, 3)
    >>> floor = _floor_of_decimals(digits, _quotient_type(digits))
    >>> str(floor([pa.scalar(Decimal(-100), digits[0]), pa.scalar(Decimal("99.999"), digits[1])]))
    '-2.0000'
    """
    dividend, divisor = types
    if any(map(pt.is_decimal256, types)):
        return by_python(kind, _floor_of)
    digits = _digits_of(dividend)
    more = max(0, (divisor.scale if pt.is_decimal(divisor) else 0) - 1 - digits[1])
    try:
        exact = dividend
        if more or not pt.is_decimal(dividend):
            exact = pa.decimal128(digits[0] + more, digits[1] + more)
        quotient = _quotient_type([exact, divisor])
    except ValueError:  # more digits than 128 bits have
        return by_python(kind, _floor_of)
    divide, cast = true_divide([exact, divisor]), pc.get_function("cast").call
    floor = rounding("floor", pc.get_function("floor").call, [quotient], {}, kind)
    exactly = pc.CastOptions(exact)
    return lambda args: floor([divide([cast(args[:1], exactly), args[1]])])


def _of_right_words(divide: Apply, exactly: Apply) -> Apply:
    """Arrow's division where it is right: a wrong quotient of its has a word of 32 bits with almost only ones."""

    def apply(args: list[Any]) -> Any:
        found = divide(args)
        sizes = pc.abs(found)
        if isinstance(sizes, pa.Scalar):
            sizes = array_of_scalars([sizes], sizes.type)
        if sizes.type.bit_width < 128 or not len(sizes):
            return found
        words = np.frombuffer(sizes.buffers()[1], np.uint32)[4 * sizes.offset :][: 4 * len(sizes)]
        if words.max() < _WRONG_FROM:
            return found
        doubtful = pa.array((words.reshape(-1, 4) >= _WRONG_FROM).any(axis=1))
        rest = exactly(
            [arg if isinstance(arg, pa.Scalar) else arg.filter(doubtful) for arg in args]
        )
        if isinstance(rest, pa.Scalar):
            return rest
        return pc.replace_with_mask(found, doubtful, rest)

    return apply


def _floor_of(dividend: Decimal, divisor: Decimal) -> Decimal:
    return (dividend / divisor).to_integral_value(ROUND_FLOOR)


def _of_floats(function: np.ufunc, kind: pa.DataType) -> Apply:
    """numpy's: Python's rule exactly (floor of the quotient is not: 1.0 // 0.1 is 9), null where one is."""

    def apply(args: list[Any]) -> Any:
        sides = [pc.cast(arg, kind) for arg in args]
        values = [_numpy(side) for side in sides]
        with np.errstate(all="ignore"):
            result = np.atleast_1d(function(*values))
        missing = [
            pc.is_null(side).to_numpy(zero_copy_only=False) for side in sides if _nulls(side)
        ]
        mask = np.logical_or.reduce(missing) if missing else None
        if any(isinstance(side, pa.Scalar) and not side.is_valid for side in sides):
            mask = np.ones(len(result), np.bool_)
        array = pa.array(result, kind, mask=mask)
        return array[0] if all(isinstance(side, pa.Scalar) for side in sides) else array

    return apply


def _numpy(side: Any) -> Any:
    if isinstance(side, pa.Scalar):
        value = side.as_py()
        return side.type.to_pandas_dtype()(np.nan if value is None else value)
    return side.to_numpy(zero_copy_only=False)


def _nulls(side: Any) -> int:
    return 0 if isinstance(side, pa.Scalar) else side.null_count


def _floor_quotient(a: Any, b: Any) -> Any:
    quotient = pc.divide_checked(a, b)
    remainder = pc.subtract(a, pc.multiply(quotient, b))
    signs_differ = pc.xor(pc.less(remainder, 0), pc.less(b, 0))
    round_down = pc.and_(pc.not_equal(remainder, 0), signs_differ)
    return pc.subtract(quotient, pc.cast(round_down, quotient.type))


def _nearest_duration(duration: Any, parts: Any) -> Any:
    units, parts = pc.cast(duration, pa.int64()), pc.cast(parts, pa.int64())
    below = _floor_quotient(units, parts)
    rest = pc.subtract(units, pc.multiply(below, parts))
    more = pc.subtract(parts, rest)  # to the next one; of the divisor's sign, as the rest is
    is_nearer = pc.if_else(pc.greater(parts, 0), pc.greater(rest, more), pc.less(rest, more))
    is_odd = pc.equal(pc.bit_wise_and(below, 1), 1)
    round_up = pc.or_(is_nearer, pc.and_(pc.equal(rest, more), is_odd))
    return pc.cast(pc.add(below, pc.cast(round_up, pa.int64())), duration.type)


def _unsigned_modulo(args: list[Any]) -> Any:
    a, b = args
    return pc.subtract(a, pc.multiply(pc.divide_checked(a, b), b))


def _signed_modulo(args: list[Any]) -> Any:
    a, b = args
    try:
        quotient = _floor_quotient(a, b)
    except pa.ArrowInvalid:  # a zero, or the least integer by -1: what is left by 1 is the same
        b = pc.if_else(pc.equal(b, -1), pa.scalar(1, b.type), b)
        quotient = _floor_quotient(a, b)
    return pc.subtract(a, pc.multiply(quotient, b))
