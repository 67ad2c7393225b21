"""Connects the channels of gates with their producers, and kept ones again when they have lost them.

A kept channel that has lost its connection is subscribed again after a pause that grows, to the same
attempt; where that attempt is over it waits to be told of the one that replaces it. When nothing has
worked until a deadline, it fails. Runs on the mailbox thread; the mailbox loop calls ``tick`` at
``next_deadline_ns``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from typing_extensions import override

from common.pb import internal_pb2
from penstock.errors import InvariantViolation, PartitionUnavailable
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.network.connection_pool import ConnectionPool
from taskmanager.network.input_channel import InputChannel
from taskmanager.network.input_gate import ChannelSpec
from taskmanager.network.kept_channel import (
    START,
    KeptChannelSpec,
    KeptInputChannel,
    RowPosition,
    SupplyListener,
)
from taskmanager.network.local_channel import LocalChannel
from taskmanager.network.messages import Subscribe
from taskmanager.network.partition_registry import PartitionRegistry, PartitionSource

PAUSE_MIN_NS = 50_000_000
PAUSE_MAX_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who reads: a subtask, as messages name it, and which attempt of it."""

    name: str
    attempt: int


@dataclass(eq=False, slots=True)
class _Supply:
    """What a kept channel reads, and what is done about it when it does not.

    Attributes:
        consumer: who asks.
        pause_ns: before the next try.
        retry_at_ns: when that is; None = the channel is connected, or only a new attempt can help.
        give_up_at_ns: when the channel fails; None = it is connected.
        reason: why it is not.
    """

    channel: KeptInputChannel
    description: internal_pb2.InputChannel
    consumer: Consumer
    pause_ns: int = PAUSE_MIN_NS
    retry_at_ns: int | None = None
    give_up_at_ns: int | None = None
    reason: str = ""


class InputConnector(SupplyListener):
    """The channels of one slot process.

    Args:
        registry: the partitions of this one.
        now_ns: monotonic time.
        wait_ms: how long a kept channel stays without its producer.
        shared: complete partitions on shared storage, by its name and the job that has written them.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        registry: PartitionRegistry,
        now_ns: Callable[[], int],
        wait_ms: int,
        shared: Callable[[str, str], PartitionSource],
    ) -> None:
        self._connections = connections
        self._registry = registry
        self._now_ns = now_ns
        self._wait_ns = wait_ms * 1_000_000
        self._shared = shared
        self._supplies: dict[InputChannel, _Supply] = {}

    def connect(
        self, channel: InputChannel, description: internal_pb2.InputChannel, consumer: Consumer
    ) -> None:
        """Begins to fetch what a channel reads."""
        channel.partition = partition_of(description)
        if isinstance(channel, KeptInputChannel):
            self._supplies[channel] = _Supply(channel, description, consumer)
        self._subscribe(channel, description, consumer)

    def replace(self, channel: KeptInputChannel, description: internal_pb2.InputChannel) -> None:
        """A new attempt has taken the place of a channel's producer; an old one changes nothing.

        Raises:
            PartitionUnavailable: see ``KeptInputChannel.producer_replaced``.
        """
        supply = self._supplies.get(channel)
        partition = partition_of(description)
        if supply is None or channel.partition is None:
            raise InvariantViolation(
                f"{channel.name} is replaced by {partition}, but not connected"
            )
        if partition.attempt <= channel.partition.attempt:
            return
        channel.producer_replaced(channel_name(description), partition)
        supply.description = description
        supply.pause_ns, supply.retry_at_ns = PAUSE_MIN_NS, None
        if not channel.is_finished:
            supply.give_up_at_ns = self._now_ns() + self._wait_ns
        self._subscribe(channel, description, supply.consumer)

    def forget(self, channels: Iterable[InputChannel]) -> None:
        """The channels are closed."""
        for channel in channels:
            self._supplies.pop(channel, None)

    def _subscribe(
        self, channel: InputChannel, description: internal_pb2.InputChannel, consumer: Consumer
    ) -> None:
        producer, partition = description.producer_attempt, partition_of(description)
        source: PartitionSource | None = None
        if description.shared_directory:
            source = self._shared(description.shared_directory, producer.job_id)
        elif description.producer.slot_id == self._connections.slot.slot_id:
            source = self._registry
        if source is not None:
            local = LocalChannel(channel, channel.credit.window, source, self._connections.post)
            deadline_ns = self._connections.request_deadline_ns()
            local.subscribe(
                partition, description.subpartition_index, consumer.attempt, deadline_ns
            )
            return
        request = Subscribe(
            job_id=producer.job_id,
            edge_id=partition.edge_id,
            vertex=partition.vertex,
            subtask_index=partition.subtask_index,
            attempt=partition.attempt,
            subpartition_index=description.subpartition_index,
            credit_bytes=channel.credit.window,
            consumer=consumer.name,
            consumer_attempt=consumer.attempt,
            first_row=channel.stream_row,
        )
        self._connections.connection_to(description.producer).subscribe(channel, request)

    # ------------------------------------------------------------ what becomes of kept channels

    @override
    def subscribed(self, channel: KeptInputChannel) -> None:
        supply = self._supplies.get(channel)
        if supply is not None:
            supply.give_up_at_ns = None

    @override
    def disconnected(self, channel: KeptInputChannel, reason: str) -> None:
        supply = self._supplies.get(channel)
        if supply is None:
            return
        now_ns = self._now_ns()
        if channel.has_arrived:
            supply.pause_ns = PAUSE_MIN_NS
        supply.retry_at_ns = now_ns + supply.pause_ns
        supply.pause_ns = min(2 * supply.pause_ns, PAUSE_MAX_NS)
        self._start_waiting(supply, now_ns, reason)

    @override
    def released(self, channel: KeptInputChannel) -> None:
        supply = self._supplies.get(channel)
        if supply is not None:
            supply.retry_at_ns = None
            self._start_waiting(supply, self._now_ns(), "its producer's attempt is over")

    def _start_waiting(self, supply: _Supply, now_ns: int, reason: str) -> None:
        supply.reason = reason
        if supply.give_up_at_ns is None:
            supply.give_up_at_ns = now_ns + self._wait_ns

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which ``tick`` has something to do; None = every channel is connected."""
        deadlines = [
            deadline
            for supply in self._supplies.values()
            for deadline in (supply.retry_at_ns, supply.give_up_at_ns)
            if deadline is not None
        ]
        return min(deadlines, default=None)

    def tick(self, now_ns: int) -> None:
        """Tries again, or gives up, what is due."""
        for supply in list(self._supplies.values()):
            if supply.give_up_at_ns is not None and now_ns >= supply.give_up_at_ns:
                self._give_up(supply)
            elif supply.retry_at_ns is not None and now_ns >= supply.retry_at_ns:
                supply.retry_at_ns = None
                self._subscribe(supply.channel, supply.description, supply.consumer)

    def _give_up(self, supply: _Supply) -> None:
        supply.give_up_at_ns = supply.retry_at_ns = None
        channel = supply.channel
        channel.fail(
            PartitionUnavailable(
                f"{channel.name}: nothing has come for {self._wait_ns // 1_000_000_000} s:"
                f" {supply.reason or 'its producer does not answer'}",
                partition=channel.partition,
            )
        )


