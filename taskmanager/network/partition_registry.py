"""The result partitions of one slot process, and the consumers that wait for one (pure).

Producers and consumers are deployed at the same time, so that a consumer may ask for a partition that
is not there yet: its request waits, bounded by a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from penstock.errors import InvariantViolation, PartitionUnavailable, StreamError
from penstock.partition_id import PartitionId
from taskmanager.network.subpartition import (
    ReadablePartition,
    Refusal,
    SubpartitionReader,
    SubpartitionView,
)


def _none_sealed(_partition_id: PartitionId) -> ReadablePartition | None:
    return None


def _is_never_lost(reason: str) -> None:
    raise InvariantViolation(f"what is in a process is not lost for a moment: {reason}")


@dataclass(eq=False, slots=True)
class PartitionRequest:
    """A consumer's wish to read one subpartition.

    Attributes:
        attached: called with its place in the subpartition, right before ``reader`` is fed.
        refused: called when it cannot be read; after ``attached``, when it cannot be read on.
        first_row: offset of the first row that is wanted.
        reader_attempt: of the consumer.
        job_id: whose partition it is.
        is_foreign: the reader is of another job, so it may read what outlives jobs and nothing else.
        lost: called when it cannot be read for the moment.
    """

    partition_id: PartitionId
    subpartition_index: int
    reader: SubpartitionReader
    deadline_ns: int
    attached: Callable[[SubpartitionView], None]
    refused: Refusal
    first_row: int = 0
    reader_attempt: int = 0
    job_id: str = ""
    is_foreign: bool = False
    lost: Callable[[str], None] = _is_never_lost


class PartitionSource(Protocol):
    """Who has partitions, or will have them.

    Attributes:
        may_be_lost: what it has may be out of reach for a while; consumers ask again, for so long.
    """

    may_be_lost: bool

    def request(self, request: PartitionRequest) -> None:
        """Attaches the reader, now or later, or refuses it."""

    def withdraw(self, request: PartitionRequest) -> None:
        """The consumer does not want it any more."""


class PartitionRegistry(PartitionSource):
    """Which partitions are there, and who waits for which.

    Args:
        find_sealed: looks for a partition that its producer has left behind on disk; it may raise
            ``StreamError`` where that is damaged.
    """

    may_be_lost = False

    def __init__(
        self, find_sealed: Callable[[PartitionId], ReadablePartition | None] = _none_sealed
    ) -> None:
        self._find_sealed = find_sealed
        self._partitions: dict[PartitionId, ReadablePartition] = {}
        self._forgotten: dict[tuple[str, str, int], int] = {}
        """Of each subtask's output on an edge, the newest attempt that has been released."""
        self._waiting: list[PartitionRequest] = []

    def register(self, partition: ReadablePartition) -> None:
        """Adds a partition and serves those that wait for it; other attempts' stay."""
        partition_id = partition.partition_id
        if partition_id in self._partitions:
            raise InvariantViolation(f"partition {partition_id} is registered already")
        self._partitions[partition_id] = partition
        self.retry()

    def find(self, partition_id: PartitionId) -> ReadablePartition | None:
        """A partition of this process."""
        return self._partitions.get(partition_id)

    def retry(self) -> None:
        """Looks again for what is waited for."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.request(request)

    def forget(self, partition_id: PartitionId) -> None:
        """The partition is released."""
        if self._partitions.pop(partition_id, None) is not None:
            key = _output_of(partition_id)
            newest = self._forgotten.get(key, partition_id.attempt)
            self._forgotten[key] = max(newest, partition_id.attempt)

    @override
    def request(self, request: PartitionRequest) -> None:
        """Attaches the reader, now or when the partition comes, or refuses it."""
        wanted = request.partition_id
        try:
            partition = self._partitions.get(wanted) or self._find_sealed(wanted)
            if partition is None:
                self._wait(request)
                return
            view = partition.view(
                request.subpartition_index,
                request.first_row,
                request.refused,
                request.reader_attempt,
            )
        except PartitionUnavailable as error:
            request.refused(error)
            return
        except StreamError as error:
            request.refused(_unavailable(wanted, f"cannot be read: {error}"))
            return
        request.attached(view)
        view.attach(request.reader)

    def _wait(self, request: PartitionRequest) -> None:
        """Waits for a partition that is to come.

        Raises:
            PartitionUnavailable: it will not come.
        """
        wanted = request.partition_id
        gone = self._forgotten.get(_output_of(wanted), -1)
        if gone == wanted.attempt:
            raise _unavailable(wanted, "has been released")
        newest = max(
            (held.attempt for held in self._partitions if _output_of(held) == _output_of(wanted)),
            default=gone,
        )
        if newest > wanted.attempt:
            raise _unavailable(wanted, f"has been replaced by attempt {newest}")
        self._waiting.append(request)

    @override
    def withdraw(self, request: PartitionRequest) -> None:
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
            reason = "was not there in time: its producer has not started, or has failed"
            request.refused(_unavailable(request.partition_id, reason))


def _output_of(partition_id: PartitionId) -> tuple[str, str, int]:
    return partition_id.edge_id, partition_id.vertex, partition_id.subtask_index


def _unavailable(partition_id: PartitionId, reason: str) -> PartitionUnavailable:
    return PartitionUnavailable(f"partition {partition_id} {reason}", partition=partition_id)
