"""Calls the user's function for windows: ``process`` with all rows, or ``reduce`` two by two.

Rows come as one batch, window after window. Results leave batch by batch, and at the latest when a
function has had its slice of time, each with how many windows are done: the owner forgets these first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from common.elements import PAUSE, OperatorOutput, SideOutput
from penstock.errors import TaskFailure
from penstock.functions.functions import Collector, WindowInfo
from penstock.pb import graph_pb2
from penstock.rows.column_values import decode, record_as_dict, short_repr
from penstock.rows.rows import (
    Row,
    RowBuilder,
    RowMismatch,
    RowSequence,
    row_maker,
    rows_of,
)
from penstock.rows.schema import EVENT_TIME, is_optional, schema_from_bytes, user_schema
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.returned_rows import emit_returned
from taskmanager.operators.time_slice import SLICE_NS
from taskmanager.operators.user_function import UserFunctionHandle
from taskmanager.operators.window_contents import times

Int64Array = npt.NDArray[np.int64]
Progress = Iterator[tuple[int, OperatorOutput]]


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Windows with their rows.

    Attributes:
        rows: the rows of the first window, of the second and so on.
        bounds: int64[n + 1]: window i has rows ``bounds[i] .. bounds[i + 1] - 1``, at least one.
        keys: per key column the key of each window.
        starts: int64[n] first millisecond; window index for count windows.
        ends: int64[n] first millisecond after; None for count windows.
        event_times: int64[n] event times of the results, None where the stream carries none.
    """

    rows: pa.RecordBatch
    bounds: Int64Array
    keys: list[pa.Array]
    starts: Int64Array
    ends: Int64Array | None
    event_times: Int64Array | None

    def info(self, window: int) -> WindowInfo:
        """The window as the user's function sees it."""
        if self.ends is None:
            return WindowInfo(index=int(self.starts[window]))
        return WindowInfo(int(self.starts[window]), int(self.ends[window]))


class WindowFunctionRunner(ABC):
    """Loads the function and calls it window by window."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._name = spec.name
        self._handle = UserFunctionHandle(spec.name, spec.window_function.function)
        self._input_schema = user_schema(schema_from_bytes(spec.input_schema))
        self._schema = schema_from_bytes(spec.output_schema)
        self._has_event_time = EVENT_TIME in self._schema.names
        self._keys = KeyColumns(spec.window_function.keys, self._input_schema)

    def open(self, context: OperatorContext) -> None:
        """Loads and opens the function."""
        self._now_ns = context.clock.monotonic_ns
        self._batch_rows = context.config.batch_rows
        self._handle.open(context)

    def close(self) -> None:
        """Closes the function."""
        self._handle.close()

    def run(self, windows: WindowRows) -> Progress:
        """The results of the windows, each with the number of windows that are done by then."""
        rows = rows_of(windows.rows)
        bounds = windows.bounds.tolist()
        deadline = self._now_ns() + SLICE_NS
        for window in range(len(bounds) - 1):
            self._call(windows, window, rows[bounds[window] : bounds[window + 1]])
            is_over = self._now_ns() >= deadline
            if is_over or self._pending() >= self._batch_rows:
                yield from ((window + 1, output) for output in self._outputs(windows))
                if is_over:
                    yield window + 1, PAUSE
                    deadline = self._now_ns() + SLICE_NS
        yield from ((len(bounds) - 1, output) for output in self._outputs(windows))

    @abstractmethod
    def _call(self, windows: WindowRows, window: int, rows: RowSequence) -> None:
        """Calls the function for one window."""

    @abstractmethod
    def _pending(self) -> int:
        """Rows emitted since the last ``_outputs``."""

    @abstractmethod
    def _outputs(self, windows: WindowRows) -> Iterator[OperatorOutput]:
        """What was emitted since the last call."""

    def _mismatch(self, error: RowMismatch) -> TaskFailure:
        return TaskFailure(
            f"operator {self._name!r}: the result of {self._handle.name} does not fit: {error}",
            operator=self._name,
            row=error.row,
        )


class ProcessRunner(WindowFunctionRunner):
    """``WindowFunction.process``: emits any rows."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(spec)
        self._collector = Collector(user_schema(self._schema), self._input_schema)
        self._window_of: list[int] = []

    @override
    def run(self, windows: WindowRows) -> Progress:
        self._key_values = [decode(array) for array in windows.keys[: len(self._keys.names)]]
        yield from super().run(windows)

    def _key(self, window: int) -> Any:
        if len(self._key_values) == 1:
            return self._key_values[0][window]
        return tuple(values[window] for values in self._key_values) or None

    @override
    def _call(self, windows: WindowRows, window: int, rows: RowSequence) -> None:
        key, info = self._key(window), windows.info(window)
        try:
            returned = self._handle.function.process(key, info, rows, self._collector)
            if returned is not None:
                emit_returned(returned, self._collector.emit)
        except Exception as error:
            self._collector.discard()
            shown = _Shown(
                f"key={key!r}, {_bounds_text(info)}, {len(rows)} rows, first {rows[0]!r}"
            )
            raise self._handle.failure(error, row=shown, method="process") from error
        self._window_of.extend([window] * (len(self._collector) - len(self._window_of)))

    @override
    def _pending(self) -> int:
        return len(self._collector)

    @override
    def _outputs(self, windows: WindowRows) -> Iterator[OperatorOutput]:
        window_of, self._window_of = self._window_of, []
        try:
            batch = self._collector.take()
            sides = self._collector.take_sides()
        except RowMismatch as error:
            raise self._mismatch(error) from error
        if batch is not None:
            arrays = batch.columns
            if self._has_event_time:
                assert windows.event_times is not None
                arrays = [*arrays, pa.array(windows.event_times[np.array(window_of, np.int64)])]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        for tag, side in sides:
            yield SideOutput(tag, side)


