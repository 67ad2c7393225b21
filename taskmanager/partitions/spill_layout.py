"""Where the rows of kept partitions lie on disk, and the index of a complete one (pure).

Below the spill directory of a TaskManager::

    <job>/<edge>-<attempt>/part=<producer subtask>/sub=<subpartition>/<sequence>.arrow|.parquet|.spark.parquet
    <job>/<edge>-<attempt>/part=<producer subtask>/index

A file has consecutive rows of one subpartition, as Arrow IPC or Parquet; files that Spark has written may be
large, and are read by row groups. The index is written last and
appears at once: a partition without one is not complete, and belongs to the process that writes it.
The index names every file with its format, its size and CRC-32, and holds the control elements, which lie between
rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from common.elements import ControlElement
from common.spill_index import INDEX_FORMAT
from common.spill_paths import job_path, partition_path, subpartition_path
from penstock.errors import StoreCorrupt, TaskFailure
from penstock.partition_id import PartitionId
from penstock.storage.framing import decode_frame, encode_frame
from taskmanager.network.frames import FrameError
from taskmanager.network.messages import decode_control, encode_control
from taskmanager.partitions.spill_format import SpillFormat


class SpillFailed(TaskFailure):
    """Rows of a kept partition cannot be written to disk."""


@dataclass(frozen=True, slots=True)
class SpillFile:
    """One file of a subpartition.

    Attributes:
        sequence: its number, which is its name.
        first_row: offset of its first row.
        rows: how many it has, at least one.
        checksum: CRC-32 of the whole file.
        groups: how many rows each of its row groups has; () = it is read as a whole.
        group: this stands for one row group of the file alone, which has the rows that are named.

    Example: a file of Spark's is read piece by piece.
        >>> file = SpillFile(3, first_row=10, rows=5, size_bytes=99, checksum=0, groups=(2, 3))
        >>> [(piece.group, piece.first_row, piece.end_row) for piece in file.pieces]
        [(0, 10, 12), (1, 12, 15)]
    """

    sequence: int
    first_row: int
    rows: int
    size_bytes: int
    checksum: int
    format: SpillFormat = SpillFormat.ARROW
    groups: tuple[int, ...] = ()
    group: int | None = None

    @property
    def end_row(self) -> int:
        """Offset of the row behind its last."""
        return self.first_row + self.rows

    @property
    def pieces(self) -> list[SpillFile]:
        """What is read of it at a time, in order."""
        pieces, row = [], self.first_row
        for number, rows in enumerate(self.groups):
            if rows:
                pieces.append(replace(self, first_row=row, rows=rows, groups=(), group=number))
                row += rows
        return pieces or [self]

    @property
    def name(self) -> str:
        """Within the directory of its subpartition."""
        return file_name(self.sequence, self.format)


@dataclass(frozen=True, slots=True)
class SubpartitionIndex:
    """What one consumer of a complete partition reads.

    Attributes:
        first_row: offset of the first row; more than 0 where the attempt was restored.
        files: in order, without gaps.
        controls: each element with the offset of the row it stands before, in order.
    """

    first_row: int
    files: tuple[SpillFile, ...]
    controls: tuple[tuple[int, ControlElement], ...]

    @property
    def end_row(self) -> int:
        """Offset of the row behind the last."""
        return self.files[-1].end_row if self.files else self.first_row


@dataclass(frozen=True, slots=True)
class PartitionIndex:
    """A complete partition."""

    job_id: str
    partition_id: PartitionId
    subpartitions: tuple[SubpartitionIndex, ...]

    @property
    def rows(self) -> int:
        """Rows of all subpartitions."""
        return sum(part.end_row - part.first_row for part in self.subpartitions)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for part in self.subpartitions for file in part.files)


def job_directory(root: Path, job_id: str) -> Path:
    """Everything that is kept for a job."""
    return root / job_path(job_id)


def partition_directory(root: Path, job_id: str, partition_id: PartitionId) -> Path:
    """Everything that is kept of a partition."""
    return root / partition_path(job_id, partition_id)


def subpartition_directory(partition: Path, subpartition_index: int) -> Path:
    """The files of a subpartition, below the directory of its partition."""
    return Path(subpartition_path(str(partition), subpartition_index))


def file_name(sequence: int, spill_format: SpillFormat = SpillFormat.ARROW) -> str:
    """Name of a file within the directory of its subpartition."""
    return f"{sequence:08d}.{spill_format.value}"


def encode_index(index: PartitionIndex) -> bytes:
    """The content of an index file."""
    partition_id = index.partition_id
    fields = {
        "job_id": index.job_id,
        "edge_id": partition_id.edge_id,
        "vertex": partition_id.vertex,
        "subtask_index": partition_id.subtask_index,
        "attempt": partition_id.attempt,
        "subpartitions": [
            {
                "first_row": part.first_row,
                "files": [_encode_file(file) for file in part.files],
                "controls": [(row, encode_control(element)) for row, element in part.controls],
            }
            for part in index.subpartitions
        ],
    }
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return encode_frame(INDEX_FORMAT, packed)


def decode_index(content: bytes, path: Path | str) -> PartitionIndex:
    """Inverse of ``encode_index``.

    Raises:
        StoreCorrupt: it is not what was written; the message names the path.
    """
    _, payload = decode_frame(INDEX_FORMAT, content, str(path))
    try:
        fields: Any = msgpack.unpackb(payload, raw=False)
        index = PartitionIndex(
            fields["job_id"],
            PartitionId(
                fields["edge_id"], fields["vertex"], fields["subtask_index"], fields["attempt"]
            ),
            tuple(_decode_subpartition(part) for part in fields["subpartitions"]),
        )
        _check(index)
    except (ValueError, TypeError, KeyError, FrameError) as error:
        raise StoreCorrupt(f"{path} does not make sense: {error!r}") from error
    return index


def _encode_file(file: SpillFile) -> tuple[int | str | tuple[int, ...], ...]:
    return (
        file.sequence,
        file.first_row,
        file.rows,
        file.size_bytes,
        file.checksum,
        file.format.value,
        *((file.groups,) if file.groups else ()),
    )


def _decode_file(
    sequence: int,
    first_row: int,
    rows: int,
    size_bytes: int,
    checksum: int,
    spill_format: str = SpillFormat.ARROW.value,
    groups: Sequence[int] = (),
) -> SpillFile:
    if groups and sum(groups) != rows:
        raise ValueError(f"the row groups of file {sequence} have not its {rows} rows")
    kind = SpillFormat(spill_format)
    return SpillFile(sequence, first_row, rows, size_bytes, checksum, kind, tuple(groups))


def _decode_subpartition(fields: Any) -> SubpartitionIndex:
    return SubpartitionIndex(
        fields["first_row"],
        tuple(_decode_file(*file) for file in fields["files"]),
        tuple((row, decode_control(payload)) for row, payload in fields["controls"]),
    )


def _check(index: PartitionIndex) -> None:
    for number, part in enumerate(index.subpartitions):
        row = part.first_row
        for file in part.files:
            if file.first_row != row or file.rows <= 0:
                raise ValueError(f"subpartition {number} has no file with row {row}")
            row = file.end_row
        rows: Sequence[int] = [part.first_row, *(row for row, _ in part.controls), row]
        if any(before > after for before, after in itertools.pairwise(rows)):
            raise ValueError(f"control elements of subpartition {number} are out of order")
