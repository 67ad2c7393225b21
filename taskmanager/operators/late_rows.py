"""Rows that come when their windows are over: counted, and dropped or sent to a side output."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from common.elements import OperatorOutput, SideOutput
from penstock.graph.window_schemas import ROWS, is_partial
from penstock.pb import graph_pb2
from taskmanager.operators.operator import NOTHING, OperatorContext


def handle_late_rows(
    late: pa.RecordBatch, window: graph_pb2.WindowSpec, context: OperatorContext
) -> Iterable[OperatorOutput]:
    """Counts late rows (or partial rows); emits them unchanged where they have a side output."""
    rows = late.num_rows
    if is_partial(late.schema):
        rows = int(late.column(ROWS).to_numpy().sum())
    context.counters.late_records += rows
    return (SideOutput(window.late_tag, late),) if window.late_tag else NOTHING
