"""What a compiled function deals with: columns, states and results of numbers and booleans, as its loop holds them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.types as pt

from penstock.loops.checked import INT64_MAX, INT64_MIN

_LIMITS = {
    pa.int8(): (-(2**7), 2**7 - 1),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (INT64_MIN, INT64_MAX),
    pa.uint8(): (0, 2**8 - 1),
    pa.uint16(): (0, 2**16 - 1),
    pa.uint32(): (0, 2**32 - 1),
}
_FLOATS = {pa.float32(): "float32", pa.float64(): "float64"}


def column_kind(type_: pa.DataType) -> str:
    """The dtype in which a loop reads a column; "" = it does not compute with it.

    Example:
        >>> column_kind(pa.int16()), column_kind(pa.string())
        ('int16', '')
    """
    if type_ in _LIMITS:
        return str(type_)
    return _FLOATS.get(type_, "bool" if pt.is_boolean(type_) else "")


def result_kind(type_: pa.DataType) -> str:
    """The dtype in which a loop keeps a state or a result: "int64", "float64" or "bool"; "" = it does not.

    Example:
        >>> result_kind(pa.int16()), result_kind(pa.float32())
        ('int64', '')
    """
    if type_ in _LIMITS:
        return "int64"
    if type_ == pa.float64():
        return "float64"
    return "bool" if pt.is_boolean(type_) else ""


def is_passed_on(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type go into a result of a type as they are: of the same, or of another width of it.

    Example:
        >>> is_passed_on(pa.decimal128(5, 2), pa.decimal128(20, 2)), is_passed_on(pa.int64(), pa.string())
        (True, False)
    """
    if given == wanted:
        return True
    if pt.is_timestamp(given) and pt.is_timestamp(wanted):
        return bool(given.tz == wanted.tz)
    return bool(given.id == wanted.id) and (pt.is_decimal(given) or pt.is_duration(given))


def limits_of(type_: pa.DataType) -> tuple[int, int]:
    """The least and the largest integer of a type; those of int64 where it has no integers."""
    return _LIMITS.get(type_, (INT64_MIN, INT64_MAX))


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state as its loop sees it.

    Attributes:
        kind: see ``result_kind``.
        low: the least integer that it holds.
        default: what it gives where it has none; None = nothing.
    """

    attribute: str
    kind: str
    low: int
    high: int
    default: int | float | bool | None


@dataclass(frozen=True, slots=True)
class FunctionShape:
    """What a function is given and gives.

    Attributes:
        columns: of its input, without event time.
        results: of its output, without event time.
        states: by attribute.
        constants: numbers by the name that the function reads: of its module, or ``self.limit``.
        functions: of Python's by the name that the function calls: "math.floor" by ``floor``.
        has_event_time: rows have one.
    """

    columns: pa.Schema
    keys: tuple[str, ...]
    results: pa.Schema
    states: dict[str, StateShape]
    constants: dict[str, int | float | bool] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    has_event_time: bool = False
