"""An input channel whose producer keeps its rows: it outlives its connection and its producer (pure).

Rows count from the start of the job. When the connection is lost the channel goes on from the row it
needs next. When the producer has been replaced by a new attempt, the channel goes back to the row it had
read at the barrier of its latest completed checkpoint, which is where the new attempt can have begun;
what it has read before is dropped, after its checksum has proved to be that of the first time.

A checkpoint barrier may come among rows that have been read before. No snapshot is taken then
(``is_comparing``): should these rows turn out to be others than the first time, the job goes back to a
checkpoint whose rows have all been compared, and from which all of them are read again.

Invariants:
    - ``position`` never goes back, and counts exactly the rows that ``take`` has handed out (and those
      before the start),
    - ``stream_row <= position.rows`` between two calls, and where it is less nothing is handed out but
      barriers,
    - a mark is the position at the barrier of its checkpoint; in mode at-least-once it may lie behind that, if
      the producer is reproducible,
    - no mark is made of rows that are still to be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from typing_extensions import override

from common.elements import (
    MIN_TIMESTAMP_MS,
    CheckpointBarrier,
    ControlElement,
    EndOfData,
    EndOfPartition,
    StreamElement,
    StreamStatus,
    Watermark,
)
from penstock.errors import NotReproducible, PartitionUnavailable
from penstock.partition_id import PartitionId
from taskmanager.kernels.row_checksum import CHECKSUM_MODULUS, rows_checksum
from taskmanager.network.input_channel import InputChannel, Upstream


@dataclass(frozen=True, slots=True)
class RowPosition:
    """How far a channel has been read.

    Attributes:
        rows: since the start of the job.
        checksum: of these rows (``row_checksum``); 0 where the producer is not reproducible.
    """

    rows: int
    checksum: int


START = RowPosition(0, 0)


@dataclass(frozen=True, slots=True)
class KeptChannelSpec:
    """A channel whose producer keeps its rows.

    Attributes:
        producer_index: the producer's subtask index.
        is_reproducible: the producer sends the same rows again after a restart: checksums are kept.
        start: where the restored state was taken.
    """

    edge_id: str
    producer_index: int
    is_reproducible: bool = False
    start: RowPosition = START


class SupplyListener(Protocol):
    """Who sees to it that a channel is connected."""

    def subscribed(self, channel: KeptInputChannel) -> None:
        """The producer's process has answered and has been asked for the rows."""

    def disconnected(self, channel: KeptInputChannel, reason: str) -> None:
        """The connection is lost, or could not be made; what has arrived can be read."""

    def released(self, channel: KeptInputChannel) -> None:
        """The producer's attempt is over, and its rows are gone with it."""


