"""How rows become the bytes of one output file: Parquet, CSV, JSON lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from typing_extensions import override

from penstock.connectors.messages import shorten
from penstock.connectors.text_parsing import is_utf8
from penstock.rows.time_text import check_time_texts
from penstock.storage.parquet_types import read_again
from taskmanager.connectors.json_text import json_rows

ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 16 << 20

EXTENSIONS = {"parquet": "parquet", "csv": "csv", "json": "json"}


def copied(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The rows of batches, which have columns, in memory of their own: nothing of what these are parts of is kept.

    As they are where Arrow cannot: dictionaries that together outgrow their index, types that it copies no rows of.
    """
    try:
        table = pa.Table.from_batches(batches)
        return table.take(np.arange(table.num_rows)).combine_chunks().to_batches()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(batches) == 1:
            return batches
    return [copy for batch in batches for copy in copied([batch])]


class FileEncoder(ABC):
    """Encodes the rows of one file.

    Attributes:
        buffered_bytes: rows taken but not encoded yet.
    """

    buffered_bytes: int = 0

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes rows."""

    def encode_buffered(self) -> None:
        """Encodes what is buffered."""

    def let_go(self) -> None:
        """Lets go of the batches that what is buffered was cut out of."""

    @abstractmethod
    def finish(self) -> None:
        """Writes what is left and the file's end; the file stays open."""

    def abandon(self) -> None:
        """The file is given up: nothing is written to it any more."""


class ParquetEncoder(FileEncoder):
    """Collects rows into row groups."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        from pyarrow import parquet

        self._schema = pa.schema([one.with_type(read_again(one.type)) for one in schema])
        self._writer = parquet.ParquetWriter(file, self._schema, compression="snappy")
        self._batches: list[pa.RecordBatch] = []
        self._copied = 0
        """How many of them are parts of no others."""
        self._rows = 0

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._rows += batch.num_rows
        self.buffered_bytes += batch.nbytes
        if self._rows >= ROW_GROUP_ROWS or self.buffered_bytes >= ROW_GROUP_BYTES:
            self.encode_buffered()

    @override
    def encode_buffered(self) -> None:
        if self._batches:
            table = pa.Table.from_batches(self._batches)
            if table.schema != self._schema:
                table = table.cast(self._schema)
            self._batches, self._copied, self._rows, self.buffered_bytes = [], 0, 0, 0
            self._writer.write_table(table, row_group_size=table.num_rows)

    @override
    def let_go(self) -> None:
        cut = self._batches[self._copied :]
        if cut:
            self._batches[self._copied :] = copied(cut)
            self._copied = len(self._batches)

    @override
    def finish(self) -> None:
        self.encode_buffered()
        self._writer.close()

    @override
    def abandon(self) -> None:
        self._batches.clear()
        self._writer.is_open = False  # else it ends the file when it is collected


class CsvEncoder(FileEncoder):
    """A header, then rows; nulls are empty, text is quoted. An empty line would be no row: alone in its row a null is ``""``."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        from pyarrow import csv

        self._file = file
        self._writer = csv.CSVWriter(file, schema)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        _refuse_times_without_text(batch)
        try:
            if batch.num_columns > 1 or not batch.column(0).null_count:
                self._writer.write_batch(batch)
            else:
                self._file.write(_lines_of(batch.column(0)))
        except pa.ArrowInvalid:
            _refuse_bytes_without_text(batch)
            raise

    @override
    def finish(self) -> None:
        self._writer.close()


def _refuse_times_without_text(batch: pa.RecordBatch) -> None:
    for column in batch.columns:
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            check_time_texts(column)


def _refuse_bytes_without_text(batch: pa.RecordBatch) -> None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        if pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind):
            unfit = next(
                (value for value in column.drop_null().to_pylist() if not is_utf8(value)), None
            )
            if unfit is not None:
                raise pa.ArrowInvalid(
                    f'column "{name}": {shorten(repr(unfit), 100)} is no text in UTF-8, and CSV has nothing else; write '
                    "JSON, where bytes are base64, or Parquet"
                )


def _lines_of(column: pa.Array) -> bytes:
    """The rows of a column with nulls, as pyarrow's writer has the others.

    Example:
        >>> _lines_of(pa.array(["a", None])).split()
        [b'"a"', b'""']
    """
    texts = column.cast(pa.large_string())
    if not (pa.types.is_primitive(column.type) or pa.types.is_decimal(column.type)):
        texts = pc.replace_substring(texts, '"', '""')
        return "".join(f'"{text or ""}"\n' for text in texts.to_pylist()).encode()
    return "".join(f"{text}\n" for text in texts.fill_null('""').to_pylist()).encode()


class JsonEncoder(FileEncoder):
    """One object per line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        _refuse_times_without_text(batch)
        self._file.write(json_rows(batch))

    @override
    def finish(self) -> None:
        pass


def file_encoder(format: str, file: BinaryIO, schema: pa.Schema) -> FileEncoder:
    """An encoder that writes to an open file.

    Args:
        format: "parquet" | "csv" | "json"
        file: open for writing.
    """
    if format == "parquet":
        return ParquetEncoder(file, schema)
    return CsvEncoder(file, schema) if format == "csv" else JsonEncoder(file)
