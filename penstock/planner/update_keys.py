"""Where the updates of a running aggregate go when they are dealt out: those of one key to one subtask.

A value replaces the one before it. Dealt out evenly, the values of a key would come to several subtasks, where an
older one may be written after the newest.
"""

from __future__ import annotations

from penstock.graph.column_checks import column_name
from penstock.graph.logical import (
    AssignEventTime,
    Filter,
    NodeInput,
    Project,
    RowFunction,
    RunningAggregate,
    Union,
)
from penstock.pb import graph_pb2


def update_keys(source: NodeInput) -> tuple[str, ...]:
    """The keys of the updates that come by an input; () where rows come, or the columns are not the keys any more."""
    node = source.node
    if source.is_rows or source.tag:
        return ()
    match node.operation:
        case RunningAggregate(keys=keys):
            return keys
        case Project(columns=columns):
            keys = update_keys(node.inputs[0])
            passed = {name for name, made in columns if column_name(made) == name}
            return keys if passed.issuperset(keys) else ()
        case Filter() | AssignEventTime() | RowFunction(kind=graph_pb2.ROW_FUNCTION_KIND_FILTER):
            return update_keys(node.inputs[0])
        case Union():
            known = {keys for each in node.inputs if (keys := update_keys(each))}
            return known.pop() if len(known) == 1 else ()
        case _:
            return ()
