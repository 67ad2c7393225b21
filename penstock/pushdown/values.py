"""Values in Spark's SQL with our types, and how one becomes one of another type.

What is computed is of types that both engines have alike: booleans, signed integers, floats, decimals, strings, dates and
times. Others go through untouched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from penstock.pushdown.sql_text import NotCompiledError, cast, failing, plain_kind

CAST_FIRST = "cast it first: col('x').cast('int64')"
_WHOLE_IN_FLOAT = {pa.float32(): 2**24, pa.float64(): 2**53}
"""Up to here every integer is a float."""


@dataclass(frozen=True, slots=True)
class Value:
    """A text of SQL, and the type of ours that its values have.

    Attributes:
        constant: where it is one.
    """

    text: str
    kind: pa.DataType
    constant: pa.Scalar | None = None

    @property
    def may_be_nan(self) -> bool:
        """Whether NaN has to be thought of."""
        if not pt.is_floating(self.kind):
            return False
        return self.constant is None or (
            self.constant.is_valid and math.isnan(self.constant.as_py())
        )


def is_text(kind: pa.DataType) -> bool:
    """Strings of either width."""
    return bool(pt.is_string(kind) or pt.is_large_string(kind))


def is_computed(kind: pa.DataType) -> bool:
    """Whether something can be computed of values of a type as we do it."""
    if pt.is_timestamp(kind):
        return kind.unit != "ns"
    return bool(
        pt.is_boolean(kind)
        or pt.is_signed_integer(kind)
        or pt.is_float32(kind)
        or pt.is_float64(kind)
        or pt.is_decimal128(kind)
        or is_text(kind)
        or pt.is_date32(kind)
    )


def as_kind(value: Value, kind: pa.DataType, *, is_alone: bool = False) -> str:
    """A value as another type that holds it, as it is where two types meet.

    Args:
        is_alone: it is the argument of a function, where no integer is rounded to a float.

    Raises:
        NotCompiledError: they do not meet alike.
    """
    kind, given = plain_kind(kind), value.kind
    if given == kind or pt.is_null(given) or (is_text(given) and is_text(kind)):
        return cast(value.text, kind) if pt.is_null(given) else value.text
    if pt.is_floating(kind):
        if pt.is_integer(given):
            return _as_float(value, kind, is_alone)
        if pt.is_floating(given):
            return cast(value.text, kind)
    if pt.is_signed_integer(kind) and pt.is_signed_integer(given):
        return cast(value.text, kind)
    if pt.is_decimal128(kind) and (pt.is_signed_integer(given) or pt.is_decimal128(given)):
        return cast(value.text, kind)
    if pt.is_timestamp(kind) and pt.is_timestamp(given) and bool(kind.tz) == bool(given.tz):
        return value.text
    raise NotCompiledError(f"a {given} beside a {kind}; {CAST_FIRST}")


def _as_float(value: Value, kind: pa.DataType, is_alone: bool) -> str:
    """An integer as a float; one that is no float32, or none of a function's argument, is an error, as it is in Arrow."""
    if not pt.is_signed_integer(value.kind):
        raise NotCompiledError(f"a {value.kind} beside a {kind}; {CAST_FIRST}")
    whole, text = _WHOLE_IN_FLOAT[kind], value.text
    as_float = cast(text, kind)
    is_rounded = pt.is_float64(kind) and not is_alone
    if is_rounded or value.kind.bit_width <= (32 if pt.is_float64(kind) else 16):
        return as_float
    error = failing(f"an integer is no {kind} exactly")
    return f"CASE WHEN {text} NOT BETWEEN -{whole}L AND {whole}L THEN {error} ELSE {as_float} END"
