"""Where the updates of a running aggregate go when they are dealt out: those of one key to one subtask.

A value replaces the one before it. Dealt out evenly, the values of a key would come to several subtasks, where an
older one may be written after the newest.
"""

from __future__ import annotations

from penstock.errors import JobRejected
from penstock.graph.column_checks import column_name
from penstock.graph.logical import (
    AssignEventTime,
    Filter,
    NodeInput,
    Project,
    ReadSource,
    RowFunction,
    RunningAggregate,
    Union,
)
from penstock.pb import graph_pb2

_UNKNOWN = ("",)
"""Keys of updates that an earlier job has left behind."""


def update_keys(source: NodeInput) -> tuple[str, ...]:
    """The keys of the updates that come by an input; () where rows come, the columns are not the keys any more, or updates of
    several keys come."""
    known = _keys(source) - {_UNKNOWN}
    return known.pop() if len(known) == 1 else ()


def check_order(reader: str, source: NodeInput) -> None:
    """Refuses updates that an operator of another parallelism would read in any order.

    Args:
        reader: the operator.
        source: what is dealt out to its subtasks and is not seen through.

    Raises:
        JobRejected: they are those of an earlier job, or of several keys in one stream.
    """
    known = _keys(source)
    if not known or (len(known) == 1 and _UNKNOWN not in known):
        return
    raise JobRejected(
        f"operator {reader!r} has another parallelism than {source.node.name!r} in front of it, whose rows are updates "
        f"{'of an earlier job' if _UNKNOWN in known else 'of several keys'}: dealt out to its subtasks, an older "
        "value of a key might come last. Give both the same parallelism, call .key_by(...) with the keys of the updates in "
        "between, or .as_rows() where their order does not matter"
    )


def _keys(source: NodeInput) -> set[tuple[str, ...]]:
    node = source.node
    if source.is_rows or source.tag:
        return set()
    match node.operation:
        case RunningAggregate(keys=keys):
            return {keys}
        case ReadSource(updates_of=operator) if operator:
            return {_UNKNOWN}
        case Project(columns=columns):
            passed = {column_name(made): name for name, made in columns}
            of_input = _keys(node.inputs[0])
            there = {keys for keys in of_input if passed.keys() >= set(keys)}
            return {tuple(passed[key] for key in keys) for keys in there} | (of_input & {_UNKNOWN})
        case Filter() | AssignEventTime() | RowFunction(kind=graph_pb2.ROW_FUNCTION_KIND_FILTER):
            return _keys(node.inputs[0])
        case Union():
            return set().union(*map(_keys, node.inputs))
        case _:
            return set()
