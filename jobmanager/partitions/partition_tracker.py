"""The kept partitions of a job: which can be read, which are lost, which nobody needs any more.

A producer's attempt leaves one partition on each kept edge. A new attempt of it makes new ones. An old one
on disk stays as long as a consumer that was left alone may read it; what an old one has left in its process
goes at once, since all who read it read the new one. Beyond that nothing is known of attempts that were replaced.

Partitions that outlive the job have no consumers in it: they are needed to its end.

What is complete on shared storage is held by no TaskManager, so it stays whichever is lost.

Where the job takes checkpoints, what a region has begun from one may be read again from an older one. So a partition
is kept until every checkpoint that can be restored knows all as finished who made it and who read it: then it is
*over*, and whether it is there makes no difference to anybody any more.

Invariants: a partition is released once, and only when every consumer has finished and no region has to run
again that would read it; what is lost, missing or released is not available until its producer has run again, unless
it is over.

Source: Flink, JobMasterPartitionTracker and FLIP-1's "partition life-cycle management".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import Exchange
from jobmanager.messages import job_effects
from penstock.errors import require_invariant

_GONE = frozenset({AttemptState.FAILED, AttemptState.CANCELED})

SHARED_STORAGE = ""
"""Holds what no TaskManager needs to serve, and none takes with it."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A partition that outlives its producer's work: blocking ones lie with the TaskManager, others in
    the slot."""

    taskmanager_id: str
    slot_id: str
    is_blocking: bool
    size_bytes: int = 0


class PartitionTracker:
    """Follows the attempts of a job's producers.

    Args:
        keeps_all: of current attempts only what is over is released before the job's end: checkpoints may refer to
            the rest.
        shares_spill: blocking partitions are written to shared storage.
    """

    def __init__(
        self,
        regions: RegionGraph,
        graph: ExecutionGraph,
        *,
        keeps_all: bool,
        shares_spill: bool = False,
    ) -> None:
        self._shares_spill = shares_spill
        self._regions = regions
        self._graph = graph
        self._keeps_all = keeps_all
        self._held: dict[tuple[KeptOutput, int], _Held] = {}
        self._missed: dict[tuple[KeptOutput, int], _Held] = {}
        """Held, but a consumer could not read it."""
        self._missing: set[tuple[KeptOutput, int]] = set()
        self._released: set[tuple[KeptOutput, int]] = set()
        self._over = frozenset[KeptOutput]()
        """Nobody reads it again."""
        self._holders: set[str] = set()

    # ------------------------------------------------------------ what there is

    def is_complete(self, partition: KeptOutput) -> bool:
        """Whether a blocking partition can be read: all of it is there."""
        producer = self._producer(partition)
        return producer.done_or_waiting and not self._is_gone(partition, producer)

    def is_available(self, partition: KeptOutput) -> bool:
        """Whether its consumers get its rows without a restart of the producer, now or later."""
        producer = self._producer(partition)
        return producer.state not in _GONE and not self._is_gone(partition, producer)

    def needed_and_missing(
        self, stopping: frozenset[SubtaskId] = frozenset()
    ) -> frozenset[KeptOutput]:
        """Partitions whose producers have done their work in vain: consumers have not read to the end what
        is lost.

        Args:
            stopping: subtasks that begin again, even if they have finished: they read again.
        """
        return frozenset(
            partition
            for partition, attempt in self._missing
            if attempt == self._producer(partition).key.attempt
            and partition not in self._over
            and (self._is_persisted(partition) or not self._is_read(partition, stopping))
        )

    def _is_read(self, partition: KeptOutput, stopping: frozenset[SubtaskId]) -> bool:
        """Whether every consumer has read it to its end."""
        return all(
            self._graph.current_of(consumer).done_or_waiting and consumer not in stopping
            for consumer in self._regions.consumers_of(partition)
        )

    def is_kept(self, partition: KeptOutput) -> bool:
        """Whether the job has such a partition."""
        return any(
            group.edge.id == partition.edge_id
            for group in self._regions.written_by(partition.producer)
        )

    def persisted(self) -> tuple[job_effects.PersistedPartition, ...]:
        """What is to outlive the job, of current attempts."""
        return tuple(
            job_effects.PersistedPartition(
                held.taskmanager_id, partition.edge_id, self._producer(partition).key
            )
            for (partition, attempt), held in self._held.items()
            if self._is_persisted(partition) and attempt == self._producer(partition).key.attempt
        )

    def _is_persisted(self, partition: KeptOutput) -> bool:
        return self._regions.exchange_of(partition.edge_id).is_persisted

    def _holder_of(self, edge_id: str, attempt: ExecutionAttempt) -> str:
        """Who has what an attempt has written."""
        is_shared = self._regions.exchange_of(edge_id).may_be_shared
        return SHARED_STORAGE if self._shares_spill and is_shared else attempt.taskmanager_id

    def _producer(self, partition: KeptOutput) -> ExecutionAttempt:
        return self._graph.current_of(partition.producer)

    def _is_outdated(self, version: tuple[KeptOutput, int]) -> bool:
        partition, attempt = version
        return attempt < self._producer(partition).key.attempt

    def _is_gone(self, partition: KeptOutput, producer: ExecutionAttempt) -> bool:
        return partition not in self._over and self._is_lost((partition, producer.key.attempt))

    def _is_lost(self, version: tuple[KeptOutput, int]) -> bool:
        return version in self._missing or version in self._released

    def read_alone(self, reader: SubtaskId) -> Mapping[str, int]:
        """TaskManager -> bytes there of complete partitions that this subtask reads, and no other.

        What several subtasks share lies alike for all of them. A size that was not told counts as one byte.
        """
        lying: Counter[str] = Counter()
        for group in self._regions.read_by(reader):
            if group.edge.exchange is not Exchange.BLOCKING or len(group.consumers) > 1:
                continue
            for producer in group.producers:
                attempt = self._graph.current_of(producer).key.attempt
                held = self._held.get((KeptOutput(group.edge.id, producer), attempt))
                if held is not None and held.taskmanager_id != SHARED_STORAGE:
                    lying[held.taskmanager_id] += max(1, held.size_bytes)
        return lying

    # ------------------------------------------------------------ what happens

    def produced(self, attempt: ExecutionAttempt) -> None:
        """An attempt has done its work; harmless to repeat."""
        region = self._regions.region_of(attempt.key.subtask)
        for partition in self._regions.produced_by(region):
            version = (partition, attempt.key.attempt)
            if partition.producer != attempt.key.subtask or self._is_lost(version):
                continue
            is_blocking = self._regions.exchange_of(partition.edge_id).exchange is Exchange.BLOCKING
            if is_blocking or attempt.terminal:
                holder = self._holder_of(partition.edge_id, attempt)
                self._holders.add(holder)
                size_bytes = dict(attempt.written).get(partition.edge_id, 0)
                self._held[version] = _Held(holder, attempt.slot_id, is_blocking, size_bytes)
                self._check_version(version)

    def adopt(self, attempt: ExecutionAttempt, held: Mapping[KeptOutput, str]) -> None:
        """An attempt of an earlier JobManager has done its work.

        Args:
            held: TaskManagers that have what is still there of what it has written.
        """
        for group in self._regions.written_by(attempt.key.subtask):
            partition = KeptOutput(group.edge.id, attempt.key.subtask)
            version = (partition, attempt.key.attempt)
            if partition in held:
                self._holders.add(held[partition])
                self._held[version] = _Held(held[partition], "", is_blocking=True)
            else:
                self._missing.add(version)
            self._check_version(version)

    def lose_taskmanager(self, taskmanager_id: str) -> None:
        """Whatever it held is gone."""
        self._lose(v for v, held in self._held.items() if held.taskmanager_id == taskmanager_id)
        self._missed = {
            version: held
            for version, held in self._missed.items()
            if held.taskmanager_id != taskmanager_id
        }
        self._holders.discard(taskmanager_id)

    def give_up(self, taskmanager_id: str) -> None:
        """What it holds is made again elsewhere; it lives on, and is told at the job's end."""
        self._lose(v for v, held in self._held.items() if held.taskmanager_id == taskmanager_id)

    def is_needed_in(self, slot_id: str) -> bool:
        """Whether the process in a slot keeps rows that somebody may read yet."""
        return any(
            held.slot_id == slot_id
            and not held.is_blocking
            and not self._is_outdated(version)
            and (self._is_persisted(version[0]) or not self._is_read(version[0], frozenset()))
            for version, held in self._held.items()
        )

    def lose_slots(self, slot_ids: Iterable[str]) -> None:
        """Processes have ended, and what was kept in them is gone."""
        gone = frozenset(slot_ids)
        self._lose(
            v for v, held in self._held.items() if held.slot_id in gone and not held.is_blocking
        )

    def lose_attempt(self, key: AttemptKey) -> bool:
        """The process of one that has finished has ended; False = it kept nothing there."""
        lost = [
            version
            for version, held in self._held.items()
            if (version[0].producer, version[1]) == (key.subtask, key.attempt)
            and not held.is_blocking
        ]
        self._lose(lost)
        return bool(lost)

    def _lose(self, versions: Iterable[tuple[KeptOutput, int]]) -> None:
        for version in list(versions):
            del self._held[version]
            if not self._is_outdated(version):
                self._missing.add(version)
            self._check_version(version)

    def miss(self, partition: KeptOutput, attempt: int) -> bool:
        """A consumer could not read it.

        Returns:
            False where the producer has been replaced meanwhile, which says nothing of the new one.
        """
        version = (partition, attempt)
        self._over -= {partition}
        if not self._is_outdated(version):
            self._missing.add(version)
        if version in self._held:
            self._missed[version] = self._held.pop(version)
        self._check_version(version)
        return attempt == self._producer(partition).key.attempt

    def gone_with(self, partition: KeptOutput, reader: SubtaskId) -> list[KeptOutput]:
        """What a reader will not find either where it has missed a partition.

        Where memory is short, what else the reader has of it is as good as gone: were it asked for piece by
        piece, what comes again of one producer would push out what has come again of another.
        """
        if self._regions.exchange_of(partition.edge_id).exchange is not Exchange.CACHING_MEMORY:
            return [partition]
        return [
            KeptOutput(group.edge.id, producer)
            for group in self._regions.read_by(reader)
            if group.edge.exchange is Exchange.CACHING_MEMORY
            for producer in group.producers
        ]

    # ------------------------------------------------------------ release

    def release_unneeded(self, stopping: frozenset[SubtaskId]) -> list[job_effects.JobEffect]:
        """Partitions that nobody will read any more.

        Args:
            stopping: subtasks that begin again, even if they have finished.
        """
        if self._keeps_all:
            return [*self._release(self._unread())]
        finished = self._graph.in_state(AttemptState.FINISHED) - stopping
        unneeded = {
            version: held
            for version, held in self._held.items()
            if not self._is_needed(version[0], finished)
        }
        return [*self._release(self._unread() | unneeded)]

    def release_over(self, over: frozenset[KeptOutput]) -> list[job_effects.JobEffect]:
        """A checkpoint has been completed, or the job was taken over.

        TaskManagers may hold more of it than is known here, or may not have heard what they were told before. So each
        time all goes that they say they hold of it.

        Args:
            over: what nobody reads again, whatever fails and whichever checkpoint is restored.
        """
        self._over |= over
        left = {v: held for v, held in (self._held | self._missed).items() if v[0] in over}
        released = self._release(left)
        shared = [one for one in released if one.taskmanager_id == SHARED_STORAGE]
        return [*shared, job_effects.ReleaseOutputs(over)] if over else []

    def release_replaced(self, subtasks: Collection[SubtaskId]) -> list[job_effects.JobEffect]:
        """What finished attempts of these subtasks, which have new ones now, have left in processes that live
        on, and on disk where nobody reads it."""
        replaced = {
            version: held
            for version, held in (self._held | self._missed).items()
            if version[0].producer in subtasks and not held.is_blocking
        }
        released = self._release(replaced | self._unread())
        for known in (self._missing, self._released):
            known -= {version for version in known if self._is_outdated(version)}
        return [*released]

    def _unread(self) -> dict[tuple[KeptOutput, int], _Held]:
        """Of attempts that were replaced, what no consumer reads that began before."""
        return {
            version: held
            for version, held in (self._held | self._missed).items()
            if self._is_outdated(version) and not self._has_old_reader(version[0])
        }

    def _has_old_reader(self, partition: KeptOutput) -> bool:
        newest = self._producer(partition).key.attempt
        readers = map(self._graph.current_of, self._regions.consumers_of(partition))
        return any(
            reader.key.attempt < newest and reader.state in ON_TASKMANAGER for reader in readers
        )

    def _release(
        self, versions: Mapping[tuple[KeptOutput, int], _Held]
    ) -> list[job_effects.ReleasePartitions]:
        by_taskmanager: dict[str, list[tuple[str, AttemptKey]]] = {}
        for (partition, attempt), held in versions.items():
            self._held.pop((partition, attempt), None)
            self._missed.pop((partition, attempt), None)
            if not self._is_outdated((partition, attempt)):
                self._released.add((partition, attempt))
            self._check_version((partition, attempt))
            producer = partition.producer
            by_taskmanager.setdefault(held.taskmanager_id, []).append(
                (partition.edge_id, AttemptKey(producer.vertex, producer.subtask_index, attempt))
            )
        return [job_effects.ReleasePartitions(id, tuple(own)) for id, own in by_taskmanager.items()]

    def _is_needed(self, partition: KeptOutput, finished: frozenset[SubtaskId]) -> bool:
        """Someone reads it, or may have to run again to make what others read."""
        pending, seen = [partition], {partition}
        while pending:
            made = pending.pop()
            if self._is_persisted(made):
                return True
            for consumer in self._regions.consumers_of(made):
                region = self._regions.region_of(consumer)
                if not region.subtasks <= finished:
                    return True
                further = set(self._regions.produced_by(region)) - seen
                seen |= further
                pending += further
        return False

    def disown(self, attempt: ExecutionAttempt) -> None:
        """What an attempt writes will never be read, since another one's output counts: it is released with
        the job, if not before."""
        for group in self._regions.written_by(attempt.key.subtask):
            self._holders.add(self._holder_of(group.edge.id, attempt))

    def release_output(self, attempt: ExecutionAttempt) -> list[job_effects.JobEffect]:
        """What an attempt has written that does not count, now that it writes no more."""
        written: dict[str, list[tuple[str, AttemptKey]]] = {}
        for group in self._regions.written_by(attempt.key.subtask):
            holder = self._holder_of(group.edge.id, attempt)
            written.setdefault(holder, []).append((group.edge.id, attempt.key))
        return [job_effects.ReleasePartitions(id, tuple(own)) for id, own in written.items()]

    def release_all(self) -> list[job_effects.JobEffect]:
        """The job has ended."""
        holders, self._holders = self._holders, set()
        if self._shares_spill:  # attempts that did not end have left something there, too
            holders.add(SHARED_STORAGE)
        self._held.clear()
        self._missed.clear()
        return [job_effects.ReleasePartitions(taskmanager_id) for taskmanager_id in sorted(holders)]

    def _check_version(self, version: tuple[KeptOutput, int]) -> None:
        """The part of ``check`` that is about one partition: run when something becomes of it.

        Raises:
            InvariantViolation: it does not hold.
        """
        require_invariant(
            version not in self._held
            or (version not in self._released and version not in self._missing),
            "a partition that was lost or released is not held",
        )

    def check(self) -> None:
        """Asserts the invariants named at the head of the file."""
        assert not self._released & self._held.keys(), "what is released is not held"
        assert not self._missing & self._held.keys(), "what is missing is not held"
