"""Which subpartitions connect which subtasks: the deployment of each attempt.

A producer writes one subpartition per consumer it serves; a consumer reads one subpartition of each
of its producers. Invariant: each subpartition of each edge is read by exactly one channel, except
that nothing reads what nobody writes (checked by the tests against a drawing of each pattern).

Source: Flink, DistributionPattern ALL_TO_ALL and POINTWISE (EdgeManagerBuildUtil).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import EdgePlan, JobPlan, Partitioning


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
    """An edge that an attempt writes."""

    edge_id: str
    subpartition_count: int


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Everything an attempt must be told beyond its vertex."""

    attempt: AttemptKey
    slot_id: str
    inputs: tuple[InputPlan, ...]
    outputs: tuple[OutputPlan, ...]


def producers_of(
    partitioning: Partitioning, producers: int, consumers: int, consumer_index: int
) -> list[tuple[int, int]]:
    """What a consumer reads: (producer's subtask index, subpartition index), in producer order."""
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


def plan_deployments(
    graph: ExecutionGraph, endpoint_of_slot: Mapping[str, Endpoint]
) -> list[TaskPlan]:
    """The deployment of each current attempt.

    Args:
        graph: attempts that have their slots.
        endpoint_of_slot: where each of those slots listens.
    """

    def endpoint(subtask: SubtaskId) -> Endpoint:
        return endpoint_of_slot[graph.current_of(subtask).slot_id]

    plan = graph.plan
    return [
        TaskPlan(
            attempt=attempt.key,
            slot_id=attempt.slot_id,
            inputs=tuple(
                _plan_input(plan, edge, attempt.key, graph, endpoint)
                for edge in plan.edges
                if edge.target == attempt.key.vertex
            ),
            outputs=tuple(
                _plan_output(plan, edge, attempt.key)
                for edge in plan.edges
                if edge.source == attempt.key.vertex
            ),
        )
        for attempt in graph.current()
    ]


def _plan_input(
    plan: JobPlan,
    edge: EdgePlan,
    consumer: AttemptKey,
    graph: ExecutionGraph,
    endpoint: Callable[[SubtaskId], Endpoint],
) -> InputPlan:
    pairs = producers_of(
        edge.partitioning,
        plan.vertex(edge.source).parallelism,
        plan.vertex(edge.target).parallelism,
        consumer.subtask_index,
    )
    channels = []
    for producer_index, subpartition_index in pairs:
        producer = SubtaskId(edge.source, producer_index)
        channels.append(
            ChannelPlan(endpoint(producer), graph.current_of(producer).key, subpartition_index)
        )
    return InputPlan(edge.id, tuple(channels))


def _plan_output(plan: JobPlan, edge: EdgePlan, producer: AttemptKey) -> OutputPlan:
    count = subpartition_count(
        edge.partitioning,
        plan.vertex(edge.source).parallelism,
        plan.vertex(edge.target).parallelism,
        producer.subtask_index,
    )
    return OutputPlan(edge.id, count)
