"""What a process function emits, on its way out: checked, and given event times.

Each result knows the row (or timer) it was emitted for, so that it gets its event time, and goes the way
of the operator's error policy with it where it does not fit the output schema: with all that was emitted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from common.elements import OperatorOutput, SideOutput
from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from penstock.rows.column_values import ROW_BYTES, ValueMismatch, encode_columns, short_repr
from penstock.rows.rows import RowBuilder, RowMismatch
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.process_collector import ProcessCollector
from taskmanager.operators.row_results import row_at

_Rows = tuple[pa.RecordBatch, BadRecordPolicy]
"""What results were emitted for, and where those go of them that are bad."""
_Built = tuple[pa.RecordBatch, list[int]]
"""Results, and the row or timer of each."""
_Build = Callable[[list[Any]], pa.RecordBatch]


class ProcessOutput:
    """Makes output batches of what one operator's function emits."""

    def __init__(self, spec: graph_pb2.Operator, collector: ProcessCollector) -> None:
        self._operator = spec.name
        self._function = spec.process.function.display_name
        self._schema = schema_from_bytes(spec.output_schema)
        self._side_schema = user_schema(schema_from_bytes(spec.input_schema))
        self._built_schema = user_schema(self._schema)
        self._stream_columns = tuple(spec.stream_columns)
        self._time_position = self._schema.get_field_index(EVENT_TIME)
        self._collector = collector

    def of_rows(self, batch: pa.RecordBatch, policy: BadRecordPolicy) -> Iterator[OperatorOutput]:
        """What was emitted for rows of a batch since the last call: of a bad record nothing."""
        collector = self._collector
        if collector.indexes or collector.side_results:
            yield from self._emitted(_times_of(batch), (batch, policy))
        yield from policy.side_output(batch)

    def of_timers(self, times: pa.Array) -> Iterator[OperatorOutput]:
        """What was emitted for timers since the last call.

        Args:
            times: of the timers, by index.
        """
        collector = self._collector
        if collector.indexes or collector.side_results:
            yield from self._emitted(times, None)

    def _emitted(self, times: pa.Array | None, rows: _Rows | None) -> Iterator[OperatorOutput]:
        bad: set[int] = set()
        main = self._main(rows, bad)
        sides = self._sides(rows, bad)
        built, kept = _without(*main, bad)
        if kept:
            if self._time_position >= 0:
                assert times is not None, "a stream with event time has it in its input"
                arrays = list(built.columns)
                arrays.insert(self._time_position, times.take(pa.array(kept, pa.int64())))
                built = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            yield built
        for tag, side in sides:
            built, kept = _without(*side, bad)
            if kept:
                yield SideOutput(tag, built)

    def _main(self, rows: _Rows | None, bad: set[int]) -> _Built:
        collector, built = self._collector, None
        indexes = collector.take_indexes()
        if collector.flat:
            built = self._of_columns()
        if built is not None:
            return built, indexes
        build = partial(_built, schema=self._built_schema)
        return self._checked(collector.take_results(), indexes, build, rows, bad)

    def _of_columns(self) -> pa.RecordBatch | None:
        """The flat results as columns, None where one does not fit: then they are results as others are."""
        collector = self._collector
        flat = collector.flat
        columns = collector.take_columns()
        try:
            return encode_columns(columns, self._built_schema)
        except ValueMismatch:
            collector.flat = flat
            return None

    def _sides(self, rows: _Rows | None, bad: set[int]) -> list[tuple[str, _Built]]:
        collector = self._collector
        emitted, collector.side_results = collector.side_results, []
        sides = []
        for tag in dict.fromkeys(tag for tag, _, _ in emitted):
            results = [row for to, row, _ in emitted if to == tag]
            indexes = [index for to, _, index in emitted if to == tag]
            build = partial(_built, schema=self._side_schema, given=self._stream_columns)
            sides.append((tag, self._checked(results, indexes, build, rows, bad)))
        return sides

    def _checked(
        self,
        results: list[Any],
        indexes: list[int],
        build: _Build,
        rows: _Rows | None,
        bad: set[int],
    ) -> _Built:
        """The results as columns, and their indexes; rows with one that does not fit become bad, left to the policy."""
        try:
            return build(results), indexes
        except RowMismatch as e:
            if e.index < 0 or rows is None:
                raise self._mismatch(e, rows, indexes[max(e.index, 0)]) from e
        batch, policy = rows
        good = []
        for position, (result, index) in enumerate(zip(results, indexes, strict=True)):
            if index in bad:
                continue
            try:
                build([result])
                good.append(position)
            except RowMismatch as e:
                policy.handle(index, lambda e=e, i=index: self._mismatch(e, (batch, policy), i))  # type: ignore[misc]
                bad.add(index)
        return build([results[p] for p in good]), [indexes[p] for p in good]

    def _mismatch(
        self,
        error: RowMismatch,
        rows: _Rows | None,
        index: int,
    ) -> TaskFailure:
        shown = error.row if rows is None else short_repr(row_at(rows[0], index), ROW_BYTES)
        return TaskFailure(
            f"operator {self._operator!r}: what {self._function} emitted does not fit: {error}",
            operator=self._operator,
            row=shown,
        )


def _built(results: list[Any], schema: pa.Schema, given: Sequence[str] = ()) -> pa.RecordBatch:
    builder = RowBuilder(schema, given)
    builder.extend(results)
    return builder.build()


def _without(built: pa.RecordBatch, indexes: list[int], bad: set[int]) -> _Built:
    """The results but for those of bad records."""
    if bad.isdisjoint(indexes):
        return built, indexes
    good = [position for position, index in enumerate(indexes) if index not in bad]
    return built.take(pa.array(good, pa.int64())), [indexes[position] for position in good]


def _times_of(batch: pa.RecordBatch) -> pa.Array | None:
    position = batch.schema.get_field_index(EVENT_TIME)
    return None if position < 0 else batch.column(position)
