"""From the specification of an aggregation of windows to the operator that runs it."""

from __future__ import annotations

from penstock.graph.window_spec import is_sliced, slice_ms
from penstock.pb import graph_pb2
from taskmanager.operators.aggregate_contents import AggregateInstances, AggregateSlices
from taskmanager.operators.operator import Operator
from taskmanager.operators.window_pre_aggregate import WindowPreAggregateOperator
from taskmanager.operators.window_timing import instance_window_operator, sliced_window_operator


def window_aggregate_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a ``WindowAggregateSpec``."""
    aggregate = spec.window_aggregate
    keys, aggregates = list(aggregate.keys), list(aggregate.aggregates)
    if aggregate.phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
        is_bounded = aggregate.HasField("out_of_orderness_ms")
        bound_ms = aggregate.out_of_orderness_ms if is_bounded else None
        return WindowPreAggregateOperator(spec, keys, aggregates, aggregate.window, bound_ms)
    if is_sliced(aggregate.window):
        slices = AggregateSlices(spec, keys, aggregates, slice_ms(aggregate.window))
        return sliced_window_operator(spec, aggregate.window, slices)
    instances = AggregateInstances(spec, keys, aggregates)
    return instance_window_operator(spec, aggregate.window, keys, instances)
