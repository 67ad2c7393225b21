"""A consumer's end of a subpartition that writes down what it gets."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from typing_extensions import override

from common.elements import ControlElement
from penstock.errors import PartitionUnavailable
from taskmanager.network.subpartition import PreparedBatch, SubpartitionReader
from tests.support.exchange_slots import rows_of


class RecordingReader(SubpartitionReader):
    """Takes ``credit`` batches.

    Attributes:
        got: batches and control elements; "released" when the producer has gone.
        offsets: row offset of each batch.
        unavailable: to be handed to a view as its way to say that rows are gone.
    """

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.got: list[Any] = []
        self.offsets: list[int] = []
        self.unavailable: list[PartitionUnavailable] = []

    @override
    def prepare(self, batch: pa.RecordBatch, size_bytes: int) -> PreparedBatch:
        return PreparedBatch(batch, None, size_bytes, size_bytes)

    @override
    def may_send(self, charge_bytes: int) -> bool:
        return self.credit > 0

    @override
    def send_batch(self, prepared: PreparedBatch, row_offset: int) -> None:
        self.credit -= 1
        self.got.append(prepared.batch)
        self.offsets.append(row_offset)

    @override
    def send_control(self, element: ControlElement) -> None:
        self.got.append(element)

    @override
    def partition_released(self) -> None:
        self.got.append("released")

    def rows(self) -> list[Any]:
        """The values of column x."""
        return rows_of(self.got)

    def controls(self) -> list[Any]:
        """Everything but batches."""
        return [element for element in self.got if not isinstance(element, pa.RecordBatch)]

    def shapes(self) -> list[Any]:
        """Batches as their number of rows."""
        return [e.num_rows if isinstance(e, pa.RecordBatch) else e for e in self.got]
