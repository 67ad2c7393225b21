"""Values on their way into cells of states and results, for compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from penstock.loops.operations.numbers import fail, family, number, refused, stand_in
from penstock.loops.row_errors import RowErrorKind

MISFIT = int(RowErrorKind.MISFIT)
_LIMIT = 2.0**63
_EXACT = 2**53

as_integer = stand_in("as_integer")
as_float = stand_in("as_float")
as_boolean = stand_in("as_boolean")


def _check_given(wanted: str, given: Any, *fitting: str) -> None:
    """Refuses a value that a cell never takes."""
    given_as = family(given)
    if given_as not in (*fitting, "none"):
        words = {"int": "an integer", "float": "a number with fractions", "bool": "a boolean"}
        refused(f"what is {wanted} is given {words.get(given_as, 'something that is no number')}")


@overload(as_integer, strict=False)  # type: ignore[untyped-decorator]
def _as_integer(value: Any, low: Any, high: Any, errors: Any, line: Any) -> Any:
    """An integer that is there and within limits."""
    _check_given("an integer", value, "int")

    def checked(value: Any, low: Any, high: Any, errors: Any, line: Any) -> Any:
        given = number(value, errors, line)
        if given < low or given > high:
            fail(errors, MISFIT, line)
        return given

    return checked


@overload(as_float, strict=False)  # type: ignore[untyped-decorator]
def _as_float(value: Any, errors: Any, line: Any) -> Any:
    """A float, or an integer that one is equal to."""
    _check_given("a float64", value, "float", "int")
    if family(value) == "float":
        return lambda value, errors, line: number(value, errors, line)
    return lambda value, errors, line: _exact_float(number(value, errors, line), errors, line)


@overload(as_boolean, strict=False)  # type: ignore[untyped-decorator]
def _as_boolean(value: Any, errors: Any, line: Any) -> Any:
    """A boolean."""
    _check_given("a boolean", value, "bool")
    return lambda value, errors, line: number(value, errors, line) != 0


@njit  # type: ignore[untyped-decorator]
def _exact_float(x: Any, errors: Any, line: Any) -> Any:
    result = np.float64(x)
    if (x > _EXACT or x < -_EXACT) and (result >= _LIMIT or np.int64(result) != x):
        fail(errors, MISFIT, line)
    return result


@njit  # type: ignore[untyped-decorator]
def grown(cells: Any) -> Any:
    """The same with twice the room."""
    more = np.empty(2 * len(cells), cells.dtype)
    more[: len(cells)] = cells
    return more
