"""Readers of what is far away, on I/O threads: the mailbox thread waits for no byte of it.

``OpeningReader`` opens another reader there and asks it from then on. ``AheadReader`` runs one that decodes where
it is called: one step of it while the rows of the step before go out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.source import END, EndOfSplit, Reader, SourceContext

NOT_BEGUN = b""
"""The position of a reader that is not open yet."""

STEP_ROWS = 64 * 1024


class OpeningReader(Reader):
    """A reader that is being opened.

    Args:
        open_reader: makes it; I/O thread.
        position: with which.
    """

    def __init__(
        self, open_reader: Callable[[], Reader], context: SourceContext, position: bytes | None
    ) -> None:
        self._position = position or NOT_BEGUN
        self._reader: Reader | None = None
        self._opening: Future[Reader] = context.submit(open_reader)
        self._opening.add_done_callback(lambda _: context.wake())

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        if self._reader is None:
            if not self._opening.done():
                return None
            self._reader = self._opening.result()
            self.row_noun = self._reader.row_noun
        return self._reader.read(max_rows)

    @override
    def position(self) -> bytes:
        return self._position if self._reader is None else self._reader.position()

    @override
    def row_number(self, index: int) -> int | None:
        return None if self._reader is None else self._reader.row_number(index)

    @override
    def next_read_at_ms(self) -> int | None:
        return None if self._reader is None else self._reader.next_read_at_ms()

    @override
    def min_event_time_ms(self) -> int | None:
        return None if self._reader is None else self._reader.min_event_time_ms()

    @override
    def is_reading(self) -> bool:
        return self._reader is None or self._reader.is_reading()

    @override
    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        elif not self._opening.cancel():
            self._opening.add_done_callback(_close_opened)


def _close_opened(opening: Future[Reader]) -> None:
    if opening.exception() is None:
        opening.result().close()


class NumberedReader(Reader):
    """A reader that can say the numbers of rows later, and never answers None."""

    @abstractmethod
    def numbering(self) -> Callable[[int], int]:
        """``row_number`` of the batch handed out last, for later."""

    @override
    def row_number(self, index: int) -> int:
        return self.numbering()(index)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A batch, and what its reader says behind it."""

    batch: pa.RecordBatch
    position: bytes
    min_event_time_ms: int | None
    numbering: Callable[[int], int]


class AheadReader(Reader):
    """Hands out what another reader reads on an I/O thread; it is that thread's while a step runs."""

    def __init__(self, reader: NumberedReader, context: SourceContext) -> None:
        self._reader = reader
        self._context = context
        self._position = self._position_of_reader()
        self._min_event_time_ms = reader.min_event_time_ms()
        self._numbering: Callable[[int], int] | None = None
        self._taken: deque[_Taken] = deque()
        self._is_ended = False
        self._next = self._submit()

    def _position_of_reader(self) -> bytes:
        return self._reader.position() if self._context.takes_checkpoints else NOT_BEGUN

    def _submit(self) -> Future[tuple[list[_Taken], bool]]:
        future: Future[tuple[list[_Taken], bool]] = self._context.submit(self._step)
        future.add_done_callback(lambda _: self._context.wake())
        return future

    def _step(self) -> tuple[list[_Taken], bool]:
        """I/O thread: the next batches, and whether the split ends behind them."""
        taken: list[_Taken] = []
        rows = 0
        while rows < STEP_ROWS:
            batch = self._reader.read(self._context.batch_rows)
            assert batch is not None, "it waits for what it reads"
            if batch is END:
                return taken, True
            bound = self._reader.min_event_time_ms()
            position = self._position_of_reader()
            taken.append(_Taken(batch, position, bound, self._reader.numbering()))
            rows += batch.num_rows
        return taken, False

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        if not self._taken:
            if self._is_ended:
                return END
            if not self._next.done():
                return None
            taken, self._is_ended = self._next.result()
            self._taken.extend(taken)
            if not self._is_ended:
                self._next = self._submit()
            elif not taken:
                return END
        first = self._taken.popleft()
        self._position, self._numbering = first.position, first.numbering
        self._min_event_time_ms = first.min_event_time_ms
        return first.batch

    @override
    def position(self) -> bytes:
        return self._position

    @override
    def row_number(self, index: int) -> int | None:
        return None if self._numbering is None else self._numbering(index)

    @override
    def min_event_time_ms(self) -> int | None:
        return self._min_event_time_ms

    @override
    def is_reading(self) -> bool:
        return not self._next.done()

    @override
    def next_read_at_ms(self) -> int | None:
        return 0 if self._next.done() else None

    @override
    def close(self) -> None:
        if self._next.cancel():
            self._reader.close()
        else:
            self._next.add_done_callback(lambda _: self._reader.close())
