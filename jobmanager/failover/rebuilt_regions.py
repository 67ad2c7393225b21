"""Regions that do all their work again when they are restarted, whatever the checkpoints hold of them, and those of
them that need not: all that read what they write had read it to the end.

A blocking partition is made in one go: what a dead attempt had written of one is gone. So a region that writes
one starts from nothing, and reads its input from the first row on, which only blocking exchanges and
sources still have when checkpoints have been completed. And it may write nothing else that checkpoints commit,
since they would do so again.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from jobmanager.failover.regions import Region, RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import Exchange

_CACHING = frozenset({Exchange.CACHING, Exchange.CACHING_MEMORY})


def rebuilt_regions(regions: RegionGraph) -> frozenset[int]:
    """Indices of the regions that write blocking partitions."""
    return frozenset(
        region.index
        for region in regions.regions
        if any(
            group.edge.exchange is Exchange.BLOCKING
            for subtask in region.subtasks
            for group in regions.written_by(subtask)
        )
    )


def spared_regions(regions: RegionGraph, finished: AbstractSet[SubtaskId]) -> frozenset[int]:
    """Indices of those whose work a checkpoint makes needless: they begin as what has finished, and write nothing.

    Args:
        finished: subtasks that the checkpoint knows as finished.

    Example: what has been read to its end is not made again.
        >>> from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning, VertexPlan
        >>> vertices = (VertexPlan("write", parallelism=1), VertexPlan("read", parallelism=1))
        >>> edge = EdgePlan("e", "write", "read", Partitioning.FORWARD, Exchange.BLOCKING)
        >>> graph = RegionGraph(JobPlan(vertices, (edge,)))
        >>> writer, reader = SubtaskId("write", 0), SubtaskId("read", 0)
        >>> sorted(spared_regions(graph, {writer})), sorted(spared_regions(graph, {writer, reader}))
        ([], [0])
    """
    rebuilt = rebuilt_regions(regions)
    spared: set[int] = set()

    def needs_nothing(reader: SubtaskId) -> bool:
        index = regions.region_of(reader).index
        return reader in finished and (index not in rebuilt or index in spared)

    for region in reversed(regions.regions):
        outputs = [group for one in region.subtasks for group in regions.written_by(one)]
        if (
            region.index in rebuilt
            and region.subtasks <= finished
            and all(group.edge.exchange is Exchange.BLOCKING for group in outputs)
            and not any(group.edge.is_persisted for group in outputs)
            and all(needs_nothing(reader) for group in outputs for reader in group.consumers)
        ):
            spared.add(region.index)
    return frozenset(spared)


def rebuilt_vertices(regions: RegionGraph) -> frozenset[str]:
    """The vertices of these regions: of each all subtasks, since every one of them has such channels as its siblings have."""
    indices = rebuilt_regions(regions)
    return frozenset(
        subtask.vertex
        for region in regions.regions
        if region.index in indices
        for subtask in region.subtasks
    )


def rebuild_problem(regions: RegionGraph) -> str | None:
    """Why a job that takes checkpoints cannot be recovered, in the user's words; None = it can."""
    rebuilt = rebuilt_regions(regions)
    for region in regions.regions:
        if region.index not in rebuilt:
            continue
        if (problem := _output_problem(regions, region)) is not None:
            return problem
        for group in (g for subtask in sorted(region.subtasks) for g in regions.read_by(subtask)):
            if group.edge.exchange in _CACHING:
                return (
                    f"vertex {group.edge.target} reads the caching exchange {group.edge.id} and leads to a "
                    "blocking one: after a failure its work has to be done again from the first row on, "
                    "and a caching exchange keeps rows since the last checkpoint only; make the exchange "
                    "in front of it blocking as well, the one behind it caching, or set "
                    "execution.checkpointing.interval to none"
                )
    return None


def _output_problem(regions: RegionGraph, region: Region) -> str | None:
    vertices = {subtask.vertex for subtask in region.subtasks}
    committing = sorted(
        v.id for v in regions.plan.vertices if v.id in vertices and v.commits_output
    )
    if not committing:
        return None
    blocking = sorted(
        group.edge.id
        for subtask in region.subtasks
        for group in regions.written_by(subtask)
        if group.edge.exchange is Exchange.BLOCKING
    )
    return (
        f"vertex {committing[0]} writes output that checkpoints commit, and pipelined exchanges join it with what "
        f"the blocking exchange {blocking[0]} keeps: after a failure all of that has to be done again from the "
        "first row on, and committed output would come twice; make the exchange in front of the sink "
        "blocking as well, or set execution.checkpointing.interval to none"
    )
