"""Both ends of a channel between two processes, on the connection that carries it.

``RemoteReader`` stands for the consumer in the producer's process: it encodes batches, spends the
consumer's credit and numbers the channel's frames. ``RemoteUpstream`` stands for the producer in the
consumer's process: it sends credit back and ends the channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from typing_extensions import override

from common.elements import ControlElement
from penstock.rows.schema import schema_to_bytes
from taskmanager.network.batch_codec import encode_batch, has_dictionary
from taskmanager.network.credit import SenderCredit, charge_of
from taskmanager.network.frames import FLAG_STREAM, FrameKind, encode_header
from taskmanager.network.input_channel import Upstream
from taskmanager.network.messages import encode_control, encode_credit
from taskmanager.network.partition_registry import PartitionRequest
from taskmanager.network.subpartition import PreparedBatch, SubpartitionReader, SubpartitionView
from taskmanager.network.transport import Link


class ChannelCarrier(Protocol):
    """What a channel needs from its connection."""

    is_closed: bool

    @property
    def link(self) -> Link:
        """The link that carries the connection."""

    def send(self, kind: FrameKind, channel: int, payload: bytes, *, sequence: int = 0) -> None:
        """Sends a small frame."""

    def cancel_input(self, channel_id: int, *, is_complete: bool) -> None:
        """The consumer does not read the channel any more: forgets it, and tells the producer."""

    def forget_output(self, channel_id: int) -> None:
        """The producer does not serve the channel any more."""

    def post(self, mail: Callable[[], None]) -> None:
        """Runs something on the mailbox thread, behind what runs now."""


class PartitionProvider(Protocol):
    """What peers may read: the partitions of a slot process, or those that a partition server holds."""

    @property
    def next_deadline_ns(self) -> int | None:
        """When ``expire`` has something to do; None = nobody waits."""

    def expire(self, now_ns: int) -> None:
        """Refuses the requests whose deadline has passed."""

    def request(self, request: PartitionRequest) -> None:
        """Attaches the reader, now or when the partition comes, or refuses it."""

    def withdraw(self, request: PartitionRequest) -> None:
        """The consumer does not want it any more."""


@dataclass(slots=True)
class RemoteUpstream(Upstream):
    """Credit and cancellation of one channel, as frames to the producer."""

    connection: ChannelCarrier
    channel_id: int

    @override
    def grant(self, returned_bytes: int) -> None:
        self.connection.send(FrameKind.CREDIT, self.channel_id, encode_credit(returned_bytes))

    @override
    def cancel(self, *, is_complete: bool) -> None:
        self.connection.cancel_input(self.channel_id, is_complete=is_complete)


class RemoteReader(SubpartitionReader):
    """Feeds a subpartition to a consumer in another process."""

    def __init__(self, connection: ChannelCarrier, channel_id: int, credit: SenderCredit) -> None:
        self._connection = connection
        self._channel_id = channel_id
        self._credit = credit
        self._sequence = 0
        self._schemas: list[tuple[pa.Schema, bool]] = []  # schema id -> schema, needs a stream
        self._view: SubpartitionView | None = None
        self.request: PartitionRequest | None = None
        self.provider: PartitionProvider | None = None
        self._has_read_all = False

    # ------------------------------------------------------------ the consumer's frames

    def attached(self, view: SubpartitionView) -> None:
        """The partition is there."""
        self._view = view
        if self._has_read_all:
            self._connection.post(lambda: self.cancelled(is_complete=True))

    def granted(self, returned_bytes: int) -> None:
        """Credit came back."""
        self._credit.grant(returned_bytes)
        if self._view is not None:
            self._view.serve()

    def cancelled(self, *, is_complete: bool) -> None:
        """The consumer reads no more; one that has read all tells it even a producer that is still to come."""
        view, self._view = self._view, None
        if view is not None:
            view.detach(is_complete=is_complete)
        elif is_complete:
            self._has_read_all = True
        else:
            self._withdraw()

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        view, self._view = self._view, None
        if view is not None:
            view.connection_lost(reason)
        else:
            self._withdraw()

    def _withdraw(self) -> None:
        if self.request is not None and self.provider is not None:
            self.provider.withdraw(self.request)

    # ------------------------------------------------------------ the producer's side

    @override
    def prepare(self, batch: pa.RecordBatch, size_bytes: int) -> PreparedBatch:
        _, needs_stream = self._schemas[self._schema_id(batch.schema)]
        payload = encode_batch(batch, as_stream=needs_stream)
        return PreparedBatch(batch, payload, len(payload), charge_of(len(payload)))

    @override
    def may_send(self, charge_bytes: int) -> bool:
        return self._credit.may_send(charge_bytes)

    @override
    def send_batch(self, prepared: PreparedBatch, row_offset: int) -> None:
        if self._connection.is_closed or prepared.payload is None:
            return
        self._credit.spend(prepared.charge_bytes)
        schema_id = self._schema_id(prepared.batch.schema)
        header = encode_header(
            FrameKind.BATCH,
            self._channel_id,
            prepared.size_bytes,
            flags=FLAG_STREAM if self._schemas[schema_id][1] else 0,
            schema_id=schema_id,
            sequence=self._take_sequence(),
            row_offset=row_offset,
        )
        self._connection.link.send((header, prepared.payload))

    @override
    def send_control(self, element: ControlElement) -> None:
        payload = encode_control(element)
        sequence = self._take_sequence()
        self._connection.send(FrameKind.CONTROL, self._channel_id, payload, sequence=sequence)

    @override
    def partition_released(self) -> None:
        self._view = None
        self._connection.send(FrameKind.RELEASED, self._channel_id, b"")
        self._connection.forget_output(self._channel_id)

    def _take_sequence(self) -> int:
        sequence = self._sequence
        self._sequence += 1
        return sequence

    def _schema_id(self, schema: pa.Schema) -> int:
        """The number the channel knows the schema by; a new one is sent first."""
        for schema_id, (known, _) in enumerate(self._schemas):
            if schema.equals(known, check_metadata=True):
                return schema_id
        schema_id = len(self._schemas)
        self._schemas.append((schema, has_dictionary(schema)))
        payload = schema_to_bytes(schema)
        header = encode_header(
            FrameKind.SCHEMA,
            self._channel_id,
            len(payload),
            schema_id=schema_id,
            sequence=self._take_sequence(),
        )
        if not self._connection.is_closed:
            self._connection.link.send((header + payload,))
        return schema_id
