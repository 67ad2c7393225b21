"""The protocol on one link to another slot process: handshake, then multiplexed channels.

One connection serves a pair of slot processes in both directions. The consumer of a channel chooses
its id; as the kind of a frame tells which way its channel goes, the two sides' ids cannot be
confused. Everything here runs on the mailbox thread.

A connection that breaks, or whose peer breaks the protocol, is lost to every channel read through it:
pipelined ones fail, those whose producers keep their rows wait for another connection. The subpartitions
served through it just lose their reader (the consumer's side reports the failure, and whoever dies
tells the JobManager itself, so that the first cause is not covered by echoes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from typing_extensions import override

from penstock.errors import InvariantViolation, PartitionUnavailable
from penstock.partition_id import PartitionId
from taskmanager.network.credit import CreditError, SenderCredit
from taskmanager.network.endpoint_names import endpoint_of
from taskmanager.network.frames import (
    Frame,
    FrameError,
    FrameKind,
    encode_frame,
)
from taskmanager.network.handshake import SlotIdentity, mismatch_of, refusal_of
from taskmanager.network.input_channel import InputChannel
from taskmanager.network.messages import (
    ChannelError,
    Hello,
    HelloOk,
    Refused,
    Subscribe,
    decode_cancel,
    decode_credit,
    decode_message,
    encode_cancel,
    encode_message,
)
from taskmanager.network.partition_registry import PartitionRequest
from taskmanager.network.remote_channel import (
    ChannelCarrier,
    PartitionProvider,
    RemoteReader,
    RemoteUpstream,
)
from taskmanager.network.transport import Address, Link, LinkHandler

_log = structlog.get_logger()


class ConnectionOwner(Protocol):
    """What a connection needs from the exchange."""

    slot: SlotIdentity
    partitions: PartitionProvider

    @property
    def endpoint(self) -> str:
        """How peers know this slot process."""

    def request_deadline_ns(self) -> int:
        """Until when a request that comes now may wait for its partition."""

    def connect(self, connection: PeerConnection, address: Address) -> None:
        """Begins to open the link of a connection."""

    def connection_established(self, connection: PeerConnection) -> None:
        """The peer has identified itself."""

    def connection_closed(self, connection: PeerConnection, reason: str) -> None:
        """The connection is gone, or could not be made."""

    def post(self, mail: Callable[[], None]) -> None:
        """Adds mail to the process's mailbox."""


