"""Which operators give out equal rows for equal input: known, declared, or impossible.

Columnar operators and the sources that replay exactly are known to. Python code is when it was declared
to, on the operator or for the whole job. Windows and joins of event time are when they themselves were declared
to: which rows are late depends on when watermarks arrive, so it is for the user to say that none are.
Running aggregates and what depends on the machine's clock never are.
"""

from __future__ import annotations

from penstock.graph.logical import (
    ApplyWindowFunction,
    BatchFunction,
    Join,
    Node,
    Process,
    ReadSource,
    RowFunction,
    RunningAggregate,
    SparkStage,
    WindowAggregate,
)
from penstock.pb import graph_pb2


def is_deterministic(node: Node, *, whole_job: bool) -> bool:
    """Whether an operator gives out equal rows for equal input.

    Args:
        whole_job: all Python functions of the job were declared to.
    """
    declared = node.properties.deterministic
    if never_deterministic(node) or declared is False:
        return False
    operation = node.operation
    if isinstance(operation, (WindowAggregate, ApplyWindowFunction, Join)):
        return declared is True
    if is_python(node):
        return declared is True or whole_job
    return True


def is_python(node: Node) -> bool:
    """Whether code of the user's decides which rows an operator gives out.

    The function of a generator is not meant: it is a function of the position by its contract, and every
    restart relies on that.
    """
    operation = node.operation
    if isinstance(operation, ReadSource):
        return operation.spec.WhichOneof("kind") in ("custom", "spark")
    return isinstance(operation, (RowFunction, BatchFunction, Process, SparkStage))


def never_deterministic(node: Node) -> str:
    """Why no declaration can make an operator deterministic, "" = it can."""
    operation = node.operation
    if isinstance(operation, ReadSource) and operation.spec.WhichOneof("kind") == "socket":
        return "what came over a socket cannot be read again"
    if isinstance(operation, RunningAggregate):
        return (
            "a running aggregate gives out its values once per key and batch, and batches are cut as "
            "the rows happen to come"
        )
    if (
        isinstance(operation, (WindowAggregate, ApplyWindowFunction))
        and operation.window.time == graph_pb2.TIME_DOMAIN_PROCESSING
        and operation.window.kind != graph_pb2.WINDOW_KIND_COUNT
    ):
        return "its windows depend on the machine's clock; use event time"
    if isinstance(operation, (WindowAggregate, ApplyWindowFunction)) and operation.window.ttl_ms:
        return (
            "its keys are forgotten by the machine's clock; leave out the ttl of its count windows"
        )
    return ""
