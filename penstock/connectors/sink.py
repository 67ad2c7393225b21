"""The sink contract: what a user implements, and what every built-in sink implements too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from typing_extensions import override

from penstock.errors import JobRejected


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
    """A sink of the user's own: ``stream.sink(MySink())``. Called on the mailbox thread.

    With ``write`` and ``flush`` it is idempotent: what was written after the last checkpoint is written
    again after a failure. A class that also has ``prepare_commit`` and ``commit`` is two-phase, which
    ``TwoPhaseSink`` spells out: what it wrote becomes visible exactly once.

    Attributes:
        supports_concurrent_attempts: two attempts of a subtask may write at the same time, in two processes,
            and one of them is never committed (``execution.batch.speculative.enabled``), and may be killed
            at any moment: ``open`` and ``close`` leave alone what another attempt has written. A sink that
            is not two-phase may say so only where it does no harm that the rows of both are seen.
    """

    supports_concurrent_attempts: ClassVar[bool] = False

    def open(self, ctx: SinkContext) -> None:
        """Called once per subtask, before the first ``write``."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Takes one batch of at least one row."""

    def flush(self) -> None:
        """Returns when all that was written is safe; a two-phase sink need not do anything here.

        Called when the sender goes idle, before a checkpoint and at the end.
        """

    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        """Two-phase sinks only; see ``TwoPhaseSink``."""
        raise NotImplementedError(f"{type(self).__name__} is no two-phase sink")

    def commit(self, committable: bytes) -> None:
        """Two-phase sinks only; see ``TwoPhaseSink``."""
        raise NotImplementedError(f"{type(self).__name__} is no two-phase sink")

    def abort(self, committable: bytes) -> None:
        """Two-phase sinks only; see ``TwoPhaseSink``. Does nothing where a class leaves it out."""

    def close(self) -> None:
        """Called once at the end, whatever the end."""


class TwoPhaseSink(Sink):
    """A sink whose output becomes visible exactly once, when a checkpoint is complete.

    Committables are what it takes to commit, and are kept in the checkpoint. They may be committed by
    another object, in another process, more than once: a commit that was done must do nothing.
    """

    @abstractmethod
    @override
    def prepare_commit(self, checkpoint_id: int) -> list[bytes]:
        """Makes all that was written since the last call safe, but not visible.

        Returns:
            What ``commit`` needs, one or more committables; [] where nothing was written.
        """

    @abstractmethod
    @override
    def commit(self, committable: bytes) -> None:
        """Makes it visible: the checkpoint is complete. Must be repeatable."""

    @abstractmethod
    @override
    def abort(self, committable: bytes) -> None:
        """Removes what was prepared and will never be committed. Must be repeatable.

        Called at the end of a job without checkpoints that does not finish, and of one that is cancelled for
        good; what crashed attempts have prepared and no checkpoint names is for ``open`` to clean up.
        """


def is_two_phase(sink: Sink) -> bool:
    """Whether the sink's output is committed by checkpoints.

    Raises:
        JobRejected: its class is neither idempotent nor two-phase.
    """
    kind = type(sink)
    prepares = kind.prepare_commit is not Sink.prepare_commit
    commits = kind.commit is not Sink.commit
    if prepares != commits:
        has, lacks = ("prepare_commit", "commit") if prepares else ("commit", "prepare_commit")
        raise JobRejected(
            f"sink: {kind.__name__} has {has} and no {lacks}; a two-phase sink needs both (derive it "
            "from ps.TwoPhaseSink), any other neither"
        )
    if not prepares and kind.flush is Sink.flush:
        raise JobRejected(
            f"sink: {kind.__name__} has neither flush nor prepare_commit: give it flush(), which returns "
            "when all that was written is safe, or derive it from ps.TwoPhaseSink"
        )
    return prepares