class ReduceRunner(WindowFunctionRunner):
    """``reduce``: folds the rows of a window two by two, in order of arrival."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        super().__init__(spec)
        names = tuple(self._input_schema.names)
        keys = set(self._keys.names)
        self._make_row = _row_maker(self._input_schema, keys)
        self._builder = RowBuilder(self._input_schema)
        self._windows: list[int] = []
        self._rest = [i for i, name in enumerate(names) if name not in keys]

    @override
    def _call(self, windows: WindowRows, window: int, rows: RowSequence) -> None:
        function, make = self._handle.function, self._make_row
        reduced: Row = rows[0]
        row: Row = reduced
        try:
            for row in rows[1:]:
                result = function(reduced, row)
                reduced = result if isinstance(result, Row) else make(result, reduced)
        except Exception as error:
            raise self._handle.failure(error, row=(reduced, row)) from error
        self._builder.append(reduced)
        self._windows.append(window)

    @override
    def _pending(self) -> int:
        return len(self._windows)

    @override
    def _outputs(self, windows: WindowRows) -> Iterator[OperatorOutput]:
        if not self._windows:
            return
        done, self._windows = np.array(self._windows, np.int64), []
        try:
            batch = self._builder.build()
        except RowMismatch as error:
            raise self._mismatch(error) from error
        arrays = [array.take(pa.array(done)) for array in self._keys.outputs(windows.keys)]
        if windows.ends is None:
            arrays.append(pa.array(windows.starts[done]))
        else:
            arrays += [times(windows.starts[done]), times(windows.ends[done])]
        arrays += [batch.column(i) for i in self._rest]
        if self._has_event_time:
            assert windows.event_times is not None
            arrays.append(pa.array(windows.event_times[done]))
        yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def window_function_runner(spec: graph_pb2.Operator) -> WindowFunctionRunner:
    """The runner for the operator's kind of function."""
    if spec.window_function.kind == graph_pb2.WINDOW_FUNCTION_KIND_REDUCE:
        return ReduceRunner(spec)
    return ProcessRunner(spec)


def _row_maker(schema: pa.Schema, keys: Collection[str]) -> Callable[[object, Row], Row]:
    """A function that makes a row of what a reduce function returned.

    Keys may be left out: they are those of the window. Optional columns that are left out are null.
    """
    names = tuple(schema.names)
    new_row = row_maker(names)
    known = frozenset(names)
    needed = {f.name for f in schema if f.name not in keys and not is_optional(f)}

    def make(result: object, before: Row) -> Row:
        if isinstance(result, tuple) and not hasattr(result, "_fields"):
            if len(result) != len(names):
                raise TypeError(
                    f"reduce returned a tuple of {len(result)} values for {len(names)} columns"
                )
            record: Any = dict(zip(names, result, strict=True))
        else:
            record = record_as_dict(result)
        if record is None:
            raise TypeError(
                f"reduce must return a row with the columns {', '.join(names)} (a row, a dict, a "
                f"dataclass instance or a tuple), got {short_repr(result)}"
            )
        unknown = [str(name) for name in record if name not in known]
        if unknown:
            raise TypeError(
                f"reduce returned the columns {', '.join(unknown)}, which its rows do not have; "
                f"they have {', '.join(names)}"
            )
        missing = [name for name in names if name in needed and name not in record]
        if missing:
            raise TypeError(
                f"reduce returned no column {', '.join(missing)} (a null is given as None); its rows have "
                f"{', '.join(names)}"
            )
        return new_row(
            [
                before[name] if name in keys and name not in record else record.get(name)
                for name in names
            ]
        )

    return make


def _bounds_text(info: WindowInfo) -> str:
    if info.index is not None:
        return f"window {info.index}"
    return f"window [{info.start_ms}, {info.end_ms})"


class _Shown(str):
    """Text that is its own ``repr``."""

    __slots__ = ()

    @override
    def __repr__(self) -> str:
        return str(self)
