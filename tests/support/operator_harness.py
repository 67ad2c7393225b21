"""Drives one operator without a task: push batches and watermarks, move the clock, look at what came.

``OperatorHarness(operator)`` opens it with a context of its own; each ``push``, ``watermark``,
``advance_clock`` and ``end`` runs the operator to the end of the call and keeps what it emitted.
``snapshot`` takes a checkpoint, from which another harness starts (``restored=``), also several, and as
another subtask of another parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
from typing_extensions import override

from common.clock import steady_ms
from common.elements import (
    MAX_TIMESTAMP_MS,
    CheckpointBarrier,
    OperatorOutput,
    OriginEnded,
    Pause,
    SideOutput,
    StreamStatus,
    Watermark,
    WrittenFiles,
)
from penstock.config import Configuration
from penstock.pb import checkpoint_pb2
from penstock.rows.schema import EVENT_TIME
from penstock.storage.blobs import SnapshotReader
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.state.backend import BackendEnvironment, BackendSnapshot, KeyedStateBackend
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.operator_state import OperatorStateStore


@dataclass(frozen=True)
class HarnessSnapshot:
    """What one subtask put into a checkpoint: everything inline, and serialised."""

    keyed: bytes
    lists: tuple[bytes, ...]


class _InlineReader(SnapshotReader):
    @override
    def read(self, handle: checkpoint_pb2.StateHandle) -> bytes:
        return handle.inline

    @override
    def read_range(self, handle: checkpoint_pb2.StateHandle, offset: int, size_bytes: int) -> bytes:
        return handle.inline[offset : offset + size_bytes]


class OperatorHarness:
    """One open operator and everything it has emitted.

    Attributes:
        batches: the main output.
        sides: side outputs by tag.
        controls: watermarks and other control elements, in order.
        emitted: everything in order, pauses left out.
        timers: wall-clock times the operator asked for and did not get yet.
        pauses: monotonic times, likewise, in milliseconds.
    """

    def __init__(
        self,
        operator: Operator,
        *,
        now_ms: int = 0,
        config: Configuration | None = None,
        name: str = "operator",
        restored: Sequence[HarnessSnapshot] = (),
        subtask_index: int = 0,
        parallelism: int = 1,
        backend: Callable[[BackendEnvironment], KeyedStateBackend] = HashMapStateBackend,
        work_directory: Path = Path("unused"),
        spark: Any = None,
    ) -> None:
        self.operator = operator
        self.clock = ManualClock(now_ms)
        self.timers: list[int] = []
        self.pauses: list[int] = []
        self.counters = SubtaskCounters()
        self.memory = ManagedMemory(1 << 30)
        self.state = backend(
            BackendEnvironment(
                operator_uid="uid",
                operator_name=name,
                subtask_index=subtask_index,
                parallelism=parallelism,
                max_parallelism=128,
                clock=self.clock,
                memory=self.memory,
                work_directory=work_directory,
                restored=tuple(
                    checkpoint_pb2.KeyedStateSnapshot.FromString(taken.keyed) for taken in restored
                ),
                reader=_InlineReader(),
            )
        )
        self.operator_state = OperatorStateStore(_redistributed(restored))
        self._checkpoint_id = 0
        self.emitted: list[OperatorOutput] = []
        self.context = OperatorContext(
            job_id="job",
            job_name="job",
            vertex_id="v0",
            operator_uid="uid",
            operator_name=name,
            subtask_index=subtask_index,
            parallelism=parallelism,
            max_parallelism=128,
            attempt=0,
            config=config or Configuration.from_mapping({}),
            clock=self.clock,
            counters=self.counters,
            state=self.state,
            operator_state=self.operator_state,
            memory=self.memory,
            register_timer=self.timers.append,
            call_after=lambda pause_ms: self.pauses.append(steady_ms(self.clock) + pause_ms),
            wake=lambda: None,
            run_in_background=lambda call, done: done(call()),
            send_results=lambda _collect_id, _chunk: None,
            origins=cast("Any", SimpleNamespace(open=(), current="", input_index=0)),
            restored_checkpoint_id=1 if restored else 0,
            spark=spark,
            work_directory=work_directory,
        )
        operator.open(self.context)

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """What came out of the main output."""
        return [element for element in self.emitted if isinstance(element, pa.RecordBatch)]

    @property
    def controls(self) -> list[Any]:
        """The control elements that came out, in order."""
        return [e for e in self.emitted if not isinstance(e, (pa.RecordBatch, SideOutput))]

    def side(self, tag: str) -> list[dict[str, Any]]:
        """The rows of a side output."""
        found = [e for e in self.emitted if isinstance(e, SideOutput) and e.tag == tag]
        return [row for element in found for row in element.batch.to_pylist()]

    def rows(self, *, event_time: bool = False) -> list[dict[str, Any]]:
        """The rows of the main output so far; without the event-time column unless asked for."""
        rows = [row for batch in self.batches for row in batch.to_pylist()]
        if not event_time:
            for row in rows:
                row.pop(EVENT_TIME, None)
        return rows

    def take_rows(self, *, event_time: bool = False) -> list[dict[str, Any]]:
        """The same, and forgets everything that was emitted."""
        rows = self.rows(event_time=event_time)
        self.emitted.clear()
        return rows

    def push(self, batch: pa.RecordBatch, input_index: int = 0) -> None:
        """Hands the operator a batch, which came in by one of its inputs."""
        if batch.num_rows:
            self.context.origins.input_index = input_index
            self._run(self.operator.process(batch))

    def watermark(self, timestamp_ms: int) -> None:
        """Hands the operator a watermark."""
        self._run(self.operator.on_watermark(Watermark(timestamp_ms)))

    def status(self, *, active: bool) -> None:
        """Tells the operator that its input has become idle or active."""
        self._run(self.operator.on_stream_status(StreamStatus(active)))

    def origin_ended(self, origin: str = "origin") -> None:
        """Tells the operator that a split has ended."""
        self._run(self.operator.on_origin_ended(OriginEnded(origin)))

    def idle(self) -> None:
        """Tells the operator that nothing more is coming for now."""
        self._run(self.operator.on_idle())

    def advance_clock(self, now_ms: int) -> None:
        """Moves the clock, and calls the operator at every time it asked for on the way."""
        while (at_ms := min([*self.timers, *self.pauses], default=now_ms + 1)) <= now_ms:
            self.clock.time_ms = max(self.clock.time_ms, at_ms)
            if at_ms in self.timers:
                self.timers[:] = [timer for timer in self.timers if timer > at_ms]
                self._run(self.operator.on_timer(self.clock.time_ms))
            if at_ms in self.pauses:
                self.pauses[:] = [pause for pause in self.pauses if pause > at_ms]
                self._run(self.operator.on_pause_over())
        self.clock.time_ms = now_ms

    def end(self) -> None:
        """The end of the data: the last watermark, then the call for what is left."""
        self.watermark(MAX_TIMESTAMP_MS)
        self._run(self.operator.on_end_of_data())

    def snapshot(self, *, complete: bool = True) -> HarnessSnapshot:
        """A checkpoint: the barrier passes, then everything is exported.

        Args:
            complete: tells the operator and its backend that the checkpoint is complete, else that it
                was aborted.
        """
        return self.begin_snapshot()(complete)

    def begin_snapshot(self) -> Callable[[bool], HarnessSnapshot]:
        """The synchronous part of a checkpoint; what it returns does the rest, whenever it is called."""
        self._checkpoint_id += 1
        checkpoint_id = self._checkpoint_id
        self._run(self.operator.on_control(CheckpointBarrier(checkpoint_id, self.clock.time_ms)))
        self.operator.prepare_snapshot(checkpoint_id)
        lists = tuple(taken.SerializeToString() for taken in self.operator_state.snapshot())
        keyed = self.state.snapshot(checkpoint_id)
        return partial(self._finish_snapshot, checkpoint_id, lists, keyed)

    def _finish_snapshot(
        self,
        checkpoint_id: int,
        lists: tuple[bytes, ...],
        keyed: BackendSnapshot,
        complete: bool,
    ) -> HarnessSnapshot:
        handles = {}
        for blob in keyed.blobs():
            data = b"".join(blob.chunks())
            handles[blob.name] = checkpoint_pb2.StateHandle(inline=data, size_bytes=len(data))
        taken = HarnessSnapshot(keyed.describe(handles).SerializeToString(), lists)
        if complete:
            self.state.checkpoint_completed(checkpoint_id)
            self.operator.on_checkpoint_completed(checkpoint_id)
        else:
            self.state.checkpoint_aborted(checkpoint_id)
            self.operator.on_checkpoint_aborted(checkpoint_id)
        return taken

    def close(self) -> None:
        """Closes the operator."""
        self.operator.close()

    def _run(self, outputs: Iterable[OperatorOutput]) -> None:
        for output in outputs:
            if isinstance(output, WrittenFiles) and output.read is not None:
                self.emitted.extend(output.read())  # no exchange has files here
            elif not isinstance(output, Pause):
                self.emitted.append(output)


def _redistributed(
    restored: Sequence[HarnessSnapshot],
) -> list[checkpoint_pb2.OperatorStateSnapshot]:
    """The lists of all snapshots together: what every subtask gets of lists with union redistribution."""
    found: dict[str, checkpoint_pb2.OperatorStateSnapshot] = {}
    for taken in restored:
        for data in taken.lists:
            snapshot = checkpoint_pb2.OperatorStateSnapshot.FromString(data)
            if snapshot.redistribution != checkpoint_pb2.REDISTRIBUTION_UNION:
                assert len(restored) == 1, "redistribution is not the harness's business"
            if snapshot.name in found:
                found[snapshot.name].items.extend(snapshot.items)
            else:
                found[snapshot.name] = snapshot
    return list(found.values())
