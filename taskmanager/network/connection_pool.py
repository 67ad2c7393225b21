"""The connections of one process of the data exchange: who it listens to, and whom it has reached.

There is one connection per pair of processes, opened by whichever side is the first to need the
other; channels go over it in both directions. Answers to greetings and requests for partitions have deadlines;
the mailbox loop calls ``tick`` at ``next_deadline_ns``. For the greetings of those who connect the transport has its own.
"""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from common.clock import Clock
from common.pb import internal_pb2
from penstock.config import Configuration
from taskmanager.network.endpoint_names import endpoint_name, endpoint_of
from taskmanager.network.frames import FrameKind, encode_frame
from taskmanager.network.gateway import Gateway
from taskmanager.network.handshake import SlotIdentity, hello_of
from taskmanager.network.messages import encode_message
from taskmanager.network.peer_connection import ConnectionOwner, PeerConnection
from taskmanager.network.remote_channel import PartitionProvider
from taskmanager.network.transport import Address, Link, LinkHandler, Post, Transport

PARTITION_WAIT_MS = 600_000
"""How long a consumer waits for its producer to answer and to register.

Both are deployed at once, but a slot answers between two pieces of its own work, and a user function
may take minutes to open. A producer that has died is noticed at once, by its connection or its daemon.
"""

OnUnreachable = Callable[[internal_pb2.DataEndpoint, str], None]


def ignore_peer(_peer: internal_pb2.DataEndpoint, _reason: str) -> None:
    """Nobody asks about peers."""


class ConnectionPool(ConnectionOwner):
    """All connections of a slot process, or of a partition server.

    Args:
        config: of the job, or of the TaskManager.
        slot: who this process is.
        partitions: what peers may read.
        post: adds mail to the process's mailbox.
        clock: for deadlines.
        gateway: the way to other hosts; None = this process connects to them, and they to it.
        on_unreachable: called with the endpoint of a process that the connection to is lost, or could not be
            made, and why; once, until it has been reached again.
        partition_wait_ms: how long a peer may take to answer, and a request wait for its partition.
    """

    def __init__(
        self,
        config: Configuration,
        slot: SlotIdentity,
        partitions: PartitionProvider,
        post: Post,
        clock: Clock,
        transport: Transport,
        *,
        gateway: Gateway | None = None,
        on_unreachable: OnUnreachable = ignore_peer,
        partition_wait_ms: int = PARTITION_WAIT_MS,
    ) -> None:
        self.slot = slot
        self._post = post
        self.partitions = partitions
        self._config = config
        self._clock = clock
        self._transport = transport
        self._gateway = gateway
        self._wait_ns = partition_wait_ms * 1_000_000
        self._endpoint = endpoint_name(internal_pb2.DataEndpoint(slot_id=slot.slot_id))
        self._by_endpoint: dict[str, PeerConnection] = {}
        self._connections: dict[PeerConnection, None] = {}
        self._on_unreachable = on_unreachable
        self._reported: set[str] = set()
        """Endpoints that have been called unreachable since they were reached last."""
        self._is_closed = False
        transport.start(post, self._accept)

    def listen(
        self, unix_path: str, tcp_host: str, advertised_host: str
    ) -> internal_pb2.DataEndpoint:
        """Begins to accept connections; "" leaves out the Unix socket or TCP, which is the gateway's where there is one.

        Args:
            unix_path: path of the Unix socket, under 100 bytes.
            tcp_host: address to bind.
            advertised_host: how other hosts reach that address.

        Returns:
            Where consumers find this process.

        Raises:
            OSError: the address cannot be bound.
        """
        if self._gateway is None:
            port = self._transport.listen(unix_path, tcp_host, self._config.taskmanager_data_port)
        else:
            self._transport.listen(unix_path, "", 0)
            port = self._gateway.port
        endpoint = internal_pb2.DataEndpoint(
            slot_id=self.slot.slot_id,
            host_id=self.slot.host_id,
            unix_path=unix_path,
            tcp_host=advertised_host if port else "",
            tcp_port=port,
        )
        self._endpoint = endpoint_name(endpoint)
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
        if (waiting := self.partitions.next_deadline_ns) is not None:
            deadlines.append(waiting)
        return min(deadlines, default=None)

    def tick(self, now_ns: int) -> None:
        """Ends the waits whose deadline has passed."""
        self.partitions.expire(now_ns)
        for connection in list(self._connections):
            if connection.deadline_ns is not None and now_ns >= connection.deadline_ns:
                connection.deadline_ns = None
                connection.expire()

    def _is_local(self, peer: internal_pb2.DataEndpoint) -> bool:
        return peer.host_id == self.slot.host_id and self._config.taskmanager_local_sockets

    def is_far(self, peer: internal_pb2.DataEndpoint) -> bool:
        """Whether what comes from there comes through gateways."""
        return self._gateway is not None and not self._is_local(peer)

    def connection_to(self, peer: internal_pb2.DataEndpoint) -> PeerConnection:
        """The connection to a process; one that is not there yet is being opened from now on."""
        name = endpoint_name(peer)
        known = self._by_endpoint.get(name)
        if known is not None:
            return known
        is_local = self._is_local(peer)
        shown = Address(peer.unix_path if is_local else "", peer.tcp_host, peer.tcp_port)
        address = shown if self._gateway is None or is_local else self._gateway.address_of(peer)
        connection = PeerConnection(
            self, f"slot {peer.slot_id} at {shown}", name, address, self.request_deadline_ns()
        )
        self._by_endpoint[name] = connection
        self._connections[connection] = None
        self.connect(connection, address)
        return connection

    @override
    def connect(self, connection: PeerConnection, address: Address) -> None:
        hello = hello_of(self.slot, self._endpoint)
        greeting = address.said_first + encode_frame(FrameKind.HELLO, 0, encode_message(hello))
        connection.bind(self._transport.connect(address, connection, greeting))

    def _accept(self, link: Link) -> LinkHandler:
        connection = PeerConnection(self, "an unknown peer")
        self._connections[connection] = None
        connection.bind(link)
        return connection

    @property
    @override
    def endpoint(self) -> str:
        return self._endpoint

    @override
    def post(self, mail: Callable[[], None]) -> None:
        self._post(mail)

    @override
    def request_deadline_ns(self) -> int:
        return self._clock.monotonic_ns() + self._wait_ns

    @override
    def connection_established(self, connection: PeerConnection) -> None:
        self._by_endpoint.setdefault(connection.peer_endpoint, connection)
        self._reported.discard(connection.peer_endpoint)

    @override
    def connection_closed(self, connection: PeerConnection, reason: str) -> None:
        self._connections.pop(connection, None)
        name = connection.peer_endpoint
        if self._by_endpoint.get(name) is connection:
            del self._by_endpoint[name]
        was_wanted = connection.is_established or connection.is_outbound
        if was_wanted and name not in self._by_endpoint and name not in self._reported:
            self._reported.add(name)
            self._on_unreachable(endpoint_of(name), reason)
