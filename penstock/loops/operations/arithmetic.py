"""Checked arithmetic for compiled loops, as ``penstock.loops.checked`` does it in Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from penstock.loops.operations.numbers import are_integers, fail, family, number, refused, stand_in
from penstock.loops.row_errors import RowErrorKind

OVERFLOW = int(RowErrorKind.OVERFLOW)
ZERO_DIVISION = int(RowErrorKind.ZERO_DIVISION)
SHIFT = int(RowErrorKind.SHIFT)
_MIN = np.int64(-(2**63))
_LIMIT = 2.0**63
_SAFE_PRODUCT = 9.0e18


add = stand_in("add")
subtract = stand_in("subtract")
multiply = stand_in("multiply")
divide = stand_in("divide")
floor_divide = stand_in("floor_divide")
modulo = stand_in("modulo")
power = stand_in("power")
shift_left = stand_in("shift_left")
shift_right = stand_in("shift_right")
bit_and = stand_in("bit_and")
bit_or = stand_in("bit_or")
bit_xor = stand_in("bit_xor")
invert = stand_in("invert")
negate = stand_in("negate")
positive = stand_in("positive")
absolute = stand_in("absolute")
end_above = stand_in("end_above")
end_below = stand_in("end_below")


# Integers that may wrap are computed without sign: signed ones the compiler takes for never wrapping.


@njit  # type: ignore[untyped-decorator]
def _add(x: Any, y: Any, errors: Any, line: Any) -> Any:
    result = np.int64(np.uint64(x) + np.uint64(y))
    if ((x ^ result) & (y ^ result)) < 0:
        fail(errors, OVERFLOW, line)
    return result


@njit  # type: ignore[untyped-decorator]
def _subtract(x: Any, y: Any, errors: Any, line: Any) -> Any:
    result = np.int64(np.uint64(x) - np.uint64(y))
    if ((x ^ y) & (x ^ result)) < 0:
        fail(errors, OVERFLOW, line)
    return result


@njit  # type: ignore[untyped-decorator]
def _multiply(x: Any, y: Any, errors: Any, line: Any) -> Any:
    result = np.int64(np.uint64(x) * np.uint64(y))
    about = np.float64(x) * np.float64(y)
    if about > _SAFE_PRODUCT or about < -_SAFE_PRODUCT:
        wraps = about >= _LIMIT * 1.001 or about <= -_LIMIT * 1.001
        if wraps or (x != 0 and ((x == -1 and y == _MIN) or result // x != y)):
            fail(errors, OVERFLOW, line)
    return result


def _binary(stand_in: Any, what: str, of_ints: Any, of_floats: Any) -> None:
    """An operation with two numbers, both made integers or both floats before."""

    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, b: Any, errors: Any, line: Any) -> Any:
        if are_integers(what, a, b):

            def with_ints(a: Any, b: Any, errors: Any, line: Any) -> Any:
                return of_ints(number(a, errors, line), number(b, errors, line), errors, line)

            return with_ints

        def with_floats(a: Any, b: Any, errors: Any, line: Any) -> Any:
            x = np.float64(number(a, errors, line))
            return of_floats(x, np.float64(number(b, errors, line)), errors, line)

        return with_floats


@njit  # type: ignore[untyped-decorator]
def _add_floats(x: Any, y: Any, errors: Any, line: Any) -> Any:
    return x + y


@njit  # type: ignore[untyped-decorator]
def _subtract_floats(x: Any, y: Any, errors: Any, line: Any) -> Any:
    return x - y


@njit  # type: ignore[untyped-decorator]
def _multiply_floats(x: Any, y: Any, errors: Any, line: Any) -> Any:
    return x * y


@njit  # type: ignore[untyped-decorator]
def _divide(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y == 0:
        fail(errors, ZERO_DIVISION, line)
        return 0.0
    return np.float64(x) / np.float64(y)


@njit  # type: ignore[untyped-decorator]
def _floor_divide(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y == 0:
        fail(errors, ZERO_DIVISION, line)
        return np.int64(0)
    if y == -1:
        if x == _MIN:
            fail(errors, OVERFLOW, line)
            return np.int64(0)
        return -x
    return x // y


@njit  # type: ignore[untyped-decorator]
def _floor_divide_floats(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y == 0:
        fail(errors, ZERO_DIVISION, line)
        return 0.0
    rest = np.fmod(x, y)
    quotient = (x - rest) / y
    if rest != 0.0 and (y < 0) != (rest < 0):
        quotient -= 1.0
    if quotient == 0.0:
        return np.copysign(0.0, x / y)
    whole = math.floor(quotient) if -_LIMIT < quotient < _LIMIT else quotient
    return whole + 1.0 if quotient - whole > 0.5 else np.float64(whole)


@njit  # type: ignore[untyped-decorator]
def _modulo(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y == 0:
        fail(errors, ZERO_DIVISION, line)
        return np.int64(0)
    return np.int64(0) if y == -1 else x % y


@njit  # type: ignore[untyped-decorator]
def _modulo_floats(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y == 0:
        fail(errors, ZERO_DIVISION, line)
        return 0.0
    rest = np.fmod(x, y)
    if rest == 0.0:
        return np.copysign(0.0, y)
    return rest + y if (y < 0) != (rest < 0) else rest


_binary(add, "+", _add, _add_floats)
_binary(subtract, "-", _subtract, _subtract_floats)
_binary(multiply, "*", _multiply, _multiply_floats)
_binary(divide, "/", _divide, _divide)
_binary(floor_divide, "//", _floor_divide, _floor_divide_floats)
_binary(modulo, "%", _modulo, _modulo_floats)


@overload(power, strict=False)  # type: ignore[untyped-decorator]
def _power(a: Any, exponent: Any, errors: Any, line: Any) -> Any:
    times, one = (
        (_multiply, np.int64(1)) if are_integers("**", a) else (_multiply_floats, np.float64(1))
    )

    def multiplied(a: Any, exponent: Any, errors: Any, line: Any) -> Any:
        x = number(a, errors, line)
        result = one
        for bit in range(6, -1, -1):
            result = times(result, result, errors, line)
            if exponent >> bit & 1:
                result = times(result, x, errors, line)
        return result

    return multiplied


def _of_integers(stand_in: Any, what: str, with_ints: Any) -> None:
    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, b: Any, errors: Any, line: Any) -> Any:
        if not are_integers(what, a, b):
            return refused(f"{what} takes integers")

        def of_both(a: Any, b: Any, errors: Any, line: Any) -> Any:
            return with_ints(number(a, errors, line), number(b, errors, line), errors, line)

        return of_both


@njit  # type: ignore[untyped-decorator]
def _shift_left(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y < 0:
        fail(errors, SHIFT, line)
        return np.int64(0)
    if x == 0:
        return x
    if y > 63:
        fail(errors, OVERFLOW, line)
        return x
    result = np.int64(np.uint64(x) << np.uint64(y))
    if result >> y != x:
        fail(errors, OVERFLOW, line)
    return result


@njit  # type: ignore[untyped-decorator]
def _shift_right(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y < 0:
        fail(errors, SHIFT, line)
        return np.int64(0)
    return x >> min(y, np.int64(63))


_of_integers(shift_left, "<<", _shift_left)
_of_integers(shift_right, ">>", _shift_right)


def _bitwise(stand_in: Any, what: str, with_ints: Any, with_bools: Any) -> None:
    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, b: Any, errors: Any, line: Any) -> Any:
        if not are_integers(what, a, b):
            return refused(f"{what} takes integers or booleans")
        is_boolean = {family(a), family(b)} == {"bool"}
        operation = with_bools if is_boolean else with_ints

        def of_both(a: Any, b: Any, errors: Any, line: Any) -> Any:
            return operation(number(a, errors, line), number(b, errors, line))

        return of_both


_bitwise(bit_and, "&", njit(lambda x, y: x & y), njit(lambda x, y: (x & y) != 0))
_bitwise(bit_or, "|", njit(lambda x, y: x | y), njit(lambda x, y: (x | y) != 0))
_bitwise(bit_xor, "^", njit(lambda x, y: x ^ y), njit(lambda x, y: (x ^ y) != 0))


@overload(invert, strict=False)  # type: ignore[untyped-decorator]
def _invert(a: Any, errors: Any, line: Any) -> Any:
    if not are_integers("~", a):
        return refused("~ takes integers")
    return lambda a, errors, line: ~number(a, errors, line)


@overload(negate, strict=False)  # type: ignore[untyped-decorator]
def _negate(a: Any, errors: Any, line: Any) -> Any:
    if not are_integers("-", a):
        return lambda a, errors, line: -number(a, errors, line)

    def of_int(a: Any, errors: Any, line: Any) -> Any:
        return _subtract(np.int64(0), number(a, errors, line), errors, line)

    return of_int


@overload(positive, strict=False)  # type: ignore[untyped-decorator]
def _positive(a: Any, errors: Any, line: Any) -> Any:
    are_integers("+", a)
    return lambda a, errors, line: number(a, errors, line)


@overload(absolute, strict=False)  # type: ignore[untyped-decorator]
def _absolute(a: Any, errors: Any, line: Any) -> Any:
    if not are_integers("abs()", a):
        return lambda a, errors, line: abs(number(a, errors, line))

    def of_int(a: Any, errors: Any, line: Any) -> Any:
        x = number(a, errors, line)
        return _subtract(np.int64(0), x, errors, line) if x < 0 else x

    return of_int


@njit  # type: ignore[untyped-decorator]
def _end_above(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y > x:
        _subtract(y, x, errors, line)
    return max(x, y)


@njit  # type: ignore[untyped-decorator]
def _end_below(x: Any, y: Any, errors: Any, line: Any) -> Any:
    if y < x:
        _subtract(y, x, errors, line)
    return min(x, y)


# Where a range ends that starts at the first number: one that is farther from it than 64 bits tell wraps as well.
_of_integers(end_above, "range()", _end_above)
_of_integers(end_below, "range()", _end_below)
