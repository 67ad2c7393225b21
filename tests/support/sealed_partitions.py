"""Complete partitions on disk, made as a producer makes them."""

from __future__ import annotations

from pathlib import Path

from common.elements import EndOfData, EndOfPartition
from common.pb import internal_pb2
from penstock.partition_id import PartitionId
from taskmanager.partitions.sealed_store import write_index
from taskmanager.partitions.spill_files import write_spill_files
from taskmanager.partitions.spill_layout import (
    PartitionIndex,
    SubpartitionIndex,
    partition_directory,
    subpartition_directory,
)
from tests.support.exchange_slots import numbers


def write_rows(spill: Path, job_id: str, partition_id: PartitionId, rows: int) -> SubpartitionIndex:
    """What a producer has written before its partition is complete: rows 0, 1, ... of one consumer."""
    directory = subpartition_directory(partition_directory(spill, job_id, partition_id), 0)
    files = [file for file, _ in write_spill_files(directory, 0, 0, [numbers(0, rows)])]
    return SubpartitionIndex(0, tuple(files), ((rows, EndOfData()), (rows, EndOfPartition())))


def seal_rows(spill: Path, job_id: str, partition_id: PartitionId, rows: int) -> Path:
    """A complete partition with rows 0, 1, ... for one consumer; returns its directory."""
    subpartition = write_rows(spill, job_id, partition_id, rows)
    write_index(spill, PartitionIndex(job_id, partition_id, (subpartition,)))
    return partition_directory(spill, job_id, partition_id)


def partition_message(partition_id: PartitionId) -> internal_pb2.PartitionId:
    """The id as daemons say it."""
    return internal_pb2.PartitionId(
        edge_id=partition_id.edge_id,
        vertex=partition_id.vertex,
        subtask_index=partition_id.subtask_index,
        attempt=partition_id.attempt,
    )
