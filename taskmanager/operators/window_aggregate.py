"""From the specification of an aggregation of windows to the operator that runs it."""

from __future__ import annotations

from penstock.pb import graph_pb2
from taskmanager.operators.accumulation import BoundAggregation
from taskmanager.operators.operator import Operator
from taskmanager.operators.window_pre_aggregate import WindowPreAggregateOperator
from taskmanager.operators.window_timing import accumulating_window_operator


def window_aggregate_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a ``WindowAggregateSpec``."""
    aggregate = spec.window_aggregate
    keys, aggregates = list(aggregate.keys), list(aggregate.aggregates)
    if aggregate.phase == graph_pb2.AGGREGATION_PHASE_PARTIAL:
        is_bounded = aggregate.HasField("out_of_orderness_ms")
        bound_ms = aggregate.out_of_orderness_ms if is_bounded else None
        return WindowPreAggregateOperator(spec, keys, aggregates, aggregate.window, bound_ms)
    accumulation = BoundAggregation(spec, keys, aggregates)
    return accumulating_window_operator(spec, aggregate.window, keys, accumulation)
