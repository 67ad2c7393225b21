"""One Parquet file with rows of a subpartition: what is written comes back batch by batch, exactly.

The rows are one row group, so that who reads the file in place finds large ones; the file remembers at
which rows its batches end, and their Arrow schema. Written are only schemas that
``penstock.storage.parquet_types`` finds nothing against.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

_BATCHES: Final = "penstock.batch_rows"
_SCHEMA: Final = b"penstock.schema"


def write_parquet(sink: pa.NativeFile, batches: Sequence[pa.RecordBatch]) -> None:
    """Writes batches of one schema.

    Raises:
        OSError: the disk does not take it.
    """
    schema = batches[0].schema
    writer = pq.ParquetWriter(
        sink, schema, compression="lz4", use_dictionary=False, write_statistics=False
    )
    with writer:
        table = pa.Table.from_batches(batches)
        writer.write_table(table, row_group_size=table.num_rows)
        rows = [batch.num_rows for batch in batches]
        encoded = schema.serialize().to_pybytes().hex()
        writer.add_key_value_metadata(
            {_BATCHES: json.dumps(rows, separators=(",", ":")), _SCHEMA.decode(): encoded}
        )


def read_parquet(content: pa.Buffer) -> list[pa.RecordBatch]:
    """The batches of a file.

    Raises:
        pa.ArrowException, OSError, ValueError, KeyError: it is not what was written.
    """
    file = pq.ParquetFile(pa.BufferReader(content))
    told: dict[bytes, bytes] = file.metadata.metadata
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(told[_SCHEMA].decode())))
    table = file.read(use_threads=False)
    columns = [_whole(column, field) for column, field in zip(table.columns, schema, strict=True)]
    rows = pa.RecordBatch.from_arrays(columns, schema=schema)
    batches, start = [], 0
    for count in json.loads(told[_BATCHES.encode()]):
        batches.append(rows.slice(start, count))
        start += count
    return batches


def _whole(column: Any, field: pa.Field) -> pa.Array:
    if not column.type.equals(field.type):
        raise ValueError(f"column {field.name} has come back as {column.type}, not {field.type}")
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
