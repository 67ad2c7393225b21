"""Joins of the rows that two streams have in the same window.

When a window fires, its rows are joined by key: for each left row in order of arrival its partners in
order of arrival, then (for the joins that keep them) the right rows without a partner. As in SQL a null key
equals nothing. The timing is that of windows in general; sessions are those of both streams together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.graph.window_spec import is_sliced
from penstock.pb import graph_pb2
from penstock.storage.key_types import Int64Array
from taskmanager.kernels import RecordTable
from taskmanager.operators.join_interval import IntervalJoinOperator
from taskmanager.operators.join_pairs import NO_ROW, joined_pairs
from taskmanager.operators.joined_rows import JoinedRows
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.operators.row_contents import LoggedInstances, RowSlices, SequencedRows
from taskmanager.operators.window_contents import (
    FiredInstances,
    Rows,
    constant_time,
    result_time,
    result_times,
    times,
)
from taskmanager.operators.window_timing import instance_window_operator, sliced_window_operator
from taskmanager.state.instances import InstanceState
from taskmanager.state.row_table import RowDescriptor, part_count, part_rows
from taskmanager.state.wide_columns import widest_row_bytes

_SLICES = ("left_slices", "right_slices")


class JoinSlices(RowSlices):
    """Rows of tumbling and sliding windows: per slice and input, joined at the firing.

    A window that is larger than memory is joined part by part.
    """

    has_one_input = False

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._joined = JoinedRows(spec)
        self._how = spec.join.how
        sides = (self._joined.left, self._joined.right)
        descriptors = [RowDescriptor(side.schema, side.keys.names) for side in sides]
        super().__init__(_SLICES, descriptors)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._batch_rows = context.config.batch_rows

    @override
    def emit(self, start: int, end: int, slices: Sequence[int]) -> Iterator[OperatorOutput]:
        sides = [self._tables(side, slices) for side in range(2)]
        count = max(map(part_count, sides))
        for index in range(count):
            parts = (part_rows(tables, index, count) for tables in sides)
            left, right = (self.unfired(part, end) for part in parts)
            yield from self._joined_part(left, right, start, end)

    def _joined_part(
        self, left: pa.RecordBatch, right: pa.RecordBatch, start: int, end: int
    ) -> Iterator[OperatorOutput]:
        """What rows of a window make; both sides have all rows of the same keys."""
        rows_max = self._joined.rows_max(
            widest_row_bytes(left), widest_row_bytes(right), self._batch_rows
        )
        for of_left, of_right in joined_pairs(*self._ids(left, right), self._how, rows_max):
            rows = len(of_left)
            window = [constant_time(start, rows), constant_time(end, rows)]
            event_times = np.full(rows, result_time(end), np.int64)
            yield self._joined.build(left, of_left, right, of_right, window, event_times)

    @override
    def emit_updated(
        self,
        start: int,
        end: int,
        slices: Sequence[int],
        updated: Sequence[tuple[SequencedRows, Rows | None]],
    ) -> Iterator[OperatorOutput]:
        raise AssertionError("the windows of a join have no allowed lateness, so they fire once")

    def _ids(self, left: pa.RecordBatch, right: pa.RecordBatch) -> tuple[Int64Array, Int64Array]:
        """Numbers for the keys of both sides: equal keys, equal numbers; ``NO_ROW`` for null keys."""
        table = RecordTable(self._joined.left.keys.types, [], with_index=True)
        found = []
        for side, batch in ((self._joined.left, left), (self._joined.right, right)):
            ids = table.lookup_or_insert(side.keys.encode(batch)).astype(np.int64)
            found.append(np.where(side.has_key(batch), ids, NO_ROW))
        return found[0], found[1]


class JoinSessions(LoggedInstances):
    """Rows of sessions: those of both inputs in one log, joined when the session ends."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        self._joined = JoinedRows(spec)
        self._how = spec.join.how
        sides = (self._joined.left, self._joined.right)
        self._types = [pa.struct(list(side.schema)) for side in sides]
        rows = [pa.field(n, kind) for n, kind in zip(("left", "right"), self._types, strict=True)]
        super().__init__(pa.struct([pa.field("is_right", pa.bool_(), nullable=False), *rows]))

    @override
    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        super().open(context, state)
        self._batch_rows = context.config.batch_rows

    @override
    def _columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        side, count = self.context.origins.input_index, batch.num_rows
        rows = [pa.nulls(count, kind) for kind in self._types]
        rows[side] = pa.StructArray.from_arrays(batch.columns, fields=list(self._types[side]))
        return [pa.repeat(bool(side), count), *rows]

    @override
    def emit(self, fired: FiredInstances) -> Iterator[tuple[int, OperatorOutput]]:
        assert fired.ends is not None, "a session has an end"
        counts, _, values = self._state.gather(fired.instances)
        session_of = np.repeat(np.arange(len(counts)), counts)
        is_right = values.field("is_right").to_numpy(zero_copy_only=False)
        sides, sessions, ids = [], [], []
        for side, mine in enumerate((~is_right, is_right)):
            rows = values.field(side + 1).filter(pa.array(mine))
            batch = pa.RecordBatch.from_struct_array(rows)
            sides.append(batch)
            sessions.append(session_of[mine])
            has_key = self._joined.side(side).has_key(batch)
            ids.append(np.where(has_key, session_of[mine], NO_ROW))
        rows_max = self._joined.rows_max(
            widest_row_bytes(sides[0]), widest_row_bytes(sides[1]), self._batch_rows
        )
        for of_left, of_right in joined_pairs(ids[0], ids[1], self._how, rows_max):
            has_left = of_left >= 0
            session = np.empty(len(of_left), np.int64)
            session[has_left] = sessions[0][of_left[has_left]]
            session[~has_left] = sessions[1][of_right[~has_left]]
            window = [times(fired.starts[session]), times(fired.ends[session])]
            ends = fired.ends[session]
            yield (
                0,
                self._joined.build(
                    sides[0], of_left, sides[1], of_right, window, result_times(ends)
                ),
            )


def join_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a ``JoinSpec``."""
    if spec.join.is_interval:
        return IntervalJoinOperator(spec)
    window = spec.join.window
    if is_sliced(window):
        return sliced_window_operator(spec, window, JoinSlices(spec))
    return instance_window_operator(spec, window, list(spec.join.keys), JoinSessions(spec))
