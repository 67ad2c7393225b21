"""Where the updates of a running aggregate go when they are dealt out: those of one key to one subtask.

A value replaces the one before it. Dealt out evenly, the values of a key would come to several subtasks, where an
older one may be written after the newest.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import JobRejected
from penstock.expressions import Expr
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

_Names = tuple[frozenset[str], ...]
"""Of each key, the columns that it is in."""

_UNKNOWN: _Names = (frozenset({""}),)
"""Keys of updates that an earlier job has left behind."""


def update_keys(source: NodeInput) -> tuple[str, ...]:
    """The keys of the updates that come by an input; () where rows come, the columns are not the keys any more, or updates of
    several keys or of an earlier job come."""
    return tuple(map(min, _common(_keys(source))))


def check_order(reader: str, source: NodeInput) -> None:
    """Refuses updates that an operator of another parallelism would read in any order.

    Args:
        reader: the operator.
        source: what is dealt out to its subtasks and is not seen through.

    Raises:
        JobRejected: they are those of an earlier job, or of several keys in one stream.
    """
    known = _keys(source)
    if known <= {()} or _common(known):
        return
    raise JobRejected(
        f"operator {reader!r} has another parallelism than {source.node.name!r} in front of it, whose rows are updates "
        f"{'of an earlier job' if _UNKNOWN in known else 'of several keys'}: dealt out to its subtasks, an older "
        "value of a key might come last. Give both the same parallelism, call .key_by(...) with the keys of the updates in "
        "between, or .as_rows() where their order does not matter"
    )


def _common(known: set[_Names]) -> _Names:
    """The columns that the keys of all these updates are in; () where there are none."""
    if not known or _UNKNOWN in known or len(set(map(len, known))) > 1:
        return ()
    common = tuple(frozenset.intersection(*columns) for columns in zip(*known, strict=True))
    return common if all(common) else ()


def _keys(source: NodeInput) -> set[_Names]:
    node = source.node
    if source.is_rows or source.tag:
        return set()
    match node.operation:
        case RunningAggregate(keys=keys):
            return {tuple(frozenset({key}) for key in keys)}
        case ReadSource(updates_of=operator) if operator:
            return {_UNKNOWN}
        case Project(columns=columns):
            of_input = _keys(node.inputs[0])
            passed = {_renamed(keys, columns) for keys in of_input - {_UNKNOWN}}
            return {keys for keys in passed if all(keys)} | (of_input & {_UNKNOWN})
        case Filter() | AssignEventTime() | RowFunction(kind=graph_pb2.ROW_FUNCTION_KIND_FILTER):
            return _keys(node.inputs[0])
        case Union():
            return set().union(*map(_keys, node.inputs))
        case _:
            return set()


def _renamed(keys: _Names, columns: Sequence[tuple[str, Expr]]) -> _Names:
    return tuple(
        frozenset(name for name, made in columns if column_name(made) in key) for key in keys
    )
