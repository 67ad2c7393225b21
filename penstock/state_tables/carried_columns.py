"""Columns of state as Spark has them (pure): which types, and values from the one to the other and back."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from penstock.rows.spark_types import DECIMAL_DIGITS_MAX, NotCarriedError, carried_type
from penstock.storage.codec import StateError


def spark_type(kind: pa.DataType) -> pa.DataType | None:
    """What a column is given to Spark as; None = it has no type for it.

    Example: sums of decimals are kept with more digits than they need.
        >>> spark_type(pa.decimal256(75, 2)), spark_type(pa.uint8()), spark_type(pa.month_day_nano_interval())
        (Decimal128Type(decimal128(38, 2)), DataType(int16), None)
    """
    if pt.is_decimal(kind) and kind.precision > DECIMAL_DIGITS_MAX >= kind.scale >= 0:
        return pa.decimal128(DECIMAL_DIGITS_MAX, kind.scale)
    try:
        return carried_type(kind)
    except NotCarriedError:
        return None


def spark_schema(schema: pa.Schema, where: str) -> pa.Schema:
    """The columns as Spark is given them: its own types, or such as lose nothing.

    Args:
        where: the state, for the message.

    Raises:
        StateError: Spark cannot have a column.

    Example: times are microseconds there.
        >>> spark_schema(pa.schema([("at", pa.timestamp("ms", "UTC"))]), "state 's'").field("at").type
        TimestampType(timestamp[us, tz=UTC])
    """
    fields = []
    for one in schema:
        kind = spark_type(one.type)
        if kind is None:
            raise StateError(
                f"{where}: column {one.name!r} is {one.type}, which Spark has no type for: read it with ps.open_state"
            )
        fields.append(pa.field(one.name, kind))
    return pa.schema(fields)


def converted_batch(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Rows with other types, where no value is changed by it.

    Raises:
        StateError: one would be; the message names the column.
    """
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise StateError(
                    f"{where}: column {field.name!r} is {column.type}, and has values that are no {field.type}: {error}"
                ) from error
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)
