"""A channel whose rows come from within the consumer's process: its producer lives there, or they lie on storage (pure).

Batches go over by reference, nothing is serialised; order, row offsets and credit are those of any
other channel, so back-pressure works the same.
"""

from __future__ import annotations

import pyarrow as pa
from typing_extensions import override

from common.elements import ControlElement
from penstock.partition_id import PartitionId
from taskmanager.network.credit import SenderCredit, charge_of
from taskmanager.network.input_channel import InputChannel, Upstream
from taskmanager.network.partition_registry import PartitionRequest, PartitionSource
from taskmanager.network.subpartition import PreparedBatch, SubpartitionReader, SubpartitionView
from taskmanager.network.transport import Post


class LocalChannel(SubpartitionReader, Upstream):
    """Both the producer's view of the consumer and the consumer's way back."""

    def __init__(
        self, channel: InputChannel, credit_bytes: int, source: PartitionSource, post: Post
    ) -> None:
        self._channel = channel
        self._credit = SenderCredit(credit_bytes)
        self._source = source
        self._post = post
        self._has_read_all = self._is_had = False
        self._view: SubpartitionView | None = None
        self._request: PartitionRequest | None = None

    def subscribe(
        self,
        partition_id: PartitionId,
        subpartition_index: int,
        reader_attempt: int,
        deadline_ns: int,
    ) -> None:
        """Asks for the subpartition; waits for it until the deadline."""
        self._request = PartitionRequest(
            partition_id,
            subpartition_index,
            self,
            deadline_ns,
            self._attached,
            self._channel.fail,
            self._channel.stream_row,
            reader_attempt,
            lost=self._lost,
        )
        self._channel.connected(self)
        self._is_had = not self._source.may_be_lost
        if self._is_had:
            self._channel.subscribed()
        self._source.request(self._request)

    def _attached(self, view: SubpartitionView) -> None:
        self._view = view
        if self._has_read_all:
            self._post(lambda: self.cancel(is_complete=True))

    def _lost(self, reason: str) -> None:
        self._view = self._request = None
        self._channel.connection_lost(reason)

    def _note_arrival(self) -> None:
        """What may be lost is there when something of it has come."""
        if not self._is_had:
            self._is_had = True
            self._channel.subscribed()

    # ------------------------------------------------------------ the producer's side

    @override
    def prepare(self, batch: pa.RecordBatch, size_bytes: int) -> PreparedBatch:
        return PreparedBatch(batch, None, size_bytes, charge_of(size_bytes))

    @override
    def may_send(self, charge_bytes: int) -> bool:
        return self._credit.may_send(charge_bytes)

    @override
    def send_batch(self, prepared: PreparedBatch, row_offset: int) -> None:
        self._note_arrival()
        self._credit.spend(prepared.charge_bytes)
        self._channel.batch_arrived(prepared.batch, row_offset, prepared.charge_bytes)

    @override
    def send_control(self, element: ControlElement) -> None:
        self._note_arrival()
        self._channel.control_arrived(element)

    @override
    def partition_released(self) -> None:
        self._view = None
        self._channel.released()

    # ------------------------------------------------------------ the consumer's side

    @override
    def grant(self, returned_bytes: int) -> None:
        self._credit.grant(returned_bytes)
        if self._view is not None:
            self._view.serve()

    @override
    def cancel(self, *, is_complete: bool) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.detach(is_complete=is_complete)
        elif is_complete:
            self._has_read_all = True
        elif self._request is not None:
            self._source.withdraw(self._request)
