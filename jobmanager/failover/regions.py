"""Which subtasks are started and restarted together: the pipelined regions of a job.

Pipelined edges join the subtasks that their channels connect, since what was read is gone; a colocation
group joins its subtasks of equal index. Edges that keep their rows (blocking, caching) separate regions, unless
regions depend on each other in a cycle over such edges: these are one region, which no order could start. The
other subtasks of a source depend on its subtask 0, which discovers what they read, wherever it is.

Invariants: each subtask is in exactly one region; a region's index is larger than those of all regions that
it reads from. A kept edge may have both its ends in one region, where another way joins them: such
a partition is nothing that the region waits for or asks others for.

Source: FLIP-1; Flink, PipelinedRegionComputeUtil and SchedulingPipelinedRegion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jobmanager.failover.channel_groups import ChannelGroup, channel_groups
from jobmanager.graph.components import connected, strongly_connected
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output of one producer subtask on an edge that keeps its rows, whatever its attempt."""

    edge_id: str
    producer: SubtaskId


@dataclass(frozen=True, slots=True)
class Region:
    """Subtasks that are started and restarted together; ``index`` counts from 0 in topological order."""

    index: int
    subtasks: frozenset[SubtaskId]


class RegionGraph:
    """The regions of a job and the kept partitions between them.

    Args:
        plan: a plan without problems (``plan_problem``).

    Attributes:
        regions: producers before their consumers; the order is the same for equal plans.

    Example: a blocking edge separates what a pipelined one joins.
        >>> from jobmanager.graph.job_plan import Partitioning, VertexPlan
        >>> vertices = tuple(VertexPlan(id, parallelism=1) for id in ("read", "map", "sort"))
        >>> edges = (
        ...     EdgePlan("e1", "read", "map", Partitioning.FORWARD),
        ...     EdgePlan("e2", "map", "sort", Partitioning.HASH, Exchange.BLOCKING),
        ... )
        >>> for region in RegionGraph(JobPlan(vertices, edges)).regions:
        ...     print(region.index, *sorted(map(str, region.subtasks)))
        0 map/0 read/0
        1 sort/0
    """

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        groups = channel_groups(plan)
        self._edges = {edge.id: edge for edge in plan.edges}
        self._read_by: dict[SubtaskId, list[ChannelGroup]] = {}
        self._written_by: dict[SubtaskId, list[ChannelGroup]] = {}
        kept = [group for group in groups if group.edge.exchange is not Exchange.PIPELINED]
        for group in kept:
            for subtask in group.consumers:
                self._read_by.setdefault(subtask, []).append(group)
            for subtask in group.producers:
                self._written_by.setdefault(subtask, []).append(group)
        parts = _without_cycles(_joined_subtasks(plan, groups), kept, plan)
        self.regions = tuple(Region(index, frozenset(part)) for index, part in enumerate(parts))
        self._subtasks = parts
        self._region_of = {
            subtask: region for region in self.regions for subtask in region.subtasks
        }

    def region_of(self, subtask: SubtaskId) -> Region:
        """The region of a subtask of this job."""
        return self._region_of[subtask]

    def subtasks_of(self, region: Region) -> Sequence[SubtaskId]:
        """The subtasks of a region, in the order of the plan."""
        return self._subtasks[region.index]

    def exchange_of(self, edge_id: str) -> EdgePlan:
        """The edge of this id."""
        return self._edges[edge_id]

    def read_by(self, subtask: SubtaskId) -> Sequence[ChannelGroup]:
        """Where a subtask reads from kept edges, one group for each edge."""
        return self._read_by.get(subtask, ())

    def written_by(self, subtask: SubtaskId) -> Sequence[ChannelGroup]:
        """Where a subtask writes to kept edges, one group for each edge."""
        return self._written_by.get(subtask, ())

    def _inputs(self, region: Region) -> list[ChannelGroup]:
        groups = (group for s in self._subtasks[region.index] for group in self.read_by(s))
        return list(dict.fromkeys(groups))

    def consumed_by(self, region: Region) -> tuple[KeptOutput, ...]:
        """The kept partitions that its subtasks read from other regions."""
        return tuple(
            KeptOutput(group.edge.id, producer)
            for group in self._inputs(region)
            for producer in group.producers
            if producer not in region.subtasks
        )

    def produced_by(self, region: Region) -> tuple[KeptOutput, ...]:
        """The kept partitions that its subtasks write, whoever reads them."""
        return tuple(
            KeptOutput(group.edge.id, subtask)
            for subtask in self._subtasks[region.index]
            for group in self.written_by(subtask)
        )

    def consumers_of(self, partition: KeptOutput) -> tuple[SubtaskId, ...]:
        """The subtasks of any region that read a subpartition of it, in order of their index.

        Raises:
            KeyError: it is no kept partition of this job.
        """
        for group in self.written_by(partition.producer):
            if group.edge.id == partition.edge_id:
                return group.consumers
        raise KeyError(partition)

    def startable(
        self,
        started: AbstractSet[SubtaskId],
        complete: Callable[[KeptOutput], bool],
        waiting: AbstractSet[SubtaskId] | None = None,
    ) -> list[Region]:
        """The regions that can be started now, in topological order.

        None of their subtasks has been started, all blocking partitions that they read from other regions
        are complete, and what they read over caching edges comes from regions that are started, or
        are startable themselves.

        Args:
            started: subtasks that have been started.
            complete: whether a blocking partition can be read to its end.
            waiting: subtasks that are to start; None = all that have not.
        """
        runs = {self.region_of(subtask).index for subtask in started}
        startable = []
        verdicts: dict[ChannelGroup, bool] = {}

        def is_ready(group: ChannelGroup, producer: SubtaskId) -> bool:
            if group.edge.exchange is Exchange.BLOCKING:
                return complete(KeptOutput(group.edge.id, producer))
            return self.region_of(producer).index in runs

        def can_be_read(group: ChannelGroup) -> bool:
            if group not in verdicts:
                verdicts[group] = all(is_ready(group, producer) for producer in group.producers)
            return verdicts[group]

        def can_be_read_in(region: Region, group: ChannelGroup) -> bool:
            others = (p for p in group.producers if p not in region.subtasks)
            return all(is_ready(group, producer) for producer in others)

        for region in self.regions:
            if region.index in runs or not (waiting is None or region.subtasks <= waiting):
                continue
            # At most one region both reads and writes in a group: two would be in a cycle.
            own = {group for subtask in region.subtasks for group in self.written_by(subtask)}
            if all(
                can_be_read_in(region, group) if group in own else can_be_read(group)
                for group in self._inputs(region)
            ):
                startable.append(region)
                runs.add(region.index)
        return startable


