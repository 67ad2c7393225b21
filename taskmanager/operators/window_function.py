"""From the specification of a function over windows to the operator that runs it."""

from __future__ import annotations

from penstock.graph.window_spec import is_sliced
from penstock.pb import graph_pb2
from taskmanager.operators.function_contents import FunctionInstances, FunctionSlices
from taskmanager.operators.operator import Operator
from taskmanager.operators.window_timing import instance_window_operator, sliced_window_operator


def window_function_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a ``WindowFunctionSpec``: ``reduce`` or ``process`` on a windowed stream."""
    window = spec.window_function.window
    if is_sliced(window):
        return sliced_window_operator(spec, window, FunctionSlices(spec))
    keys = list(spec.window_function.keys)
    return instance_window_operator(spec, window, keys, FunctionInstances(spec))
