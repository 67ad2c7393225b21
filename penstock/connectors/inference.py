"""The schema of files that a user names without one.

Parquet and Arrow files say it in their footers. CSV and JSON are parsed by pyarrow's inference over the
first block of the first files. Files may differ in width of numbers (the wider type wins); the other
differences are refused here, where the user can still say ``schema=``, rather than on the cluster.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connectors.differing_files import told_differences
from penstock.connectors.inferred_numbers import (
    json_objects,
    lossy_json,
    lossy_text,
    may_lose_digits,
)
from penstock.connectors.input_files import open_input
from penstock.connectors.json_shape import JsonShape, NotTabularJsonError, detect_shape
from penstock.connectors.json_times import infer_json_schema
from penstock.connectors.messages import delimiter_hint, name_list, os_reason, shorten
from penstock.connectors.text_options import DEFAULTS, TextOptions, read_head
from penstock.connectors.text_parsing import csv_convert_options, utf8_problem
from penstock.errors import JobRejected

SAMPLED_FILES_MAX = 16
"""Files looked at: the schema of the others is checked when they are read."""

_log = logging.getLogger("penstock")

SAMPLE_BYTES = 4 << 20
"""Text looked at per file."""

_FIRST_ROW_BYTES_MAX = 64 << 20


def infer_schema(format: str, paths: Sequence[str], options: TextOptions = DEFAULTS) -> pa.Schema:
    """The common schema of the first files.

    Args:
        format: "parquet" | "csv" | "json" | "arrow"
        paths: the files, at least one.
        options: of CSV and JSON.

    Raises:
        JobRejected: a file cannot be read, has no columns, or the files do not fit together.
    """
    samples: dict[str, _Sample] = {}
    merged: pa.Schema | None = None
    for path in paths[:SAMPLED_FILES_MAX]:
        sample = _sample(format, path, options)
        if sample is None:
            continue
        merged = (
            sample.schema
            if merged is None
            else _merge(
                format,
                merged,
                sample.schema,
                options.optional,
                older=next(iter(samples)),
                newer=path,
            )
        )
        samples[path] = sample
    if merged is None:
        raise JobRejected(
            f"{name_list(paths, limit=3)}: there are no rows to infer a schema from; give schema="
        )
    for path, sample in samples.items():
        _check_digits(path, sample.lossy(merged))
    for told in told_differences({path: sample.schema for path, sample in samples.items()}, merged):
        _log.warning("%s", told)
    if format in ("parquet", "arrow"):
        return merged
    return pa.schema([pa.field(field.name, _settled_type(field.type)) for field in merged])


@dataclass(frozen=True, slots=True)
class _Sample:
    """What the beginning of a file shows.

    Attributes:
        lossy: the first integer that would be another number with the types of a schema, as (column, text).
    """

    schema: pa.Schema
    lossy: Callable[[pa.Schema], tuple[str, str] | None] = lambda _: None


def file_names(format: str, path: str, options: TextOptions) -> list[str] | None:
    """The columns that a file of Parquet, Arrow or CSV says it has; None where it says nothing."""
    if format == "csv":
        if not options.header:
            return None
        return parse_csv_header(path, read_head(path, SAMPLE_BYTES, options), options)[0]
    schema = _parquet_schema(path) if format == "parquet" else _arrow_schema(path)
    names: list[str] = schema.names
    return names


def first_csv_row(path: str, options: TextOptions) -> list[str]:
    """The fields of the first row of a CSV file; none where it is empty."""
    from penstock.connectors.csv_structure import row_ends

    text = read_head(path, SAMPLE_BYTES, options).removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    ends = row_ends(text, options.delimiter)
    line = text[: int(ends[0])] if len(ends) else text
    rows = csv.reader([line.decode(errors="replace").rstrip("\r\n")], delimiter=options.delimiter)
    return next(rows, [])


def plain_type(type_: pa.DataType) -> pa.DataType:
    """The type of the values, without encodings: operators see plain columns."""
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return plain_type(type_.value_type)
    if type_ == pa.string_view():
        return pa.string()
    return pa.binary() if type_ == pa.binary_view() else type_


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without encodings and metadata."""
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema])


def file_schema(format: str, path: str, options: TextOptions) -> pa.Schema | None:
    """The schema of one file; None where a text file has no rows."""
    sample = _sample(format, path, options)
    return None if sample is None else sample.schema


def _sample(format: str, path: str, options: TextOptions) -> _Sample | None:
    """What one file shows; None where a text file has no rows."""
    try:
        if format in ("parquet", "arrow"):
            schema = _parquet_schema(path) if format == "parquet" else _arrow_schema(path)
            return _Sample(_check_names(path, schema))
        return _csv_sample(path, options) if format == "csv" else _json_sample(path, options)
    except OSError as error:
        raise JobRejected(f"{path}: cannot be read: {os_reason(error)}") from error
    except (pa.ArrowException, NotTabularJsonError) as error:
        raise JobRejected(f"{path}: not a readable {format} file: {shorten(str(error))}") from error


