"""Which operator keeps the time of a kind of window, whatever the window holds."""

from __future__ import annotations

from typing import Any

from penstock.graph.window_spec import is_sliced, slice_ms
from penstock.pb import graph_pb2
from taskmanager.operators.accumulation import Accumulation
from taskmanager.operators.aggregate_contents import AggregateInstances, AggregateSlices
from taskmanager.operators.count_window import CountWindowOperator
from taskmanager.operators.operator import Operator
from taskmanager.operators.session_window import (
    EventTimeSessionOperator,
    ProcessingTimeSessionOperator,
)
from taskmanager.operators.sliced_window import (
    EventTimeWindowOperator,
    ProcessingTimeWindowOperator,
)
from taskmanager.operators.window_contents import InstanceContents, SliceContents


def sliced_window_operator(
    spec: graph_pb2.Operator, window: graph_pb2.WindowSpec, contents: SliceContents[Any]
) -> Operator:
    """The operator of a tumbling or sliding window."""
    if window.time == graph_pb2.TIME_DOMAIN_EVENT:
        return EventTimeWindowOperator(spec, window, contents)
    return ProcessingTimeWindowOperator(spec, window, contents)


def instance_window_operator(
    spec: graph_pb2.Operator,
    window: graph_pb2.WindowSpec,
    keys: list[str],
    contents: InstanceContents[Any],
) -> Operator:
    """The operator of a session or count window."""
    if window.kind == graph_pb2.WINDOW_KIND_COUNT:
        return CountWindowOperator(spec, window, keys, contents)
    if window.time == graph_pb2.TIME_DOMAIN_EVENT:
        return EventTimeSessionOperator(spec, window, keys, contents)
    return ProcessingTimeSessionOperator(spec, window, keys, contents)


def accumulating_window_operator(
    spec: graph_pb2.Operator,
    window: graph_pb2.WindowSpec,
    keys: list[str],
    accumulation: Accumulation,
) -> Operator:
    """The operator of a window of any kind that holds one accumulator per key."""
    if is_sliced(window):
        slices = AggregateSlices(accumulation, slice_ms(window))
        return sliced_window_operator(spec, window, slices)
    return instance_window_operator(spec, window, keys, AggregateInstances(accumulation))
