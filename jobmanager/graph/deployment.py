"""Which subpartitions connect which subtasks: the deployment of each attempt.

A producer writes one subpartition per consumer it serves; a consumer reads one subpartition of each
of its producers. Invariant: each subpartition of each edge is read by exactly one channel, except
that nothing reads what nobody writes (checked by the tests against a drawing of each pattern).

Source: Flink, DistributionPattern ALL_TO_ALL and POINTWISE (EdgeManagerBuildUtil).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jobmanager.graph.execution_attempt import (
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning

_CACHING = frozenset({Exchange.CACHING, Exchange.CACHING_MEMORY})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a slot process takes data connections."""

    slot_id: str
    host_id: str = ""
    unix_path: str = ""
    tcp_host: str = ""
    tcp_port: int = 0


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """One subpartition that an attempt reads."""

    producer: Endpoint
    producer_attempt: AttemptKey
    subpartition_index: int


@dataclass(frozen=True, slots=True)
class InputPlan:
    """An edge that an attempt reads; channels in order of the producer's subtask index."""

    edge_id: str
    channels: tuple[ChannelPlan, ...]


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """An edge that an attempt writes.

    Attributes:
        finished_subpartitions: whose consumers have finished, and read no more.
    """

    edge_id: str
    subpartition_count: int
    finished_subpartitions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Everything an attempt must be told beyond its vertex.

    Attributes:
        beside: number of another attempt of the subtask that runs; None = it is alone.
    """

    attempt: AttemptKey
    slot_id: str
    inputs: tuple[InputPlan, ...]
    outputs: tuple[OutputPlan, ...]
    beside: int | None = None


def producers_of(
    partitioning: Partitioning, producers: int, consumers: int, consumer_index: int
) -> list[tuple[int, int]]:
    """What a consumer reads: (producer's subtask index, subpartition index), in producer order.

    Example: three consumers of two producers; all read from both, or rescaled from one each.
        >>> producers_of(Partitioning.HASH, producers=2, consumers=3, consumer_index=1)
        [(0, 1), (1, 1)]
        >>> [producers_of(Partitioning.RESCALE, 2, 3, index) for index in range(3)]
        [[(0, 0)], [(0, 1)], [(1, 0)]]
    """
    match partitioning:
        case Partitioning.HASH | Partitioning.REBALANCE | Partitioning.BROADCAST:
            return [(producer, consumer_index) for producer in range(producers)]
        case Partitioning.FORWARD:
            assert producers == consumers, "a forward edge joins equal parallelisms"
            return [(consumer_index, 0)]
        case Partitioning.RESCALE:
            if producers <= consumers:
                producer = consumer_index * producers // consumers
                return [(producer, consumer_index - _first(producer, producers, consumers))]
            group = range(
                _first(consumer_index, consumers, producers),
                _first(consumer_index + 1, consumers, producers),
            )
            return [(producer, 0) for producer in group]


class Channel(NamedTuple):
    """What a consumer reads of one of its producers.

    Attributes:
        subpartition: of the producer's.
    """

    edge: EdgePlan
    consumer: SubtaskId
    producer: SubtaskId
    subpartition: int


def channels_of(plan: JobPlan) -> Iterator[Channel]:
    """All channels of a job, consumer by consumer; nobody in the job reads what outlives it.

    Example: two consumers of two producers, each with one of its own.
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> edge = EdgePlan("e", "a", "b", Partitioning.FORWARD)
        >>> plan = JobPlan((VertexPlan("a", 2), VertexPlan("b", 2)), (edge,))
        >>> [f"{channel.producer} -> {channel.consumer}" for channel in channels_of(plan)]
        ['a/0 -> b/0', 'a/1 -> b/1']
    """
    for edge in plan.edges:
        if edge.is_persisted:
            continue
        producers = plan.vertex(edge.source).parallelism
        consumers = plan.vertex(edge.target).parallelism
        for index in range(consumers):
            consumer = SubtaskId(edge.target, index)
            for producer, subpartition in producers_of(
                edge.partitioning, producers, consumers, index
            ):
                yield Channel(edge, consumer, SubtaskId(edge.source, producer), subpartition)


def subpartition_count(
    partitioning: Partitioning, producers: int, consumers: int, producer_index: int
) -> int:
    """How many consumers a producer serves."""
    match partitioning:
        case Partitioning.HASH | Partitioning.REBALANCE | Partitioning.BROADCAST:
            return consumers
        case Partitioning.FORWARD:
            return 1
        case Partitioning.RESCALE:
            if producers > consumers:
                return 1
            first = _first(producer_index, producers, consumers)
            return _first(producer_index + 1, producers, consumers) - first


def _first(index: int, few: int, many: int) -> int:
    """First of ``many`` that belongs to number ``index`` of ``few``: ceil(index*many/few)."""
    return -(-index * many // few)


class Endpoints(Protocol):
    """Where processes listen."""

    def endpoint_of(self, slot_id: str) -> Endpoint | None:
        """The process of a slot; None = there is none."""

    def partition_endpoint_of(self, taskmanager_id: str) -> Endpoint | None:
        """What serves the partitions of a TaskManager's finished attempts."""


class DeploymentPlanner:
    """What attempts are told when they start.

    Args:
        graph: attempts; those that are deployed have their slots.
        endpoints: where those listen.
    """

    def __init__(self, graph: ExecutionGraph, endpoints: Endpoints) -> None:
        self._graph = graph
        self._plan = graph.plan
        self._endpoints = endpoints

    def task(self, attempt: ExecutionAttempt) -> TaskPlan:
        """The deployment of an attempt, current or a rival."""
        subtask = attempt.key.subtask
        edges = self._plan.edges
        return TaskPlan(
            attempt=attempt.key,
            slot_id=attempt.slot_id,
            inputs=tuple(
                InputPlan(edge.id, tuple(self._channels(edge, subtask.subtask_index)))
                for edge in edges
                if edge.target == subtask.vertex
            ),
            outputs=tuple(
                self._output(edge, subtask.subtask_index)
                for edge in edges
                if edge.source == subtask.vertex
            ),
            beside=self._graph.current_of(subtask).key.attempt
            if self._graph.rival_of(subtask) is attempt
            else None,
        )

    def replaced_producers(
        self, deployed: frozenset[SubtaskId]
    ) -> Iterator[tuple[AttemptKey, str, ChannelPlan]]:
        """Consumers that went on while a producer of theirs was replaced: (consumer, edge, its new
        channel)."""
        for edge in self._plan.edges:
            if edge.exchange not in _CACHING:
                continue
            new = {s.subtask_index for s in deployed if s.vertex == edge.source}
            for index in range(self._plan.vertex(edge.target).parallelism if new else 0):
                consumer = SubtaskId(edge.target, index)
                if consumer in deployed:
                    continue
                key = self._graph.current_of(consumer).key
                for channel in self._channels(edge, index):
                    if channel.producer_attempt.subtask_index in new:
                        yield key, edge.id, channel

    def _channels(self, edge: EdgePlan, consumer_index: int) -> Iterator[ChannelPlan]:
        for producer_index, subpartition_index in self._producers(edge, consumer_index):
            producer = self._graph.current_of(SubtaskId(edge.source, producer_index))
            yield ChannelPlan(self._endpoint(edge, producer), producer.key, subpartition_index)

    def _endpoint(self, edge: EdgePlan, producer: ExecutionAttempt) -> Endpoint:
        """Where a partition is read; nowhere (an empty address) as long as its producer has no slot."""
        if edge.exchange is Exchange.BLOCKING:
            found = self._endpoints.partition_endpoint_of(producer.taskmanager_id)
        else:
            found = self._endpoints.endpoint_of(producer.slot_id)
        return found or Endpoint(producer.slot_id)

    def _output(self, edge: EdgePlan, producer_index: int) -> OutputPlan:
        if edge.is_persisted:
            return OutputPlan(edge.id, 1)
        target = self._plan.vertex(edge.target)
        count = subpartition_count(
            edge.partitioning,
            self._plan.vertex(edge.source).parallelism,
            target.parallelism,
            producer_index,
        )
        finished = tuple(
            sorted(
                subpartition_index
                for index in range(target.parallelism)
                if self._has_finished(SubtaskId(edge.target, index))
                for producer, subpartition_index in self._producers(edge, index)
                if producer == producer_index
            )
            if edge.exchange in _CACHING
            else ()
        )
        return OutputPlan(edge.id, count, finished)

    def _has_finished(self, subtask: SubtaskId) -> bool:
        return self._graph.current_of(subtask).state is AttemptState.FINISHED

    def _producers(self, edge: EdgePlan, consumer_index: int) -> list[tuple[int, int]]:
        return producers_of(
            edge.partitioning,
            self._plan.vertex(edge.source).parallelism,
            self._plan.vertex(edge.target).parallelism,
            consumer_index,
        )
