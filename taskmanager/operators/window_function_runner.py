"""Calls the user's function for windows with all their rows.

Rows come as one batch, window after window. Results leave batch by batch, and at the latest when a
function has had its slice of time, each with how many windows are done: the owner forgets these first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import PAUSE, OperatorOutput, SideOutput
from penstock.errors import TaskFailure
from penstock.functions.functions import Collector, WindowInfo
from penstock.pb import graph_pb2
from penstock.rows.decoded_values import decoded_keys
from penstock.rows.rows import (
    RowMismatch,
    RowSequence,
    rows_of,
)
from penstock.rows.schema import EVENT_TIME, schema_from_bytes, user_schema
from penstock.storage.key_types import Int64Array
from taskmanager.operators.operator import OperatorContext
from taskmanager.operators.returned_rows import emit_returned
from taskmanager.operators.time_slice import SLICE_NS
from taskmanager.operators.user_function import UserFunctionHandle

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


class WindowFunctionRunner:
    """Loads a ``WindowFunction`` and calls its ``process`` window by window; it emits any rows."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._name = spec.name
        self._handle = UserFunctionHandle(spec.name, spec.window_function.function)
        input_schema = user_schema(schema_from_bytes(spec.input_schema))
        self._schema = schema_from_bytes(spec.output_schema)
        self._has_event_time = EVENT_TIME in self._schema.names
        self._key_names = tuple(spec.window_function.keys)
        self._collector = Collector(user_schema(self._schema), input_schema)
        self._window_of: list[int] = []

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
        names = self._key_names
        self._keys = decoded_keys(windows.keys[: len(names)], names) if names else None
        deadline = self._now_ns() + SLICE_NS
        for window in range(len(bounds) - 1):
            self._call(windows, window, rows[bounds[window] : bounds[window + 1]])
            is_over = self._now_ns() >= deadline
            if is_over or len(self._collector) >= self._batch_rows:
                yield from ((window + 1, output) for output in self._outputs(windows))
                if is_over:
                    yield window + 1, PAUSE
                    deadline = self._now_ns() + SLICE_NS
        yield from ((len(bounds) - 1, output) for output in self._outputs(windows))

    def _call(self, windows: WindowRows, window: int, rows: RowSequence) -> None:
        key, info = None, windows.info(window)
        try:
            if self._keys is not None:
                key = self._keys[window]
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

    def _outputs(self, windows: WindowRows) -> Iterator[OperatorOutput]:
        """What was emitted since the last call."""
        window_of, self._window_of = self._window_of, []
        try:
            batch = self._collector.take()
            sides = self._collector.take_sides()
        except RowMismatch as error:
            raise TaskFailure(
                f"operator {self._name!r}: the result of {self._handle.name} does not fit: {error}",
                operator=self._name,
                row=error.row,
            ) from error
        if batch is not None:
            arrays = batch.columns
            if self._has_event_time:
                assert windows.event_times is not None
                arrays = [*arrays, pa.array(windows.event_times[np.array(window_of, np.int64)])]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        for tag, side in sides:
            yield SideOutput(tag, side)


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
