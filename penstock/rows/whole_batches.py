"""Whole batches and columns of any number of rows; of none, too, where Arrow makes some nested types from nulls only."""

from __future__ import annotations

import pyarrow as pa


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The values of a column of a table or batch, as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.combine_chunks() if column.num_chunks else pa.nulls(0, column.type)


def one_batch(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """The rows of a table or batch, as one batch."""
    if isinstance(rows, pa.RecordBatch):
        return rows
    return pa.RecordBatch.from_arrays(list(map(one_array, rows.columns)), schema=rows.schema)
