"""Cells of states and results for compiled loops."""

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


put = stand_in("put")
store = stand_in("store")


def _check_given(kind: Any, given: Any, what: str) -> None:
    """Refuses a value that a cell of a kind ("int64", "float64", "bool") never takes."""
    wanted, given_as = str(kind), family(given)
    if not given_as:
        refused(f"{what} is given something that is no number")
    fits = {"int64": {"int"}, "float64": {"int", "float"}, "bool": {"bool"}}[wanted]
    if given_as != "none" and given_as not in fits:
        shown = {"int": "an integer", "float": "a number with fractions", "bool": "a boolean"}[
            given_as
        ]
        refused(f"{what} of type {wanted} is given {shown}")


@njit  # type: ignore[untyped-decorator]
def _exact_float(x: Any, errors: Any, line: Any) -> Any:
    """An integer as a float that is equal to it."""
    result = np.float64(x)
    if (x > _EXACT or x < -_EXACT) and (result >= _LIMIT or np.int64(result) != x):
        fail(errors, MISFIT, line)
    return result


def _cell_value(dtype: Any, given_as: str) -> Any:
    if str(dtype) == "bool":
        return njit(lambda x, errors, line: x != 0)
    if str(dtype) == "float64" and given_as != "float":
        return _exact_float
    return njit(lambda x, errors, line: x)


@overload(put, strict=False)  # type: ignore[untyped-decorator]
def _put(cells: Any, are_there: Any, index: Any, value: Any, errors: Any, line: Any) -> Any:
    """One value of a result."""
    _check_given(cells.dtype, value, "a column")
    converted = _cell_value(cells.dtype, family(value))

    def written(cells: Any, are_there: Any, index: Any, value: Any, errors: Any, line: Any) -> None:
        is_there = value is not None
        are_there[index] = is_there
        if is_there:
            cells[index] = converted(number(value, errors, line), errors, line)

    def nothing(cells: Any, are_there: Any, index: Any, value: Any, errors: Any, line: Any) -> None:
        are_there[index] = False

    return nothing if family(value) == "none" else written


@overload(store, strict=False)  # type: ignore[untyped-decorator]
def _store(
    cells: Any, are_there: Any, index: Any, value: Any, low: Any, high: Any, errors: Any, line: Any
) -> Any:
    """A new value of a state, which is within limits where it is an integer; None removes it."""
    _check_given(cells.dtype, value, "a state")
    converted = _cell_value(cells.dtype, family(value))
    is_limited = str(cells.dtype) == "int64"

    def written(
        cells: Any,
        are_there: Any,
        index: Any,
        value: Any,
        low: Any,
        high: Any,
        errors: Any,
        line: Any,
    ) -> None:
        if value is None:
            are_there[index] = False
            return
        given = converted(number(value, errors, line), errors, line)
        if is_limited and not low <= given <= high:
            fail(errors, MISFIT, line)
        if errors[0] == 0:
            are_there[index] = True
            cells[index] = given

    def nothing(
        cells: Any,
        are_there: Any,
        index: Any,
        value: Any,
        low: Any,
        high: Any,
        errors: Any,
        line: Any,
    ) -> None:
        are_there[index] = False

    return nothing if family(value) == "none" else written


@njit  # type: ignore[untyped-decorator]
def grown(cells: Any) -> Any:
    """The same with twice the room."""
    more = np.empty(2 * len(cells), cells.dtype)
    more[: len(cells)] = cells
    return more
