"""From the specification in the job graph to the operator that runs."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import JobRejected
from penstock.graph.operator_checks import is_spark_operator
from penstock.pb import graph_pb2
from taskmanager.operators.batch_function import BatchFunctionOperator
from taskmanager.operators.collect_sink import CollectOperator
from taskmanager.operators.event_time import EventTimeOperator
from taskmanager.operators.join_window import join_operator
from taskmanager.operators.operator import Operator
from taskmanager.operators.persisted import PersistedSourceOperator, PersistOperator
from taskmanager.operators.process import process_operator
from taskmanager.operators.project import FilterOperator, ProjectOperator
from taskmanager.operators.row_function import RowFunctionOperator
from taskmanager.operators.running_aggregate import running_aggregate_operator
from taskmanager.operators.sink import SinkOperator
from taskmanager.operators.spark_stage import SparkStageOperator
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.operators.window_function import window_function_operator


class PassOperator(Operator):
    """Passes everything on: where streams meet."""

    def __init__(self, spec: graph_pb2.Operator) -> None:
        """Needs nothing of its specification."""


def _sink(spec: graph_pb2.Operator) -> Operator:
    if spec.sink.WhichOneof("kind") == "collect":
        return CollectOperator(spec)
    if spec.sink.WhichOneof("kind") == "persist":
        return PersistOperator(spec)
    return SinkOperator(spec)


def _source(spec: graph_pb2.Operator) -> Operator:
    if is_spark_operator(spec):
        return SparkStageOperator(spec)
    return PersistedSourceOperator(spec)


_BUILDERS: dict[str, Callable[[graph_pb2.Operator], Operator]] = {
    "project": ProjectOperator,
    "filter": FilterOperator,
    "row_function": RowFunctionOperator,
    "batch_function": BatchFunctionOperator,
    "event_time": EventTimeOperator,
    "window_aggregate": window_aggregate_operator,
    "window_function": window_function_operator,
    "running_aggregate": running_aggregate_operator,
    "join": join_operator,
    "process": process_operator,
    "sink": _sink,
    "source": _source,
    "spark": SparkStageOperator,
    "pass": PassOperator,
}


def build_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a specification; sources that read splits are built by their task.

    Raises:
        JobRejected: the specification is of a kind that this version does not know.
    """
    kind = spec.WhichOneof("spec")
    if kind not in _BUILDERS:
        raise JobRejected(
            f"operator {spec.name}: this TaskManager does not know operators of kind {kind!r};"
            " run client and cluster in the same version"
        )
    return _BUILDERS[kind](spec)
