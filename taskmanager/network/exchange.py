"""The data exchange of one slot process: creates partitions and gates and connects them.

Runs on the mailbox thread. Channels within the process are short-circuited; the others go over the
connections of ``connection_pool``. Waits have deadlines; the mailbox loop calls ``tick`` at
``next_deadline_ns``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.clock import Clock
from common.elements import ControlElement
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import InvariantViolation
from penstock.partition_id import PartitionId
from taskmanager.network.connection_pool import PARTITION_WAIT_MS, ConnectionPool
from taskmanager.network.handshake import SlotIdentity
from taskmanager.network.input_channel import InputChannel
from taskmanager.network.input_gate import InputGate
from taskmanager.network.local_channel import LocalChannel
from taskmanager.network.messages import Subscribe
from taskmanager.network.partition_registry import NO_BARRIER, PartitionRegistry
from taskmanager.network.partitioner import partitioner_of
from taskmanager.network.result_partition import ExchangeCounters, ResultPartition
from taskmanager.network.transport import Post, Transport

__all__ = ["DataExchange", "SlotIdentity"]


class DataExchange:
    """Partitions, gates and connections of one slot process.

    Args:
        config: of the job.
        slot: who this process is.
        post: adds mail to the slot's mailbox.
        clock: for deadlines and the buffer timeout.
        transport: carries the frames.
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
        partition_wait_ms: int = PARTITION_WAIT_MS,
    ) -> None:
        self.slot = slot
        self.registry = PartitionRegistry()
        self._config = config
        self._clock = clock
        self._connections = ConnectionPool(
            config,
            slot,
            self.registry,
            post,
            clock,
            transport,
            partition_wait_ms=partition_wait_ms,
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
        return self._connections.next_deadline_ns

    def tick(self, now_ns: int) -> None:
        """Ends the waits whose deadline has passed."""
        self._connections.tick(now_ns)

    # ------------------------------------------------------------ partitions and gates

    def create_partition(
        self,
        attempt: internal_pb2.AttemptId,
        edge: internal_pb2.OutputEdge,
        subtask_index: int,
        counters: ExchangeCounters,
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> ResultPartition:
        """The output of an attempt on one edge; consumers may read it from now on."""
        credit_bytes = self._config.network_credit_bytes
        partition_id = PartitionId(
            edge.edge.id, attempt.vertex, attempt.subtask_index, attempt.attempt
        )
        partition = ResultPartition(
            partition_id,
            partitioner_of(edge, subtask_index),
            subpartition_count=edge.subpartition_count,
            batch_rows=self._config.batch_rows,
            batch_bytes_max=max(1, credit_bytes // 2),
            buffer_timeout_ms=self._config.buffer_timeout_ms,
            counters=counters,
            now_ns=self._clock.monotonic_ns,
            on_available=on_available,
            on_error=on_error,
            on_release=lambda: self.registry.forget(partition_id),
        )
        self.registry.register(partition)
        return partition

    def create_gate(
        self,
        attempt: internal_pb2.AttemptId,
        inputs: Sequence[internal_pb2.InputEdge],
        counters: ExchangeCounters,
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_announcement: Callable[[int, ControlElement], None] | None = None,
    ) -> InputGate:
        """The input of an attempt; begins to fetch from all its producers."""
        channels = [channel for edge in inputs for channel in edge.channels]
        gate = InputGate(
            [_channel_name(channel) for channel in channels],
            self._config.network_credit_bytes,
            counters=counters,
            on_available=on_available,
            on_error=on_error,
            on_announcement=on_announcement,
            is_exactly_once=self._config.execution_checkpointing_mode == "exactly-once",
            now_ms=self._clock.now_ms,
        )
        consumer = f"{attempt.vertex}/{attempt.subtask_index}"
        for description, channel in zip(channels, gate.channels, strict=True):
            self._subscribe(description, channel, consumer)
        return gate

    def _subscribe(
        self, description: internal_pb2.InputChannel, channel: InputChannel, consumer: str
    ) -> None:
        producer = description.producer_attempt
        credit_bytes = self._config.network_credit_bytes
        if description.producer.slot_id == self.slot.slot_id:
            partition_id = PartitionId(
                description.edge_id, producer.vertex, producer.subtask_index, producer.attempt
            )
            local = LocalChannel(channel, credit_bytes, self.registry)
            local.subscribe(
                partition_id,
                description.subpartition_index,
                self._connections.request_deadline_ns(),
            )
            return
        request = Subscribe(
            job_id=producer.job_id,
            edge_id=description.edge_id,
            vertex=producer.vertex,
            subtask_index=producer.subtask_index,
            attempt=producer.attempt,
            subpartition_index=description.subpartition_index,
            credit_bytes=credit_bytes,
            consumer=consumer,
            first_row=0,
            last_barrier=NO_BARRIER,
        )
        self._connections.connection_to(description.producer).subscribe(channel, request)


def _channel_name(channel: internal_pb2.InputChannel) -> str:
    producer = channel.producer_attempt
    if not channel.edge_id or not channel.HasField("producer_attempt"):
        raise InvariantViolation(f"an input channel was deployed without a producer: {channel}")
    return (
        f"subpartition {channel.subpartition_index} of {channel.edge_id} from"
        f" {producer.vertex}/{producer.subtask_index} (attempt {producer.attempt},"
        f" slot {channel.producer.slot_id})"
    )
