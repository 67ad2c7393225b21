"""Sinks at the end of a chain: runs a writer and commits what it wrote, exactly once.

With checkpoints on, output goes through two phases: at a barrier the writer makes what was written so
far safe and says how to commit it (*committables*), which becomes part of the snapshot; when the
checkpoint is complete, it is committed. After a restore everything the snapshot names is committed first:
whether that had been done before does not matter, and what the snapshot does not name was written by
an attempt that nobody will ever know of. Without checkpoints there is one such commit, at the end of the job.

Rows that are too few for a file may be carried on in the state of a checkpoint: no file holds them yet. No savepoint
does that, since what it covers is the original's to publish.

A savepoint that is no checkpoint commits nothing. What it names stays, whatever becomes of the job, until a checkpoint
behind it has committed it. One that is made of a checkpoint is there only when that is complete.

What an aborted checkpoint had prepared is part of the next one. ``abort`` is for output that nobody will
ever commit: what was prepared at the end of a job without checkpoints that ends otherwise before anything
of it is committed, and all that is not committed of a job that was cancelled for good.

The list of committables is restored by union, each item with the subtask that wrote it: the same rule says
who commits what a subtask prepared and who removes what else it left behind, so the one is done before
the other, also where the parallelism has changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from typing_extensions import override

from common.elements import CheckpointBarrier, ControlElement, OperatorOutput, WrittenFiles
from penstock.connectors.sink import SinkContext
from penstock.errors import TaskFailure, Unrecoverable
from penstock.pb import graph_pb2
from penstock.rows.schema import user_batch
from taskmanager.connectors.factory import build_sink_writer
from taskmanager.connectors.sink_writer import SinkWriter
from taskmanager.operators.operator import NOTHING, Handling, LateItems, Operator, OperatorContext
from taskmanager.state.operator_state import SPLIT, UNION
from taskmanager.user_code.user_failure import error_text, user_traceback

_STATE = "committables"
_CARRIED = "carried"
_END_OF_JOB = 0
"""Stands for the id of a checkpoint where there are none."""
_OWNER = struct.Struct("<i")


class SinkOperator(Operator):
    """Hands batches to a sink writer."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._spec = spec
        if spec.sink.WhichOneof("kind") == "custom":
            self.handling = Handling.AT_ONCE
        self._writer: SinkWriter | None = None
        self._prepared: dict[int, list[bytes]] = {}
        self._named: list[bytes] = []
        """What the newest snapshot names."""
        self._in_doubt: dict[int, list[bytes]] = {}
        """By savepoint what it names as prepared, until a checkpoint behind it has committed that."""
        self._savepoint_id: int | None = None
        """Whose barrier is passing, or has passed last, of those that are no checkpoint."""
        self._target_id: int | None = None
        """The same, of whatever makes a savepoint."""
        self._is_dirty = False
        self._is_discarded = False
        self._has_ended_data = False

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._writer = writer = build_sink_writer(self._spec.sink, self._spec)
        writer.open(
            SinkContext(
                job_id=context.job_id,
                operator_name=context.operator_name,
                operator_uid=context.operator_uid,
                subtask_index=context.subtask_index,
                parallelism=context.parallelism,
                attempt=context.attempt,
            )
        )
        self._committables = context.operator_state.list(_STATE, UNION)
        self._committables.codec = "committable/1"
        with self._failing("commit what a checkpoint covers"):
            writer.recover(
                [*self._own(self._committables.items)], is_speculative=context.is_speculative
            )
        self._committables.items = []
        self._carried = context.operator_state.list(_CARRIED, SPLIT)
        self._carried.codec = "carried-rows/1"
        with self._failing("write what a checkpoint has carried on"):
            writer.take_carried(self._carried.items)
        self._carried.items = []

    def _own(self, items: Iterable[bytes]) -> Iterator[bytes]:
        """Of the restored committables those of this subtask, and of subtasks that are no more."""
        for item in items:
            (owner,) = _OWNER.unpack_from(item)
            if owner % self.context.parallelism == self.context.subtask_index:
                yield item[_OWNER.size :]

    @property
    def _opened(self) -> SinkWriter:
        assert self._writer is not None, "the sink is open"
        return self._writer

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        self._is_dirty = True
        with self._failing("write"):
            self._opened.write(user_batch(batch))
            self._roll()
        self.context.counters.records_out += batch.num_rows
        return NOTHING

    @override
    def on_files(self, written: WrittenFiles) -> Iterable[OperatorOutput]:
        with self._failing("take files"):
            self._opened.adopt([path for path, _ in written.files])
        self.context.counters.records_out += sum(rows for _, rows in written.files)
        return NOTHING

    @override
    def on_pause_over(self) -> Iterable[OperatorOutput]:
        with self._failing("write"):
            self._roll()
        return NOTHING

    def _roll(self) -> None:
        now_ms = self.context.clock.now_ms()
        next_at_ms = self._opened.roll(now_ms)
        if next_at_ms is not None:
            self.context.call_after(next_at_ms - now_ms)

    @override
    def on_idle(self) -> Iterable[OperatorOutput]:
        self._flush()
        return NOTHING

    @override
    def on_end_of_data(self) -> Iterable[OperatorOutput]:
        self._flush()
        self._has_ended_data = True
        if not self.context.takes_checkpoints:
            self._prepare(_END_OF_JOB)
            work = self._opened.finish_prepared()
            if work is not None:
                with self._failing("make its output safe"):
                    work()
        return NOTHING

    def _prepare(self, checkpoint_id: int) -> None:
        with self._failing("prepare its output"):
            committables = self._opened.prepare_commit(checkpoint_id)
        if committables:
            self._prepared[checkpoint_id] = committables

    # -- checkpoints

    @override
    def on_control(self, element: ControlElement) -> Iterable[OperatorOutput]:
        if isinstance(element, CheckpointBarrier) and element.properties.target:
            self._target_id = element.checkpoint_id
            if element.properties.is_savepoint:
                self._savepoint_id = element.checkpoint_id
        return super().on_control(element)

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._flush()
        is_last = self._has_ended_data or checkpoint_id == self._target_id
        now_ms = self.context.clock.now_ms()
        self._carried.items = [] if is_last else self._opened.carry(now_ms)
        self._prepare(checkpoint_id)
        # What earlier checkpoints prepared is still to be committed, whatever became of them.
        named = [committable for own in self._prepared.values() for committable in own]
        if checkpoint_id == self._savepoint_id and named:
            self._in_doubt[checkpoint_id] = named
            named = self._opened.hold(checkpoint_id, named)
        self._named = named
        self._committables.items = self._with_owner(named)

    def _with_owner(self, named: list[bytes]) -> list[bytes]:
        owner = _OWNER.pack(self.context.subtask_index)
        return [owner + committable for committable in self._opened.described(named)]

    @override
    def finish_snapshot(self, checkpoint_id: int) -> Callable[[], LateItems] | None:
        work, named = self._opened.finish_prepared(), self._named
        held = self._in_doubt.get(checkpoint_id, [])
        if work is None and not held:
            return None  # it was safe before it was named

        def finish() -> LateItems:
            if work is not None:
                work()
            self._opened.keep_held(checkpoint_id, held)
            if held and checkpoint_id not in self._in_doubt:
                self._opened.let_go(checkpoint_id, held)  # it was aborted meanwhile
            return {_STATE: self._with_owner(named)}

        return finish

    @override
    def on_checkpoint_completed(self, checkpoint_id: int) -> None:
        for prepared in [id for id in self._prepared if id <= checkpoint_id]:
            self._commit(prepared)
        for savepoint_id in [id for id in self._in_doubt if id <= checkpoint_id]:
            self._let_go(savepoint_id)

    @override
    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        if checkpoint_id in self._in_doubt:
            self._let_go(checkpoint_id)

    def _let_go(self, savepoint_id: int) -> None:
        with self._failing("let go what a savepoint named"):
            self._opened.let_go(savepoint_id, self._in_doubt.pop(savepoint_id))

    # -- the end of the data

    @property
    @override
    def needs_commit(self) -> bool:
        if self.context.takes_checkpoints:
            return bool(self._prepared) or self._opened.has_unprepared
        return bool(self._prepared)

    @override
    def commit_output(self) -> None:
        self._commit(_END_OF_JOB)

    def _commit(self, checkpoint_id: int) -> None:
        # Taken out first: nothing of it is aborted any more, whatever becomes of the rest.
        committables = self._prepared.pop(checkpoint_id)
        with self._failing("commit its output"):
            self._opened.commit(committables)

    @override
    def discard_output(self) -> None:
        self._is_discarded = True

    @override
    def close(self) -> None:
        if self._writer is None:
            return
        # What a checkpoint or savepoint may cover is left for whoever is restored from it.
        in_doubt = {committable for named in self._in_doubt.values() for committable in named}
        aborted = [
            committable
            for checkpoint_id, own in self._prepared.items()
            if self._is_discarded or checkpoint_id == _END_OF_JOB
            for committable in own
            if committable not in in_doubt
        ]
        self._prepared = {}
        try:
            if aborted:
                self._writer.abort(aborted)
        finally:
            self._writer.close()

    def _flush(self) -> None:
        if not self._is_dirty:
            return
        self._is_dirty = False
        with self._failing("flush"):
            self._opened.flush()

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Turns what a writer raises into a failure that names the sink."""
        try:
            yield
        except (TaskFailure, Unrecoverable):
            raise
        except Exception as error:
            raise TaskFailure(
                f"sink {self._spec.name} could not {action}: {error_text(error)}",
                operator=self._spec.name,
                user_traceback=user_traceback(error),
            ) from error
