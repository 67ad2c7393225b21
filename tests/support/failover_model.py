"""An independent model of regions and restart sets, that names every channel.

It knows no groups, no order and no worklist. Regions are the classes of subtasks that reach each other when
joined ones are linked both ways; what the rules demand of a restart set is asked channel by channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jobmanager.failover.failover_strategy import FailoverView
from jobmanager.failover.regions import KeptOutput
from jobmanager.graph.deployment import producers_of
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan

CACHING = (Exchange.CACHING, Exchange.CACHING_MEMORY)

Regions = frozenset[frozenset[SubtaskId]]


@dataclass(frozen=True)
class Channel:
    """One consumer's view of one producer."""

    edge: EdgePlan
    producer: SubtaskId
    consumer: SubtaskId

    @property
    def partition(self) -> KeptOutput:
        """Which result partition it reads."""
        return KeptOutput(self.edge.id, self.producer)


@dataclass(frozen=True)
class Model:
    """The job as subtasks and channels."""

    plan: JobPlan

    @cached_property
    def subtasks(self) -> list[SubtaskId]:
        """All of the job."""
        return [SubtaskId(v.id, i) for v in self.plan.vertices for i in range(v.parallelism)]

    @cached_property
    def channels(self) -> list[Channel]:
        """All of the job."""
        return [
            Channel(edge, SubtaskId(edge.source, producer), SubtaskId(edge.target, consumer))
            for edge in self.plan.edges
            for consumer in range(self.plan.vertex(edge.target).parallelism)
            for producer, _ in producers_of(
                edge.partitioning,
                self.plan.vertex(edge.source).parallelism,
                self.plan.vertex(edge.target).parallelism,
                consumer,
            )
        ]

    @cached_property
    def kept(self) -> list[Channel]:
        """Those that keep their rows."""
        return [one for one in self.channels if one.edge.exchange is not Exchange.PIPELINED]

    @cached_property
    def regions(self) -> Regions:
        """All of the job."""
        reached = {subtask: {subtask} for subtask in self.subtasks}
        links = {(channel.producer, channel.consumer) for channel in self.channels}
        links |= {
            (channel.consumer, channel.producer)
            for channel in self.channels
            if channel.edge.exchange is Exchange.PIPELINED
        }
        group = {vertex.id: vertex.colocation_group for vertex in self.plan.vertices}
        links |= {
            (one, other)
            for one in self.subtasks
            for other in self.subtasks
            if one.subtask_index == other.subtask_index
            and group[one.vertex] == group[other.vertex] != ""
        }
        # The first subtask of a source finds the splits of all of them.
        links |= {
            (SubtaskId(vertex.id, 0), SubtaskId(vertex.id, index))
            for vertex in self.plan.vertices
            if vertex.source_uids
            for index in range(1, vertex.parallelism)
        }
        for _ in self.subtasks:
            for source, target in links:
                for subtask in self.subtasks:
                    if source in reached[subtask]:
                        reached[subtask] |= reached[target]
        return frozenset(
            frozenset(other for other in reached[one] if one in reached[other])
            for one in self.subtasks
        )

    @cached_property
    def region_of(self) -> dict[SubtaskId, frozenset[SubtaskId]]:
        """Where each subtask is."""
        return {subtask: region for region in self.regions for subtask in region}

    @cached_property
    def read_by(self) -> dict[frozenset[SubtaskId], list[Channel]]:
        """Region -> its channels from other regions."""
        return {
            region: [
                one for one in self.kept if one.consumer in region and one.producer not in region
            ]
            for region in self.regions
        }


@dataclass(frozen=True)
class Failure:
    """What has failed, and what is known then."""

    failed: frozenset[SubtaskId]
    started: frozenset[SubtaskId]
    finished: frozenset[SubtaskId]
    available: frozenset[KeptOutput]
    missing: frozenset[KeptOutput]
    not_repeated: frozenset[str] = frozenset()

    @property
    def view(self) -> FailoverView:
        """The same for the real strategy."""
        available = self.available.__contains__
        return FailoverView(self.started, self.finished, available, self.not_repeated)

    def is_readable(self, partition: KeptOutput) -> bool:
        """Whether a consumer can read it again."""
        return partition in self.available and partition not in self.missing


def promises(edge: EdgePlan, failure: Failure, *, order: bool) -> bool:
    """Whether the edge's rows come again, in the same order or in any."""
    is_promised = edge.is_reproducible if order else edge.is_deterministic
    return is_promised and edge.source not in failure.not_repeated


def reads_changed(model: Model, restart: Regions, failure: Failure, *, order: bool) -> Regions:
    """Restarted regions that may get other rows than before, or (``order``) the same in another order."""
    changed = {
        region
        for region in restart
        for one in model.read_by[region]
        if model.region_of[one.producer] in restart and not promises(one.edge, failure, order=order)
    }
    for _ in model.regions:
        changed |= {
            region
            for region in restart
            for one in model.read_by[region]
            if model.region_of[one.producer] in changed
        }
    return frozenset(changed)


def demanded(model: Model, restart: Regions, failure: Failure) -> Regions:
    """Regions that the rules add to a restart set; none = it is closed."""
    union = frozenset[SubtaskId]().union(*restart)
    other_rows = reads_changed(model, restart, failure, order=False)
    other_order = reads_changed(model, restart, failure, order=True)
    wanted = {model.region_of[subtask] for subtask in failure.failed}
    wanted |= {
        model.region_of[channel.producer]
        for region in restart
        for channel in model.read_by[region]
        if not failure.is_readable(channel.partition)
    }
    wanted |= {
        region
        for region in model.regions
        for channel in model.read_by[region]
        if channel.producer in union
        and not (
            is_protected(channel, region, failure)
            and model.region_of[channel.producer]
            not in (other_order if channel.edge.exchange in CACHING else other_rows)
        )
    }
    return frozenset(region for region in wanted if region & failure.started) - restart


def is_protected(channel: Channel, reader: frozenset[SubtaskId], failure: Failure) -> bool:
    """Whether this channel from a restarted producer lets its reader stay."""
    if channel.edge.exchange in CACHING:
        return promises(channel.edge, failure, order=True)
    return promises(channel.edge, failure, order=False) and (
        reader <= failure.finished or failure.is_readable(channel.partition)
    )


def failing(model: Model, finished: frozenset[SubtaskId]) -> frozenset[SubtaskId]:
    """Whom a failure of the whole job concerns: not who has done all its work, for readers of blocking exchanges only."""
    writing = {channel.producer for channel in model.kept}
    caching = {channel.producer for channel in model.kept if channel.edge.exchange in CACHING}
    return frozenset(
        subtask
        for subtask, region in model.region_of.items()
        if not region <= finished or region & caching or not region & writing
    )


def closure(model: Model, failure: Failure) -> frozenset[SubtaskId]:
    """The started subtasks of the regions that the rules demand, beginning with none."""
    restart: Regions = frozenset()
    while more := demanded(model, restart, failure):
        restart |= more
    return frozenset[SubtaskId]().union(*restart) & failure.started
