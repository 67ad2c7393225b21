"""The snapshot of a subtask: frozen on the mailbox thread, written on an I/O thread, acknowledged.

In the story of a barrier this stands between the aligner and the coordinator. ``take`` is called when
the barrier has passed the whole chain and before anything else is processed; it only marks what the
snapshot is to contain. Whatever keeps the snapshot from being written declines the checkpoint and
leaves the job running; an error of our own ends the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from common.clock import Clock
from common.elements import CheckpointBarrier
from penstock.errors import CheckpointAborted, StreamError, TaskFailure
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob, SnapshotWriter
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointProperties,
    SavepointFormat,
)
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import LateItems, Operator
from taskmanager.state.backend import BackendSnapshot, KeyedStateBackend
from taskmanager.state.operator_state import OperatorStateStore

_log = structlog.get_logger()

_NANOS_PER_MS = 1_000_000

_SMALL_LIST_BYTES = 1024
"""Lists up to this size stay where the JobManager can read them (how far a collect sink has got)."""


LastStates = Sequence[checkpoint_pb2.OperatorSnapshot]
_Work = Callable[[], LateItems | None]


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """What one operator of the chain contributes.

    Attributes:
        operator: None for a source, which is no operator of the chain.
        backend: None where the operator keeps no keyed state.
        splits: a source's splits as they stand, for a checkpoint.
        split_parallelism: how many subtasks these were made for.
        is_of_function: its lists are those of a user's function, which count beyond the subtask's end.
    """

    uid: str
    operator: Operator | None
    operator_state: OperatorStateStore
    backend: KeyedStateBackend | None
    splits: Callable[[int], list[checkpoint_pb2.SplitSnapshot]] | None = None
    is_of_function: bool = False
    split_parallelism: int = 0


@dataclass(frozen=True, slots=True)
class ChannelPositions:
    """Where the edges that keep their rows are at a barrier.

    Attributes:
        inputs: rows taken of each input channel.
        outputs: rows written to each subpartition.
    """

    inputs: Sequence[checkpoint_pb2.ChannelPosition] = ()
    outputs: Sequence[checkpoint_pb2.ChannelPosition] = ()


NO_POSITIONS = ChannelPositions()


@dataclass(frozen=True, slots=True)
class Alignment:
    """From the first barrier of a checkpoint to the last.

    Attributes:
        first_at_ms: wall-clock time of the first.
    """

    first_at_ms: int
    bytes: int


class SnapshotListener(Protocol):
    """Who is told what became of a snapshot; any thread."""

    def acknowledge(
        self, barrier: CheckpointBarrier, snapshot: checkpoint_pb2.SubtaskSnapshot
    ) -> None:
        """The snapshot is safe."""

    def decline(self, barrier: CheckpointBarrier, reason: str) -> None:
        """There will be none."""

    def fail_later(self, error: BaseException) -> None:
        """Writing it came upon an error of our own."""


class SubtaskSnapshotter:
    """Takes the snapshots of one attempt.

    Args:
        parts: the operators of the chain, the source's first where there is one.
        new_writer: makes the writer for a checkpoint, or for the savepoint that is written to a directory.
        submit: runs a function on an I/O thread.
        inline_max_bytes: larger lists of operators go to the file.
        is_incremental: backends refer to files of earlier checkpoints.
        on_written: told of each snapshot of the job's own before it is acknowledged, on an I/O thread.
    """

    def __init__(
        self,
        vertex: str,
        subtask_index: int,
        parts: Sequence[SnapshotPart],
        *,
        new_writer: Callable[[int, str], SnapshotWriter],
        submit: Callable[[Callable[[], None]], object],
        listener: SnapshotListener,
        clock: Clock,
        counters: SubtaskCounters,
        inline_max_bytes: int,
        is_incremental: bool = True,
        on_written: Callable[[int, checkpoint_pb2.SubtaskSnapshot], None] | None = None,
    ) -> None:
        self._vertex = vertex
        self._subtask_index = subtask_index
        self._parts = parts
        self._new_writer = new_writer
        self._submit = submit
        self._listener = listener
        self._clock = clock
        self._counters = counters
        self._inline_max_bytes = inline_max_bytes
        self._is_incremental = is_incremental
        self._on_written = on_written

    def take(
        self,
        barrier: CheckpointBarrier,
        alignment: Alignment | None,
        *,
        finished: bool,
        positions: ChannelPositions = NO_POSITIONS,
    ) -> None:
        """The synchronous part, on the mailbox thread.

        Args:
            finished: the subtask has emitted all it ever will.
            positions: as they are now.
        """
        obstacle = _obstacle(barrier.properties, is_incremental=self._is_incremental)
        if obstacle:
            self._listener.decline(barrier, obstacle)
            return
        started_ns, now_ms = self._clock.monotonic_ns(), self._clock.now_ms()
        first_at_ms = now_ms if alignment is None else alignment.first_at_ms
        metrics = checkpoint_pb2.CheckpointMetrics(
            start_delay_ms=max(0, first_at_ms - barrier.timestamp_ms),
            alignment_ms=max(0, now_ms - first_at_ms),
            aligned_bytes=0 if alignment is None else alignment.bytes,
        )
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            vertex=self._vertex,
            subtask_index=self._subtask_index,
            finished=finished,
            metrics=metrics,
            inputs=positions.inputs,
            outputs=positions.outputs,
        )
        frozen: list[BackendSnapshot | None] = []
        work: list[_Work | None] = []
        try:
            for part in self._parts:
                operator, left = self._sync_part(part, barrier.checkpoint_id)
                snapshot.operators.append(operator)
                work.append(left)
                frozen.append(
                    None
                    if part.backend is None
                    else part.backend.snapshot(
                        barrier.checkpoint_id,
                        is_full=barrier.properties.is_full,
                        in_runs=barrier.properties.format is SavepointFormat.CANONICAL,
                    )
                )
        except CheckpointAborted as aborted:
            _discard(frozen)
            self._listener.decline(barrier, aborted.reason)
            return
        sync_ns = self._clock.monotonic_ns() - started_ns
        snapshot.metrics.sync_ms = sync_ns / _NANOS_PER_MS
        self._counters.checkpoint_alignment_ms = metrics.alignment_ms
        self._counters.checkpoint_start_delay_ms = metrics.start_delay_ms
        self._counters.checkpoint_aligned_bytes = metrics.aligned_bytes
        self._counters.checkpoint_sync_ms = snapshot.metrics.sync_ms
        self._submit(lambda: self._finish(barrier, snapshot, frozen, work))

    def take_last(self, when_written: Callable[[LastStates | None], None]) -> LastStates | None:
        """The lists of functions as the subtask leaves them; called on the mailbox thread.

        Args:
            when_written: called on an I/O thread where they are large, with None where they could not be
                written now.

        Returns:
            The lists; None = they are being written.
        """
        parts = [part for part in self._parts if part.is_of_function]
        operators = [self._sync_part(part, 0)[0] for part in parts]
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            operators=[operator for operator in operators if operator.lists]
        )
        if not any(self._large_lists(snapshot)):
            return snapshot.operators
        self._submit(lambda: self._write_last(snapshot, when_written))
        return None

    def _write_last(
        self,
        snapshot: checkpoint_pb2.SubtaskSnapshot,
        when_written: Callable[[LastStates | None], None],
    ) -> None:
        try:
            self._write(0, "", snapshot, ())
        except (StreamError, OSError) as error:
            _log.warning(
                "state.last_not_written",
                vertex=self._vertex,
                subtask_index=self._subtask_index,
                reason=str(error),
            )
            when_written(None)
        except BaseException as error:  # noqa: BLE001 - handed to the task's boundary
            self._listener.fail_later(error)
        else:
            when_written(snapshot.operators)

    def _sync_part(
        self, part: SnapshotPart, checkpoint_id: int
    ) -> tuple[checkpoint_pb2.OperatorSnapshot, _Work | None]:
        left = None
        if part.operator is not None:
            part.operator.prepare_snapshot(checkpoint_id)
            left = part.operator.finish_snapshot(checkpoint_id)
        operator = checkpoint_pb2.OperatorSnapshot(
            operator_uid=part.uid,
            lists=part.operator_state.snapshot(),
            splits=part.splits(checkpoint_id) if part.splits is not None else (),
            split_parallelism=part.split_parallelism,
        )
        return operator, left

    def _finish(
        self,
        barrier: CheckpointBarrier,
        snapshot: checkpoint_pb2.SubtaskSnapshot,
        frozen: Sequence[BackendSnapshot | None],
        work: Sequence[_Work | None],
    ) -> None:
        """The asynchronous part, on an I/O thread."""
        started_ns = self._clock.monotonic_ns()
        try:
            for operator, left in zip(snapshot.operators, work, strict=True):
                if left is not None:
                    _put_late(operator, left())
            # Of the job's own checkpoint the JobManager makes the savepoint.
            target = barrier.properties.target if barrier.properties.is_savepoint else ""
            self._write(barrier.checkpoint_id, target, snapshot, frozen)
        except TaskFailure as error:
            _discard(frozen)
            self._listener.fail_later(error)
        except (StreamError, OSError) as error:
            _discard(frozen)
            self._listener.decline(barrier, str(error))
        except BaseException as error:  # noqa: BLE001 - handed to the task's boundary
            _discard(frozen)
            self._listener.fail_later(error)
        else:
            elapsed_ns = self._clock.monotonic_ns() - started_ns
            snapshot.metrics.async_ms = elapsed_ns // _NANOS_PER_MS
            self._counters.checkpoint_async_ms = snapshot.metrics.async_ms
            self._counters.checkpoint_uploaded_bytes = snapshot.metrics.uploaded_bytes
            self._counters.state_bytes = snapshot.metrics.state_bytes
            if self._on_written is not None and not barrier.properties.is_savepoint:
                self._on_written(barrier.checkpoint_id, snapshot)
            self._listener.acknowledge(barrier, snapshot)

    def _write(
        self,
        checkpoint_id: int,
        target: str,
        snapshot: checkpoint_pb2.SubtaskSnapshot,
        frozen: Sequence[BackendSnapshot | None],
    ) -> None:
        lists = dict(self._large_lists(snapshot))
        handles = self._new_writer(checkpoint_id, target).write(_blobs(frozen, lists))
        for name, held in lists.items():
            held.handle.CopyFrom(handles[name])
            held.item_count = len(held.items)
            del held.items[:]
        for index, backend in enumerate(frozen):
            if backend is not None:
                own = _of_operator(index, handles)
                snapshot.operators[index].keyed.CopyFrom(backend.describe(own))
        snapshot.metrics.uploaded_bytes = sum(handle.size_bytes for handle in handles.values())
        snapshot.metrics.state_bytes = _state_bytes(snapshot)

    def _large_lists(
        self, snapshot: checkpoint_pb2.SubtaskSnapshot
    ) -> Iterator[tuple[str, checkpoint_pb2.OperatorStateSnapshot]]:
        for index, operator in enumerate(snapshot.operators):
            for held in operator.lists:
                if sum(map(len, held.items)) > max(self._inline_max_bytes, _SMALL_LIST_BYTES):
                    yield f"list/{index}/{held.name}", held


def _put_late(operator: checkpoint_pb2.OperatorSnapshot, late: LateItems | None) -> None:
    """Puts items in the place of those that were taken when not all was known of them."""
    for held in operator.lists:
        if late is not None and held.name in late:
            held.items[:] = late[held.name]


def _obstacle(properties: CheckpointProperties, *, is_incremental: bool) -> str:
    """Why a snapshot of these properties cannot be taken here; "" = it can."""
    makes_savepoint = properties.is_savepoint or properties.is_stop or properties.is_saved
    is_held = properties.behind in (BehindBarrier.HOLD, BehindBarrier.DRAIN, BehindBarrier.MOVE)
    if (
        makes_savepoint != bool(properties.target)
        or (properties.is_savepoint and is_held)
        or (properties.is_saved and (is_held or properties.behind is BehindBarrier.END))
        or (
            properties.format is not SavepointFormat.NATIVE
            and (not makes_savepoint or properties.is_saved)
        )
    ):
        return f"tasks of this version do not take {properties}"
    if properties.is_savepoint:
        return ""
    if properties.is_full and is_incremental:
        return (
            "it is to refer to no earlier checkpoint, and the tasks were started with "
            "execution.checkpointing.incremental"
        )
    return ""


def _blobs(
    frozen: Sequence[BackendSnapshot | None],
    lists: Mapping[str, checkpoint_pb2.OperatorStateSnapshot],
) -> Iterator[Blob]:
    for index, backend in enumerate(frozen):
        if backend is not None:
            for blob in backend.blobs():
                yield Blob(f"{index}/{blob.name}", blob.chunks)
    for name, held in lists.items():
        content = checkpoint_pb2.OperatorStateItems(items=held.items).SerializeToString()
        yield Blob(name, partial(_whole, content))


def _whole(content: bytes) -> tuple[bytes]:
    return (content,)


def _of_operator(
    index: int, handles: Mapping[str, checkpoint_pb2.StateHandle]
) -> dict[str, checkpoint_pb2.StateHandle]:
    prefix = f"{index}/"
    return {
        name.removeprefix(prefix): handle
        for name, handle in handles.items()
        if name.startswith(prefix)
    }


def _state_bytes(snapshot: checkpoint_pb2.SubtaskSnapshot) -> int:
    return sum(
        sum(file.handle.size_bytes for file in operator.keyed.files)
        + sum(held.handle.size_bytes + sum(map(len, held.items)) for held in operator.lists)
        for operator in snapshot.operators
    )


def _discard(frozen: Sequence[BackendSnapshot | None]) -> None:
    for backend in frozen:
        if backend is not None:
            backend.discard()
