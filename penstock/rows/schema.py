"""Arrow schemas as bytes, and the reserved column that carries event time."""

from __future__ import annotations

import pyarrow as pa

EVENT_TIME = "__event_time"
"""Column that carries a row's event time: int64 milliseconds since the epoch, never null."""


def schema_to_bytes(schema: pa.Schema) -> bytes:
    """The schema as an Arrow IPC message."""
    return bytes(schema.serialize())


def schema_from_bytes(data: bytes) -> pa.Schema:
    """Inverse of ``schema_to_bytes``."""
    return pa.ipc.read_schema(pa.py_buffer(data))


_OPTIONAL = {b"penstock.optional": b"1"}


def optional(field: pa.Field) -> pa.Field:
    """The field of a column that a function's results may leave out."""
    return field.with_nullable(True).with_metadata(_OPTIONAL)


def is_optional(field: pa.Field) -> bool:
    """Whether a result without the column is null there."""
    metadata: dict[bytes, bytes] = field.metadata or {}
    return _OPTIONAL.items() <= metadata.items()


def user_schema(schema: pa.Schema) -> pa.Schema:
    """The schema as the user knows it: without the reserved column."""
    index = schema.get_field_index(EVENT_TIME)
    return schema if index < 0 else schema.remove(index)


def user_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as the user knows it: without the reserved column."""
    if batch.schema.get_field_index(EVENT_TIME) < 0:
        return batch
    return batch.drop_columns([EVENT_TIME])
