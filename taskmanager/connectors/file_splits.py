"""Which splits a file source has: whole files, and groups of row groups of large Parquet files.

A split's id is the file's path, with what tells the content and the row groups where there are several
splits of one file. The way a file is cut depends on the file alone, so that it is the same at every discovery.
"""

from __future__ import annotations

import datetime as dt
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from common.elements import TIME_LIMIT_MS
from penstock.connectors.listing import ListedFile
from penstock.connectors.messages import os_reason, shorten
from penstock.connectors.source import PART_OF, Split
from penstock.errors import TaskFailure
from taskmanager.connectors.file_identity import OpenedFile, file_version, this_host
from taskmanager.connectors.opened_object import open_file
from taskmanager.connectors.parquet_columns import column_names

SPLIT_BYTES = 4 << 20
"""A Parquet file is cut between row groups into splits of about this size."""

_FOOTER_LENGTH = struct.Struct("<I")
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_MS_PER_DAY = 86_400_000
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class FileSplit:
    """The payload of a split: what was found at discovery.

    Attributes:
        size_bytes: of the file.
        first_row_group: of a Parquet file.
        end_row_group: behind the last one, -1 = all of the file.
        version: of the file, see ``OpenedFile``.
        footer_checksum: CRC-32 of a Parquet file's footer, 0 of others.
        start_byte: of a piece of text, 0 = behind the header.
        end_byte: behind a piece of text, -1 = all of the file.
        first_line: number of the piece's first line, 0 = as the header says.
        piece_checksum: CRC-32 of header and piece, -1 of what is no piece.
        host: where the file was found, of a part without a checksum.
        found_ms: when, in ms since the epoch.
    """

    path: str
    size_bytes: int
    first_row_group: int = 0
    end_row_group: int = -1
    version: str = ""
    footer_checksum: int = 0
    start_byte: int = 0
    end_byte: int = -1
    first_line: int = 0
    piece_checksum: int = -1
    host: str = ""
    found_ms: int = 0

    def encode(self) -> bytes:
        """As bytes for ``Split.payload``."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(payload: bytes) -> FileSplit:
        """Inverse of ``encode``."""
        return FileSplit(**json.loads(payload))


def part_id(path: str, content: str, part: str) -> str:
    """The id of a part of a file that is cut into several: parts of another content are other splits."""
    return f"{path}{PART_OF}{content}{PART_OF}{part}"


def whole_file_split(file: ListedFile) -> Split:
    """The file as one split."""
    version = file.etag or file_version(file.modified_ns, file.changed_ns, file.inode)
    payload = FileSplit(file.path, file.size_bytes, version=version).encode()
    return Split(id=file.path, payload=payload, size=file.size_bytes)


def parquet_splits(file: ListedFile, event_time: pa.Field | None, now_ms: int) -> list[Split]:
    """The file cut between row groups, with the lower bound of event times its statistics give.

    Args:
        event_time: the declared column that event time is taken from, None = it is no column of the file.
        now_ms: since the epoch.

    Raises:
        TaskFailure: the file cannot be read or is no Parquet file.
    """
    from pyarrow import parquet

    opened = open_file(file.path)
    try:
        with opened.stream() as handle:
            metadata = parquet.read_metadata(handle)
        footer = footer_checksum(opened)
    except OSError as error:
        raise TaskFailure(f"{file.path}: cannot be read: {os_reason(error)}") from error
    except pa.ArrowException as error:
        raise TaskFailure(
            f"{file.path}: not a readable Parquet file: {shorten(str(error))}"
        ) from error
    finally:
        opened.close()
    groups = _row_group_ranges(metadata)
    splits: list[Split] = []
    for first, end in groups:
        whole = len(groups) == 1
        payload = FileSplit(
            file.path,
            file.size_bytes,
            first,
            -1 if whole else end,
            opened.version,
            footer,
            host=this_host(),
            found_ms=now_ms,
        )
        splits.append(
            Split(
                id=file.path
                if whole
                else part_id(file.path, f"{footer:08x}", f"{first}-{end - 1}"),
                payload=payload.encode(),
                size=sum(_row_group_bytes(metadata, index) for index in range(first, end)),
                min_event_time_ms=_smallest(
                    min_event_times(metadata, event_time, range(first, end))
                ),
            )
        )
    return splits


def footer_checksum(file: OpenedFile) -> int:
    """CRC-32 of a Parquet file's footer, which says where its pages are, and what statistics they have."""
    size = file.size()
    (length,) = _FOOTER_LENGTH.unpack_from(file.read(size - 8, 8))
    return file.checksum(size - 8 - length, size)


def _row_group_ranges(metadata: Any) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    first, size = 0, 0
    for index in range(metadata.num_row_groups):
        size += _row_group_bytes(metadata, index)
        if size >= SPLIT_BYTES:
            ranges.append((first, index + 1))
            first, size = index + 1, 0
    if first < metadata.num_row_groups:
        ranges.append((first, metadata.num_row_groups))
    return ranges


def _row_group_bytes(metadata: Any, index: int) -> int:
    group = metadata.row_group(index)
    return sum(group.column(column).total_compressed_size for column in range(group.num_columns))


def min_event_times(metadata: Any, event_time: pa.Field | None, groups: range) -> list[int | None]:
    """The smallest event time of each row group; None where its statistics do not say.

    Args:
        event_time: the declared column that event time is taken from, None = it is no column of the file.
    """
    column = -1 if event_time is None else _column_index(metadata, event_time)
    if column < 0:
        return [None] * len(groups)
    return [_min_event_time(metadata.row_group(index).column(column)) for index in groups]


def _column_index(metadata: Any, declared: pa.Field) -> int:
    """Index of the leaf column, -1 where there is none of that name, or its values mean other times."""
    leaves = [index for index, name in enumerate(column_names(metadata)) if name == declared.name]
    if len(leaves) != 1 or metadata.schema.column(leaves[0]).path != declared.name:
        return -1
    actual = metadata.schema.to_arrow_schema().field(declared.name).type
    # A number that is cast to a timestamp counts in its unit, and the other way round.
    is_same_kind = pt.is_integer(actual) == pt.is_integer(declared.type)
    return leaves[0] if is_same_kind else -1


def _min_event_time(column: Any) -> int | None:
    """The smallest event time of a row group's column chunk; None where its statistics do not say."""
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        return event_time_ms(statistics.min)
    except OverflowError:  # a time that Python's datetime cannot hold
        return None
    except (
        ValueError
    ):  # nanoseconds, which it has not; where there is pandas, its Timestamp has them
        return int(statistics.min_raw) // _NS_PER_MS


def _smallest(times: list[int | None]) -> int | None:
    """The smallest of them; None where one is not known, or there are none."""
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def event_time_ms(value: Any) -> int | None:
    """An event-time column's value in milliseconds since the epoch; None for what is none."""
    if isinstance(value, bool) or value != value:  # pandas' NaT is a datetime
        return None
    if isinstance(value, int):
        return value if abs(value) <= TIME_LIMIT_MS else None
    if isinstance(value, dt.datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
        since = zoned - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        return since // dt.timedelta(milliseconds=1)
    if isinstance(value, dt.date):
        return (value.toordinal() - _EPOCH_DAY) * _MS_PER_DAY
    return None