def _joined_subtasks(plan: JobPlan, groups: Sequence[ChannelGroup]) -> list[list[SubtaskId]]:
    """Subtasks joined by pipelined channels and by colocation, in the order of the plan."""
    subtasks = [
        SubtaskId(vertex.id, index)
        for vertex in plan.vertices
        for index in range(vertex.parallelism)
    ]
    joins = [
        group.producers + group.consumers
        for group in groups
        if group.edge.exchange is Exchange.PIPELINED
    ]
    colocated: dict[tuple[str, int], tuple[SubtaskId, ...]] = {}
    for vertex in plan.vertices:
        if not vertex.colocation_group:
            continue
        for index in range(vertex.parallelism):
            place = (vertex.colocation_group, index)
            colocated[place] = (*colocated.get(place, ()), SubtaskId(vertex.id, index))
    return connected(subtasks, [*joins, *colocated.values()])


def _without_cycles(
    parts: list[list[SubtaskId]], kept: Sequence[ChannelGroup], plan: JobPlan
) -> list[list[SubtaskId]]:
    """Parts that depend on each other, over kept edges or for splits, merged into one; topological order.

    Each group is a node of the searched graph, between its producers' parts and its consumers': a path for
    each pair of them, without an edge for each.
    """
    part_of = {subtask: index for index, part in enumerate(parts) for subtask in part}
    successors: list[list[int]] = [[] for _ in parts]
    for node, group in enumerate(kept, start=len(parts)):
        for part in dict.fromkeys(part_of[producer] for producer in group.producers):
            successors[part].append(node)
        successors.append(list(dict.fromkeys(part_of[consumer] for consumer in group.consumers)))
    for vertex in plan.vertices:
        if vertex.source_uids:
            readers = (SubtaskId(vertex.id, index) for index in range(1, vertex.parallelism))
            successors[part_of[SubtaskId(vertex.id, 0)]] += [part_of[reader] for reader in readers]
    merged = (
        [subtask for node in component if node < len(parts) for subtask in parts[node]]
        for component in strongly_connected(successors)
    )
    return [part for part in merged if part]
