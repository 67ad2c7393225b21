"""Sources that make rows by number: a user's function, and the Nexmark generator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.source import END, EndOfSplit, Reader, Source, SourceContext, Split
from penstock.errors import TaskFailure
from penstock.nexmark import generator as nexmark
from penstock.pb import graph_pb2
from taskmanager.connectors.row_blocks import BlockSplit, RowCursor, block_splits
from taskmanager.user_code.calls import calling_user_code, load_function

MakeRows = Callable[[int, int], pa.RecordBatch]
"""(number of the first row, count) -> the rows"""


class NumberedRowsSource(Source):
    """A source whose n-th row is a function of n."""

    def __init__(self, schema: pa.Schema, rows: int, rate: float) -> None:
        self._schema = schema
        self._rows = rows
        self._rate = rate
        self._context: SourceContext | None = None
        self.bounded = rows >= 0

    @property
    @override
    def schema(self) -> pa.Schema:
        return self._schema

    @override
    def start(self, ctx: SourceContext) -> None:
        self._context = ctx

    @override
    def discover(self, ctx: SourceContext) -> list[Split]:
        return block_splits(self._rows, self._rate, ctx.parallelism, ctx.batch_rows)

    @override
    def open(self, split: Split, position: bytes | None) -> Reader:
        assert self._context is not None, "start() comes before open()"
        blocks = BlockSplit.decode(split.payload)
        cursor = RowCursor(blocks, self._rows, self._rate, position)
        return _NumberedRowsReader(self._make_rows(), cursor, self._context.now_ms)

    @abstractmethod
    def _make_rows(self) -> MakeRows:
        """The function, ready to be called on this subtask."""


class _NumberedRowsReader(Reader):
    def __init__(self, make: MakeRows, cursor: RowCursor, now_ms: Callable[[], int]) -> None:
        self._make = make
        self._cursor = cursor
        self._now_ms = now_ms
        self._start = 0

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | EndOfSplit | None:
        run = self._cursor.next_run(max_rows, self._now_ms())
        if run is None:
            return END
        start, count = run
        if count == 0:
            return None
        batch = self._make(start, count)
        self._cursor.advance(count)
        self._start = start
        return batch

    @override
    def row_number(self, index: int) -> int:
        return self._start + index + 1

    @override
    def next_read_at_ms(self) -> int | None:
        return self._cursor.next_due_ms()

    @override
    def position(self) -> bytes:
        return self._cursor.position()


class NexmarkSource(NumberedRowsSource):
    """Nexmark events of one kind or of all."""

    def __init__(self, spec: graph_pb2.NexmarkSource, schema: pa.Schema) -> None:
        rows = -1 if spec.events < 0 else nexmark.kind_count(spec.kind, spec.events)
        super().__init__(schema, rows, spec.rate)
        self._spec = spec

    @override
    def discover(self, ctx: SourceContext) -> list[Split]:
        splits = super().discover(ctx)
        if ctx.event_time_column != "ts":
            return splits
        return [replace(split, min_event_time_ms=self._first_event_time(split)) for split in splits]

    def _first_event_time(self, split: Split) -> int:
        start, _ = BlockSplit.decode(split.payload).run_at(0, self._rows)
        batch = self._make(start, 1, ["ts"])
        return int(batch.column(0)[0].as_py())

    def _make(self, start: int, count: int, columns: list[str]) -> pa.RecordBatch:
        spec = self._spec
        return nexmark.nexmark_batch(
            spec.kind,
            spec.seed,
            start,
            count,
            columns=columns,
            first_event_time_ms=spec.first_event_time_ms,
            event_interval_us=spec.event_interval_us,
        )

    @override
    def _make_rows(self) -> MakeRows:
        columns = self._schema.names
        return lambda start, count: self._make(start, count, columns)


class GeneratorSource(NumberedRowsSource):
    """A user's function of the position."""

    def __init__(
        self, spec: graph_pb2.GeneratorSource, schema: pa.Schema, operator_name: str
    ) -> None:
        super().__init__(schema, spec.rows, spec.rate)
        self._function = spec.function
        self._operator = operator_name

    @override
    def _make_rows(self) -> MakeRows:
        function = load_function(self._function, self._operator)
        name = self._function.display_name or "the generator function"

        def make(start: int, count: int) -> pa.RecordBatch:
            call = f"{name}({start}, {count})"
            with calling_user_code(call, self._operator):
                batch = function(start, count)
            return self._checked(batch, count, call)

        return make

    def _checked(self, batch: object, count: int, call: str) -> pa.RecordBatch:
        if not isinstance(batch, pa.RecordBatch):
            raise self._failure(
                f"{call} returned {type(batch).__name__}, not a pyarrow.RecordBatch"
            )
        if batch.num_rows != count:
            raise self._failure(
                f"{call} returned {batch.num_rows} rows; a generator returns exactly as many as it is "
                "asked for"
            )
        return batch

    def _failure(self, message: str) -> TaskFailure:
        return TaskFailure(message, operator=self._operator)
