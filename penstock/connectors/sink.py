"""The sink contract: what a user implements, and what every built-in sink implements too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink knows about its place."""

    job_id: str
    operator_name: str
    operator_uid: str
    subtask_index: int
    parallelism: int
    attempt: int


class Sink(ABC):
    """An idempotent sink: ``stream.sink(MySink())``. Called on the mailbox thread."""

    def open(self, ctx: SinkContext) -> None:
        """Called once per subtask, before the first ``write``."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes one batch of at least one row."""

    @abstractmethod
    def flush(self) -> None:
        """Returns when all that was written is safe. Called when the sender goes idle and at the end."""

    def close(self) -> None:
        """Called once at the end, whatever the end."""
