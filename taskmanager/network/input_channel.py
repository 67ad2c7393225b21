"""One input channel of a gate: the consumer's end of a subpartition (pure).

What has arrived waits here until the task takes it; frames are decoded only then, so that memory is
the bytes that came, bounded by the channel's credit.

Invariants:
    - frames of the channel come in sequence; a gap is an error,
    - row offsets have no gaps; rows seen before are dropped, so that a producer may resend,
    - credit goes back as the task takes batches, not as they arrive,
    - nothing follows ``EndOfPartition``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from common.elements import (
    ControlElement,
    EndOfPartition,
    StreamElement,
    Watermark,
)
from penstock.errors import PartitionUnavailable, TaskFailure
from penstock.partition_id import PartitionId
from taskmanager.network.batch_codec import decode_batch, decode_schema
from taskmanager.network.credit import BATCH_OVERHEAD_BYTES, ReceiverCredit, charge_of
from taskmanager.network.frames import Frame, FrameError, FrameKind
from taskmanager.network.messages import decode_control


class Upstream(Protocol):
    """The way back to the producer."""

    def grant(self, returned_bytes: int) -> None:
        """Gives credit back."""

    def cancel(self, *, is_complete: bool) -> None:
        """Nothing more is read; complete = everything has been."""


@dataclass(slots=True)
class _Arrived:
    """A batch by reference (same process) or a frame that is not decoded yet."""

    source: pa.RecordBatch | Frame
    row_offset: int
    charge_bytes: int


class InputChannel:
    """Queue of one channel.

    Args:
        index: the channel's index in its gate.
        name: which subpartition of which producer it reads, for messages.
        on_data: called when the channel has something to take after it had nothing.
        on_failure: called when the channel cannot go on, with the reason.
    """

    def __init__(
        self,
        index: int,
        name: str,
        credit_bytes: int,
        *,
        on_data: Callable[[InputChannel], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.index = index
        self.name = name
        self.partition: PartitionId | None = None
        """What it reads, once it has been asked for."""
        self.credit = ReceiverCredit(credit_bytes)
        self.has_arrived = False
        """Something has come on this connection."""
        self.is_queued = False
        """Kept by the gate: the channel is in its round."""
        self.is_finished = False
        self.taken_bytes = 0
        """Payload of the batch taken last."""
        self._on_data = on_data
        self._on_failure = on_failure
        self._queue: deque[_Arrived | ControlElement] = deque()
        self._schemas: dict[int, pa.Schema] = {}
        self._next_sequence = 0
        self._next_row = 0
        self._upstream: Upstream | None = None
        self._is_closed = False

    @property
    def has_data(self) -> bool:
        """True when ``take`` has something."""
        return bool(self._queue)

    @property
    def stream_row(self) -> int:
        """The row that is to come next: the first one to ask the producer for."""
        return self._next_row

    def connected(self, upstream: Upstream) -> None:
        """The producer is found: where credit goes."""
        if self._is_closed:
            upstream.cancel(is_complete=False)
            return
        self._upstream = upstream

    def subscribed(self) -> None:
        """The producer's process has answered and has been asked for the rows."""

    def connection_lost(self, reason: str) -> None:
        """The way to the producer is gone, or could not be found."""
        self.fail(PartitionUnavailable(f"{self.name}: {reason}", partition=self.partition))

    def released(self) -> None:
        """The producer's attempt is over: a pipelined channel is restarted with it."""

    def fail(self, error: Exception) -> None:
        """The channel cannot go on."""
        if not self._is_closed and not self.is_finished:
            self._on_failure(error)

    def _renew_connection(self) -> None:
        """Frames are numbered, and credit is given, anew."""
        self.credit = ReceiverCredit(self.credit.window)
        self.has_arrived = False
        self._schemas = {}
        self._next_sequence = 0

    # ------------------------------------------------------------ arrivals

    def frame_arrived(self, frame: Frame) -> None:
        """Takes a frame of this channel.

        Raises:
            FrameError: it breaks the protocol.
            CreditError: the producer had no credit for it.
        """
        if self._is_closed or self.is_finished:
            return
        if frame.sequence != self._next_sequence:
            raise FrameError(
                f"{self.name}: frame {frame.sequence} came where {self._next_sequence} was expected"
            )
        self._next_sequence += 1
        if frame.kind is FrameKind.SCHEMA:
            self._schemas[frame.schema_id] = decode_schema(frame.payload)
        elif frame.kind is FrameKind.BATCH:
            charge_bytes = charge_of(len(frame.payload))
            self.credit.received(charge_bytes)
            self._arrive(_Arrived(frame, frame.row_offset, charge_bytes))
        else:
            self.control_arrived(decode_control(frame.payload))

    def batch_arrived(self, batch: pa.RecordBatch, row_offset: int, charge_bytes: int) -> None:
        """Takes a batch of a producer in the same process."""
        if not self._is_closed and not self.is_finished:
            self.credit.received(charge_bytes)
            self._arrive(_Arrived(batch, row_offset, charge_bytes))

    def control_arrived(self, element: ControlElement) -> None:
        """Takes a control element."""
        if not self._is_closed and not self.is_finished:
            self._arrive(element)

    def _arrive(self, arrived: _Arrived | ControlElement) -> None:
        self.has_arrived = True
        queue = self._queue
        takes_place = isinstance(arrived, Watermark) and arrived.takes_place
        if queue and takes_place and isinstance(queue[-1], Watermark):
            queue[-1] = arrived  # control elements cost no credit: only the newest one waits
            return
        queue.append(arrived)
        if len(self._queue) == 1:
            self._on_data(self)

    # ------------------------------------------------------------ the task's side

    def take(self) -> StreamElement | None:
        """The next element; None where there is none, or nothing of it is new.

        Raises:
            TaskFailure: rows are missing, or what came is not readable.
        """
        if not self._queue:
            return None
        arrived = self._queue.popleft()
        if not isinstance(arrived, _Arrived):
            return self._control_taken(arrived)
        batch = self._decoded(arrived)
        self.taken_bytes = arrived.charge_bytes - BATCH_OVERHEAD_BYTES
        returned_bytes = self.credit.taken(arrived.charge_bytes)
        if returned_bytes and self._upstream is not None:
            self._upstream.grant(returned_bytes)
        return self._unseen(batch, arrived.row_offset)

    def _control_taken(self, element: ControlElement) -> StreamElement | None:
        if isinstance(element, EndOfPartition):
            self._finish()
        return element

    def close(self) -> None:
        """Drops what waits and lets the producer know that nobody reads."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.clear()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.cancel(is_complete=False)

    def _finish(self) -> None:
        if self._queue:
            raise TaskFailure(f"{self.name}: {len(self._queue)} elements came behind its end")
        self.is_finished = True
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.cancel(is_complete=True)

    def _decoded(self, arrived: _Arrived) -> pa.RecordBatch:
        source = arrived.source
        if not isinstance(source, Frame):
            return source
        schema = self._schemas.get(source.schema_id)
        if schema is None:
            raise TaskFailure(f"{self.name}: a batch of the unknown schema {source.schema_id}")
        try:
            return decode_batch(source.payload, schema, source.flags)
        except FrameError as error:
            raise TaskFailure(f"{self.name}: {error}") from error

    def _unseen(self, batch: pa.RecordBatch, row_offset: int) -> pa.RecordBatch | None:
        expected = self._next_row
        end = row_offset + batch.num_rows
        if row_offset > expected:
            raise TaskFailure(
                f"{self.name}: rows {expected} to {row_offset - 1} are missing;"
                " the producer and this consumer do not agree on what was sent"
            )
        if end <= expected:
            return None
        self._next_row = end
        return batch if row_offset == expected else batch.slice(expected - row_offset)
