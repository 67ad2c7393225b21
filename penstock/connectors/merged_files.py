"""Several small files of one format as one: their rows in the order of the files.

Text is joined as it is, CSV under one header; Parquet is written anew, with row groups of a useful size. Only files with the same
columns are merged.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from penstock.connectors.csv_structure import row_ends
from penstock.connectors.messages import shorten
from penstock.errors import JobRejected

_ROW_GROUP_ROWS: Final = 128 * 1024
_ROW_GROUP_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class NamedContent:
    """A file that was read; the name is for messages."""

    name: str
    content: bytes


def alike(form: str, files: Sequence[NamedContent]) -> list[list[NamedContent]]:
    """The files in groups that have the same columns, in the order of each group's first.

    Args:
        form: "parquet" | "csv" | "json"

    Raises:
        JobRejected: one is no file of the format.
    """
    groups: dict[bytes, list[NamedContent]] = {}
    for file in files:
        groups.setdefault(_COLUMNS[form](file), []).append(file)
    return list(groups.values())


def merge(form: str, files: Sequence[NamedContent]) -> bytes:
    """One content with all rows.

    Args:
        form: "parquet" | "csv" | "json"
        files: a group of ``alike``.
    """
    if form == "parquet":
        return _merge_parquet(files)
    if form == "json":
        return b"".join(_ended(file.content) for file in files)
    header = _csv_header(files[0])
    return header + b"".join(_ended(file.content[len(header) :]) for file in files)


def _ended(text: bytes) -> bytes:
    return text if not text or text.endswith(b"\n") else text + b"\n"


def _csv_header(file: NamedContent) -> bytes:
    ends = row_ends(file.content)
    if not len(ends):
        raise JobRejected(f"{file.name}: is no CSV file with a header")
    return file.content[: int(ends[0])]


def _opened(file: NamedContent) -> Any:
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(pa.BufferReader(file.content))
    except pa.ArrowException as error:
        raise JobRejected(
            f"{file.name}: not a readable Parquet file: {shorten(str(error))}"
        ) from error


_COLUMNS: Final[dict[str, Callable[[NamedContent], bytes]]] = {
    "parquet": lambda file: _opened(file).schema_arrow.serialize().to_pybytes(),
    "csv": _csv_header,
    "json": lambda _: b"",
}
"""What two files must have in common."""


def _merge_parquet(files: Sequence[NamedContent]) -> bytes:
    from pyarrow import parquet

    out = io.BytesIO()
    schema = _opened(files[0]).schema_arrow
    with parquet.ParquetWriter(out, schema, compression="snappy") as writer:
        for table in _row_groups(files):
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
    return out.getvalue()


def _row_groups(files: Sequence[NamedContent]) -> Iterator[pa.Table]:
    tables: list[pa.Table] = []
    rows = size_bytes = 0
    for file in files:
        opened = _opened(file)
        for group in range(opened.num_row_groups):
            tables.append(opened.read_row_group(group))
            rows += tables[-1].num_rows
            size_bytes += tables[-1].nbytes
            if rows >= _ROW_GROUP_ROWS or size_bytes >= _ROW_GROUP_BYTES:
                yield pa.concat_tables(tables)
                tables, rows, size_bytes = [], 0, 0
    if tables:
        yield pa.concat_tables(tables)
