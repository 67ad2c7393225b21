"""What a partition server does with the requests of consumers.

A complete partition is there or it is not: nobody waits. It is looked for on disk at each request, so
that what was sealed a moment ago is found, and what was released is not.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from common.spill_paths import can_be_kept
from penstock.errors import PartitionUnavailable, StreamError
from taskmanager.network.partition_registry import PartitionRequest
from taskmanager.network.remote_channel import PartitionProvider
from taskmanager.partitions.promoted_store import PromotedStore
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import SealedStore


class PartitionShelf(PartitionProvider):
    """The complete partitions below a spill directory, of every job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.forget()

    def forget(self) -> None:
        """Drops what is remembered of partitions: some of them have been removed."""
        self._sealed = SealedStore(self._directory)
        self._promoted = PromotedStore(self._directory)

    @property
    @override
    def next_deadline_ns(self) -> int | None:
        return None

    @override
    def expire(self, now_ns: int) -> None:
        """Nobody waits."""

    @override
    def withdraw(self, request: PartitionRequest) -> None:
        """Nobody waits."""

    @override
    def request(self, request: PartitionRequest) -> None:
        wanted = request.partition_id
        try:
            partition = self._find(request)
            view = partition.view(request.subpartition_index, request.first_row, request.refused)
        except PartitionUnavailable as error:
            request.refused(error)
            return
        except StreamError as error:
            reason = f"partition {wanted} of job {request.job_id} cannot be read: {error}"
            request.refused(PartitionUnavailable(reason, partition=wanted))
            return
        request.attached(view)
        view.attach(request.reader)

    def _find(self, request: PartitionRequest) -> SealedPartition:
        job_id, wanted = request.job_id, request.partition_id
        partition = None
        if can_be_kept(job_id, wanted):
            partition = None if request.is_foreign else self._sealed.find(job_id, wanted)
            partition = partition or self._promoted.find(job_id, wanted)
        if partition is None:
            raise PartitionUnavailable(
                f"partition {wanted} of job {job_id} is not held here (any more): its producer must "
                "run again",
                partition=wanted,
            )
        return partition
