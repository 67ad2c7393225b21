"""Row functions: the user's Python called for each row of a batch.

The function runs in slices of time with a cursor into the batch: after each slice what it made is
emitted, so that a slow function holds back neither its own results nor the slot's other mail. Results
keep their row's event time. Rows it raises for, and results that do not fit the output schema, go the
way of the operator's error policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from typing_extensions import override

from common.elements import PAUSE, OperatorOutput
from penstock.functions.functions import check_has_run
from penstock.pb import graph_pb2
from penstock.rows.handed_over import handed_over, handed_over_whole, handing_over
from penstock.rows.row_calls import RowCalls
from penstock.rows.rows import Row, lazy_columns, make_row, row_class
from penstock.rows.schema import schema_from_bytes
from taskmanager.operators.bad_records import BadRecordPolicy
from taskmanager.operators.operator import NOTHING, Handling, Operator, OperatorContext
from taskmanager.operators.row_results import RowResults, row_at
from taskmanager.operators.time_slice import TimeSlice
from taskmanager.operators.user_function import UserFunctionHandle

_NO_ITERABLE_OF_ROWS = (str, bytes, dict, Row)


class RowFunctionOperator(Operator):
    """Runs a map, flat_map, filter or key function."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._kind = spec.row_function.kind
        is_flat_map = self._kind == graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP
        self.handling = Handling.AT_ONCE if is_flat_map else Handling.ONE_TO_ONE
        schema = schema_from_bytes(spec.output_schema)
        self._output_names = schema.names
        self._own = handing_over(schema)
        self._handle = UserFunctionHandle(spec.name, spec.row_function.function)
        self._policy = BadRecordPolicy(spec)
        self._results = RowResults(spec, self._policy)
        self._calls = RowCalls(hands_over=self._kind != graph_pb2.ROW_FUNCTION_KIND_FILTER)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._batch_rows = context.config.batch_rows
        self._slice = TimeSlice(context.clock.monotonic_ns)
        self._policy.open(context)
        self._handle.open(context)

    @override
    def close(self) -> None:
        self._handle.close()

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        if not batch.num_rows:
            return NOTHING
        if self._kind == graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP:
            return self._flat_map(batch)
        return self._row_by_row(batch)

    def _row_by_row(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        self._calls.begin(batch)
        rows, time_slice = batch.num_rows, self._slice
        results: list[Any] = []
        bad: list[int] = []
        start = cursor = 0
        time_slice.begin()
        while cursor < rows:
            stop = min(rows, cursor + time_slice.stride)
            while cursor < stop:
                cursor = self._call_rows(batch, cursor, stop, results, bad)
            if time_slice.is_over() and cursor < rows:
                yield from self._emit(batch, results, _without(start, cursor, bad))
                yield PAUSE
                results, bad, start = [], [], cursor
                time_slice.begin()
        self._calls.end()
        yield from self._emit(batch, results, _without(start, rows, bad))

    def _call_rows(
        self, batch: pa.RecordBatch, start: int, stop: int, results: list[Any], bad: list[int]
    ) -> int:
        """Calls the function for rows up to ``stop`` or the first it raises for; where to go on."""
        before = len(results)
        try:
            self._calls.map(self._function, results, start, stop)
        except (Exception, SystemExit) as e:  # noqa: BLE001 - the user's code may raise anything; the policy decides
            index = start + len(results) - before
            bad.append(index)
            self._raised(batch, index, e)
            return index + 1
        return stop

    @property
    def _function(self) -> Callable[[Row], Any]:
        function: Callable[[Row], Any] = self._handle.function
        if self._kind != graph_pb2.ROW_FUNCTION_KIND_MAP or self._own is handed_over:
            return function
        return lambda row: handed_over_whole(function(row))

    def _emit(
        self, batch: pa.RecordBatch, results: list[Any], indexes: range | list[int]
    ) -> Iterator[OperatorOutput]:
        if self._kind != graph_pb2.ROW_FUNCTION_KIND_FILTER:
            yield from self._results.emit(batch, results, indexes)
            return
        kept = []
        for index, result in zip(indexes, results, strict=True):
            try:
                if result:
                    if result is not True:
                        check_has_run(result, "the predicate")
                    kept.append(index)
            except Exception as e:  # noqa: BLE001 - the truth of the user's object may raise anything
                self._raised(batch, index, e)
        if kept:
            visible = batch.select(self._output_names)
            is_all = len(kept) == batch.num_rows
            yield visible if is_all else visible.take(pa.array(kept, pa.int64()))
        yield from self._policy.side_output(batch)

    def _flat_map(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        kind, columns, time_slice = row_class(batch), lazy_columns(batch), self._slice
        results: list[Any] = []
        indexes: list[int] = []
        steps = 0
        self._results.last_bad = -1
        time_slice.begin()
        for index in range(batch.num_rows):
            iterator: Iterator[Any] | None = None
            is_done, first = False, len(results)
            while not is_done:
                before = len(results)
                try:
                    if iterator is None:
                        iterator = self._iterate(make_row(kind, columns, index))
                    is_done = self._take(iterator, results)
                except (Exception, SystemExit) as e:  # noqa: BLE001 - as in _call_rows
                    self._raised(batch, index, e)
                    del results[first:], indexes[first:]  # what an earlier slice emitted is out
                    is_done, before = True, len(results)
                steps += 1 + len(results) - before
                indexes.extend([index] * (len(results) - before))
                is_over = steps >= time_slice.stride and time_slice.is_over()
                if is_over or len(results) >= self._batch_rows:
                    yield from self._results.emit(batch, results, indexes)
                    results, indexes, first = [], [], 0
                    is_done = is_done or self._results.last_bad == index
                if is_over:
                    yield PAUSE
                    time_slice.begin()
                if steps >= time_slice.stride:
                    steps = 0
        yield from self._results.emit(batch, results, indexes)

    def _iterate(self, row: Row) -> Iterator[Any]:
        result = self._handle.function(row)
        if result is None:
            return iter(())
        if isinstance(result, _NO_ITERABLE_OF_ROWS) or not hasattr(result, "__iter__"):
            raise TypeError(
                "a flat_map function returns a list of rows, None for no row, or yields them, "
                f"got {type(result).__name__}"
            )
        return iter(result)

    def _take(self, iterator: Iterator[Any], results: list[Any]) -> bool:
        """Takes results until the clock is due or the batch is full; True when there are no more."""
        room = min(self._slice.stride, self._batch_rows - len(results))
        own = self._own
        for result in iterator:
            results.append(own(result))
            room -= 1
            if room <= 0:
                return False
        return True

    def _raised(self, batch: pa.RecordBatch, index: int, error: Exception | SystemExit) -> None:
        if isinstance(error, SystemExit):  # asks for the end, not for the next row
            failure = self._handle.failure(error, row=row_at(batch, index))
            failure.row_index = index
            raise failure from error
        self._policy.handle(index, lambda: self._handle.failure(error, row=row_at(batch, index)))


def _without(start: int, stop: int, bad: list[int]) -> range | list[int]:
    """The rows from ``start`` on that the function returned something for."""
    if not bad:
        return range(start, stop)
    dropped = set(bad)
    return [index for index in range(start, stop) if index not in dropped]
