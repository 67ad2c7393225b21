"""Comparisons for compiled loops, exact between integers and floats as in Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from penstock.loops.operations.numbers import are_integers, family, number, refused, stand_in

_LIMIT = 2.0**63


less = stand_in("less")
less_equal = stand_in("less_equal")
equal = stand_in("equal")
minimum = stand_in("minimum")
maximum = stand_in("maximum")


@njit  # type: ignore[untyped-decorator]
def _order(x: Any, y: Any) -> Any:
    """-1, 0 or 1 as an integer is less than, equal to or greater than a float, exactly; 2 = neither."""
    if math.isnan(y):
        return 2
    if y >= _LIMIT:
        return -1
    if y < -_LIMIT:
        return 1
    whole = math.floor(y)
    cut = np.int64(whole)
    if x < cut:
        return -1
    if x > cut:
        return 1
    return -1 if whole < y else 0


def _comparison(
    stand_in: Any, same: Any, of_order: Any, of_reversed: Any, *, takes_none: bool = False
) -> None:
    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, b: Any, errors: Any, line: Any) -> Any:
        are_integers("a comparison", a, b)
        floats = [family(kind) == "float" for kind in (a, b)]
        if floats[0] == floats[1]:
            decide = same
        elif floats[1]:
            decide = of_order
        else:
            decide = of_reversed

        def of_present(a: Any, b: Any, errors: Any, line: Any) -> Any:
            return decide(number(a, errors, line), number(b, errors, line))

        if not takes_none:
            return of_present

        def of_any(a: Any, b: Any, errors: Any, line: Any) -> Any:
            is_none = a is None
            if is_none or b is None:
                return is_none and b is None
            return decide(number(a, errors, line), number(b, errors, line))

        return of_any


_comparison(
    less,
    njit(lambda x, y: x < y),
    njit(lambda x, y: _order(x, y) == -1),
    njit(lambda x, y: _order(y, x) == 1),
)
_comparison(
    less_equal,
    njit(lambda x, y: x <= y),
    njit(lambda x, y: _order(x, y) <= 0),
    njit(lambda x, y: 0 <= _order(y, x) <= 1),
)
_comparison(
    equal,
    njit(lambda x, y: x == y),
    njit(lambda x, y: _order(x, y) == 0),
    njit(lambda x, y: _order(y, x) == 0),
    takes_none=True,
)


def _extreme(stand_in: Any, what: str, is_second: Any) -> None:
    @overload(stand_in, strict=False)  # type: ignore[untyped-decorator]
    def overloads(a: Any, b: Any, errors: Any, line: Any) -> Any:
        are_integers(what, a, b)
        families = {family(a), family(b)} - {"none"}
        if len(families) > 1:
            return refused(
                f"{what} of an integer and a number with fractions is one or the other: write float(...) or "
                "int(...) around one of them"
            )

        def of_both(a: Any, b: Any, errors: Any, line: Any) -> Any:
            x, y = number(a, errors, line), number(b, errors, line)
            return y if is_second(x, y) else x

        return of_both


_extreme(minimum, "min()", njit(lambda x, y: y < x))
_extreme(maximum, "max()", njit(lambda x, y: y > x))
