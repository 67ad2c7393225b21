"""Files as sources and sinks: what the user says is checked here, before anything is submitted."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from penstock.connectors.declared_columns import check_declared
from penstock.connectors.declared_fields import warn_of_absent_fields
from penstock.connectors.file_paths import normal_path, whole_path
from penstock.connectors.inference import infer_schema, plain_schema
from penstock.connectors.listing import (
    EntryRefusedError,
    ListedFile,
    is_directory,
    is_file,
    list_files,
    partition_values,
)
from penstock.connectors.messages import name_list, nearest_name, os_reason
from penstock.connectors.partition_columns import with_partition_columns
from penstock.connectors.text_options import DEFAULTS, TextOptions
from penstock.errors import JobRejected
from penstock.pb import graph_pb2
from penstock.rows.column_types import (
    first_of_type,
    has_no_parquet_type,
    is_calendar_interval,
    is_extension,
)
from penstock.rows.schema import EVENT_TIME, schema_to_bytes
from penstock.storage.open_store import is_s3

_log = logging.getLogger("penstock")

SOURCE_FORMATS = ("parquet", "csv", "json", "arrow")
SINK_FORMATS = ("parquet", "csv", "json")
DEFAULT_ROLL_BYTES = 64 << 20
DEFAULT_DELAY_MS = 60_000
MIN_SIZE_BYTES_MAX = 16 << 20
"""Of rows that a checkpoint carries on for one file: they are in memory and in every checkpoint."""

_UNFIT = {
    "csv": (pa.types.is_nested, is_calendar_interval, is_extension),
    "parquet": (has_no_parquet_type,),
    "json": (),
}
"""Types that files of a format have no column for."""
_NO_DIRECTORY = (
    pa.types.is_nested,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)
"""Types whose values are no names of directories."""
_NAMES = {"csv": "CSV", "parquet": "Parquet", "json": "JSON"}


def file_source(
    format: str,
    path: str | os.PathLike[str],
    *,
    schema: pa.Schema | None = None,
    columns: Sequence[str] | None = None,
    watch_ms: int = 0,
    options: TextOptions = DEFAULTS,
) -> tuple[graph_pb2.SourceSpec, pa.Schema]:
    """A source that reads files.

    Args:
        format: "parquet" | "csv" | "json" | "arrow"
        path: a file, a directory (read recursively, ``key=value`` directories are columns) or a
            glob; a relative one is taken from the client's working directory.
        schema: the columns of the files, ``key=value`` directories included; None infers it.
        columns: the columns to read, in this order; None reads all.
        watch_ms: 0 = the files that are there now; else the directory is listed again this often.
        options: of CSV and JSON.

    Returns:
        The source and the schema of its rows.

    Raises:
        JobRejected: the path, the schema or a column does not exist or does not fit.
    """
    _check_format(format, SOURCE_FORMATS)
    given = whole_path(path)
    location = normal_path(given)
    if watch_ms < 0:
        raise JobRejected(f"watch must be positive, not {watch_ms} ms")
    files = _existing_files(location, watch=watch_ms > 0, schema_given=schema is not None)
    declared = schema
    schema = _inferred(format, location, files, options) if schema is None else plain_schema(schema)
    _check_names(schema, location)
    _check_readable_types(format, schema)
    selected = _select(schema, columns, location)
    _check_optional(options, schema, location)
    required = [field.name for field in declared or () if not field.nullable]
    if declared is not None:
        _check_declaration(format, selected, location, files, options, required)
    in_files = [
        field.with_nullable(field.name not in required or field.name in options.optional)
        for field in schema
    ]
    spec = graph_pb2.SourceSpec(
        files=graph_pb2.FileSource(
            format=format,
            path=location,
            path_as_given=given if given != location else "",
            columns=list(columns) if columns is not None else [],
            schema=schema_to_bytes(pa.schema(in_files)),
            watch_interval_ms=watch_ms,
            may_be_empty=not files,
            text=options.encode(),
        ),
        bounded=watch_ms == 0,
    )
    return spec, selected


def _inferred(
    format: str, location: str, files: Sequence[ListedFile], options: TextOptions
) -> pa.Schema:
    schema = infer_schema(format, [file.path for file in files], options)
    if not is_directory(location):
        return schema
    found = {file.path: partition_values(location, file.path) for file in files}
    return with_partition_columns(schema, found, options.optional)


def file_sink(
    format: str,
    directory: str | os.PathLike[str],
    partition_by: Sequence[str] | str | None = None,
    roll: int = DEFAULT_ROLL_BYTES,
    *,
    schema: pa.Schema | None = None,
    roll_interval_ms: int = 0,
    inactivity_ms: int = 0,
    min_size_bytes: int = 0,
    max_delay_ms: int = DEFAULT_DELAY_MS,
) -> graph_pb2.SinkSpec:
    """A sink that writes files into a directory.

    Args:
        format: "parquet" | "csv" | "json"
        directory: where the files go; it is made when it is missing.
        partition_by: columns that become ``key=value`` directories.
        roll: bytes after which a new file begins.
        schema: of the rows, to check the rest against; None checks later.
        roll_interval_ms: age at which a file is completed, 0 = no limit.
        inactivity_ms: time without rows after which a file is completed, 0 = no limit.
        min_size_bytes: rows of fewer bytes are carried on in state by a checkpoint, 0 = none are.
        max_delay_ms: age from which on they are written all the same.

    Raises:
        JobRejected: a partition column does not exist, or a type cannot be written in this format.
    """
    _check_format(format, SINK_FORMATS)
    location = whole_path(directory)
    if is_s3(location):
        _check_prefix(location)
    elif Path(location).exists() and not Path(location).is_dir():
        raise JobRejected(f"{location}: is not a directory; name a directory for the output files")
    if roll <= 0:
        raise JobRejected(f"roll must be a positive size, not {roll}")
    if not 0 <= min_size_bytes <= min(roll, MIN_SIZE_BYTES_MAX):
        raise JobRejected(
            f"min_size is {min_size_bytes} bytes; it may be up to {min(roll, MIN_SIZE_BYTES_MAX)}, since the rows "
            "are in memory and in every checkpoint; penstock compact makes larger files"
        )
    partitions = _column_names(partition_by)
    if len(set(partitions)) < len(partitions):
        raise JobRejected(f"partition_by names a column twice: {name_list(partitions)}")
    if schema is not None:
        _check_written_columns(format, schema, partitions)
    return graph_pb2.SinkSpec(
        files=graph_pb2.FileSink(
            format=format,
            directory=location,
            partition_by=partitions,
            roll_size_bytes=roll,
            roll_interval_ms=roll_interval_ms,
            inactivity_interval_ms=inactivity_ms,
            min_size_bytes=min_size_bytes,
            max_delay_ms=max_delay_ms if min_size_bytes else 0,
        ),
        supports_concurrent_attempts=True,
    )


def _check_prefix(location: str) -> None:
    if not location.removeprefix("s3://").partition("/")[2]:
        raise JobRejected(f"{location}: name a prefix for the output files: s3://bucket/prefix")


def _check_format(format: str, known: Sequence[str]) -> None:
    if format not in known:
        raise JobRejected(f'unknown file format "{format}"; known are {name_list(known)}')


def _column_names(partition_by: Sequence[str] | str | None) -> list[str]:
    names = [partition_by] if isinstance(partition_by, str) else partition_by
    if names is None:
        return []
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise JobRejected(f"partition_by takes names of columns, got {partition_by!r}")
    return list(names)


def warn_of_circle(link: str) -> None:
    """Says that a link of an input directory is not followed."""
    _log.warning("%s: the link leads round in a circle; it is not followed", link)


def _check_declaration(
    format: str,
    selected: pa.Schema,
    location: str,
    files: Sequence[ListedFile],
    options: TextOptions,
    required: Sequence[str],
) -> None:
    base = location if is_directory(location) else ""
    check_declared(
        format,
        selected.names,
        files,
        lambda file: frozenset(partition_values(base, file)),
        options,
        required=required,
    )
    warn_of_absent_fields(format, selected, [file.path for file in files], options)


def _existing_files(location: str, *, watch: bool, schema_given: bool) -> list[ListedFile]:
    try:
        files = list_files(location, warn_of_circle)
    except EntryRefusedError as error:
        raise JobRejected(str(error)) from error
    except FileNotFoundError as error:
        raise JobRejected(f"{location}: no such file or directory") from error
    except OSError as error:
        raise JobRejected(f"{location}: cannot be read: {os_reason(error)}") from error
    if watch and is_file(location):
        raise JobRejected(f"{location}: watch needs a directory or a glob, this is a file")
    # A prefix below which nothing is cannot be told from one that is misspelt.
    is_place = is_directory(location) and not is_s3(location)
    if files or (schema_given and (watch or is_place)):
        return files
    where = "is empty" if is_place else "matches no file"
    hidden = "names that start with _ or . are not read"
    if watch or is_place:
        raise JobRejected(
            f"{location}: {where} ({hidden}), so there is no schema to infer: give schema="
        )
    raise JobRejected(f"{location}: {where} ({hidden})")


def _check_names(schema: pa.Schema, location: str) -> None:
    names = schema.names
    if not names:
        raise JobRejected(f"{location}: the schema has no columns")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JobRejected(f'{location}: the schema names the column "{twice[0]}" twice')
    if EVENT_TIME in names:
        raise JobRejected(
            f'{location}: the column name "{EVENT_TIME}" is reserved; read the other columns with '
            "columns="
        )


def _check_readable_types(format: str, schema: pa.Schema) -> None:
    """Refuses types that the text parsers do not know, before a cluster finds out."""
    if format not in ("csv", "json"):
        return
    from penstock.connectors.text_parsing import (
        json_parse_schema,
        nested_type_of_text,
        parse_csv,
        parse_json,
    )

    for field in schema:
        inner = nested_type_of_text(field.type) if format == "json" else None
        if inner is not None:
            raise JobRejected(
                f'column "{field.name}": inside of {field.type}, JSON cannot be read as {inner}; read it as string '
                "there and convert it in a function"
            )
        try:
            if format == "csv":
                parse_csv(b"0\n", [field.name], {field.name: field.type})
            else:
                one = json_parse_schema(pa.schema([field]))
                parse_json(b"{}\n", one)
        except pa.ArrowNotImplementedError as error:
            raise JobRejected(
                f'column "{field.name}": {format} cannot be read as {field.type}; read it as another '
                "type and convert it with .cast"
            ) from error
        except pa.ArrowInvalid:
            # The probe "0" does not fit, for example a date: the type as such is known.
            continue


def _check_optional(options: TextOptions, schema: pa.Schema, location: str) -> None:
    for name in sorted(options.optional.difference(schema.names)):
        raise JobRejected(
            f'{location}: optional= names "{name}"{nearest_name(name, schema.names)}, which is no column '
            f"of the schema; columns: {name_list(schema.names)}"
        )


def _select(schema: pa.Schema, columns: Sequence[str] | None, location: str) -> pa.Schema:
    if columns is None:
        return schema
    if not columns:
        raise JobRejected(f"{location}: columns= names no column")
    for name in columns:
        if name not in schema.names:
            raise JobRejected(
                f'{location}: there is no column "{name}"{nearest_name(name, schema.names)}; columns: '
                f"{name_list(schema.names)}"
            )
    if len(set(columns)) < len(columns):
        raise JobRejected(f"{location}: columns= names a column twice: {name_list(columns)}")
    return pa.schema([schema.field(name) for name in columns])


def _check_written_columns(format: str, schema: pa.Schema, partitions: Sequence[str]) -> None:
    names = [name for name in schema.names if name != EVENT_TIME]
    for name in partitions:
        if name not in names:
            raise JobRejected(
                f'partition_by: there is no column "{name}"{nearest_name(name, names)}; columns: '
                f"{name_list(names)}"
            )
        type_ = plain_schema(schema).field(name).type
        stored = type_.storage_type if is_extension(type_) else type_
        if any(is_kind(stored) for is_kind in _NO_DIRECTORY):
            raise JobRejected(
                f'partition_by: column "{name}" is {type_}, which cannot name a directory; take a column of texts, '
                "numbers or times"
            )
    if len(partitions) == len(names):
        raise JobRejected(
            "partition_by: at least one column must remain to be written to the files"
        )
    for unfit in _UNFIT[format]:
        found = first_of_type(schema, unfit)
        if found is not None:
            instead = (
                "write JSON or Parquet, or select its parts" if format == "csv" else "write JSON"
            )
            raise JobRejected(
                f'column "{found.name}" is {found.type}, which {_NAMES[format]} cannot hold; {instead}, or '
                ".cast(...) it to another type"
            )
