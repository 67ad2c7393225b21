"""Session windows in event and processing time.

A row opens the session [time, time + gap) of its key and becomes one with all sessions it touches. It
is late when the session that it is then part of is over, the allowed lateness included: a row whose own
interval is over is still taken in by an open session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import (
    MAX_TIMESTAMP_MS,
    MIN_TIMESTAMP_MS,
    TIME_LIMIT_MS,
    OperatorOutput,
    Watermark,
)
from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import time_bounds
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.late_rows import handle_late_rows
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext
from taskmanager.operators.operator_progress import WatermarkState
from taskmanager.operators.window_contents import FiredInstances, InstanceContents, result_times
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.session_table import SessionTable

_SESSIONS = "sessions"


class _SessionWindowOperator(Operator):
    """What both time domains share."""

    is_by_clock: ClassVar[bool] = False
    """Whether its time is the machine's."""

    def __init__(
        self,
        spec: graph_pb2.Operator,
        window: graph_pb2.WindowSpec,
        keys: list[str],
        contents: InstanceContents[Any],
    ) -> None:
        self._name = spec.name
        self._window = window
        self._gap_ms = window.gap_ms
        self._lateness_ms = window.allowed_lateness_ms
        self._keys = KeyColumns(keys, schema_from_bytes(spec.input_schema))
        self._contents = contents
        self._watermark_ms = MIN_TIMESTAMP_MS

    @override
    def restore(self, context: OperatorContext) -> None:
        self._sessions_in(context.state)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._contents.open(context, lambda: self._sessions.contents)
        self._watermark = WatermarkState(context, by_clock=self.is_by_clock)
        self._watermark_ms = self._watermark.restored_ms()
        self._ranges = self._watermark.ranges()

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._watermark.keep(self._watermark_ms, self._ranges)
        self._contents.prepare_snapshot()

    @override
    def close(self) -> None:
        self._contents.close()

    @property
    def _sessions(self) -> SessionTable:
        return self._sessions_in(self.context.state)

    def _sessions_in(self, state: KeyedStateBackend) -> SessionTable:
        return state.session_table(
            _SESSIONS, self._keys.types, self._gap_ms, self._contents.new_state
        )

    def _add(self, batch: pa.RecordBatch, keys: Int64Array, times: Int64Array) -> Int64Array:
        """Adds rows; returns the session of each."""
        update = self._sessions.add(keys, times)
        if len(update.source):
            self._contents.merge(update.source, update.target)
        self._contents.add(update.of_row, batch)
        return update.of_row

    def _advance(self, time_ms: int) -> Iterator[OperatorOutput]:
        """Fires the sessions that are over, then moves time on."""
        while len(due := self._sessions.due(time_ms)):
            yield from self._fire(due)
        self._watermark_ms = max(self._watermark_ms, time_ms)
        if self._lateness_ms:
            while len(gone := self._sessions.expired(self._watermark_ms, self._lateness_ms)):
                self._forget(gone)

    def _fire(self, due: Int64Array) -> Iterator[OperatorOutput]:
        table = self._sessions
        ends = table.ends(due)
        fired = FiredInstances(due, table.keys(due), table.starts(due), ends, result_times(ends))
        done = 0
        for now_done, output in self._contents.emit(fired):
            self._fired(due[done:now_done])
            done = now_done
            yield output
        self._fired(due[done:])

    def _fired(self, sessions: Int64Array) -> None:
        if self._lateness_ms:
            self._sessions.mark_fired(sessions)
        else:
            self._forget(sessions)

    def _forget(self, sessions: Int64Array) -> None:
        if len(sessions):
            self._contents.clear(sessions)
            self._sessions.remove(sessions)


class EventTimeSessionOperator(_SessionWindowOperator):
    """Sessions of event time, which watermarks fire."""

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        times: Int64Array = batch.column(EVENT_TIME).to_numpy()
        smallest, largest = time_bounds(times)
        if smallest < -TIME_LIMIT_MS or largest > TIME_LIMIT_MS:
            raise BadRecord(
                f"an event time of {smallest if smallest < 0 else largest} ms is out of range",
                operator=self._name,
            )
        encoded = self._keys.encode(batch)
        keys = self._sessions.key_indices(encoded)
        watermarks: int | Int64Array = self._watermark_ms
        furthest_ms = self._watermark_ms
        if self._ranges.are_ahead(self._watermark_ms):
            # Of keys that were further before a restore, rows are late by that until the stream has come so far.
            watermarks = np.maximum(self._ranges.of_keys(encoded), self._watermark_ms)
            furthest_ms = self._ranges.largest_ms
        if smallest + self._gap_ms + self._lateness_ms - 1 <= furthest_ms:
            is_late = self._late_rows(keys, times, watermarks)
            if is_late.any():
                late = batch.filter(pa.array(is_late))
                self._sessions.forget_unused(np.setdiff1d(keys[is_late], keys[~is_late]))
                batch = batch.filter(pa.array(~is_late))
                yield from handle_late_rows(late, self._window, self.context)
                keys, times = keys[~is_late], times[~is_late]
                if not len(times):
                    return
        sessions = self._add(batch, keys, times)
        if self._lateness_ms:
            over = np.unique(sessions[self._sessions.ends(sessions) - 1 <= self._watermark_ms])
            if len(over):
                yield from self._fire(self._sessions.by_end(over))

    def _late_rows(
        self, keys: Int64Array, times: Int64Array, watermarks: int | Int64Array
    ) -> BoolArray:
        """Which rows find no open session: decided in order of arrival, for the few keys in question."""
        suspects = times + (self._gap_ms + self._lateness_ms - 1) <= watermarks
        is_late = np.zeros(len(times), np.bool_)
        rows = np.flatnonzero(np.isin(keys, np.unique(keys[suspects])))
        open_sessions: dict[int, list[tuple[int, int]]] = {}
        for row, key, time, suspect in zip(
            rows.tolist(),
            keys[rows].tolist(),
            times[rows].tolist(),
            suspects[rows].tolist(),
            strict=True,
        ):
            if key not in open_sessions:
                open_sessions[key] = self._sessions.intervals(key)
            start, end = time, time + self._gap_ms
            apart = []
            for session in open_sessions[key]:
                if session[0] <= end and start <= session[1]:
                    start, end = min(start, session[0]), max(end, session[1])
                else:
                    apart.append(session)
            if suspect and len(apart) == len(open_sessions[key]):
                is_late[row] = True
            else:
                open_sessions[key] = [*apart, (start, end)]
        return is_late

    @override
    def on_watermark(self, watermark: Watermark) -> Iterator[OperatorOutput]:
        yield from self._advance(watermark.timestamp_ms)
        yield watermark


class ProcessingTimeSessionOperator(_SessionWindowOperator):
    """Sessions of the machine's clock, which timers fire; what is open fires at the end of data."""

    is_by_clock = True

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._register_timer()

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        now_ms = max(self.context.clock.now_ms(), self._watermark_ms + 1)
        keys = self._sessions.key_indices(self._keys.encode(batch))
        self._add(batch, keys, np.full(batch.num_rows, now_ms, np.int64))
        self._register_timer()
        return NOTHING

    @override
    def on_timer(self, now_ms: int) -> Iterator[OperatorOutput]:
        yield from self._advance(now_ms - 1)
        self._register_timer()

    @override
    def on_end_of_data(self) -> Iterator[OperatorOutput]:
        yield from self._advance(MAX_TIMESTAMP_MS)

    def _register_timer(self) -> None:
        end = self._sessions.next_end()
        if end is not None:
            self.context.register_timer(end)
