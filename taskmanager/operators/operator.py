"""The contract between an operator and the chain that runs it.

An operator is called on the mailbox thread only (but for ``restore``), never by two threads, never
re-entrantly, and it never waits. Each call returns an iterable of what it emits; a call that may emit much or run long
is a generator, so that the chain can stop between two elements: after every ``yield`` the operator's
state must be consistent (a timer is removed as its rows are emitted).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from common.clock import Clock
from common.elements import (
    ControlElement,
    OperatorOutput,
    OriginEnded,
    StreamStatus,
    Watermark,
    WrittenFiles,
)
from penstock.config import Configuration
from penstock.connectors.source import run_at_once
from penstock.errors import InvariantViolation
from penstock.pb import client_pb2

if TYPE_CHECKING:
    from taskmanager.alignment.origins import Origins
    from taskmanager.operators.metrics import SubtaskCounters
    from taskmanager.partitions.in_place import PartitionInPlace
    from taskmanager.spark.driver_runner import SparkDriverRunner
    from taskmanager.state.backend import KeyedStateBackend
    from taskmanager.state.memory import ManagedMemory
    from taskmanager.state.operator_state import OperatorStateStore

NOTHING: tuple[OperatorOutput, ...] = ()

LateItems = Mapping[str, Sequence[bytes]]
"""Items of lists of an operator, by their names, of which not all was known when a snapshot was taken."""


@dataclass(slots=True)
class OperatorContext:
    """What an operator knows about its place, and the few things it may ask for.

    Attributes:
        register_timer: asks for a call of ``on_timer`` at the given wall-clock millisecond, for what users time; the
            earliest of all requests wins, later ones are asked for again in ``on_timer``.
        call_after: asks for a call of ``on_pause_over`` when so many milliseconds have passed, however the wall clock is
            set meanwhile, for what the operator times by itself; likewise.
        wake: thread-safe; the subtask may be able to go on (data arrived, a sink has room).
        run_in_background: runs the first function, which may block for as long as it likes, on another thread and hands
            its result to the second on the mailbox thread; what it raises fails the task.
        post: thread-safe; runs a function on the mailbox thread, while the operator is open.
        submit: runs a function on an I/O thread, without a word to the mailbox thread.
        submit_apart: likewise, one that may block for as long as it likes.
        send_results: ships a chunk of a collect sink to the JobManager; answered by ``ResultsTaken``.
        artifact_paths: artifact id -> local file.
        origins: where the rows being processed come from (a split of the source, or a channel), and
            which input of a vertex with two (``origins.input_index``).
        state: keyed state; restored before ``open``.
        operator_state: state without a key; restored before ``open``.
        memory: what the states of the slot may take together.
        restored_checkpoint_id: the checkpoint that the operator starts from, 0 = from nothing.
        takes_checkpoints: output is committed by checkpoints, not at the end of the job.
        is_speculative: another attempt of the subtask runs, and may yet be the one that counts.
        spark: the slot's; None = there is none.
        in_place: per input, the partitions that the operator is given as files instead of rows.
        work_directory: for files of the operator's own, missing at first; it goes with the slot. None = there is none.
    """

    job_id: str
    job_name: str
    vertex_id: str
    operator_uid: str
    operator_name: str
    subtask_index: int
    parallelism: int
    max_parallelism: int
    attempt: int
    config: Configuration
    clock: Clock
    counters: SubtaskCounters
    state: KeyedStateBackend
    operator_state: OperatorStateStore
    memory: ManagedMemory
    register_timer: Callable[[int], None]
    call_after: Callable[[int], None]
    wake: Callable[[], None]
    run_in_background: Callable[[Callable[[], Any], Callable[[Any], None]], None]
    send_results: Callable[[str, client_pb2.ResultChunk], None]
    origins: Origins
    artifact_paths: dict[str, str] = field(default_factory=dict)
    restored_checkpoint_id: int = 0
    takes_checkpoints: bool = False
    is_speculative: bool = False
    post: Callable[[Callable[[], None]], object] = run_at_once
    submit: Callable[[Callable[[], Any]], Future[Any]] = run_at_once
    submit_apart: Callable[[Callable[[], Any]], Future[Any]] = run_at_once
    spark: SparkDriverRunner | None = None
    in_place: Mapping[int, Sequence[PartitionInPlace]] = field(default_factory=dict)
    work_directory: Path | None = None


class Handling(Enum):
    """How ``process`` treats the rows it is given, for saying where a failing row stands in the input."""

    HOLDS = auto()  # works on rows that may have come earlier
    AT_ONCE = auto()  # all it does there is about the rows it was given
    ONE_TO_ONE = auto()  # likewise, and it emits at most one row for each, in their order


class Operator:
    """Base of all operators: passes everything through."""

    context: OperatorContext
    handling: Handling = Handling.HOLDS

    @property
    def is_open(self) -> bool:
        """True once ``open`` has been called, even where it did not come to its end."""
        return hasattr(self, "context")

    def load(self) -> None:
        """Called first where keyed state is restored: loads the user's code that ``restore`` needs."""

    def restore(self, context: OperatorContext) -> None:
        """Called next, where keyed state is restored, on an I/O thread while other subtasks of the slot
        run: asks ``context.state`` for what ``open`` and later calls will ask for, so that they find it in
        memory. Calls no user code but what states are read with; may take long."""

    def open(self, context: OperatorContext) -> None:
        """Called once, before anything else that is called in every attempt, in state INITIALIZING."""
        self.context = context

    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        """Handles one batch of at least one row; yields what it emits."""
        return (batch,)

    def on_files(self, written: WrittenFiles) -> Iterable[OperatorOutput]:
        """Handles rows that are in files; only sinks of files are given them.

        Raises:
            InvariantViolation: it is none.
        """
        raise InvariantViolation(f"operator {self.context.operator_name} is given files")

    def on_watermark(self, watermark: Watermark) -> Iterable[OperatorOutput]:
        """Handles progress of event time; must yield the watermark once its firing is done."""
        return (watermark,)

    def on_stream_status(self, status: StreamStatus) -> Iterable[OperatorOutput]:
        """Handles a change between idle and active; passes it on."""
        return (status,)

    def on_control(self, element: ControlElement) -> Iterable[OperatorOutput]:
        """Handles any other control element (a barrier); passes it on."""
        return (element,)

    def on_origin_ended(self, ended: OriginEnded) -> Iterable[OperatorOutput]:
        """Handles the end of a split or channel; passes it on to the end of the chain."""
        return (ended,)

    def on_idle(self) -> Iterable[OperatorOutput]:
        """Called when the input has nothing more for now: yields what was held for company."""
        return NOTHING

    def on_timer(self, now_ms: int) -> Iterable[OperatorOutput]:
        """Called at or after the wall-clock time asked for with ``context.register_timer``."""
        return NOTHING

    def on_pause_over(self) -> Iterable[OperatorOutput]:
        """Called when the time asked for with ``context.call_after`` has passed."""
        return NOTHING

    def on_end_of_data(self) -> Iterable[OperatorOutput]:
        """Called once after the last batch and the last watermark; yields what is left."""
        return NOTHING

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """The barrier has passed the whole chain: puts what is kept outside of ``context.state`` into
        ``context.operator_state`` (a sink: what it has made safe and must commit). Must be fast.

        Called once per checkpoint, before the backends are snapshotted and before the next batch.
        """

    def finish_snapshot(self, checkpoint_id: int) -> Callable[[], LateItems | None] | None:
        """Called right after ``prepare_snapshot``: what is left to do on an I/O thread before the snapshot
        counts (a sink: to sync its files). If that raises, the attempt fails; what it returns takes the place of
        items of lists that ``prepare_snapshot`` has put there."""
        return None

    def on_checkpoint_completed(self, checkpoint_id: int) -> None:
        """A checkpoint that this attempt took part in, or a later one, is complete: commits."""

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """A checkpoint will not complete; what was prepared for it belongs to the next one.

        Of one that was under way when its JobManager was killed nothing is told: it may be a savepoint that is complete.
        """

    def is_available(self) -> bool:
        """False while a batch could not be taken without growing a queue (sinks that ship rows)."""
        return True

    def is_drained(self) -> bool:
        """True when nothing handed to this operator is still under way (asked at end of data)."""
        return True

    def commit_output(self) -> None:
        """All attempts of the job have reached the end of their data: makes the output visible."""

    @property
    def needs_commit(self) -> bool:
        """True where ``commit_output`` must be called before the subtask may finish."""
        return False

    def discard_output(self) -> None:
        """The job is never gone on with: ``close``, which comes next, also removes output that was
        prepared for checkpoints and is not committed."""

    def close(self) -> None:
        """Called once at the end, whatever the end; releases files, sockets and temporary output."""
