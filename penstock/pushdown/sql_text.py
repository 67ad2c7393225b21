"""Names, types and constants as Spark's SQL writes them.

A value has the type there that its column is carried with (``penstock.rows.spark_types``): what is computed is of that
type exactly, so texts say types where Spark would choose another.
"""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import JobRejected
from penstock.rows.spark_types import NotCarriedError, carried_type

_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.date32(): "DATE",
}
_PLAIN = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:;/+=()@#<>!?"
)


class NotCompiledError(JobRejected):
    """Something that does not run on Spark as it does here; the message says what, and what to do."""


def quoted(name: str) -> str:
    """A column.

    Example: a backtick is doubled.
        >>> quoted("a`b")
        '`a``b`'
    """
    return f"`{name.replace('`', '``')}`"


def plain_kind(kind: pa.DataType) -> pa.DataType:
    """The type of the values: that of an encoded one decoded, of an extension as it is stored."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_kind(kind.storage_type)
    return plain_kind(kind.value_type) if pt.is_dictionary(kind) else kind


def sql_type(kind: pa.DataType) -> str:
    """The type that a column of ours has in Spark.

    Raises:
        NotCompiledError: there is none by a simple name.
    """
    try:
        carried = carried_type(kind)
    except NotCarriedError as error:
        raise NotCompiledError(f"{kind}: {error}") from error
    if pt.is_decimal(carried):
        return f"DECIMAL({carried.precision},{carried.scale})"
    if pt.is_timestamp(carried):
        return "TIMESTAMP_LTZ" if carried.tz else "TIMESTAMP_NTZ"
    if carried not in _NAMES:
        raise NotCompiledError(f"nothing is computed of values of type {kind} on Spark")
    return _NAMES[carried]


def cast(text: str, kind: pa.DataType) -> str:
    """A value in another type, by Spark's own rule."""
    return f"CAST({text} AS {sql_type(kind)})"


def text_constant(value: str) -> str:
    """A string; what could mean something to anybody is escaped.

    Example: nothing is substituted in it, and no quote ends it.
        >>> text_constant("it's ${x}")
        "'it\\\\u0027s \\\\u0024\\\\u007Bx\\\\u007D'"
    """
    parts = []
    for character in value:
        if character in _PLAIN:
            parts.append(character)
            continue
        units = character.encode("utf-16-be")
        parts += [f"\\u{units[i]:02X}{units[i + 1]:02X}" for i in range(0, len(units), 2)]
    return f"'{''.join(parts)}'"


def constant(value: pa.Scalar) -> str:
    """A constant of our type.

    Raises:
        NotCompiledError: there is no such constant in Spark.

    Example: of the type that the column has.
        >>> constant(pa.scalar(5, pa.int8())), constant(pa.scalar(float("-inf")))
        ('CAST(5 AS TINYINT)', "CAST('-Infinity' AS DOUBLE)")
    """
    kind = plain_kind(value.type)
    if not value.is_valid:
        return cast("NULL", kind)
    if pt.is_boolean(kind):
        return str(value.as_py()).upper()
    if pt.is_int64(kind) and value.as_py() > -(2**63):
        return f"{value.as_py()}L"
    if pt.is_integer(kind):
        return cast(f"'{value.as_py()}'" if kind.bit_width > 32 else str(value.as_py()), kind)
    if pt.is_floating(kind):
        return cast(f"'{_float_text(value.as_py())}'", kind)
    if pt.is_decimal(kind):
        number: Decimal = value.as_py()
        return cast(f"'{number:f}'", kind)
    if pt.is_string(kind) or pt.is_large_string(kind):
        return text_constant(value.as_py())
    if pt.is_date32(kind):
        return f"date_from_unix_date({value.cast(pa.int32()).as_py()})"
    if pt.is_timestamp(kind) and kind.unit != "ns":
        micros = value.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).as_py()
        instant = f"timestamp_micros({micros}L)"
        return instant if kind.tz else f"CAST({instant} AS TIMESTAMP_NTZ)"
    raise NotCompiledError(f"a constant of type {value.type}")


def _float_text(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return repr(number)


def failing(message: str) -> str:
    """What ends the stage where it is evaluated, with a message."""
    return f"raise_error({text_constant(message)})"
