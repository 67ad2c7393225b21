"""The result partitions of one slot process, and the consumers that wait for one (pure).

Producers and consumers are deployed at the same time, so that a consumer may ask for a partition that
is not there yet: its request waits, bounded by a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import InvariantViolation, PartitionUnavailable
from penstock.partition_id import PartitionId
from taskmanager.network.pipelined import PipelinedSubpartition, SubpartitionReader
from taskmanager.network.result_partition import ResultPartition

NO_BARRIER = -1
"""``PartitionRequest.last_barrier`` of a consumer that has just been deployed."""


@dataclass(eq=False, slots=True)
class PartitionRequest:
    """A consumer's wish to read one subpartition.

    Attributes:
        attached: called with the subpartition once it is there, right before ``reader`` is fed.
        refused: called when it cannot be read.
        first_row: the first row it wants, counted from the start of the job (kept partitions).
        last_barrier: the newest checkpoint whose barrier it has read on this channel: barriers behind it
            are sent even if they were put in before; ``NO_BARRIER`` = only those put in from now on.
        job_id: whose partition it is.
    """

    partition_id: PartitionId
    subpartition_index: int
    reader: SubpartitionReader
    deadline_ns: int
    attached: Callable[[ResultPartition, PipelinedSubpartition], None]
    refused: Callable[[PartitionUnavailable], None]
    first_row: int = 0
    last_barrier: int = NO_BARRIER
    job_id: str = ""


class PartitionRegistry:
    """Which partitions are there, and who waits for which."""

    def __init__(self) -> None:
        self._partitions: dict[PartitionId, ResultPartition] = {}
        self._newest_attempt: dict[tuple[str, str, int], int] = {}
        self._waiting: list[PartitionRequest] = []

    def register(self, partition: ResultPartition) -> None:
        """Adds a partition and serves those that wait for it."""
        partition_id = partition.partition_id
        if partition_id in self._partitions:
            raise InvariantViolation(f"partition {partition_id} is registered already")
        self._partitions[partition_id] = partition
        key = (partition_id.edge_id, partition_id.vertex, partition_id.subtask_index)
        newest = max(partition_id.attempt, self._newest_attempt.get(key, -1))
        self._newest_attempt[key] = newest
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.request(request)

    def forget(self, partition_id: PartitionId) -> None:
        """The partition is released."""
        self._partitions.pop(partition_id, None)

    def request(self, request: PartitionRequest) -> None:
        """Attaches the reader, now or when the partition comes, or refuses it."""
        wanted = request.partition_id
        partition = self._partitions.get(wanted)
        if partition is None:
            key = (wanted.edge_id, wanted.vertex, wanted.subtask_index)
            newest = self._newest_attempt.get(key, -1)
            if newest >= wanted.attempt:
                state = "released" if newest == wanted.attempt else f"replaced by attempt {newest}"
                request.refused(PartitionUnavailable(f"partition {wanted} has been {state}"))
                return
            self._waiting.append(request)
            return
        count = len(partition.subpartitions)
        if not 0 <= request.subpartition_index < count:
            request.refused(
                PartitionUnavailable(
                    f"partition {wanted} has {count} subpartitions, not one of index"
                    f" {request.subpartition_index}"
                )
            )
            return
        subpartition = partition.subpartitions[request.subpartition_index]
        if subpartition.has_reader or subpartition.has_sent:
            request.refused(
                PartitionUnavailable(
                    f"subpartition {request.subpartition_index} of {wanted} is pipelined and has"
                    " been read already; its producer must run again"
                )
            )
            return
        request.attached(partition, subpartition)
        partition.attach(subpartition, request.reader)

    def withdraw(self, request: PartitionRequest) -> None:
        """The consumer does not want it any more."""
        if request in self._waiting:
            self._waiting.remove(request)

    @property
    def next_deadline_ns(self) -> int | None:
        """When ``expire`` has something to do; None = nobody waits."""
        return min((request.deadline_ns for request in self._waiting), default=None)

    def expire(self, now_ns: int) -> None:
        """Refuses the requests whose deadline has passed."""
        late = [request for request in self._waiting if now_ns >= request.deadline_ns]
        if not late:
            return
        self._waiting = [request for request in self._waiting if now_ns < request.deadline_ns]
        for request in late:
            request.refused(
                PartitionUnavailable(
                    f"partition {request.partition_id} was not there in time: its producer has not"
                    " started, or has failed"
                )
            )
