"""One consumer's place among the elements of a complete partition: they are sent as far as its credit goes."""

from __future__ import annotations

import pyarrow as pa
from typing_extensions import override

from taskmanager.network.batch_codec import SizeEstimator
from taskmanager.network.subpartition import PreparedBatch, SubpartitionReader, SubpartitionView
from taskmanager.partitions.sealed_elements import Elements


class ElementsView(SubpartitionView):
    """Sends elements.

    Args:
        elements: those that come first.
    """

    def __init__(self, elements: Elements) -> None:
        self._elements = elements
        self._sizes = SizeEstimator()
        self._reader: SubpartitionReader | None = None
        self._waiting: tuple[int, PreparedBatch] | None = None

    @override
    def attach(self, reader: SubpartitionReader) -> None:
        self._reader = reader
        self.serve()

    @override
    def serve(self) -> None:
        while (reader := self._reader) is not None and self._send(reader):
            pass

    def _send(self, reader: SubpartitionReader) -> bool:
        """Sends one element; False when there is no credit, or nothing at the moment."""
        if self._waiting is None:
            row, element = next(self._elements, (0, None))
            if element is None:
                return self._go_on()
            if not isinstance(element, pa.RecordBatch):
                reader.send_control(element)
                return True
            self._waiting = row, reader.prepare(element, self._sizes.size_bytes(element))
        row, prepared = self._waiting
        if not reader.may_send(prepared.charge_bytes):
            return False
        self._waiting = None
        reader.send_batch(prepared, row)
        return True

    def _go_on(self) -> bool:
        """Turns to the elements behind those that have been sent; False where there are none now."""
        return False

    @override
    def detach(self, *, is_complete: bool) -> None:
        self._reader = self._waiting = None
        self._elements = iter(())

    @override
    def connection_lost(self, reason: str) -> None:
        self.detach(is_complete=False)
