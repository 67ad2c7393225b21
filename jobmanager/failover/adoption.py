"""Stages that were done under an earlier JobManager, and that its successor need not have done again.

A checkpoint says for each subtask that had begun whose rows it reads. Whoever has written a blocking partition
that is read had done all its work, and its TaskManager keeps what it has written: the checkpoint *pins* it. Where
it is still there the attempt is adopted, as finished. That saves its work, and where its work does not come out
the same again, nobody else could go on in the middle of it. Only what the checkpoint itself knows as finished is
adopted, since it holds what that has left (``LastState``): a producer that was running again when the checkpoint
was taken, for others than those that had read its former attempt, had left nothing yet.

What begins again is decided as after any failure (``failover_strategy``): all that was not done has failed, and
with it goes what it would make void.

Invariants: what is adopted had finished in the checkpoint; whole regions are adopted or none of their subtasks; what an adopted attempt has written is held, or
its readers are adopted as well; the readers of one source are adopted together, since who discovers splits for one
discovers them for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.failover_strategy import (
    FailoverStrategyName,
    FailoverView,
    tasks_to_restart,
)
from jobmanager.failover.rebuilt_regions import rebuilt_regions
from jobmanager.failover.regions import KeptOutput, Region, RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import Exchange

Version = tuple[KeptOutput, int]
"""What one attempt of a producer has written."""


def pinned(regions: RegionGraph, restored: RestoredCheckpoint) -> frozenset[Version]:
    """The blocking partitions to look for, those that outlive the job included."""
    numbers = _numbers(regions, restored)
    return frozenset(
        (partition, number)
        for region in regions.regions
        if (number := numbers.get(region.index)) is not None
        for partition in _blocking_of(regions, region)
    )


def adopted(
    regions: RegionGraph, restored: RestoredCheckpoint, held: Collection[Version]
) -> Mapping[SubtaskId, int]:
    """The subtasks that have done their work, and the number of the attempt that did it.

    Args:
        restored: the checkpoint that the job goes on from, whole.
        held: what is there of what is pinned.

    Example: what a checkpoint says of a stage that was done before, and that is still there.
        >>> from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
        >>> from jobmanager.checkpoint.restored_checkpoint import RestoredRead
        >>> vertices = (VertexPlan("write", parallelism=1), VertexPlan("read", parallelism=1))
        >>> edge = EdgePlan("e", "write", "read", Partitioning.FORWARD, Exchange.BLOCKING)
        >>> regions = RegionGraph(JobPlan(vertices, (edge,)))
        >>> writer, reader = SubtaskId("write", 0), SubtaskId("read", 0)
        >>> checkpoint = RestoredCheckpoint(
        ...     7,
        ...     finished=frozenset([writer]),
        ...     reads=(RestoredRead(reader, "e", 0, attempt=3, rows=10),),
        ...     subtasks=frozenset([writer, reader]),
        ... )
        >>> adopted(regions, checkpoint, held=[(KeptOutput("e", writer), 3)])
        {SubtaskId(vertex='write', subtask_index=0): 3}
        >>> adopted(regions, checkpoint, held=[])
        {}
    """
    numbers = _numbers(regions, restored)
    done = frozenset(
        subtask
        for region in regions.regions
        if region.index in numbers
        for subtask in region.subtasks
    )

    def number_of(subtask: SubtaskId) -> int | None:
        return numbers.get(regions.region_of(subtask).index)

    def is_available(partition: KeptOutput) -> bool:
        number = number_of(partition.producer)
        return number is not None and (partition, number) in held

    view = FailoverView(started=restored.subtasks | done, finished=done, is_available=is_available)
    failed = restored.subtasks - done
    while True:
        again = tasks_to_restart(FailoverStrategyName.REGION, regions, failed, (), view)
        kept = done - again
        useless = frozenset(s for s in kept if not _is_of_use(regions, s, kept, is_available))
        if not useless:
            return {subtask: number_of(subtask) or 0 for subtask in sorted(kept)}
        failed |= useless


def _numbers(regions: RegionGraph, restored: RestoredCheckpoint) -> dict[int, int | None]:
    """Indices of the regions that were done and write blocking partitions; number of their attempts, None where
    nobody reads them any more."""
    named: dict[SubtaskId, set[int]] = {}
    for read in restored.reads:
        if not regions.plan.has_edge(read.edge_id, read.reader.vertex):
            continue  # what an earlier job has left
        edge = regions.exchange_of(read.edge_id)
        if edge.exchange is Exchange.BLOCKING:
            named.setdefault(SubtaskId(edge.source, read.producer_index), set()).add(read.attempt)
    rebuilt = rebuilt_regions(regions)
    numbers: dict[int, int | None] = {}
    for region in regions.regions:
        attempts = {attempt for s in region.subtasks for attempt in named.get(s, ())}
        is_done = region.subtasks <= restored.finished
        if region.index in rebuilt and is_done and len(attempts) <= 1:
            numbers[region.index] = next(iter(attempts), None)
    return numbers


def _blocking_of(regions: RegionGraph, region: Region) -> list[KeptOutput]:
    return [
        partition
        for partition in regions.produced_by(region)
        if regions.exchange_of(partition.edge_id).exchange is Exchange.BLOCKING
    ]


def _is_of_use(
    regions: RegionGraph,
    subtask: SubtaskId,
    kept: Collection[SubtaskId],
    is_available: Callable[[KeptOutput], bool],
) -> bool:
    """Whether all is there that is still read of what it has written, and its siblings are where it reads splits."""
    for group in regions.written_by(subtask):
        partition = KeptOutput(group.edge.id, subtask)
        is_read = group.edge.is_persisted or any(c not in kept for c in group.consumers)
        if is_read and not is_available(partition):
            return False
    vertex = regions.plan.vertex(subtask.vertex)
    siblings = (SubtaskId(vertex.id, index) for index in range(vertex.parallelism))
    return not vertex.source_uids or all(sibling in kept for sibling in siblings)