def _check_names(path: str, schema: pa.Schema) -> pa.Schema:
    twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if twice is not None:
        raise JobRejected(
            f'{path}: has several columns "{twice}", and which one is meant cannot be told: write the file with names that '
            "differ, or give the other columns as schema="
        )
    return schema


def _parquet_schema(path: str) -> pa.Schema:
    from pyarrow import parquet

    with open_input(path) as file:
        return plain_schema(parquet.read_schema(file))


def _arrow_schema(path: str) -> pa.Schema:
    with open_input(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            return plain_schema(pa.ipc.open_file(file).schema)
        return plain_schema(pa.ipc.open_stream(file).schema)


def _csv_sample(path: str, options: TextOptions) -> _Sample | None:
    from penstock.connectors.csv_structure import row_ends

    text = read_head(path, SAMPLE_BYTES, options)
    whole = len(text) < SAMPLE_BYTES
    text, names = _csv_head(path, text, options)
    if names is None:
        return None
    first = names if options.header else first_csv_row(path, options)
    hint = delimiter_hint(first, options.delimiter)
    if hint:
        _log.warning("%s: %s", path, hint)
    if not whole:
        ends = row_ends(text, options.delimiter)
        if not len(ends):
            raise JobRejected(f"{path}: a row is longer than {SAMPLE_BYTES} bytes; give schema=")
        text = text[: ends[-1]]
    if not text.strip():
        return _Sample(pa.schema([pa.field(name, pa.null()) for name in names]))
    schema = _infer_leniently(text, names, options).schema
    if not may_lose_digits(text):
        return _Sample(schema)
    return _Sample(schema, lambda merged: _lossy_csv(text, names, options, merged))


def _lossy_csv(
    text: bytes, names: list[str], options: TextOptions, merged: pa.Schema
) -> tuple[str, str] | None:
    floats = {
        field.name: pa.string()
        for field in merged
        if pa.types.is_floating(field.type) and field.name in names
    }
    if not floats:
        return None
    columns = _infer_leniently(text, names, options, types=floats)
    found = ((name, lossy_text(columns[name])) for name in floats)
    return next(((name, integer) for name, integer in found if integer is not None), None)


def _check_digits(path: str, found: tuple[str, str] | None) -> None:
    if found is not None:
        column, integer = found
        raise JobRejected(
            f'{path}: column "{column}": {integer} is no int64, or stands beside fractions, and would be another '
            f"number as a float64: give schema=, for example with {column!r} as string, uint64 or decimal128(38, 0), "
            "or as float64 where the last digits do not count"
        )


def _infer_leniently(
    text: bytes,
    names: list[str],
    options: TextOptions,
    types: dict[str, pa.DataType] | None = None,
) -> pa.Table:
    """The rows with the right number of fields: what to do with others is not decided here.

    Args:
        types: columns that are made, with their types; None makes all, and infers.
    """
    from pyarrow import csv as arrow_csv

    convert = csv_convert_options(types, None if types is None else list(types), options)
    convert.check_utf8 = False
    return arrow_csv.read_csv(
        pa.BufferReader(text),
        read_options=arrow_csv.ReadOptions(
            use_threads=False, block_size=len(text) + 1, column_names=names
        ),
        parse_options=arrow_csv.ParseOptions(
            newlines_in_values=b'"' in text,
            invalid_row_handler=lambda _: "skip",
            delimiter=options.delimiter,
        ),
        convert_options=convert,
    )


def _csv_head(path: str, text: bytes, options: TextOptions) -> tuple[bytes, list[str] | None]:
    """The text behind the header row, and the names in it; no names where the file is empty."""
    if text[:2] == b"\x1f\x8b":
        raise JobRejected(f'{path}: it is compressed with gzip; give compression="gzip"')
    names, length = parse_csv_header(path, text, options)
    return text[length:], names


def parse_csv_header(
    path: str, text: bytes, options: TextOptions = DEFAULTS, declared: Sequence[str] = ()
) -> tuple[list[str] | None, int]:
    """The column names, and how many bytes come before the rows; None where there are none.

    Args:
        path: for errors.
        text: the start of the file.
        options: delimiter, and whether the first row has the names.
        declared: the names where the first row does not have them; none = f0, f1, ...

    Raises:
        JobRejected: the header is malformed, names a column twice, or leaves one without a name.
    """
    from penstock.connectors.csv_structure import row_ends

    mark = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    body = text[mark:]
    blank = len(body) - len(body.lstrip(b"\r\n"))
    mark, body = mark + blank, body[blank:]
    if not body:
        return None, len(text)
    if not options.header and declared:
        return list(declared), mark
    ends = row_ends(body, options.delimiter)
    length = int(ends[0]) if len(ends) else len(body)
    header = body[:length]
    if problem := utf8_problem(header):
        raise JobRejected(f"{path}:1: the header is {problem}")
    line = header.decode().rstrip("\r\n")
    try:
        row = next(csv.reader([line], delimiter=options.delimiter))
    except csv.Error as error:
        raise JobRejected(f"{path}:1: {_unreadable_header(line, error)}") from error
    if not options.header:
        return [f"f{index}" for index in range(len(row))], mark
    twice = sorted({name for name in row if row.count(name) > 1})
    if twice or "" in row:
        what = f'names the column "{twice[0]}" twice' if twice else "has a column without a name"
        raise JobRejected(f"{path}:1: the header {what}")
    return row, mark + length


def _unreadable_header(line: str, error: csv.Error) -> str:
    if "\r" in line:
        return (
            "its lines end in carriage returns alone: end them in line feeds, for example with: "
            "tr '\\r' '\\n'"
        )
    return f"the header is no CSV: {error}"


def _json_sample(path: str, options: TextOptions) -> _Sample | None:
    from penstock.connectors.json_structure import elements_as_lines, scan_array

    length = SAMPLE_BYTES
    text = read_head(path, length, options)
    starts: npt.NDArray[np.int64] | None = None
    shape, offset = detect_shape(text)
    if shape is JsonShape.EMPTY:
        return None
    if shape is JsonShape.ARRAY:
        scan = scan_array(text[offset:])
        if scan.end < 0 and len(scan.commas):
            # The last element may be cut off: what comes before its comma is whole.
            text = text[: offset + int(scan.commas[-1])]
            scan = scan_array(text[offset:])
        lines, starts = elements_as_lines(text[offset:], scan), scan.value_starts
    else:
        while len(text) == length and b"\n" not in text and length < _FIRST_ROW_BYTES_MAX:
            length *= 2
            text = read_head(path, length, options)
        lines = text[offset:] if len(text) < length else text[offset : text.rfind(b"\n") + 1]
    if not lines.strip():
        return None
    schema = _infer_json(path, lines, starts)
    if not may_lose_digits(lines):
        return _Sample(schema)
    return _Sample(schema, lambda merged: lossy_json(merged, json_objects(lines, starts)))


def _infer_json(path: str, lines: bytes, starts: npt.NDArray[np.int64] | None) -> pa.Schema:
    try:
        return infer_json_schema(lines, starts)
    except pa.ArrowInvalid as error:
        # Malformed rows are for on_error to decide: infer from the rows before the first of them.
        good = _rows_before_error(lines, starts)
        if good is None:
            raise JobRejected(
                f"{path}: no schema can be inferred: {shorten(str(error))}; expected JSON lines (one "
                "object per line) or one array of objects whose columns have one type each; "
                "otherwise give schema="
            ) from error
        return good


def _rows_before_error(lines: bytes, starts: npt.NDArray[np.int64] | None) -> pa.Schema | None:
    """The schema of the longest good beginning; None where the first row is malformed already."""
    if starts is None:
        ends = [match.end() for match in re.finditer(rb"\n|\Z", lines)]
    else:
        ends = [*(int(start) for start in starts[1:]), len(lines)]
    good, bad = 0, len(ends)
    found: pa.Schema | None = None
    while good < bad - 1:
        middle = (good + bad) // 2
        head = None if starts is None else starts[:middle]
        try:
            found = infer_json_schema(lines[: ends[middle - 1]], head)
        except pa.ArrowInvalid:
            bad = middle
        else:
            good = middle
    return found


def _merge(
    format: str,
    left: pa.Schema,
    right: pa.Schema,
    optional: frozenset[str],
    *,
    older: str,
    newer: str,
) -> pa.Schema:
    """The first file's columns with types wide enough for both."""
    missing = [name for name in left.names if name not in right.names and name not in optional]
    if missing and format != "json":
        raise JobRejected(
            f'{newer}: has no column "{missing[0]}", which {older} has; its columns: '
            f"{name_list(right.names)}; give schema= and columns= that fit all files"
        )
    fields: list[pa.Field] = []
    for field in left:
        index = right.get_field_index(field.name)
        type_ = field.type if index < 0 else _wider(format, field.type, right.field(index).type)
        if type_ is None:
            raise JobRejected(
                f'column "{field.name}" is {field.type} in {older} and {right.field(index).type} in '
                f"{newer}; give schema="
            )
        fields.append(pa.field(field.name, type_))
    more = [field for field in right if field.name not in left.names]
    fields += [field for field in more if format == "json" or field.name in optional]
    return pa.schema(fields)


def _wider(format: str, left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """A type that holds the values of both, None where there is none."""
    if left == right:
        return left
    try:
        merged = pa.unify_schemas(
            [pa.schema([("x", left)]), pa.schema([("x", right)])], promote_options="permissive"
        )
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        both_times = pa.types.is_timestamp(left) and pa.types.is_timestamp(right)
        return pa.string() if format == "csv" or (format == "json" and both_times) else None
    return merged.field("x").type


def _settled_type(type_: pa.DataType) -> pa.DataType:
    """What an inferred type becomes: columns without a value are text, seconds may have fractions."""
    if pa.types.is_null(type_):
        return pa.string()
    if pa.types.is_timestamp(type_) and type_.unit == "s":
        return pa.timestamp("us", type_.tz)
    if pa.types.is_list(type_):
        return pa.list_(_settled_type(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(field.name, _settled_type(field.type)) for field in type_])
    return type_
