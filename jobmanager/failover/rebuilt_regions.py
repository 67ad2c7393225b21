"""Regions that do all their work again when they are restarted, whatever the checkpoints hold of them.

A blocking partition is made in one go: what a dead attempt had written of one is gone. So a region that writes
one starts from nothing, and reads its input from the first row on, which only blocking exchanges and
sources still have when checkpoints have been completed. And it may write nothing else that checkpoints commit,
since they would do so again.
"""

from __future__ import annotations

from jobmanager.failover.regions import Region, RegionGraph
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
