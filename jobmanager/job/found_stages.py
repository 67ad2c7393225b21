"""What of a job was done before its attempts were looked for, or had not begun, where no attempt tells so (pure).

A process that has ended, or a TaskManager that has left, takes what it knew of finished attempts along; what these have
written may still be there, and may be all that is needed of them. And behind blocking exchanges subtasks begin late.

- A subtask that nobody has found is *done* where everything that it has written is there, or has been read to its
  end. Which attempt of it counts is told by those who read it, or else by what is kept.
- A region is *unbegun* where nothing at all is known of it, unless a TaskManager is missing on which it may have begun,
  or a restart of it is known.

Invariants: what makes output visible is done only where its attempt says so; the subtasks of a source are done together
or not at all, since who reads which split is known to their attempts only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.channel_groups import ChannelGroup, channel_groups
from jobmanager.failover.regions import KeptOutput, Region, RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import Exchange
from jobmanager.job.found_reads import Newest
from jobmanager.messages import job_events


@dataclass(frozen=True, slots=True)
class DoneStage:
    """A subtask whose attempt is nowhere any more.

    Attributes:
        attempt: its number; 0 where it does not matter, since nobody reads what it has written.
        held: who has what it has written and is still to be read.
    """

    attempt: int = 0
    held: Mapping[KeptOutput, str] = field(default_factory=dict)


def done_stages(
    regions: RegionGraph,
    newest: Newest,
    located: Iterable[job_events.LocatedPartition],
    begins_again: Callable[[SubtaskId], bool] = lambda _: False,
) -> Mapping[SubtaskId, DoneStage]:
    """Subtasks that nobody has found, and that have done their work.

    Args:
        regions: of a job that takes no checkpoints: what an attempt leaves to these is told by nobody else.
        newest: the attempts that count.
        located: complete partitions.
        begins_again: whether a restart of a subtask is known.

    Example: the process that has written is gone, and what it has written is there.
        >>> from jobmanager.graph.deployment import Endpoint
        >>> from jobmanager.graph.execution_attempt import AttemptKey
        >>> from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
        >>> vertices = (VertexPlan("sort", parallelism=1), VertexPlan("read", parallelism=1))
        >>> edge = EdgePlan("e", "sort", "read", Partitioning.FORWARD, Exchange.BLOCKING)
        >>> regions = RegionGraph(JobPlan(vertices, (edge,)))
        >>> kept = job_events.LocatedPartition("tm-1", Endpoint(""), "e", AttemptKey("sort", 0, 3))
        >>> [(str(s), done.attempt) for s, done in done_stages(regions, {}, [kept]).items()]
        [('sort/0', 3)]
        >>> done_stages(regions, {}, [])
        {}
    """
    return _DoneStages(regions, newest, located, begins_again).find()


def known_stages(
    regions: RegionGraph,
    newest: Newest,
    restored: RestoredCheckpoint,
    located: Iterable[job_events.LocatedPartition],
) -> Mapping[SubtaskId, DoneStage]:
    """Subtasks that nobody has found, and that a checkpoint knows as finished: where nobody reads any more what they
    have kept, or the rows are there that the checkpoint says are read. Who reads some of them may not have begun: the
    attempts of a region have one number.

    Args:
        regions: of a job that takes checkpoints.
        newest: the attempts that count.
        restored: the newest checkpoint.
        located: complete partitions.
    """
    numbers: dict[KeptOutput, set[int]] = {}
    of_regions: dict[int, set[int]] = {}
    for read in restored.reads:
        if regions.plan.has_edge(read.edge_id, read.reader.vertex):
            source = regions.exchange_of(read.edge_id).source
            kept = KeptOutput(read.edge_id, SubtaskId(source, read.producer_index))
            numbers.setdefault(kept, set()).add(read.attempt)
            of_regions.setdefault(regions.region_of(kept.producer).index, set()).add(read.attempt)
    holders: dict[KeptOutput, tuple[int, str]] = {}
    for one in located:
        kept = KeptOutput(one.edge_id, one.producer.subtask)
        counting = numbers.get(kept) or of_regions.get(regions.region_of(kept.producer).index)
        if counting == {one.producer.attempt}:
            holders[kept] = one.producer.attempt, one.taskmanager_id
    done = restored.finished - newest.keys()
    over = done | {s for s, one in newest.items() if one.has_done_all}
    stages: dict[SubtaskId, DoneStage] = {}
    for subtask in done:
        needed = [
            KeptOutput(group.edge.id, subtask)
            for group in regions.written_by(subtask)
            if not over.issuperset(group.consumers)
        ]
        held = {partition: holders[partition] for partition in needed if partition in holders}
        attempts = {number for number, _ in held.values()}
        if len(held) == len(needed) and len(attempts) <= 1:
            taskmanagers = {partition: id for partition, (_, id) in held.items()}
            stages[subtask] = DoneStage(next(iter(attempts), 0), taskmanagers)
    return stages


class _DoneStages:
    """Goes from the last vertices to the first: what is read to its end is known by those who read it."""

    def __init__(
        self,
        regions: RegionGraph,
        newest: Newest,
        located: Iterable[job_events.LocatedPartition],
        begins_again: Callable[[SubtaskId], bool],
    ) -> None:
        self._plan = regions.plan
        self._newest = newest
        self._begins_again = begins_again
        self._written: dict[SubtaskId, list[ChannelGroup]] = {}
        self._read: dict[SubtaskId, list[ChannelGroup]] = {}
        for group in channel_groups(regions.plan):
            for producer in group.producers:
                self._written.setdefault(producer, []).append(group)
            for consumer in group.consumers:
                self._read.setdefault(consumer, []).append(group)
        self._holders = {
            (KeptOutput(one.edge_id, one.producer.subtask), one.producer.attempt): (
                one.taskmanager_id
            )
            for one in located
        }
        self._numbers: dict[SubtaskId, set[int]] = {}
        for partition, number in self._holders:
            self._numbers.setdefault(partition.producer, set()).add(number)
        self._over = {s for s, one in newest.items() if one.has_done_all}

    def find(self) -> dict[SubtaskId, DoneStage]:
        found: dict[SubtaskId, DoneStage] = {}
        for vertex in reversed(self._plan.vertices):
            subtasks = [SubtaskId(vertex.id, index) for index in range(vertex.parallelism)]
            lost = [s for s in subtasks if s not in self._newest and not self._begins_again(s)]
            if vertex.commits_output or (vertex.source_uids and len(lost) < len(subtasks)):
                continue
            done = {s: one for s in lost if (one := self._done(s)) is not None}
            if not vertex.source_uids or len(done) == len(subtasks):
                found |= done
                self._over |= done.keys()
        return found

    def _done(self, subtask: SubtaskId) -> DoneStage | None:
        groups = self._written.get(subtask, [])
        if not groups:
            return None
        needed = [
            group
            for group in groups
            if group.edge.is_persisted or not self._over.issuperset(group.consumers)
        ]
        if not needed:
            return DoneStage()
        if any(group.edge.exchange is not Exchange.BLOCKING for group in needed):
            return None
        partitions = [KeptOutput(group.edge.id, subtask) for group in needed]
        numbers = [
            number
            for number in self._numbers.get(subtask, ())
            if all((partition, number) in self._holders for partition in partitions)
            and not self._is_outdated(subtask, number)
        ]
        # One that is read by somebody is one that counted.
        read = self._read_numbers(subtask)
        for number in sorted(numbers, key=lambda number: (number in read, number), reverse=True):
            return DoneStage(number, {one: self._holders[one, number] for one in partitions})
        return None

    def _is_outdated(self, subtask: SubtaskId, number: int) -> bool:
        """Whether what it had read has been made otherwise since."""
        return any(
            (one := self._newest.get(producer)) is not None and one.key.attempt > number
            for group in self._read.get(subtask, ())
            if not (group.edge.exchange is Exchange.BLOCKING and group.edge.is_deterministic)
            for producer in group.producers
        )

    def _read_numbers(self, subtask: SubtaskId) -> frozenset[int]:
        return frozenset(
            key.attempt
            for one in self._newest.values()
            for _, key in one.reads
            if key.subtask == subtask
        )


def unbegun(
    regions: RegionGraph,
    newest: Newest,
    done: Collection[SubtaskId],
    begun: Callable[[SubtaskId], bool],
    *,
    is_anyone_missing: bool,
) -> frozenset[SubtaskId]:
    """Subtasks of regions that had not begun.

    Args:
        newest: the attempts that count.
        done: what has done its work and is nowhere any more.
        begun: whether something else says of a subtask that it had begun.
        is_anyone_missing: a TaskManager that had attempts of the job has not come.
    """
    read = {key.subtask for one in newest.values() for _, key in one.reads}
    known = {*newest, *done, *read}
    over = {*done, *(s for s, one in newest.items() if one.has_done_all)}

    def may_have_begun(region: Region) -> bool:
        return is_anyone_missing and all(
            _is_ready(regions, partition, over, newest) for partition in regions.consumed_by(region)
        )

    return frozenset(
        subtask
        for region in regions.regions
        if not (region.subtasks & known or any(map(begun, region.subtasks)))
        and not may_have_begun(region)
        for subtask in region.subtasks
    )


def _is_ready(
    regions: RegionGraph, partition: KeptOutput, over: Collection[SubtaskId], newest: Newest
) -> bool:
    if regions.exchange_of(partition.edge_id).exchange is Exchange.BLOCKING:
        return partition.producer in over
    return partition.producer in newest or partition.producer in over