class PeerConnection(LinkHandler, ChannelCarrier):
    """One link and its channels.

    Args:
        owner: the exchange.
        peer: how messages call the other side until it has said who it is.
        expected_endpoint: who must answer (connecting side), "" on the accepting side.
        address: where it is (connecting side).
        deadline_ns: until when it must answer (connecting side).
    """

    def __init__(
        self,
        owner: ConnectionOwner,
        peer: str,
        expected_endpoint: str = "",
        address: Address | None = None,
        deadline_ns: int | None = None,
    ) -> None:
        self._owner = owner
        self._address = address
        self._has_greeted = False
        self._may_greet_again = False
        self.is_outbound = bool(expected_endpoint)
        self.peer = peer
        self.peer_endpoint = expected_endpoint
        self._peer_job_id = owner.slot.job_id
        self.deadline_ns = deadline_ns
        self.is_established = False
        self.is_closed = False
        self._link: Link | None = None
        self._next_channel = 0
        self._inputs: dict[int, InputChannel] = {}
        self._unsent: list[tuple[FrameKind, int, bytes]] = []
        self._outputs: dict[int, RemoteReader] = {}

    def bind(self, link: Link) -> None:
        """The link that carries the connection."""
        self._link = link

    @property
    @override
    def link(self) -> Link:
        """The link that carries the connection."""
        if self._link is None:
            raise InvariantViolation("a connection is used before it has a link")
        return self._link

    @override
    def send(self, kind: FrameKind, channel: int, payload: bytes, *, sequence: int = 0) -> None:
        """Sends a small frame."""
        if not self.is_closed:
            self.link.send((encode_frame(kind, channel, payload, sequence=sequence),))

    def subscribe(self, channel: InputChannel, request: Subscribe) -> None:
        """Asks the peer for a subpartition, as soon as the handshake is done."""
        channel_id = self._next_channel
        self._next_channel += 1
        self._inputs[channel_id] = channel
        self._send_established(FrameKind.SUBSCRIBE, channel_id, encode_message(request))
        channel.connected(RemoteUpstream(self, channel_id))
        if self.is_established:
            channel.subscribed()

    @override
    def cancel_input(self, channel_id: int, *, is_complete: bool) -> None:
        """The consumer does not read the channel any more: forgets it, and tells the producer."""
        self._inputs.pop(channel_id, None)
        if not is_complete and not self.is_established:
            self._unsent = [unsent for unsent in self._unsent if unsent[1] != channel_id]
            return
        payload = encode_cancel(is_complete=is_complete)
        self._send_established(FrameKind.CANCEL_CHANNEL, channel_id, payload)

    def _send_established(self, kind: FrameKind, channel_id: int, payload: bytes) -> None:
        """Sends a frame, once the handshake is done."""
        if self.is_established:
            self.send(kind, channel_id, payload)
        else:
            self._unsent.append((kind, channel_id, payload))

    @override
    def post(self, mail: Callable[[], None]) -> None:
        self._owner.post(mail)

    @override
    def forget_output(self, channel_id: int) -> None:
        """The producer does not serve the channel any more."""
        self._outputs.pop(channel_id, None)

    def expire(self) -> None:
        """The peer has not answered in time."""
        self._close("it did not answer in time")

    def _close(self, reason: str) -> None:
        """Ends the connection from this side."""
        self._may_greet_again = False
        self.link.close(reason)

    # ------------------------------------------------------------ the link's events

    @override
    def link_opened(self) -> None:
        """The greeting is on its way: where it comes too late, there is another one."""
        self._may_greet_again = not self._has_greeted
        self._has_greeted = True

    @override
    def frames_arrived(self, frames: Sequence[Frame]) -> None:
        """Takes frames; a peer that breaks the protocol loses the connection."""
        try:
            for frame in frames:
                if self.is_closed:
                    return
                if self.is_established:
                    self._channel_frame(frame)
                else:
                    self._handshake_frame(frame)
        except (FrameError, CreditError) as error:
            self._close(f"it broke the protocol: {error}")
        except Exception as error:  # noqa: BLE001 - the boundary of a connection
            _log.error("connection.crashed", peer=self.peer, exc_info=error)
            self._close(f"what it sent could not be handled: {error!r}")

    @override
    def link_closed(self, reason: str) -> None:
        """Tells what is read through the connection, detaches what is served through it."""
        if self.is_closed:
            return
        if self._may_greet_again and self._address is not None and not self.is_established:
            # This process may have been held up between connecting and greeting, and have been given up for it.
            self._may_greet_again = False
            self._owner.connect(self, self._address)
            return
        self.is_closed = True
        self.deadline_ns = None
        self._unsent = []
        self._owner.connection_closed(self, reason)
        inputs, self._inputs = self._inputs, {}
        for channel in inputs.values():
            channel.connection_lost(f"the connection to {self.peer} is lost: {reason}")
        outputs, self._outputs = self._outputs, {}
        for reader in outputs.values():
            reader.lost(f"the connection to {self.peer} is lost: {reason}")

    # ------------------------------------------------------------ handshake

    def _handshake_frame(self, frame: Frame) -> None:
        if self.is_outbound:
            self._answer_arrived(frame)
        elif frame.kind is FrameKind.HELLO:
            self._hello_arrived(decode_message(Hello, frame.payload))
        else:
            raise FrameError(f"a {frame.kind.name} frame where HELLO was expected")

    def _hello_arrived(self, hello: Hello) -> None:
        refusal = refusal_of(self._owner.slot, hello)
        if refusal is not None:
            self.send(FrameKind.REFUSED, 0, encode_message(Refused(refusal)))
            self.link.close(f"refused: {refusal}", drain=True)
            return
        endpoint_of(hello.endpoint)  # breaks off where it is none
        self.peer = f"slot {hello.slot_id}"
        self.peer_endpoint = hello.endpoint
        self._peer_job_id = hello.job_id
        self.link.open_limits()
        answer = HelloOk(self._owner.slot.slot_id, self._owner.endpoint)
        self.send(FrameKind.HELLO_OK, 0, encode_message(answer))
        self._established()

    def _answer_arrived(self, frame: Frame) -> None:
        if frame.kind is FrameKind.REFUSED:
            refused = decode_message(Refused, frame.payload)
            self._close(f"it refused this slot: {refused.reason}")
            return
        if frame.kind is not FrameKind.HELLO_OK:
            raise FrameError(f"a {frame.kind.name} frame where HELLO_OK was expected")
        mismatch = mismatch_of(self.peer_endpoint, decode_message(HelloOk, frame.payload))
        if mismatch is not None:
            self._close(mismatch)
            return
        self._established()

    def _established(self) -> None:
        self.is_established = True
        self.deadline_ns = None
        self._owner.connection_established(self)
        unsent, self._unsent = self._unsent, []
        for kind, channel_id, payload in unsent:
            self.send(kind, channel_id, payload)
        for channel in list(self._inputs.values()):
            channel.subscribed()

    # ------------------------------------------------------------ channels

    def _channel_frame(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.BATCH | FrameKind.CONTROL | FrameKind.SCHEMA:
                channel = self._input(frame)
                if channel is not None:
                    channel.frame_arrived(frame)
            case FrameKind.CREDIT:
                reader = self._outputs.get(frame.channel)
                if reader is not None:
                    reader.granted(decode_credit(frame.payload))
            case FrameKind.SUBSCRIBE:
                self._subscribe_arrived(frame.channel, decode_message(Subscribe, frame.payload))
            case FrameKind.CANCEL_CHANNEL:
                reader = self._outputs.pop(frame.channel, None)
                if reader is not None:
                    reader.cancelled(is_complete=decode_cancel(frame.payload))
            case FrameKind.CHANNEL_ERROR:
                channel = self._input(frame)
                if channel is not None:
                    message = decode_message(ChannelError, frame.payload).message
                    self._inputs.pop(frame.channel)
                    channel.fail(
                        PartitionUnavailable(
                            f"{channel.name} on {self.peer}: {message}", partition=channel.partition
                        )
                    )
            case FrameKind.RELEASED:
                channel = self._input(frame)
                if channel is not None:
                    channel.released()
            case FrameKind.HELLO | FrameKind.HELLO_OK | FrameKind.REFUSED:
                raise FrameError(f"a {frame.kind.name} frame behind the handshake")

    def _input(self, frame: Frame) -> InputChannel | None:
        """The channel of a frame; None for one that was given up a moment ago."""
        if frame.channel >= self._next_channel:
            raise FrameError(f"a {frame.kind.name} frame of the unknown channel {frame.channel}")
        return self._inputs.get(frame.channel)

    def _subscribe_arrived(self, channel_id: int, request: Subscribe) -> None:
        if channel_id in self._outputs:
            raise FrameError(f"channel {channel_id} is subscribed twice")
        is_foreign = request.job_id != self._peer_job_id
        if is_foreign and self._owner.slot.job_id:
            raise FrameError(
                f"a slot of job {self._peer_job_id} asks for a partition of job {request.job_id}"
            )
        reader = RemoteReader(self, channel_id, SenderCredit(request.credit_bytes))
        self._outputs[channel_id] = reader

        def refuse(error: PartitionUnavailable) -> None:
            self.forget_output(channel_id)
            payload = encode_message(ChannelError(str(error)))
            self.send(FrameKind.CHANNEL_ERROR, channel_id, payload)

        reader.request = PartitionRequest(
            PartitionId(request.edge_id, request.vertex, request.subtask_index, request.attempt),
            request.subpartition_index,
            reader,
            self._owner.request_deadline_ns(),
            reader.attached,
            refuse,
            request.first_row,
            request.consumer_attempt,
            request.job_id,
            is_foreign,
        )
        reader.provider = self._owner.partitions
        self._owner.partitions.request(reader.request)
