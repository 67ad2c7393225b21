"""Which subtasks an edge connects, without naming each of its channels.

Every way to spread rows connects whole groups: all producers with all consumers, or a few with one. An
edge is therefore a list of groups in which each consumer reads from each producer, and its size is that of
the subtasks, not of the channels, of which an all-to-all edge has the product. Invariants: each subtask of
the edge's two vertices is in exactly one group; the pairs of the groups are those of ``producers_of``. On an edge
that nobody in the job reads each producer is a group of its own.

Source: Flink, ConsumedPartitionGroup and ConsumerVertexGroup (FLINK-21110).
"""

from __future__ import annotations

from dataclasses import dataclass

from jobmanager.graph.deployment import producers_of
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning

_ALL_TO_ALL = frozenset({Partitioning.HASH, Partitioning.REBALANCE, Partitioning.BROADCAST})


@dataclass(frozen=True, slots=True, eq=False)
class ChannelGroup:
    """Subtasks of one edge of which each consumer reads from each producer; both in order of their index.

    Groups are compared by identity: they are made once for each job.
    """

    edge: EdgePlan
    producers: tuple[SubtaskId, ...]
    consumers: tuple[SubtaskId, ...]


def channel_groups(plan: JobPlan) -> list[ChannelGroup]:
    """The groups of all edges, in the order of the plan's edges and of the consumers."""
    return [
        ChannelGroup(
            edge,
            tuple(SubtaskId(edge.source, index) for index in producers),
            tuple(SubtaskId(edge.target, index) for index in consumers),
        )
        for edge in plan.edges
        for producers, consumers in _indices(plan, edge)
    ]


def _indices(plan: JobPlan, edge: EdgePlan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    producers = plan.vertex(edge.source).parallelism
    if edge.is_persisted:
        return [((producer,), ()) for producer in range(producers)]
    return _connected_indices(edge.partitioning, producers, plan.vertex(edge.target).parallelism)


def _connected_indices(
    partitioning: Partitioning, producers: int, consumers: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    if partitioning in _ALL_TO_ALL:
        return [(tuple(range(producers)), tuple(range(consumers)))]
    readers: dict[tuple[int, ...], list[int]] = {}
    for consumer in range(consumers):
        pairs = producers_of(partitioning, producers, consumers, consumer)
        readers.setdefault(tuple(producer for producer, _ in pairs), []).append(consumer)
    return [(read, tuple(by)) for read, by in readers.items()]
