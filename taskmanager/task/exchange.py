"""The data exchange of one slot process: creates partitions and gates and connects them.

Runs on the mailbox thread. Channels within the process are short-circuited; the others go over the
connections of ``connection_pool``. Waits have deadlines; the mailbox loop calls ``tick`` at
``next_deadline_ns``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from common.clock import Clock
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2
from taskmanager.network.connection_pool import (
    PARTITION_WAIT_MS,
    ConnectionPool,
    OnUnreachable,
    ignore_peer,
)
from taskmanager.network.credit import far_windows, near_windows
from taskmanager.network.gateway import Gateway
from taskmanager.network.handshake import SlotIdentity
from taskmanager.network.input_connector import (
    Consumer,
    InputConnector,
    channel_spec,
    partition_of,
)
from taskmanager.network.input_gate import InputGate
from taskmanager.network.kept_channel import KeptInputChannel
from taskmanager.network.partition_registry import PartitionRegistry
from taskmanager.network.partitioner import partitioner_of
from taskmanager.network.result_partition import (
    ExchangeCounters,
    PartitionContext,
    ResultPartition,
)
from taskmanager.network.transport import Post, Transport
from taskmanager.partitions.kept_partition import KeptPartition
from taskmanager.partitions.partition_factory import PartitionFactory
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.partitions.spilling import Spilling

__all__ = ["DataExchange", "SlotIdentity"]


class DataExchange:
    """Partitions, gates and connections of one slot process.

    Args:
        config: of the job.
        slot: who this process is.
        post: adds mail to the slot's mailbox.
        clock: for deadlines and the buffer timeout.
        on_unreachable: see ``ConnectionPool``.
        spill: where partitions go that are kept; None = they stay in memory.
        partition_wait_ms: how long a request waits for a partition that is not there.
    """

    def __init__(
        self,
        config: Configuration,
        slot: SlotIdentity,
        post: Post,
        clock: Clock,
        transport: Transport,
        *,
        gateway: Gateway | None = None,
        on_unreachable: OnUnreachable = ignore_peer,
        spill: SpillRunner | None = None,
        partition_wait_ms: int = PARTITION_WAIT_MS,
    ) -> None:
        self.slot = slot
        self.registry = PartitionRegistry()
        self._partitions = PartitionFactory(config, spill)
        self._config = config
        self._clock = clock
        self._connections = ConnectionPool(
            config,
            slot,
            self.registry,
            post,
            clock,
            transport,
            gateway=gateway,
            on_unreachable=on_unreachable,
            partition_wait_ms=partition_wait_ms,
        )
        self._connector = InputConnector(
            self._connections,
            self.registry,
            clock.monotonic_ns,
            partition_wait_ms,
            self._partitions.shared,
        )

    # ------------------------------------------------------------ life

    def listen(
        self, unix_path: str, tcp_host: str, advertised_host: str
    ) -> internal_pb2.DataEndpoint:
        """Begins to accept connections; see ``ConnectionPool.listen``."""
        return self._connections.listen(unix_path, tcp_host, advertised_host)

    def close(self) -> None:
        """Ends every connection and the I/O thread; channels hear nothing any more."""
        self._connections.close()

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which ``tick`` has something to do; None = nothing waits."""
        deadlines = (
            self._connections.next_deadline_ns,
            self._connector.next_deadline_ns,
            self._partitions.next_deadline_ns,
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, now_ns: int) -> None:
        """Ends the waits whose deadline has passed, and connects again what is due."""
        self._connections.tick(now_ns)
        self._connector.tick(now_ns)
        self._partitions.tick(now_ns)

    # ------------------------------------------------------------ partitions and gates

    def create_partition(
        self,
        attempt: internal_pb2.AttemptId,
        edge: internal_pb2.OutputEdge,
        subtask_index: int,
        counters: ExchangeCounters,
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
        positions: Iterable[checkpoint_pb2.ChannelPosition] = (),
    ) -> ResultPartition:
        """The output of an attempt on one edge; unless it is blocking, consumers may read it from now on.

        Args:
            positions: where the attempt goes on writing edges that keep their rows.
        """
        credit_bytes = self._config.network_credit_bytes
        partition_id = PartitionId(
            edge.edge.id, attempt.vertex, attempt.subtask_index, attempt.attempt
        )
        context = PartitionContext(
            partition_id,
            partitioner_of(edge, subtask_index),
            subpartition_count=edge.subpartition_count,
            batch_rows=self._config.batch_rows,
            batch_bytes_max=credit_bytes,
            buffer_timeout_ms=self._config.buffer_timeout_ms,
            counters=counters,
            now_ns=self._clock.monotonic_ns,
            on_available=on_available,
            on_error=on_error,
            on_release=lambda: self.registry.forget(partition_id),
            waits_for_readers=edge.edge.waits,
        )
        partition = self._partitions.create(context, edge, positions)
        if partition.is_served_here:
            self.registry.register(partition)
        return partition

    def complete_here(self, channel: internal_pb2.InputChannel) -> SealedPartition | None:
        """The complete partition that a channel would read, where this machine sees its files.

        Blocks; any thread. See ``SpillRunner.here``.
        """
        job_id = channel.producer_attempt.job_id
        return self._partitions.here(job_id, partition_of(channel), channel.shared_directory)

    def read_here(self, channel: internal_pb2.InputChannel) -> None:
        """Has a channel read the complete partition that ``complete_here`` has found itself: nobody serves it."""
        if not channel.shared_directory:
            channel.shared_directory = self._partitions.local_name()

    def set_spilling(self, spilling: Spilling) -> None:
        """Whether kept partitions may be written to disk from now on."""
        self._partitions.set_spilling(spilling)

    def release_partitions(self, partition_ids: Iterable[PartitionId]) -> None:
        """Drops partitions that finished attempts have left behind; others are no affair of this call."""
        for partition_id in partition_ids:
            partition = self.registry.find(partition_id)
            if isinstance(partition, KeptPartition) and partition.is_retired:
                partition.release()

    def create_gate(
        self,
        attempt: internal_pb2.AttemptId,
        inputs: Sequence[internal_pb2.InputEdge],
        counters: ExchangeCounters,
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
        positions: Sequence[checkpoint_pb2.ChannelPosition] = (),
        first_checkpoint_id: int = 0,
    ) -> InputGate:
        """The input of an attempt; begins to fetch from all its producers.

        Args:
            positions: how far the restored state has read edges that keep their rows.
            first_checkpoint_id: it takes no part in checkpoints before this one.
        """
        listed = [(edge, channel) for edge in inputs for channel in edge.channels]
        starts = {(start.edge_id, start.index): start for start in positions}
        far = [self._connections.is_far(channel.producer) for _, channel in listed]
        near, windows = near_windows(len(far)), far_windows(sum(far))
        gate = InputGate(
            [
                replace(channel_spec(edge, channel, starts), windows=windows if is_far else near)
                for (edge, channel), is_far in zip(listed, far, strict=True)
            ],
            self._config.network_credit_bytes,
            counters=counters,
            supply=self._connector,
            on_available=on_available,
            on_error=on_error,
            on_release=self._connector.forget,
            is_exactly_once=self._config.execution_checkpointing_mode == "exactly-once",
            first_checkpoint_id=first_checkpoint_id,
            now_ms=self._clock.now_ms,
        )
        consumer = Consumer(f"{attempt.vertex}/{attempt.subtask_index}", attempt.attempt)
        waiting = []
        for (_, description), channel in zip(listed, gate.channels, strict=True):
            connect = partial(self._connector.connect, channel, description, consumer)
            if gate.holds(channel) and not isinstance(channel, KeptInputChannel):
                # Its producers begin when it is asked for.
                waiting.append(connect)
            else:
                connect()
        gate.on_loaded = waiting
        return gate

    def replace_producer(self, gate: InputGate, description: internal_pb2.InputChannel) -> None:
        """A gate reads one of its kept channels from a new attempt from now on.

        Raises:
            PartitionUnavailable: the consumer cannot go on with the rows of the new attempt.
        """
        producer_index = description.producer_attempt.subtask_index
        channel = gate.kept_channel(description.edge_id, producer_index)
        self._connector.replace(channel, description)
