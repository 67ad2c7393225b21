"""Stream elements: what flows between operators and between subtasks.

A batch is a plain ``pyarrow.RecordBatch``; where a stream carries event time, the batch has the
column ``EVENT_TIME`` (int64, milliseconds since the epoch, no nulls) like any other column, so it is
filtered, pruned, partitioned and shipped like any other. Between batches flow the control elements
defined here. There is one object per batch or control element, never one per record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.storage.checkpoint_properties import PLAIN, CheckpointProperties

MIN_TIMESTAMP_MS = -(2**63)
"""The watermark before there is one."""

MAX_TIMESTAMP_MS = 2**63 - 1
"""The watermark after the last row: everything fires."""

TIME_LIMIT_MS = 2**62
"""Times beyond it, in either direction, are no event times: window bounds stay within int64."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """No row with an event time at or below ``timestamp_ms`` is expected any more."""

    timestamp_ms: int

    @property
    def takes_place(self) -> bool:
        """Whether it says all that one before it has said. The end of time does not: where others go on from the end of
        a history, what counts is what was said before."""
        return self.timestamp_ms != MAX_TIMESTAMP_MS


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """Separates the rows before a checkpoint from those after it.

    Attributes:
        timestamp_ms: wall-clock time of the trigger.
        leader_epoch: of the leader that has triggered it.
    """

    checkpoint_id: int
    timestamp_ms: int
    leader_epoch: int = 0
    properties: CheckpointProperties = PLAIN


@dataclass(frozen=True, slots=True)
class CheckpointCancelled:
    """Stands where the barrier of a checkpoint would have come: nobody need wait for it."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """An idle channel holds no watermark back."""

    active: bool


@dataclass(frozen=True, slots=True)
class EndOfData:
    """The producer has consumed all its input; timers and windows have fired."""


@dataclass(frozen=True, slots=True)
class EndOfPartition:
    """Nothing follows on this channel."""


@dataclass(frozen=True, slots=True)
class OriginEnded:
    """A split or an input channel has ended; stays within the chain it was read by."""

    origin: str


@dataclass(frozen=True, slots=True)
class SideOutput:
    """Rows for a side output; leaves the chain under ``tag`` instead of the main output."""

    tag: str
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Rows that are in Parquet files already, for the sink that is next in the chain, or exchanges that can have files.

    Attributes:
        files: path and number of rows of each, at least one: they are the sink's from now on.
        read: reads the rows, for who cannot have files; None = it is a sink that is next.
        size_bytes: of all files, where it is not a sink.
    """

    files: tuple[tuple[str, int], ...]
    read: Callable[[], Iterator[pa.RecordBatch]] | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """Yielded by a long-running operator between time slices: the mailbox may serve other mail."""


PAUSE = Pause()

ControlElement = (
    Watermark | CheckpointBarrier | CheckpointCancelled | StreamStatus | EndOfData | EndOfPartition
)
StreamElement = pa.RecordBatch | ControlElement
"""What flows on an edge."""

OperatorOutput = pa.RecordBatch | SideOutput | WrittenFiles | ControlElement | OriginEnded | Pause
"""What an operator yields."""
