"""Which columns Spark can have, what they are there, and what becomes of ours on the way.

Between the two lies Parquet. A column has a *carried* type there: an Arrow type that Spark reads as one of its own, and
writes for it. What Spark has no type for is carried by one that loses nothing; where there is none the column is
refused. Values that do not fit (a nanosecond that is not a whole microsecond) are errors where they are met.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from penstock.errors import JobRejected, TaskFailure
from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed_column

DECIMAL_DIGITS_MAX = 38

SparkJson = Any
"""A type as Spark writes it in JSON."""

_SAME = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
}
_CARRIED_AS = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.date64(): pa.date32(),
}


class NotCarriedError(ValueError):
    """A type that Spark has none for; the message says why, and what to do."""


def carried_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column in the Parquet files between us and Spark.

    Raises:
        NotCarriedError: there is none.

    Example: unsigned integers widen.
        >>> carried_type(pa.uint32()), carried_type(pa.duration("ms"))
        (DataType(int64), DataType(int64))
    """
    if isinstance(kind, pa.BaseExtensionType):
        return carried_type(kind.storage_type)
    if kind in _SAME:
        return kind
    if kind in _CARRIED_AS:
        return _CARRIED_AS[kind]
    if pt.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pt.is_duration(kind) or pt.is_time64(kind):
        return pa.int64()
    if pt.is_time32(kind):
        return pa.int32()
    if pt.is_fixed_size_binary(kind):
        return pa.binary()
    if pt.is_decimal(kind):
        return _carried_decimal(kind)
    if pt.is_dictionary(kind):
        return carried_type(kind.value_type)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return pa.list_(carried_type(kind.value_type))
    if pt.is_map(kind):
        return pa.map_(carried_type(kind.key_type), carried_type(kind.item_type))
    if pt.is_struct(kind):
        if not 0 < len({field.name for field in kind}) == kind.num_fields:
            raise NotCarriedError(
                "Spark has no struct without fields, and none with two of one name; leave it out by .drop(...)"
            )
        return pa.struct([pa.field(field.name, carried_type(field.type)) for field in kind])
    raise NotCarriedError("Spark has no such type; leave it out by .drop(...), or cast it")


def _carried_decimal(kind: pa.DataType) -> pa.DataType:
    if kind.precision > DECIMAL_DIGITS_MAX:
        raise NotCarriedError(
            f"Spark has decimals of {DECIMAL_DIGITS_MAX} digits at most; cast it to decimal128 first"
        )
    if not 0 <= kind.scale <= kind.precision:
        raise NotCarriedError(
            "Spark has decimals of a scale from 0 to their precision; cast it first"
        )
    return pa.decimal128(kind.precision, kind.scale)


def spark_json(kind: pa.DataType) -> SparkJson:
    """The type that Spark has for a carried one, in JSON, with everything nullable.

    Example: a list.
        >>> spark_json(pa.list_(pa.int16()))
        {'type': 'array', 'elementType': 'short', 'containsNull': True}
    """
    if pt.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pt.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pt.is_list(kind):
        return {
            "type": "array",
            "elementType": spark_json(kind.value_type),
            "containsNull": True,
        }
    if pt.is_map(kind):
        return {
            "type": "map",
            "keyType": spark_json(kind.key_type),
            "valueType": spark_json(kind.item_type),
            "valueContainsNull": True,
        }
    if pt.is_struct(kind):
        return spark_json_of_columns(pa.schema([kind.field(i) for i in range(kind.num_fields)]))
    return _SAME[kind]


def spark_json_of_columns(carried: pa.Schema) -> SparkJson:
    """The schema of a DataFrame, in JSON."""
    fields = [
        {"name": field.name, "type": spark_json(field.type), "nullable": True, "metadata": {}}
        for field in carried
    ]
    return {"type": "struct", "fields": fields}


def all_nullable(kind: SparkJson) -> SparkJson:
    """A type of Spark's in JSON, whatever it says on nulls and metadata made to say the same."""
    if not isinstance(kind, dict):
        return kind
    match kind["type"]:
        case "array":
            return {**kind, "elementType": all_nullable(kind["elementType"]), "containsNull": True}
        case "map":
            key, value = all_nullable(kind["keyType"]), all_nullable(kind["valueType"])
            return {**kind, "keyType": key, "valueType": value, "valueContainsNull": True}
        case "struct":
            fields = [
                {
                    "name": field["name"],
                    "type": all_nullable(field["type"]),
                    "nullable": True,
                    "metadata": {},
                }
                for field in kind["fields"]
            ]
            return {"type": "struct", "fields": fields}
        case _:
            return kind


