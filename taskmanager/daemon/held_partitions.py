"""The complete partitions of this TaskManager, as the JobManager is told of them (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.pb import internal_pb2
from penstock.partition_id import PartitionId

LISTED_MAX = 4096
"""In one message; what does not fit is told when others have gone."""

HeldRow = tuple[str, PartitionId, int, int]
"""Job, partition, rows, bytes."""


@dataclass(frozen=True, slots=True)
class HeldPartitionsReport:
    """What is held at a time.

    Attributes:
        listed: at most ``LISTED_MAX``.
        count: of all, each once, also where it is promoted.
        size_bytes: of all.
        promoted: to which some of them belong.
        version: grows with each look at the disk.
    """

    listed: tuple[internal_pb2.HeldPartition, ...] = ()
    count: int = 0
    size_bytes: int = 0
    promoted: tuple[internal_pb2.PromotedSet, ...] = ()
    version: int = 0

    def to_message(self) -> internal_pb2.Holdings:
        """As the JobManager is told of them."""
        return internal_pb2.Holdings(
            partitions=self.listed,
            count=self.count,
            size_bytes=self.size_bytes,
            promoted=self.promoted,
            version=self.version,
        )


def summarize(
    own: Sequence[HeldRow],
    promoted: Iterable[tuple[str, HeldRow]],
    sets: Iterable[internal_pb2.PromotedSet] = (),
    *,
    version: int = 0,
) -> HeldPartitionsReport:
    """What is held.

    Args:
        own: of jobs.
        promoted: name and partition; they are listed besides what their job still has, and before it.
        sets: to which those belong.
        version: of this look at the disk.
    """
    named = [*promoted]
    listed = [held_message(row, name) for name, row in named]
    listed += [held_message(row) for row in own]
    sizes = {(row[0], row[1]): row[3] for row in (*own, *(row for _, row in named))}
    return HeldPartitionsReport(
        tuple(listed[:LISTED_MAX]), len(sizes), sum(sizes.values()), tuple(sets), version
    )


def held_message(row: HeldRow, promoted_as: str = "") -> internal_pb2.HeldPartition:
    """A partition as a message."""
    job_id, partition_id, rows, size_bytes = row
    return internal_pb2.HeldPartition(
        job_id=job_id,
        partition=internal_pb2.PartitionId(
            edge_id=partition_id.edge_id,
            vertex=partition_id.vertex,
            subtask_index=partition_id.subtask_index,
            attempt=partition_id.attempt,
        ),
        rows=rows,
        size_bytes=size_bytes,
        promoted_as=promoted_as,
    )


def partition_id_of(message: internal_pb2.PartitionId) -> PartitionId:
    """Inverse of the partition in ``held_message``."""
    return PartitionId(message.edge_id, message.vertex, message.subtask_index, message.attempt)
