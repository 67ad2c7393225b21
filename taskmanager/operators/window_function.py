"""From the specification of a function over windows to the operator that runs it."""

from __future__ import annotations

from penstock.graph.window_spec import is_sliced
from penstock.pb import graph_pb2
from taskmanager.operators.function_contents import FunctionInstances, FunctionSlices
from taskmanager.operators.operator import Operator
from taskmanager.operators.reduction import Reduction
from taskmanager.operators.window_timing import (
    accumulating_window_operator,
    instance_window_operator,
    sliced_window_operator,
)


def window_function_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a ``WindowFunctionSpec``: ``reduce`` or ``process`` on a windowed stream."""
    window, keys = spec.window_function.window, list(spec.window_function.keys)
    if spec.window_function.kind == graph_pb2.WINDOW_FUNCTION_KIND_REDUCE:
        return accumulating_window_operator(spec, window, keys, Reduction(spec))
    if is_sliced(window):
        return sliced_window_operator(spec, window, FunctionSlices(spec))
    return instance_window_operator(spec, window, keys, FunctionInstances(spec))