def partition_of(channel: internal_pb2.InputChannel) -> PartitionId:
    """Which partition a channel reads."""
    producer = channel.producer_attempt
    return PartitionId(channel.edge_id, producer.vertex, producer.subtask_index, producer.attempt)


def channel_spec(
    edge: internal_pb2.InputEdge,
    channel: internal_pb2.InputChannel,
    starts: Mapping[tuple[str, int], checkpoint_pb2.ChannelPosition],
) -> ChannelSpec:
    """What a gate has to know of a channel.

    Args:
        starts: (edge id, producer's subtask index) -> how far the restored state has read it.
    """
    name = channel_name(channel)
    is_first, follows = edge.load_first, edge.follows
    if edge.partition_type == graph_pb2.RESULT_PARTITION_TYPE_PIPELINED:
        return ChannelSpec(name, is_first=is_first, follows=follows)
    producer_index = channel.producer_attempt.subtask_index
    start = starts.get((edge.edge_id, producer_index))
    return ChannelSpec(
        name,
        is_first=is_first,
        follows=follows,
        carries_barriers=edge.partition_type != graph_pb2.RESULT_PARTITION_TYPE_BLOCKING,
        kept=KeptChannelSpec(
            edge.edge_id,
            producer_index,
            is_reproducible=edge.reproducible,
            start=START if start is None else RowPosition(start.rows, start.checksum),
        ),
    )


def channel_name(channel: internal_pb2.InputChannel) -> str:
    """What a channel reads, for messages.

    Raises:
        InvariantViolation: it does not say.
    """
    producer = channel.producer_attempt
    if not channel.edge_id or not channel.HasField("producer_attempt"):
        raise InvariantViolation(f"an input channel was deployed without a producer: {channel}")
    return (
        f"subpartition {channel.subpartition_index} of {channel.edge_id} from"
        f" {producer.vertex}/{producer.subtask_index} (attempt {producer.attempt},"
        f" slot {channel.producer.slot_id})"
    )
