"""Arithmetic as compiled functions do it, in Python: integers have 64 bits, and one that does not fit is an error.

A function that is declared as compiled computes with these wherever it runs uncompiled, so that both forms give the same.
Values that are no numbers pass as they are.

Example: what Python would carry on with is an error here.
    >>> add(2**63 - 1, 1)
    Traceback (most recent call last):
    OverflowError: an integer beyond 64 bits
"""

from __future__ import annotations

import math
from typing import Any, Final

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
POWER_MAX: Final = 64
"""The largest exponent of ``**``."""

BEYOND_64_BITS: Final = "an integer beyond 64 bits"


def _within(value: Any) -> Any:
    if type(value) is int and not INT64_MIN <= value <= INT64_MAX:
        raise OverflowError(BEYOND_64_BITS)
    return value


def add(a: Any, b: Any) -> Any:
    """``a + b``."""
    return _within(a + b)


def subtract(a: Any, b: Any) -> Any:
    """``a - b``."""
    return _within(a - b)


def multiply(a: Any, b: Any) -> Any:
    """``a * b``."""
    return _within(a * b)


def divide(a: Any, b: Any) -> Any:
    """``a / b``; integers are made floats before, as the machine does it."""
    if isinstance(a, int) and isinstance(b, int):
        return float(a) / float(b)
    return a / b


def floor_divide(a: Any, b: Any) -> Any:
    """``a // b``."""
    return _within(a // b)


def shift_left(a: Any, b: Any) -> Any:
    """``a << b``."""
    if b > POWER_MAX and a:
        raise OverflowError(BEYOND_64_BITS)
    return _within(a << b)


def negate(a: Any) -> Any:
    """``-a``."""
    return _within(-a)


def power(a: Any, exponent: int) -> Any:
    """``a ** exponent`` for exponents from 0 to 64: multiplications, from the highest bit on."""
    if not isinstance(a, int | float):
        return a**exponent
    result: Any = 1.0 if isinstance(a, float) else 1
    for bit in f"{exponent:b}":
        result = _within(result * result)
        if bit == "1":
            result = _within(result * a)
    return result


def absolute(a: Any) -> Any:
    """``abs(a)``."""
    return _within(abs(a))


def to_int(a: Any) -> Any:
    """``int(a)``."""
    return _within(int(a))


def rounded(a: Any) -> Any:
    """``round(a)``: to the nearest integer, the even one of two."""
    return _within(round(a))


def floor(a: Any) -> Any:
    """``math.floor(a)``."""
    return _within(math.floor(a))


def ceil(a: Any) -> Any:
    """``math.ceil(a)``."""
    return _within(math.ceil(a))


def trunc(a: Any) -> Any:
    """``math.trunc(a)``."""
    return _within(math.trunc(a))


def numbers_from(start: Any, stop: Any, step: Any = 1) -> range:
    """``range(start, stop, step)``."""
    if (stop - start) * step > 0:
        _within(stop - start)
    return range(start, stop, step)
