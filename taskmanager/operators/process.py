"""``.process(function)``: the operator for the function's kind."""

from __future__ import annotations

from penstock.pb import graph_pb2
from taskmanager.operators.operator import Operator
from taskmanager.operators.process_batch import BatchProcessOperator
from taskmanager.operators.process_compiled import CompiledProcessOperator
from taskmanager.operators.process_rows import ProcessOperator


def process_operator(spec: graph_pb2.Operator) -> Operator:
    """The operator of a specification."""
    if spec.process.kind == graph_pb2.PROCESS_KIND_KEYED_BATCH:
        return BatchProcessOperator(spec)
    if spec.process.HasField("compiled"):
        return CompiledProcessOperator(spec)
    return ProcessOperator(spec)