def shown_spark_type(kind: SparkJson) -> str:
    """A type of Spark's as a person reads it: "array<short>"."""
    if not isinstance(kind, dict):
        return str(kind)
    match kind["type"]:
        case "array":
            return f"array<{shown_spark_type(kind['elementType'])}>"
        case "map":
            key, value = shown_spark_type(kind["keyType"]), shown_spark_type(kind["valueType"])
            return f"map<{key}, {value}>"
        case "struct":
            fields = (f"{f['name']}: {shown_spark_type(f['type'])}" for f in kind["fields"])
            return f"struct<{', '.join(fields)}>"
        case other:
            return str(other)


def carried_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as they lie in the Parquet files.

    Raises:
        NotCarriedError: Spark cannot have one of them.
    """
    return pa.schema([pa.field(field.name, carried_type(field.type)) for field in schema])


def is_read_alike(kind: pa.DataType) -> bool:
    """Whether Spark reads a column of a Parquet file as its carried type: what is not known to be is not.

    Example: an unsigned integer, which Parquet knows; it has no nanoseconds of Spark's.
        >>> is_read_alike(pa.list_(pa.uint64())), is_read_alike(pa.timestamp("ns"))
        (True, False)
    """
    if pt.is_list(kind) or pt.is_large_list(kind):
        return is_read_alike(kind.value_type)
    if pt.is_struct(kind):
        return all(is_read_alike(kind.field(index).type) for index in range(kind.num_fields))
    if pt.is_timestamp(kind):
        return kind.unit in ("ms", "us")
    if pt.is_decimal(kind):
        return kind.precision <= DECIMAL_DIGITS_MAX and 0 <= kind.scale <= kind.precision
    return any(is_kind(kind) for is_kind in _READ_ALIKE)


_READ_ALIKE = (
    pt.is_boolean,
    pt.is_integer,
    pt.is_float32,
    pt.is_float64,
    pt.is_string,
    pt.is_large_string,
    pt.is_binary,
    pt.is_large_binary,
    pt.is_date32,
)


def check_for_spark(where: str, schema: pa.Schema) -> None:
    """Checks that Spark can be given these columns.

    Args:
        where: the call, for the message.

    Raises:
        JobRejected: it cannot.
    """
    for field in schema:
        _check_carried(where, field)


def same_but_for_case(fields: Iterable[pa.Field]) -> tuple[str, str] | None:
    """Two names, of columns or within one, that a session of Spark that is not case-sensitive takes for one; None = there are none.

    Example:
        >>> same_but_for_case(pa.schema([("a", pa.int8()), ("o", pa.struct([("x", pa.int8()), ("X", pa.int8())]))]))
        ('x', 'X')
    """
    seen: dict[str, str] = {}
    for field in fields:
        other = seen.setdefault(field.name.lower(), field.name)
        if other != field.name:
            return other, field.name
        inside = (same_but_for_case(part) for part in _parts(field.type) if pt.is_struct(part))
        found = next(filter(None, inside), None)
        if found is not None:
            return found
    return None


def check_from_spark(where: str, schema: pa.Schema) -> None:
    """Checks that Spark can give out these columns, exactly.

    Raises:
        JobRejected: it cannot.
    """
    for field in schema:
        _check_carried(where, field)
        if any(pt.is_float16(part) or pt.is_time(part) for part in _parts(field.type)):
            raise JobRejected(
                f"{where}: column {field.name!r} is {field.type}, which Spark does not have: declare it as "
                "float32, or as a number, and cast it behind the stage"
            )


def _check_carried(where: str, field: pa.Field) -> None:
    try:
        carried_type(field.type)
    except NotCarriedError as error:
        raise JobRejected(f"{where}: column {field.name!r} is {field.type}: {error}") from error


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    if isinstance(kind, pa.BaseExtensionType):
        return [kind, *_parts(kind.storage_type)]
    if pt.is_dictionary(kind):
        return [kind, *_parts(kind.value_type)]
    inner = (_parts(kind.field(index).type) for index in range(kind.num_fields))
    return [kind, *(part for parts in inner for part in parts)]


def converted(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Rows with the types of another schema of the same columns.

    Raises:
        TaskFailure: a value has no equal there; the message names the column.
    """
    columns = []
    for field in schema:
        column = table.column(field.name)
        try:
            chunks = [conformed_column(chunk, field) for chunk in column.chunks]
        except ValueMismatch as error:
            raise TaskFailure(f"{where}: {error}") from error
        columns.append(pa.chunked_array(chunks, field.type).unify_dictionaries())
    return pa.Table.from_arrays(columns, schema=schema)
