"""Conversions and functions of ``math`` for compiled loops, with the errors that Python has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from penstock.loops.operations.numbers import are_integers, fail, number, stand_in
from penstock.loops.row_errors import RowErrorKind

OVERFLOW = int(RowErrorKind.OVERFLOW)
DOMAIN = int(RowErrorKind.DOMAIN)
NOT_A_NUMBER = int(RowErrorKind.NOT_A_NUMBER)
INFINITE = int(RowErrorKind.INFINITE)
_LIMIT = 2.0**63


to_int = stand_in("to_int")
to_float = stand_in("to_float")
rounded = stand_in("rounded")
floor = stand_in("floor")
ceil = stand_in("ceil")
sqrt = stand_in("sqrt")
log = stand_in("log")
log10 = stand_in("log10")
exp = stand_in("exp")
is_nan = stand_in("is_nan")
is_inf = stand_in("is_inf")
is_finite = stand_in("is_finite")


@njit  # type: ignore[untyped-decorator]
def _whole(x: Any, errors: Any, line: Any) -> Any:
    """A float without fraction as an integer."""
    if math.isnan(x):
        fail(errors, NOT_A_NUMBER, line)
    elif math.isinf(x):
        fail(errors, INFINITE, line)
    elif not -_LIMIT <= x < _LIMIT:
        fail(errors, OVERFLOW, line)
    else:
        return np.int64(x)
    return np.int64(0)


def _to_whole(stand_in: Any, what: str, of_float: Any) -> None:
    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, errors: Any, line: Any) -> Any:
        if are_integers(what, a):
            return lambda a, errors, line: number(a, errors, line)

        def cut(a: Any, errors: Any, line: Any) -> Any:
            return _whole(of_float(number(a, errors, line)), errors, line)

        return cut


_to_whole(to_int, "int()", njit(lambda x: np.trunc(x)))
_to_whole(rounded, "round()", njit(lambda x: np.rint(x)))
_to_whole(floor, "math.floor()", njit(lambda x: np.floor(x)))
_to_whole(ceil, "math.ceil()", njit(lambda x: np.ceil(x)))


@overload(to_float, strict=False)  # type: ignore[untyped-decorator]
def _to_float(a: Any, errors: Any, line: Any) -> Any:
    are_integers("float()", a)
    return lambda a, errors, line: np.float64(number(a, errors, line))


def _of_float(stand_in: Any, what: str, function: Any) -> None:
    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, errors: Any, line: Any) -> Any:
        are_integers(what, a)

        def called(a: Any, errors: Any, line: Any) -> Any:
            return function(np.float64(number(a, errors, line)), errors, line)

        return called


@njit  # type: ignore[untyped-decorator]
def _sqrt(x: Any, errors: Any, line: Any) -> Any:
    if x < 0:
        fail(errors, DOMAIN, line)
        return 0.0
    return math.sqrt(x)


@njit  # type: ignore[untyped-decorator]
def _log(x: Any, errors: Any, line: Any) -> Any:
    if x <= 0:
        fail(errors, DOMAIN, line)
        return 0.0
    return math.log(x)


@njit  # type: ignore[untyped-decorator]
def _log10(x: Any, errors: Any, line: Any) -> Any:
    if x <= 0:
        fail(errors, DOMAIN, line)
        return 0.0
    return math.log10(x)


@njit  # type: ignore[untyped-decorator]
def _exp(x: Any, errors: Any, line: Any) -> Any:
    result = math.exp(x)
    if math.isinf(result) and not math.isinf(x):
        fail(errors, OVERFLOW, line)
    return result


_of_float(sqrt, "math.sqrt()", _sqrt)
_of_float(log, "math.log()", _log)
_of_float(log10, "math.log10()", _log10)
_of_float(exp, "math.exp()", _exp)
_of_float(is_nan, "math.isnan()", njit(lambda x, errors, line: math.isnan(x)))
_of_float(is_inf, "math.isinf()", njit(lambda x, errors, line: math.isinf(x)))
_of_float(is_finite, "math.isfinite()", njit(lambda x, errors, line: math.isfinite(x)))
