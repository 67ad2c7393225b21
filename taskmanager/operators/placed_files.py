"""Files of a source that Spark reads itself, where it can: the others are written anew beside the stage.

Spark takes a file as it is when it sees it, and when it reads the same rows out of it as we would: columns of the declared
types, in codecs and encodings that it knows, none of them said by the path. Everything else, file by file, is read by us
and written as an exchange would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.connectors.listing import EntryRefusedError, is_glob, list_files
from penstock.connectors.messages import os_reason, shorten
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.column_values import ValueMismatch
from penstock.rows.conforming import conformed
from penstock.rows.schema import schema_from_bytes
from penstock.rows.spark_types import is_read_alike
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.parquet_columns import column_names
from taskmanager.spark.stage_files import StageInputFiles, has_other_calendar

_CODECS = frozenset({"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD"})
_ENCODINGS = frozenset(
    {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
    | {"DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"}
)
_DECODE_ROWS = 64 * 1024


def place_files(
    spec: graph_pb2.FileSource, given: StageInputFiles, seen_below: Path | None
) -> None:
    """Gives a stage the files of a source; on an I/O thread.

    Args:
        given: takes their names, and the rows of those that Spark cannot be given.
        seen_below: the only directory whose files Spark sees; None = it sees what this machine does.

    Raises:
        TaskFailure: a file cannot be read, or has not the columns that were declared.
    """
    base = "" if is_glob(spec.path) else spec.path
    schema = schema_from_bytes(spec.schema)
    output = pa.schema([schema.field(name) for name in spec.columns])
    for path in _listed(spec):
        plan = ColumnPlan(output, path, base, declared=schema.names)
        is_seen = seen_below is None or Path(path).resolve().is_relative_to(seen_below.resolve())
        try:
            with pq.ParquetFile(path) as file:
                plan.check_present(file.schema_arrow)
                if is_seen and plan.file_schema.equals(output) and reads_alike(file, output):
                    given.files.append(path)
                    continue
                for batch in _batches(file, plan):
                    given.add(batch)
                    if given.is_full:
                        given.write(given.take())
        except OSError as error:
            raise TaskFailure(f"{path}: cannot be read: {os_reason(error)}") from error
        except pa.ArrowException as error:
            message = f"{path}: not a readable Parquet file: {shorten(str(error))}"
            raise TaskFailure(message) from error
    if given.is_open:
        given.write(given.take())


def _listed(spec: graph_pb2.FileSource) -> Sequence[str]:
    try:
        files = [file.path for file in list_files(spec.path)]
    except EntryRefusedError as error:
        raise TaskFailure(str(error)) from error
    except FileNotFoundError as error:
        raise TaskFailure(
            f"{spec.path}: no such file or directory on this TaskManager; every TaskManager must "
            "see the files under the same path"
        ) from error
    except OSError as error:
        raise TaskFailure(f"{spec.path}: cannot be read: {os_reason(error)}") from error
    if not files and not spec.may_be_empty:
        raise TaskFailure(f"{spec.path}: there are no files to read on this TaskManager")
    return files


def _batches(file: pq.ParquetFile, plan: ColumnPlan) -> Iterator[pa.RecordBatch]:
    names = plan.file_schema.names
    rows = 0
    for batch in file.iter_batches(_DECODE_ROWS, columns=names):
        try:
            conforming = conformed(plan.assemble(batch), plan.output)
            yield pa.RecordBatch.from_arrays(conforming.columns, names=plan.output.names)
        except ValueMismatch as error:
            row = f", row {rows + error.index + 1}" if error.index >= 0 else ""
            raise TaskFailure(f"{plan.path}{row}: the source returned {error}") from error
        rows += batch.num_rows


def reads_alike(file: pq.ParquetFile, output: pa.Schema) -> bool:
    """Whether Spark reads the same out of a file as we do.

    Args:
        output: the columns that are read.
    """
    if has_other_calendar(file.metadata):
        return False
    actual = file.schema_arrow
    by_lower = [name.lower() for name in actual.names]
    for field in output:
        if actual.field(field.name).type != field.type or not is_read_alike(field.type):
            return False
        if by_lower.count(field.name.lower()) > 1:
            return False  # one column to Spark
    never_null = frozenset(  # an empty list counts as a null in a file's statistics
        field.name for field in output if not field.nullable and actual.field(field.name).nullable
    )
    return all(
        _is_known(column) for column in _column_chunks(file.metadata, frozenset(output.names))
    ) and all(_has_no_null(column) for column in _column_chunks(file.metadata, never_null))


def _column_chunks(metadata: Any, names: frozenset[str]) -> Iterator[Any]:
    leaves = [index for index, name in enumerate(column_names(metadata)) if name in names]
    for group in range(metadata.num_row_groups):
        yield from map(metadata.row_group(group).column, leaves)


def _has_no_null(column: Any) -> bool:
    statistics = column.statistics
    return bool(statistics and statistics.has_null_count and not statistics.null_count)


def _is_known(column: Any) -> bool:
    return column.compression in _CODECS and _ENCODINGS.issuperset(column.encodings)
