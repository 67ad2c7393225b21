"""What users give as the rows of a state: anything that is a table, as batches of Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from penstock.rows.column_values import ValueMismatch, encode_columns
from penstock.state_tables.carried_columns import converted_batch, spark_type
from penstock.state_tables.spark_rows_client import frame_batches, is_frame
from penstock.storage.codec import StateError
from penstock.storage.key_types import plain_array

_ROWS_AT_ONCE: Final = 1 << 16


def given_batches(data: Any, schema: pa.Schema, where: str) -> Iterator[pa.RecordBatch]:
    """The rows, as they are asked for, at most 65,536 at a time.

    Args:
        data: a ``pyarrow`` table, batch, reader or iterable of batches, a list of dicts, or anything that gives Arrow
            (``__arrow_c_stream__``: pandas, Polars, DuckDB), or a
            DataFrame of Spark.
        schema: of the state's table; of a list of dicts.
        where: the state, for messages.

    Raises:
        StateError: it is none of that.
    """
    for batch in _batches(data, schema, where):
        plain = pa.RecordBatch.from_arrays(
            [plain_array(column) for column in batch.columns], names=batch.schema.names
        )
        for start in range(0, plain.num_rows, _ROWS_AT_ONCE):
            yield plain.slice(start, _ROWS_AT_ONCE)


def given_columns(data: Any) -> list[str] | None:
    """Names of the columns, where they are known before the rows are; None = they are not."""
    schema = getattr(data, "schema", None)
    return list(schema.names) if isinstance(schema, pa.Schema) else None


def _batches(data: Any, schema: pa.Schema, where: str) -> Iterable[pa.RecordBatch]:
    if isinstance(data, pa.Table):
        return data.to_batches(max_chunksize=_ROWS_AT_ONCE)
    if isinstance(data, pa.RecordBatch):
        return [data]
    if isinstance(data, pa.RecordBatchReader):
        return data
    if is_frame(data):
        return (_as_given(batch, schema, where) for batch in frame_batches(data))
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data)
    if isinstance(data, list) and all(isinstance(row, Mapping) for row in data):
        names = {name for row in data for name in row}
        fields = [pa.field(one.name, one.type) for one in schema if one.name in names]
        unknown = sorted(names - {one.name for one in fields})
        if unknown:
            columns = ", ".join(schema.names)
            raise StateError(f"{where} is given with unknown {unknown}; its columns are {columns}")
        values = [[row.get(one.name) for row in data] for one in fields]
        try:
            return [encode_columns(values, pa.schema(fields))]
        except ValueMismatch as error:
            row = f"row {error.index}: " if error.index >= 0 else ""
            raise StateError(f"{where}: its rows do not fit: {row}{error}") from error
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        return _checked(data, where)
    raise StateError(
        f"{where} is given as {type(data).__name__}: give a pyarrow table or batches, a list of dicts, or a data frame; "
        "None drops the state"
    )


def _as_given(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The rows of a DataFrame with what Spark has no type for as it was before it was given to it."""
    fields = []
    for one in batch.schema:
        wanted = schema.field(one.name).type if one.name in schema.names else one.type
        is_carried = one.type != wanted and one.type == spark_type(wanted)
        fields.append(pa.field(one.name, wanted if is_carried else one.type))
    return converted_batch(batch, pa.schema(fields), where)


def _checked(batches: Iterable[Any], where: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if isinstance(batch, pa.Table):
            yield from batch.to_batches()
        elif isinstance(batch, pa.RecordBatch):
            yield batch
        else:
            raise StateError(
                f"{where} is given as an iterable of {type(batch).__name__}, not of batches"
            )
