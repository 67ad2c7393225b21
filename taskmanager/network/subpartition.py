"""What the two sides of a subpartition see of each other (pure).

A producer adds to a ``Subpartition``. A consumer asks the partition for a ``SubpartitionView`` and
attaches its ``SubpartitionReader`` to that: a connection's channel, or the input channel of a gate in
the same process. A view is one consumer's place; how many there may be is the subpartition's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from common.elements import ControlElement
from penstock.errors import PartitionUnavailable
from penstock.partition_id import PartitionId
from taskmanager.network.frames import Buffer


@dataclass(slots=True)
class PreparedBatch:
    """A batch in the form its reader takes it, and what it costs.

    ``payload`` is None where the reader takes the batch itself.
    """

    batch: pa.RecordBatch
    payload: Buffer | None
    size_bytes: int
    charge_bytes: int


class SubpartitionReader(Protocol):
    """The consumer's end of a subpartition."""

    def prepare(self, batch: pa.RecordBatch, size_bytes: int) -> PreparedBatch:
        """Brings a batch into the form it is sent in; ``size_bytes`` is an estimate."""

    def may_send(self, charge_bytes: int) -> bool:
        """True when there is credit for a batch of this charge."""

    def send_batch(self, prepared: PreparedBatch, row_offset: int) -> None:
        """Sends a batch; there is credit for it."""

    def send_control(self, element: ControlElement) -> None:
        """Sends a control element behind what was sent before."""

    def partition_released(self) -> None:
        """The producer has gone; nothing follows."""


Refusal = Callable[[PartitionUnavailable], None]
"""Tells a consumer that what it wants to read is not there (any more)."""


class SubpartitionView(Protocol):
    """One consumer's place in a subpartition."""

    def attach(self, reader: SubpartitionReader) -> None:
        """Begins to feed the reader; called once, before anything else."""

    def serve(self) -> None:
        """Credit came back: sends what waits."""

    def detach(self, *, is_complete: bool) -> None:
        """The consumer has read everything, or has gone before that: nothing is sent any more."""

    def connection_lost(self, reason: str) -> None:
        """The way to the consumer is gone, whatever it has read."""


class ReadablePartition(Protocol):
    """The consumers' side of a result partition."""

    partition_id: PartitionId

    def view(
        self, index: int, first_row: int, on_unavailable: Refusal, reader_attempt: int = 0
    ) -> SubpartitionView:
        """A consumer's place in one of the subpartitions.

        Args:
            index: which subpartition.
            first_row: offset of the first row it wants.
            on_unavailable: called when rows turn out to be gone later on; nothing follows then.
            reader_attempt: of the consumer.

        Raises:
            PartitionUnavailable: it cannot be read from there.
        """


class Subpartition(Protocol):
    """The producer's side: takes rows and control elements for one consumer, in order."""

    @property
    def has_collected(self) -> bool:
        """True while rows wait for their batch to fill."""

    @property
    def is_consumed(self) -> bool:
        """True once the producer need not stay for the consumer's sake."""

    def add(self, batch: pa.RecordBatch, size_bytes: int) -> None:
        """Takes rows."""

    def add_control(self, element: ControlElement) -> None:
        """Takes a control element behind the rows taken before."""

    def let_go(self) -> None:
        """Lets go of the batches that rows which wait for theirs to fill were cut out of."""

    def flush(self) -> None:
        """Makes what is collected readable now."""

    def view(
        self, first_row: int, on_unavailable: Refusal, reader_attempt: int = 0
    ) -> SubpartitionView:
        """See ``ReadablePartition``."""

    def release(self) -> None:
        """The producer's attempt has ended: drops what is left."""
