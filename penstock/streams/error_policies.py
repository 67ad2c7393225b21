"""What ``on_error`` asks for, and which operators have bad records of their own (pure)."""

from __future__ import annotations

from penstock.errors import JobRejected
from penstock.graph.logical import Join, Node, Process, Union, input_schema, is_spark
from penstock.graph.operator_checks import ERROR_COLUMN
from penstock.pb import graph_pb2


def policy_of(action: str, node: Node) -> graph_pb2.ErrorPolicy:
    """What happens to records that an operator cannot handle.

    Args:
        action: "fail", "skip", or the name of a side output.

    Raises:
        JobRejected: it is none of these, or the operator has no such records.
    """
    policy = _policy(action)
    if (
        policy.action != graph_pb2.ERROR_ACTION_FAIL
        and isinstance(node.operation, Process)
        and node.operation.kind == graph_pb2.PROCESS_KIND_KEYED_BATCH
    ):
        raise JobRejected(
            f"on_error({action!r}): {node.name!r} handles whole batches and has no bad records of its "
            "own: catch the error in the function, or use a ps.KeyedProcessFunction"
        )
    if policy.action != graph_pb2.ERROR_ACTION_FAIL and is_spark(node.operation):
        raise JobRejected(
            f"on_error({action!r}): {node.name!r} runs on Spark, where what fails fails as a whole: leave bad "
            "rows out in the function, or before it"
        )
    if policy.action != graph_pb2.ERROR_ACTION_FAIL and node.is_grouping:
        late = "late rows go to .window(..., late_to='late')"
        if isinstance(node.operation, Join):
            late = "late rows are dropped and counted"
        raise JobRejected(
            f"on_error({action!r}): {node.name!r} works on groups of rows and has no bad records of "
            f"its own: {late}, and a function or a sum that fails fails the job; set on_error on "
            "the operators before it"
        )
    if policy.tag:
        if isinstance(node.operation, Union):
            raise JobRejected("on_error: a union has no bad records; set it on its inputs")
        if node.inputs and ERROR_COLUMN in input_schema(node.inputs[0]).names:
            raise JobRejected(
                f"on_error({policy.tag!r}): bad records get a column {ERROR_COLUMN!r}, and the "
                f"input of {node.name!r} has one already; rename it first"
            )
    return policy


def _policy(action: str) -> graph_pb2.ErrorPolicy:
    if action == "fail":
        return graph_pb2.ErrorPolicy(action=graph_pb2.ERROR_ACTION_FAIL)
    if action == "skip":
        return graph_pb2.ErrorPolicy(action=graph_pb2.ERROR_ACTION_SKIP)
    if not isinstance(action, str) or not action:
        raise JobRejected(
            f"on_error: {action!r} is not 'fail', 'skip' or the name of a side output"
        )
    if action.lower() in ("fail", "skip"):
        raise JobRejected(
            f"on_error: {action!r} would be the name of a side output; did you mean {action.lower()!r}?"
        )
    return graph_pb2.ErrorPolicy(action=graph_pb2.ERROR_ACTION_SIDE_OUTPUT, tag=action)
