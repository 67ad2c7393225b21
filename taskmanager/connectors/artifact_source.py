"""A table that the client shipped: an Arrow IPC file, memory mapped, read in stripes.

The table is cut into pieces of rows that are dealt out to the splits in turn, so that all subtasks move
through it side by side and event time advances evenly in all of them.
"""

from __future__ import annotations

import struct

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.source import END, EndOfSplit, Reader, Source, SourceContext, Split
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from taskmanager.connectors.arrow_reader import ArrowBatches
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.file_identity import LocalFile

PIECE_ROWS_MAX = 64 * 1024

_PAYLOAD = struct.Struct("<qqq")
_POSITION = struct.Struct("<qqq")


class ArtifactSource(Source):
    """Reads an artifact in Arrow's IPC file format; as many splits as subtasks."""

    bounded = True

    def __init__(self, spec: graph_pb2.ArrowSource, schema: pa.Schema) -> None:
        self._artifact = spec.artifact
        self._schema = schema
        self._context: SourceContext | None = None

    @property
    @override
    def schema(self) -> pa.Schema:
        return self._schema

    @override
    def start(self, ctx: SourceContext) -> None:
        self._context = ctx

    def _batches(self, ctx: SourceContext) -> ArrowBatches:
        path = ctx.artifact_paths.get(self._artifact)
        if path is None:
            raise TaskFailure(
                f"the table's artifact {self._artifact} is not on this TaskManager; submit the job again",
                operator=ctx.operator_name,
            )
        file = LocalFile(path)
        try:
            return ArrowBatches(file, ColumnPlan(self._schema, path, ""))
        finally:
            file.close()

    @override
    def discover(self, ctx: SourceContext) -> list[Split]:
        batches = self._batches(ctx)
        try:
            rows = sum(_rows(batches, index) for index in range(batches.count))
        finally:
            batches.close()
        if not rows:
            return []
        count = min(ctx.parallelism, rows)
        piece_rows = min(-(-rows // count), PIECE_ROWS_MAX)
        return [
            Split(
                id=f"rows-{index}-of-{count}",
                payload=_PAYLOAD.pack(index, count, piece_rows),
                size=-(-rows // count),
            )
            for index in range(count)
        ]

    @override
    def open(self, split: Split, position: bytes | None) -> Reader:
        assert self._context is not None, "start() comes before open()"
        path_plan = ColumnPlan(self._schema, self._artifact, "")
        return _PieceReader(self._batches(self._context), path_plan, split.payload, position)


def _rows(batches: ArrowBatches, index: int) -> int:
    batch = batches.get(index)
    return 0 if batch is None else int(batch.num_rows)


class _PieceReader(Reader):
    """Every n-th piece. The position is (batch, next row in it, number of the batch's first piece)."""

    def __init__(
        self, batches: ArrowBatches, plan: ColumnPlan, payload: bytes, position: bytes | None
    ) -> None:
        self._batches = batches
        self._plan = plan
        self._index, self._count, self._piece_rows = _PAYLOAD.unpack(payload)
        self._batch_index, self._row, self._first_piece = (
            (0, 0, 0) if position is None else _POSITION.unpack(position)
        )
        self._batch: pa.RecordBatch | None = None
        self._last_rows = 0

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit:
        while True:
            if self._batch is None:
                loaded = self._batches.get(self._batch_index)
                if loaded is None:
                    return END
                self._batch = self._plan.assemble(loaded)
            rows = self._batch.num_rows
            if self._row >= rows:
                self._first_piece += -(-rows // self._piece_rows)
                self._batch_index += 1
                self._batch, self._row = None, 0
                continue
            piece = self._row // self._piece_rows
            ahead = (self._index - self._first_piece - piece) % self._count
            if ahead:
                self._row = (piece + ahead) * self._piece_rows
                continue
            return self._take(min((piece + 1) * self._piece_rows, rows), max_rows)

    def _take(self, end: int, max_rows: int) -> pa.RecordBatch:
        assert self._batch is not None
        remaining = end - self._row
        rows = -(-remaining // -(-remaining // max_rows))
        taken = self._batch if rows == self._batch.num_rows else self._batch.slice(self._row, rows)
        self._row += rows
        self._last_rows = rows
        return taken

    @override
    def row_number(self, index: int) -> int:
        before = sum(_rows(self._batches, number) for number in range(self._batch_index))
        return before + self._row - self._last_rows + index + 1

    @override
    def position(self) -> bytes:
        return _POSITION.pack(self._batch_index, self._row, self._first_piece)

    @override
    def close(self) -> None:
        self._batches.close()
