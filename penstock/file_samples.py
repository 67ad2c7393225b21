"""The first rows of files, read by the client while a job is being built."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from penstock.connectors.csv_structure import row_ends
from penstock.connectors.inference import SAMPLE_BYTES, parse_csv_header
from penstock.connectors.json_shape import JsonShape, detect_shape
from penstock.connectors.listing import list_files, partition_values
from penstock.connectors.text_parsing import json_parse_schema, parse_csv, parse_json


def sample_files(form: str, path: str, schema: pa.Schema, rows: int) -> pa.RecordBatch | None:
    """The first rows of the files of a source.

    Args:
        form: "parquet" | "csv" | "json" | "arrow"
        path: a file, a directory or a glob.
        schema: the columns wanted.
        rows: at most.

    Returns:
        None where there are none, or none that can be read as they are (what is malformed is for
        ``on_error`` to decide when the job runs).
    """
    try:
        for file in list_files(path):
            table = _head(form, file.path, schema, rows)
            if table.num_rows:
                return _conform(table.slice(0, rows), schema, partition_values(path, file.path))
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None
    return None


def _head(form: str, path: str, schema: pa.Schema, rows: int) -> pa.Table:
    if form == "parquet":
        return _parquet_head(path, schema, rows)
    if form == "arrow":
        return _arrow_head(path)
    with Path(path).open("rb") as file:
        text = file.read(SAMPLE_BYTES)
    return _csv_head(path, text, schema) if form == "csv" else _json_head(text, schema, rows)


def _parquet_head(path: str, schema: pa.Schema, rows: int) -> pa.Table:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = [name for name in schema.names if name in file.schema_arrow.names]
        batches = (
            [next(file.iter_batches(batch_size=rows, columns=names))]
            if file.metadata.num_rows
            else []
        )
        return pa.Table.from_batches(batches, schema=None if batches else pa.schema([]))


def _arrow_head(path: str) -> pa.Table:
    with Path(path).open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        if is_file and not reader.num_record_batches:
            return pa.table({})
        batch = reader.get_batch(0) if is_file else reader.read_next_batch()
        return pa.Table.from_batches([batch])


def _csv_head(path: str, text: bytes, schema: pa.Schema) -> pa.Table:
    names, length = parse_csv_header(path, text)
    if names is None:
        return pa.table({})
    body = text[length:]
    if len(text) >= SAMPLE_BYTES:
        body = body[: row_ends(body)[-1]]
    if not body.strip():
        return pa.table({})
    wanted = [name for name in schema.names if name in names]
    types = {name: schema.field(name).type for name in wanted}
    return parse_csv(body, names, types, wanted)


def _json_head(text: bytes, schema: pa.Schema, rows: int) -> pa.Table:
    shape, offset = detect_shape(text)
    if shape is JsonShape.EMPTY:
        return pa.table({})
    lines = (
        _array_lines(text[offset:], rows)
        if shape is JsonShape.ARRAY
        else _lines(text[offset:], rows)
    )
    if not lines.strip():
        return pa.table({})
    return parse_json(lines, json_parse_schema(schema))


def _lines(text: bytes, rows: int) -> bytes:
    whole = text if len(text) < SAMPLE_BYTES // 2 else text[: text.rfind(b"\n") + 1]
    return b"\n".join(whole.split(b"\n", rows)[:rows])


def _array_lines(text: bytes, rows: int) -> bytes:
    """The first elements of an array, one per line."""
    decoder, rest = json.JSONDecoder(), text.decode(errors="ignore")
    lines: list[str] = []
    position = 0
    while len(lines) < rows:
        while position < len(rest) and (rest[position].isspace() or rest[position] == ","):
            position += 1
        if position >= len(rest) or rest[position] == "]":
            break
        try:
            element, position = decoder.raw_decode(rest, position)
        except json.JSONDecodeError:
            break
        lines.append(json.dumps(element))
    return "\n".join(lines).encode()


def _conform(
    table: pa.Table, schema: pa.Schema, partitions: dict[str, str | None]
) -> pa.RecordBatch:
    columns = []
    for field in schema:
        if field.name in partitions:
            value = pa.scalar(partitions[field.name], pa.string())
            column = pa.chunked_array([pa.array([value.as_py()] * table.num_rows, pa.string())])
        elif field.name in table.column_names:
            column = table[field.name]
        else:
            column = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        columns.append(column.cast(field.type).combine_chunks())
    return pa.Table.from_arrays(columns, schema=schema).to_batches()[0]
