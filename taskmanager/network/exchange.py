"""The data exchange of one slot process: creates partitions and gates and connects them.

Runs on the mailbox thread. Channels within the process are short-circuited; for the others there is
one connection per pair of slot processes, opened by whichever side is the first to need the other.
Waits (for a partition, for a handshake) have deadlines; the mailbox loop calls ``tick`` at
``next_deadline_ns``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from common.clock import Clock
from common.elements import ControlElement
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import InvariantViolation
from penstock.partition_id import PartitionId
from taskmanager.network.handshake import SlotIdentity
from taskmanager.network.input_channel import InputChannel
from taskmanager.network.input_gate import InputGate
from taskmanager.network.local_channel import LocalChannel
from taskmanager.network.messages import Subscribe
from taskmanager.network.partition_registry import PartitionRegistry
from taskmanager.network.partitioner import partitioner_of
from taskmanager.network.peer_connection import ConnectionOwner, PeerConnection
from taskmanager.network.result_partition import ExchangeCounters, ResultPartition
from taskmanager.network.transport import Address, Link, LinkHandler, Post, Transport

__all__ = ["DataExchange", "SlotIdentity"]

PARTITION_WAIT_MS = 600_000
"""How long a consumer waits for its producer to answer and to register.

Both are deployed at once, but a slot answers between two pieces of its own work, and a user function
may take minutes to open. A producer that has died is noticed at once, by its connection or its daemon.
"""


class DataExchange(ConnectionOwner):
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
        self._transport = transport
        self._partition_wait_ns = partition_wait_ms * 1_000_000
        self._handshake_ns = self._partition_wait_ns
        self._endpoint = _endpoint_name(internal_pb2.DataEndpoint(slot_id=slot.slot_id))
        self._by_endpoint: dict[str, PeerConnection] = {}
        self._connections: set[PeerConnection] = set()
        self._is_closed = False
        transport.start(post, self._accept)

    # ------------------------------------------------------------ life

    def listen(
        self, unix_path: str, tcp_host: str, advertised_host: str
    ) -> internal_pb2.DataEndpoint:
        """Begins to accept connections; "" leaves out the Unix socket or TCP.

        Args:
            unix_path: path of the Unix socket, under 100 bytes.
            tcp_host: address to bind.
            advertised_host: how other hosts reach that address.

        Returns:
            Where consumers find this slot process.

        Raises:
            OSError: the address cannot be bound.
        """
        port = self._transport.listen(unix_path, tcp_host, self._config.taskmanager_data_port)
        endpoint = internal_pb2.DataEndpoint(
            slot_id=self.slot.slot_id,
            host_id=self.slot.host_id,
            unix_path=unix_path,
            tcp_host=advertised_host if port else "",
            tcp_port=port,
        )
        self._endpoint = _endpoint_name(endpoint)
        return endpoint

    def close(self) -> None:
        """Ends every connection and the I/O thread; channels hear nothing any more."""
        if not self._is_closed:
            self._is_closed = True
            self._transport.close()
            self._connections.clear()
            self._by_endpoint.clear()

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which ``tick`` has something to do; None = nothing waits."""
        deadlines = [
            connection.deadline_ns
            for connection in self._connections
            if connection.deadline_ns is not None
        ]
        if (waiting := self.registry.next_deadline_ns) is not None:
            deadlines.append(waiting)
        return min(deadlines, default=None)

    def tick(self, now_ns: int) -> None:
        """Ends the waits whose deadline has passed."""
        self.registry.expire(now_ns)
        for connection in list(self._connections):
            if connection.deadline_ns is not None and now_ns >= connection.deadline_ns:
                connection.deadline_ns = None
                connection.expire()

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
                partition_id, description.subpartition_index, self.request_deadline_ns()
            )
            return
        request = Subscribe(
            edge_id=description.edge_id,
            vertex=producer.vertex,
            subtask_index=producer.subtask_index,
            attempt=producer.attempt,
            subpartition_index=description.subpartition_index,
            credit_bytes=credit_bytes,
            consumer=consumer,
        )
        self._connection_to(description.producer).subscribe(channel, request)

    # ------------------------------------------------------------ connections

    def _connection_to(self, producer: internal_pb2.DataEndpoint) -> PeerConnection:
        name = _endpoint_name(producer)
        known = self._by_endpoint.get(name)
        if known is not None:
            return known
        is_local = producer.host_id == self.slot.host_id and self._config.taskmanager_local_sockets
        address = Address(
            producer.unix_path if is_local else "", producer.tcp_host, producer.tcp_port
        )
        connection = PeerConnection(
            self,
            f"slot {producer.slot_id} at {address}",
            name,
            self._clock.monotonic_ns() + self._handshake_ns,
        )
        self._by_endpoint[name] = connection
        self._connections.add(connection)
        connection.bind(self._transport.connect(address, connection))
        return connection

    def _accept(self, link: Link) -> LinkHandler:
        deadline_ns = self._clock.monotonic_ns() + self._handshake_ns
        connection = PeerConnection(self, "an unknown peer", "", deadline_ns)
        self._connections.add(connection)
        connection.bind(link)
        return connection

    @property
    @override
    def endpoint(self) -> str:
        return self._endpoint

    @override
    def request_deadline_ns(self) -> int:
        return self._clock.monotonic_ns() + self._partition_wait_ns

    @override
    def connection_established(self, connection: PeerConnection) -> None:
        self._by_endpoint.setdefault(connection.peer_endpoint, connection)

    @override
    def connection_closed(self, connection: PeerConnection) -> None:
        self._connections.discard(connection)
        if self._by_endpoint.get(connection.peer_endpoint) is connection:
            del self._by_endpoint[connection.peer_endpoint]


def _endpoint_name(endpoint: internal_pb2.DataEndpoint) -> str:
    """Identity of a slot process: a slot id alone may come back in another process."""
    return f"{endpoint.slot_id}|{endpoint.unix_path}|{endpoint.tcp_host}:{endpoint.tcp_port}"


def _channel_name(channel: internal_pb2.InputChannel) -> str:
    producer = channel.producer_attempt
    if not channel.edge_id or not channel.HasField("producer_attempt"):
        raise InvariantViolation(f"an input channel was deployed without a producer: {channel}")
    return (
        f"subpartition {channel.subpartition_index} of {channel.edge_id} from"
        f" {producer.vertex}/{producer.subtask_index} (attempt {producer.attempt},"
        f" slot {channel.producer.slot_id})"
    )
