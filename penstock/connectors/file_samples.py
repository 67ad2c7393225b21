"""The first rows of files, read by the client while a job is being built."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from penstock.connectors.csv_structure import row_ends
from penstock.connectors.inference import SAMPLE_BYTES, SAMPLED_FILES_MAX, parse_csv_header
from penstock.connectors.input_files import open_input
from penstock.connectors.json_shape import JsonShape, detect_shape
from penstock.connectors.listing import list_files, partition_values
from penstock.connectors.text_options import TextOptions, read_head
from penstock.connectors.text_parsing import json_columns, json_parse_schema, parse_csv, parse_json
from penstock.pb import graph_pb2
from penstock.rows.conforming import conformed_column
from penstock.rows.schema import schema_from_bytes
from penstock.rows.whole_batches import one_array, one_batch


def sample_files(
    form: str, path: str, schema: pa.Schema, rows: int, spec: graph_pb2.FileSource
) -> pa.RecordBatch | None:
    """The first rows of the files of a source.

    Args:
        form: "parquet" | "csv" | "json" | "arrow"
        path: a file, a directory or a glob.
        schema: the columns wanted.
        rows: at most.
        spec: the source, with its declared columns and options of text.

    Returns:
        None where they cannot be read; rows that are malformed are left out (they are for ``on_error``
        to decide when the job runs).
    """
    batches: list[pa.RecordBatch] = []
    found = 0
    try:
        for file in list_files(path)[:SAMPLED_FILES_MAX]:
            table = _head(form, file.path, schema, rows - found, spec)
            if table.num_rows:
                table = table.slice(0, rows - found)
                batches.append(_conform(table, schema, partition_values(path, file.path)))
                found += table.num_rows
            if found >= rows:
                break
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None
    return one_batch(pa.Table.from_batches(batches, schema=schema))


def _head(
    form: str, path: str, schema: pa.Schema, rows: int, spec: graph_pb2.FileSource
) -> pa.Table:
    if form == "parquet":
        return _parquet_head(path, schema, rows)
    if form == "arrow":
        return _arrow_head(path, rows)
    options = TextOptions.decode(spec.text)
    text = read_head(path, SAMPLE_BYTES, options)
    if form == "json":
        return _json_head(text, schema, rows)
    partitions = partition_values(spec.path, path)
    names = [name for name in schema_from_bytes(spec.schema).names if name not in partitions]
    return _csv_head(path, text, schema, rows, options, names)


def _parquet_head(path: str, schema: pa.Schema, rows: int) -> pa.Table:
    from pyarrow import parquet

    with open_input(path) as opened, parquet.ParquetFile(opened) as file:
        names = [name for name in schema.names if name in file.schema_arrow.names]
        return _up_to(rows, file.iter_batches(batch_size=rows, columns=names))


def _arrow_head(path: str, rows: int) -> pa.Table:
    with open_input(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if not is_file:
            return _up_to(rows, pa.ipc.open_stream(file))
        reader = pa.ipc.open_file(file)
        return _up_to(rows, map(reader.get_batch, range(reader.num_record_batches)))


def _up_to(rows: int, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """As many of the batches as it takes to have so many rows."""
    taken: list[pa.RecordBatch] = []
    for batch in batches:
        taken.append(batch)
        rows -= batch.num_rows
        if rows <= 0:
            break
    return pa.Table.from_batches(taken) if taken else pa.table({})


def _csv_head(
    path: str,
    text: bytes,
    schema: pa.Schema,
    rows: int,
    options: TextOptions,
    declared: Sequence[str],
) -> pa.Table:
    names, length = parse_csv_header(path, text, options, declared)
    if names is None:
        return pa.table({})
    body = text[length:]
    ends = row_ends(body, options.delimiter).tolist()
    if len(text) < SAMPLE_BYTES and (not ends or ends[-1] < len(body)):
        ends.append(len(body))
    pieces = _pieces(body, ends[:rows])
    wanted = [name for name in schema.names if name in names]
    types = {name: schema.field(name).type for name in wanted}
    return _parsed(pieces, lambda piece: parse_csv(piece, names, types, wanted, options))


def _json_head(text: bytes, schema: pa.Schema, rows: int) -> pa.Table:
    shape, offset = detect_shape(text)
    if shape is JsonShape.EMPTY:
        return pa.table({})
    lines = (
        array_lines(text[offset:], rows)
        if shape is JsonShape.ARRAY
        else _lines(text[offset:], rows)
    )
    wanted = json_parse_schema(schema)
    return _parsed(lines, lambda line: json_columns(parse_json(line, wanted), schema))


def _parsed(rows: Sequence[bytes], parse: Callable[[bytes], pa.Table]) -> pa.Table:
    """The rows that can be parsed, each with its line end; all at once where all of them can."""
    rows = [row for row in rows if row.strip()]
    if not rows:
        return pa.table({})
    try:
        return parse(b"".join(rows))
    except pa.ArrowInvalid:
        if len(rows) == 1:
            return pa.table({})
    half = len(rows) // 2
    tables = [_parsed(rows[:half], parse), _parsed(rows[half:], parse)]
    return pa.concat_tables([table for table in tables if table.num_rows] or tables)


def _pieces(text: bytes, ends: Sequence[int]) -> list[bytes]:
    return [text[start:end] for start, end in itertools.pairwise([0, *ends])]


def _lines(text: bytes, rows: int) -> list[bytes]:
    whole = text if len(text) < SAMPLE_BYTES // 2 else text[: text.rfind(b"\n") + 1]
    return [line + b"\n" for line in whole.split(b"\n", rows)[:rows]]


def array_lines(text: bytes, rows: int) -> list[bytes]:
    """The first elements of an array, one per line."""
    decoder, rest = json.JSONDecoder(), text.decode(errors="ignore")
    lines: list[bytes] = []
    position = 0
    while len(lines) < rows:
        while position < len(rest) and (rest[position].isspace() or rest[position] == ","):
            position += 1
        if position >= len(rest) or rest[position] == "]":
            break
        try:
            element, position = decoder.raw_decode(rest, position)
        except (json.JSONDecodeError, RecursionError):
            break
        lines.append(json.dumps(element).encode() + b"\n")
    return lines


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
        columns.append(conformed_column(one_array(column), field))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