class KeptInputChannel(InputChannel):
    """Queue of one channel on a blocking or caching edge.

    Args:
        spec: what it reads, and from where on.
        supply: is told when the connection has gone.

    See ``InputChannel`` for the others.
    """

    def __init__(
        self,
        index: int,
        name: str,
        credit_bytes: int,
        *,
        spec: KeptChannelSpec,
        supply: SupplyListener,
        on_data: Callable[[InputChannel], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(
            index,
            name,
            credit_bytes,
            on_data=on_data,
            on_failure=on_failure,
        )
        self.spec = spec
        self.position = start = spec.start
        self._next_row = start.rows
        self._replay_start = start.rows
        self._replayed_checksum = 0
        """Of the rows before ``stream_row``, while these are being read again."""
        self._supply = supply
        self._completed = start
        self._marks: dict[int, RowPosition] = {}
        self._at_barrier: dict[int, RowPosition] = {}
        """Of checkpoints whose barrier has come, and whose snapshot has not been taken."""
        self._has_ended_data = False
        self._last_barrier_id = -1
        self._watermark_ms = MIN_TIMESTAMP_MS
        self._is_active = True

    @property
    def producer_attempt(self) -> int:
        """Whose rows are being read."""
        return self.partition.attempt if self.partition is not None else 0

    @property
    def _is_replaying(self) -> bool:
        return self._next_row < self.position.rows

    # ------------------------------------------------------------ checkpoints

    @property
    def is_comparing(self) -> bool:
        """Rows in the state are read again, and may yet turn out to be others: no time for a snapshot.

        What has read the end compares nothing any more.
        """
        return self._is_replaying and not self.is_finished

    def mark(self, checkpoint_id: int) -> RowPosition:
        """The state as it is now goes into a checkpoint.

        Returns:
            Where a task goes on that is restored from it. In mode at-least-once rows from behind the barrier
            may be in the state already; they are left out only if they are sure to come again as they were.
        """
        assert not self.is_comparing, f"{self.name}: a snapshot of rows that are being compared"
        at_barrier = self._at_barrier.pop(checkpoint_id, self.position)
        mark = self.position if self.spec.is_reproducible else at_barrier
        self._marks[checkpoint_id] = mark
        return mark

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """A producer that is replaced from now on begins at the barrier of this checkpoint, or behind it."""
        self._completed = self._marks.get(checkpoint_id, self._completed)
        self._marks = _after(checkpoint_id, self._marks)
        self._at_barrier = _after(checkpoint_id, self._at_barrier)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete."""
        self._marks.pop(checkpoint_id, None)
        self._at_barrier.pop(checkpoint_id, None)

    # ------------------------------------------------------------ connections

    @override
    def connected(self, upstream: Upstream) -> None:
        if self.is_finished:
            upstream.cancel(is_complete=True)
            return
        self._drop_supply()
        super().connected(upstream)

    @override
    def subscribed(self) -> None:
        self._supply.subscribed(self)

    @override
    def connection_lost(self, reason: str) -> None:
        self._upstream = None
        if not self._is_closed and not self.is_finished:
            self._supply.disconnected(self, reason)

    @override
    def released(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.cancel(is_complete=False)
        if not self._is_closed and not self.is_finished:
            self._supply.released(self)

    def producer_replaced(self, name: str, partition: PartitionId) -> None:
        """A new attempt sends the rows again from the latest completed checkpoint on.

        Raises:
            PartitionUnavailable: rows of the old attempt are in the state and the new one cannot be
                trusted to send the same.
        """
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.cancel(is_complete=False)
        self.name, self.partition = name, partition
        self._next_row = self._replay_start = self._completed.rows
        self._replayed_checksum = self._completed.checksum
        if self.is_finished:
            return
        self._drop_supply()
        if not self.spec.is_reproducible and self._completed.rows < self.position.rows:
            raise PartitionUnavailable(
                f"{name}: its producer was replaced, and is not reproducible: rows"
                f" {self._completed.rows} to {self.position.rows - 1} were read from the one before it",
                partition=partition,
            )

    def _drop_supply(self) -> None:
        """Nothing of an earlier connection is read any more: the next one sends it again."""
        self._queue.clear()
        self._renew_connection()

    # ------------------------------------------------------------ the task's side

    @override
    def _control_taken(self, element: ControlElement) -> StreamElement | None:
        return super()._control_taken(element) if self._is_news(element) else None

    def _is_news(self, element: ControlElement) -> bool:
        """False for what the task has been told before; takes note of the rest."""
        match element:
            case EndOfData() | EndOfPartition() if self._is_replaying:
                raise NotReproducible(
                    f"{self.name}: it ends after {self._next_row} rows, though {self.position.rows}"
                    f" were read before its producer was restarted: {_ADVICE}"
                )
            case EndOfData():
                is_news, self._has_ended_data = not self._has_ended_data, True
            case CheckpointBarrier(checkpoint_id):
                is_news = checkpoint_id > self._last_barrier_id
                self._last_barrier_id = max(self._last_barrier_id, checkpoint_id)
                if is_news:
                    self._at_barrier[checkpoint_id] = self.position
            case Watermark(timestamp_ms):
                is_news = not self._is_replaying and timestamp_ms > self._watermark_ms
                self._watermark_ms = timestamp_ms if is_news else self._watermark_ms
            case StreamStatus(active):
                is_news = not self._is_replaying and active != self._is_active
                self._is_active = active if is_news else self._is_active
            case _:
                is_news = True
        return is_news

    @override
    def _unseen(self, batch: pa.RecordBatch, row_offset: int) -> pa.RecordBatch | None:
        rows = super()._unseen(batch, row_offset)
        if rows is None:
            return None
        first = self._next_row - rows.num_rows
        known = min(rows.num_rows, self.position.rows - first)
        if known > 0:
            self._compare(rows.slice(0, known), first)
            rows, first = rows.slice(known), first + known
            if not rows.num_rows:
                return None
        if self._has_ended_data:
            raise NotReproducible(
                f"{self.name}: more than the {first} rows that it had before its producer was"
                f" restarted: {_ADVICE}"
            )
        checksum = self.position.checksum
        if self.spec.is_reproducible:
            checksum = (checksum + rows_checksum(rows, first)) % CHECKSUM_MODULUS
        self.position = RowPosition(self._next_row, checksum)
        return rows

    def _compare(self, rows: pa.RecordBatch, first: int) -> None:
        """Takes rows that were read before; those up to the position must have its checksum."""
        if not self.spec.is_reproducible:
            return
        replayed = (self._replayed_checksum + rows_checksum(rows, first)) % CHECKSUM_MODULUS
        self._replayed_checksum = replayed
        if first + rows.num_rows == self.position.rows and replayed != self.position.checksum:
            raise NotReproducible(
                f"{self.name}: its restarted producer has sent other rows than before, among rows"
                f" {self._replay_start} to {self.position.rows - 1}: {_ADVICE}"
            )


def _after(checkpoint_id: int, positions: dict[int, RowPosition]) -> dict[int, RowPosition]:
    return {id: position for id, position in positions.items() if id > checkpoint_id}


_ADVICE = (
    "an operator of the producer that was declared deterministic is not; leave the declaration out, and"
    " its consumers restart with it"
)
