"""Record batches as frame payloads, and how large a batch is (pure).

The payload is one Arrow IPC message, decoded without a copy against the schema that a SCHEMA frame
carried before. Schemas with dictionary-encoded columns need their dictionaries with each batch:
there the payload is a whole IPC stream (``FLAG_STREAM``).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.rows.schema import schema_from_bytes
from taskmanager.network.frames import FLAG_STREAM, Buffer, FrameError


def has_dictionary(schema: pa.Schema) -> bool:
    """True where a column, or a part of a nested one, is dictionary-encoded."""
    return any(_type_has_dictionary(field.type) for field in schema)


def _type_has_dictionary(data_type: Any) -> bool:
    if pa.types.is_dictionary(data_type):
        return True
    if isinstance(data_type, pa.BaseExtensionType):
        return _type_has_dictionary(data_type.storage_type)
    return any(
        _type_has_dictionary(data_type.field(index).type) for index in range(data_type.num_fields)
    )


def encode_batch(batch: pa.RecordBatch, *, as_stream: bool) -> Buffer:
    """The batch as a payload; one copy of its columns."""
    if not as_stream:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode_batch(payload: Buffer, schema: pa.Schema, flags: int) -> pa.RecordBatch:
    """Inverse of ``encode_batch``; the batch refers to the payload's memory.

    Raises:
        FrameError: it is no batch of that schema.
    """
    data = payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload)
    try:
        if not flags & FLAG_STREAM:
            return pa.ipc.read_record_batch(data, schema)
        with pa.ipc.open_stream(data) as reader:
            return reader.read_next_batch()
    except (pa.ArrowException, OSError, EOFError, StopIteration) as error:
        raise FrameError(f"a BATCH frame that does not decode: {error}") from error


def decode_schema(payload: Buffer) -> pa.Schema:
    """The schema of a SCHEMA frame.

    Raises:
        FrameError: it is no schema.
    """
    try:
        return schema_from_bytes(bytes(payload))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise FrameError(f"a SCHEMA frame that does not decode: {error}") from error


class SizeEstimator:
    """Bytes of a batch, without asking each column where the schema alone tells."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._row_bits = 0

    def size_bytes(self, batch: pa.RecordBatch) -> int:
        """Size of the batch's columns in bytes, validity excluded where the width is fixed."""
        schema = batch.schema
        if self._schema is None or not schema.equals(self._schema, check_metadata=True):
            self._schema = schema
            self._row_bits = _row_bits(schema)
        if self._row_bits:
            return (batch.num_rows * self._row_bits + 7) // 8
        return int(batch.nbytes)


def _row_bits(schema: pa.Schema) -> int:
    """Width of a row in bits; 0 where rows differ in width."""
    bits = 0
    for field in schema:
        try:
            bits += int(field.type.bit_width)
        except ValueError:
            return 0
    return bits
