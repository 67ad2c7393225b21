"""The source contract: what a user implements, and what every built-in source implements too.

A source is discovered as *splits*; a reader reads one split from a position. The position is the
reader's own bytes and must let another reader go on with exactly the next row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pyarrow as pa


class EndOfSplit(Enum):
    """Type of ``ps.END``."""

    END = "ps.END"


END: Final = EndOfSplit.END
"""Returned by ``Reader.read`` when the split is done."""


PART_OF: Final = "\0"
"""In ids of splits that are parts of one whole: whole, what tells its content, part. Once parts of a whole
are known, or the whole as one split, parts of another content are none of the source's splits.
"""


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a source's input.

    Attributes:
        id: unique within the source and the same at every discovery.
        payload: what ``Source.open`` needs to find it.
        size: relative weight for balancing, 0 = unknown.
        min_event_time_ms: lower bound of the event times in it, where it is known.
        replaces: ids of other splits with the same rows, which are discovered with it: it is read in their place
            where none of them has been. Of the parts of a whole one says so for all.
    """

    id: str
    payload: bytes = b""
    size: int = 0
    min_event_time_ms: int | None = None
    replaces: tuple[str, ...] = ()


def run_at_once(call: Callable[[], Any]) -> Future[Any]:
    """In place of an I/O thread where there is none: runs the function on this one."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - belongs to whoever asks for the result
        future.set_exception(error)
    return future


@dataclass(slots=True)
class SourceContext:
    """What a source may know while it discovers splits and reads.

    Attributes:
        parallelism: subtasks that will read.
        wake: thread-safe; call it when a reader that returned None has something again.
        now_ms: the wall clock.
        artifact_paths: artifact id -> local file.
        bad_record: reports a record that does not fit, as (where, text, error); what happens then is
            the user's choice (``on_error``): it raises, drops and counts, or fills a side output.
        submit: runs a function on one of the slot's I/O threads; what it raises is the future's.
        event_time_column: the column named by ``with_event_time`` where it reads a column of the
            source, else "" (a source that has statistics sets ``Split.min_event_time_ms`` by it).
        post: thread-safe; runs a function on the thread of the subtask, soon: what it prints or logs is in the subtask's
            log, which ``penstock logs`` shows. What ``discover`` and I/O threads print is in that of the slot.
        takes_checkpoints: whether readers will be asked for their positions; those of a job without checkpoints
            may spare what only a position needs.
    """

    job_id: str
    operator_name: str
    subtask_index: int
    parallelism: int
    wake: Callable[[], None]
    now_ms: Callable[[], int]
    bad_record: Callable[[str, str, str], None]
    artifact_paths: dict[str, str]
    event_time_column: str = ""
    batch_rows: int = 8192
    submit: Callable[[Callable[[], Any]], Future[Any]] = run_at_once
    post: Callable[[Callable[[], None]], object] = run_at_once
    takes_checkpoints: bool = True


class Reader(ABC):
    """Reads one split. Called on the mailbox thread: it never waits.

    Attributes:
        row_noun: what ``row_number`` counts.
    """

    row_noun: str = "row"

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        """The next rows, at most ``max_rows``; None = nothing now; ``ps.END`` = done."""

    @abstractmethod
    def position(self) -> bytes:
        """Where to go on: a reader opened with it returns exactly the next row."""

    def row_number(self, index: int) -> int | None:
        """The number, from 1, that a person finds a row of the batch handed out last by in what the split is
        a part of (a file's line); None = it is not known. Called for messages only, before the next ``read``."""
        return None

    def next_read_at_ms(self) -> int | None:
        """After a None: the wall-clock millisecond to ask again at; None = ``ctx.wake`` will tell, a second at most
        goes by without, and less where the source has no ``start`` that could keep it."""
        return None

    def min_event_time_ms(self) -> int | None:
        """A lower bound of the event times of what was not read yet, where it is known."""
        return None

    def is_reading(self) -> bool:
        """After a None: whether rows are on their way, so that the split is not idle."""
        return False

    def close(self) -> None:
        """Releases what the reader holds."""


class Source(ABC):
    """A source: ``env.source(MySource())``."""

    bounded: bool = True

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of every batch."""

    @property
    def has_endless_splits(self) -> bool:
        """Whether a subtask reads all its splits in turn, a batch of each, since none of them may wait for the end of
        another. Splits that end it reads one after the other, and has one reader open at a time."""
        return not self.bounded

    @abstractmethod
    def discover(self, ctx: SourceContext) -> list[Split]:
        """All splits, in a stable order. Called on subtask 0, off the hot path."""

    @abstractmethod
    def open(self, split: Split, position: bytes | None) -> Reader:
        """A reader for the split, from the position, or from its start."""

    def start(self, ctx: SourceContext) -> None:
        """Called once per subtask before ``open``; keeps ``ctx`` where readers need it."""

    def discovery_interval_ms(self) -> int | None:
        """Unbounded sources: how often ``discover`` is called again; None = once."""
        return None
