"""The collect sink: ships rows to the JobManager, from where the client fetches them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
from typing_extensions import override

from common.elements import PAUSE, CheckpointBarrier, ControlElement, OperatorOutput
from common.pb import internal_pb2
from penstock.errors import TaskFailure
from penstock.pb import client_pb2, graph_pb2
from penstock.rows.column_values import row_text
from penstock.rows.schema import user_batch
from taskmanager.operators.operator import Operator, OperatorContext

_CHUNKS_UNDER_WAY_MAX = 4
_CHUNK_BYTES = 1 << 20
_CHUNK_BYTES_MAX = 32 << 20
_GATHER_NS = 10_000_000
_STATE = "collect"
_NUMBER = struct.Struct("<q")


class CollectOperator(Operator):
    """Ships rows to the JobManager, from where the client fetches them.

    At most ``_CHUNKS_UNDER_WAY_MAX`` chunks are on their way; until one is taken the chain waits,
    and with it everything upstream. A chunk costs a round trip through three processes: small batches
    (windows that fire one by one) gather for a moment, until they are worth one, or the input is idle.

    A checkpoint covers rows that the JobManager has taken: until then the barrier waits here, and the
    chain with it, so that no row is lost with a TaskManager between the two.
    """

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._collect_id = spec.sink.collect.collect_id
        self._limit = spec.sink.collect.limit
        self._sent_rows = 0
        self._next_sequence = 0
        self._taken_sequence = -1
        self._is_satisfied = False
        self._committed_sequence = 0
        self._prepared: dict[int, int] = {}
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._last_sent_ns = 0
        self._holds_barrier = False

    @property
    def collect_id(self) -> str:
        """Names this collect within the job."""
        return self._collect_id

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        items = context.operator_state.list(_STATE).items
        if items:
            self._next_sequence, self._sent_rows = (_NUMBER.unpack(item)[0] for item in items)
            self._taken_sequence = self._next_sequence - 1
            self._committed_sequence = self._next_sequence

    @override
    def on_control(self, element: ControlElement) -> Iterator[OperatorOutput]:
        yield from self._send_waiting()  # a barrier must find every row before it shipped
        if isinstance(element, CheckpointBarrier):
            self._holds_barrier = True
            yield PAUSE  # the chain asks whether this is available before it goes on
            self._holds_barrier = False
        yield element

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        assert not self._waiting, "a barrier flushes what waits"
        self._prepared[checkpoint_id] = self._next_sequence
        self.context.operator_state.list(_STATE).items = [
            _NUMBER.pack(self._next_sequence),
            _NUMBER.pack(self._sent_rows),
        ]

    @override
    def on_checkpoint_completed(self, checkpoint_id: int) -> None:
        for prepared in [id for id in self._prepared if id <= checkpoint_id]:
            self._committed_sequence = max(self._committed_sequence, self._prepared.pop(prepared))

    @property
    @override
    def needs_commit(self) -> bool:
        return self.context.takes_checkpoints and self._committed_sequence < self._next_sequence

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        rows = user_batch(batch)
        if self._limit:
            rows = rows.slice(0, max(0, self._limit - self._sent_rows))
        if not rows.num_rows or self._is_satisfied:
            return
        self._sent_rows += rows.num_rows
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if (
            self._waiting_rows >= self.context.config.batch_rows
            or self._waiting_bytes >= _CHUNK_BYTES
            or self.context.clock.monotonic_ns() - self._last_sent_ns >= _GATHER_NS
        ):
            yield from self._send_waiting()

    @override
    def on_idle(self) -> Iterator[OperatorOutput]:
        return self._send_waiting()

    @override
    def on_end_of_data(self) -> Iterator[OperatorOutput]:
        return self._send_waiting()

    def _send_waiting(self) -> Iterator[OperatorOutput]:
        if not self._waiting:
            return
        rows = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()[0]
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        self._last_sent_ns = self.context.clock.monotonic_ns()
        chunk_rows = max(1, rows.num_rows * _CHUNK_BYTES // max(1, rows.nbytes))
        for start in range(0, rows.num_rows, chunk_rows):
            if start:
                yield PAUSE  # there may be no room for another chunk
            self._send(rows.slice(start, chunk_rows))

    def _send(self, rows: pa.RecordBatch) -> None:
        if self._is_satisfied:
            return
        arrow = _to_ipc(rows)
        if len(arrow) > _CHUNK_BYTES_MAX:
            raise TaskFailure(
                f"rows of {len(arrow) >> 20} MB cannot be collected, the limit is"
                f" {_CHUNK_BYTES_MAX >> 20} MB: write them to files instead",
                operator=self.context.operator_name,
                row=row_text(rows, 0),
            )
        chunk = client_pb2.ResultChunk(
            subtask_index=self.context.subtask_index, sequence=self._next_sequence, arrow=arrow
        )
        self._next_sequence += 1
        self.context.send_results(self._collect_id, chunk)
        self.context.counters.records_out += rows.num_rows

    def on_results_taken(self, taken: internal_pb2.ResultsTaken) -> None:
        """A chunk has arrived: there is room for another."""
        self._taken_sequence = max(self._taken_sequence, taken.sequence)
        self._is_satisfied = self._is_satisfied or taken.satisfied
        self.context.wake()

    @override
    def is_available(self) -> bool:
        if self._holds_barrier:
            return self.is_drained()
        return self._next_sequence - self._taken_sequence - 1 < _CHUNKS_UNDER_WAY_MAX

    @override
    def is_drained(self) -> bool:
        return self._taken_sequence + 1 >= self._next_sequence


def _to_ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
