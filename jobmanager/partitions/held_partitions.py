"""Which complete partitions each TaskManager says it holds, and what of it nobody needs (pure).

A TaskManager says it with each heartbeat, so that nothing is held for good that a JobManager has
forgotten, was told of by an earlier one, or could not release because a call failed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from jobmanager.partitions.promoted import PromotedPart, PromotedPartitions, PromotedSet
from penstock.partition_id import PartitionId


@dataclass(frozen=True, slots=True)
class HeldPartition:
    """One complete partition on the disk of a TaskManager.

    Attributes:
        promoted_as: the name under which it outlives its job, "" = it does not.
    """

    job_id: str
    partition_id: PartitionId
    rows: int
    size_bytes: int
    promoted_as: str = ""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one TaskManager holds.

    Attributes:
        partitions: of very many only some.
        count: of all.
        size_bytes: of all.
        promoted: to which some of them belong.
        version: what is older than what is known says nothing.
    """

    partitions: tuple[HeldPartition, ...] = ()
    count: int = 0
    size_bytes: int = 0
    promoted: tuple[PromotedSet, ...] = ()
    version: int = 0


class HeldPartitions:
    """What all TaskManagers hold."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holdings] = {}

    def observe(self, taskmanager_id: str, holdings: Holdings) -> None:
        """A TaskManager has said what it holds."""
        if holdings.version >= self.of(taskmanager_id).version:
            self._holdings[taskmanager_id] = holdings

    def lost(self, taskmanager_id: str) -> None:
        """A TaskManager is gone, and with it what it held."""
        self._holdings.pop(taskmanager_id, None)

    def of(self, taskmanager_id: str) -> Holdings:
        """What a TaskManager holds."""
        return self._holdings.get(taskmanager_id, Holdings())

    def unneeded_jobs(
        self, taskmanager_id: str, needs_partitions: Callable[[str], bool]
    ) -> tuple[str, ...]:
        """Jobs whose partitions a TaskManager holds for nothing; those that are promoted do not count.

        Args:
            needs_partitions: whether a job is known and has not ended.
        """
        jobs = {
            partition.job_id
            for partition in self.of(taskmanager_id).partitions
            if not partition.promoted_as
        }
        return tuple(sorted(job_id for job_id in jobs if not needs_partitions(job_id)))

    def unconfirmed(
        self, taskmanager_id: str, needs_partitions: Callable[[str], bool]
    ) -> tuple[tuple[str, str], ...]:
        """Names and jobs under which a TaskManager holds what promotions have left that were broken off.

        Args:
            needs_partitions: whether a job is known and has not ended: it may be just promoting.
        """
        holdings = self.of(taskmanager_id)
        there = {(one.promoted_as, one.job_id) for one in holdings.partitions if one.promoted_as}
        there |= {(one.name, one.job_id) for one in holdings.promoted}
        left = there - self.confirmed().keys()
        return tuple(sorted(key for key in left if not needs_partitions(key[1])))

    def replaced(self, name: str) -> list[str]:
        """Jobs whose sets had a name before the newest one took it."""
        return [found.whole.job_id for found in self.promoted() if found.whole.name == name][:-1]

    def replaced_at(
        self, taskmanager_id: str, needs_partitions: Callable[[str], bool]
    ) -> tuple[tuple[str, str], ...]:
        """Names and jobs under which a TaskManager holds what has been replaced for good.

        Args:
            needs_partitions: whether a job is known and has not ended: one that has replaced something may have to do
                so again.
        """
        there = {(one.name, one.job_id) for one in self.of(taskmanager_id).promoted}
        newest = {found.whole.name: found.whole.job_id for found in self.promoted()}
        return tuple(
            sorted(
                (name, job_id)
                for name, job_id in there & self.confirmed().keys()
                if newest[name] != job_id and not needs_partitions(newest[name])
            )
        )

    def confirmed(self) -> Mapping[tuple[str, str], PromotedSet]:
        """What was promoted as a whole, by name and job: it is enough that one TaskManager has been told."""
        return {
            (one.name, one.job_id): one
            for holdings in self._holdings.values()
            for one in holdings.promoted
            if one.confirmed
        }

    def all(self) -> Sequence[tuple[str, HeldPartition]]:
        """TaskManager and partition, in order."""
        return [
            (taskmanager_id, partition)
            for taskmanager_id, holdings in sorted(self._holdings.items())
            for partition in holdings.partitions
        ]

    def find(self, job_id: str, wanted: Collection[PartitionId]) -> Mapping[PartitionId, str]:
        """The TaskManager of each partition of a job that is there."""
        there = self.of_job(job_id).items()
        return {partition: id for partition, id in there if partition in wanted}

    def of_job(self, job_id: str) -> Mapping[PartitionId, str]:
        """The TaskManager of each partition of a job that is there, and does not outlive it."""
        return {
            partition.partition_id: taskmanager_id
            for taskmanager_id, partition in self.all()
            if partition.job_id == job_id and not partition.promoted_as
        }

    def holders_of(self, name: str, job_id: str = "") -> list[str]:
        """TaskManagers with partitions that are promoted under a name; of one job, "" = of any."""
        return sorted(
            {
                id
                for id, partition in self.all()
                if partition.promoted_as == name and job_id in ("", partition.job_id)
            }
        )

    def promoted(self) -> list[PromotedPartitions]:
        """The sets that were promoted as a whole, by name and age; of each what is still there of it."""
        sets = self.confirmed()
        parts: dict[tuple[str, str], list[PromotedPart]] = {}
        for taskmanager_id, held in self.all():
            if held.promoted_as:
                part = PromotedPart(taskmanager_id, held.partition_id, held.rows, held.size_bytes)
                parts.setdefault((held.promoted_as, held.job_id), []).append(part)
        return sorted(
            (
                PromotedPartitions(
                    one, tuple(sorted(parts.get(key, ()), key=lambda part: part.subtask_index))
                )
                for key, one in sets.items()
            ),
            key=lambda found: (found.whole.name, found.whole.promoted_at_ms),
        )

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(holdings.count for holdings in self._holdings.values())

    @property
    def size_bytes(self) -> int:
        """How large they are together."""
        return sum(holdings.size_bytes for holdings in self._holdings.values())
