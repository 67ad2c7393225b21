"""An exchange between subtasks of one process: what is emitted is in the consumer's gate at once.

There is one subtask per vertex. A hash edge keeps the rows whose keys that subtask owns and drops the
others, which would go to other subtasks; every other edge hands all rows over. Gates are those of any
subtask: watermarks are merged and barriers aligned there as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from common.elements import ControlElement, EndOfData, EndOfPartition
from common.pb import internal_pb2
from penstock.errors import InvariantViolation
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.network.credit import charge_of
from taskmanager.network.input_channel import InputChannel
from taskmanager.network.input_gate import ChannelSpec, InputGate
from taskmanager.network.partitioner import HashPartitioner
from taskmanager.network.result_partition import ExchangeCounters

_CREDIT_BYTES = 1 << 48


class DirectChannel:
    """The way from a producer to the channel of its consumer.

    Attributes:
        has_ended: the end of the data has gone over.
    """

    def __init__(self) -> None:
        self.target: InputChannel | None = None
        self.has_ended = False
        self._row_offset = 0

    def send(self, batch: pa.RecordBatch) -> None:
        """Hands a batch over."""
        if batch.num_rows:
            self._channel.batch_arrived(batch, self._row_offset, charge_of(batch.nbytes))
            self._row_offset += batch.num_rows

    def send_control(self, element: ControlElement) -> None:
        """Hands a control element over."""
        self._channel.control_arrived(element)

    @property
    def _channel(self) -> InputChannel:
        if self.target is None:
            raise InvariantViolation("something was emitted before its consumer was built")
        return self.target


class DirectPartition:
    """The output of a subtask on one edge: a ``ResultPartition`` that never holds anything back.

    Args:
        channel: to the consumer.
        partitioner: None = all rows are the consumer's.
        own_index: the consumer's subtask index.
    """

    flush_deadline_ns: int | None = None
    is_complete = True
    sealed_bytes = 0
    waiting_batches = 0

    def __init__(
        self,
        channel: DirectChannel,
        partitioner: HashPartitioner | None,
        own_index: int,
        counters: ExchangeCounters,
    ) -> None:
        self._channel = channel
        self._partitioner = partitioner
        self._own_index = own_index
        self._counters = counters

    def is_available(self) -> bool:
        """Always."""
        return True

    def emit(self, batch: pa.RecordBatch) -> None:
        """Hands over the rows that the consumer owns."""
        self._counters.records_out += batch.num_rows
        if self._partitioner is None:
            self._channel.send(batch)
            return
        for index, piece in self._partitioner.partition(batch):
            if index == self._own_index:
                self._channel.send(piece)

    def emit_control(self, element: ControlElement) -> None:
        """Hands a control element over."""
        self._channel.send_control(element)

    def end_data(self) -> None:
        """No row follows."""
        self.emit_control(EndOfData())

    def finish(self) -> None:
        """Nothing follows."""
        self._channel.send_control(EndOfPartition())

    def is_drained(self) -> bool:
        """Always: nothing waits here."""
        return True

    def flush(self) -> None:
        """Nothing waits here."""

    def flush_if_due(self, now_ns: int) -> None:
        """Nothing waits here."""

    def positions(self) -> list[checkpoint_pb2.ChannelPosition]:
        """Nothing is kept."""
        return []

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Nothing is kept."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Nothing is kept."""

    def retire(self) -> None:
        """Nothing is held."""

    def release(self) -> None:
        """Nothing is held."""


class DirectExchange:
    """Makes the outputs and gates of the subtasks; it is to them what ``DataExchange`` is in a slot.

    Args:
        subtask_of: vertex id -> index of its subtask that runs here.
        now_ms: the clock.
        is_exactly_once: channels are blocked while barriers are being aligned.
    """

    def __init__(
        self,
        subtask_of: Callable[[str], int],
        now_ms: Callable[[], int],
        *,
        is_exactly_once: bool,
    ) -> None:
        self._subtask_of = subtask_of
        self._now_ms = now_ms
        self._is_exactly_once = is_exactly_once
        self._channels: dict[str, DirectChannel] = {}

    def channel(self, edge_id: str) -> DirectChannel:
        """The only channel of an edge."""
        return self._channels.setdefault(edge_id, DirectChannel())

    def create_partition(
        self,
        _attempt: internal_pb2.AttemptId,
        edge: internal_pb2.OutputEdge,
        _subtask_index: int,
        counters: ExchangeCounters,
        _on_available: Callable[[], None],
        _on_error: Callable[[Exception], None],
        _positions: Iterable[checkpoint_pb2.ChannelPosition] = (),
    ) -> DirectPartition:
        """The output on one edge."""
        partitioner = None
        if edge.edge.partitioning == graph_pb2.PARTITIONING_HASH and edge.target_parallelism > 1:
            partitioner = HashPartitioner(
                edge.edge.id,
                list(edge.edge.key_columns),
                edge.target_parallelism,
                edge.target_max_parallelism,
            )
        own_index = self._subtask_of(edge.edge.target_vertex)
        return DirectPartition(self.channel(edge.edge.id), partitioner, own_index, counters)

    def create_gate(
        self,
        _attempt: internal_pb2.AttemptId,
        inputs: Sequence[internal_pb2.InputEdge],
        counters: ExchangeCounters,
        on_available: Callable[[], None],
        on_error: Callable[[Exception], None],
        *,
        positions: Sequence[checkpoint_pb2.ChannelPosition] = (),
        first_checkpoint_id: int = 0,
    ) -> InputGate:
        """The input of a subtask."""
        gate = InputGate(
            [
                ChannelSpec(edge.edge_id, is_first=edge.load_first, follows=edge.follows)
                for edge in inputs
            ],
            _CREDIT_BYTES,
            counters=counters,
            on_available=on_available,
            on_error=on_error,
            is_exactly_once=self._is_exactly_once,
            first_checkpoint_id=first_checkpoint_id,
            now_ms=self._now_ms,
        )
        for edge, channel in zip(inputs, gate.channels, strict=True):
            self.channel(edge.edge_id).target = channel
        return gate
