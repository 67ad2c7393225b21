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
    Node,
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


class UpdateKeys:
    """The keys that updates have on their way through the job.

    Args:
        nodes: the job's nodes, inputs first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._known: dict[int, set[_Names]] = {}
        for node in nodes:
            self._known[node.index] = self._of_node(node)

    def of(self, source: NodeInput) -> tuple[str, ...]:
        """The keys of the updates that come by an input; () where rows come, the columns are not the keys any more, or
        updates of several keys or of an earlier job come."""
        return tuple(map(min, _common(self._of_input(source))))

    def check_order(self, reader: str, source: NodeInput) -> None:
        """Refuses updates that an operator of another parallelism would read in any order.

        Args:
            reader: the operator.
            source: what is dealt out to its subtasks and is not seen through.

        Raises:
            JobRejected: they are those of an earlier job, or of several keys in one stream.
        """
        known = self._of_input(source)
        if known <= {()} or _common(known):
            return
        raise JobRejected(
            f"operator {reader!r} has another parallelism than {source.node.name!r} in front of it, whose rows are updates "
            f"{'of an earlier job' if _UNKNOWN in known else 'of several keys'}: dealt out to its subtasks, an older "
            "value of a key might come last. Give both the same parallelism, call .key_by(...) with the keys of the updates in "
            "between, or .as_rows() where their order does not matter"
        )

    def _of_input(self, source: NodeInput) -> set[_Names]:
        return set() if source.is_rows or source.tag else self._known[source.node.index]

    def _of_node(self, node: Node) -> set[_Names]:
        match node.operation:
            case RunningAggregate(keys=keys):
                return {tuple(frozenset({key}) for key in keys)}
            case ReadSource(updates_of=operator) if operator:
                return {_UNKNOWN}
            case Project(columns=columns):
                of_input = self._of_input(node.inputs[0])
                passed = {_renamed(keys, columns) for keys in of_input - {_UNKNOWN}}
                return {keys for keys in passed if all(keys)} | (of_input & {_UNKNOWN})
            case (
                Filter() | AssignEventTime() | RowFunction(kind=graph_pb2.ROW_FUNCTION_KIND_FILTER)
            ):
                return self._of_input(node.inputs[0])
            case Union():
                return set().union(*map(self._of_input, node.inputs))
            case _:
                return set()


def _common(known: set[_Names]) -> _Names:
    """The columns that the keys of all these updates are in; () where there are none."""
    if not known or _UNKNOWN in known or len(set(map(len, known))) > 1:
        return ()
    common = tuple(frozenset.intersection(*columns) for columns in zip(*known, strict=True))
    return common if all(common) else ()


def _renamed(keys: _Names, columns: Sequence[tuple[str, Expr]]) -> _Names:
    return tuple(
        frozenset(name for name, made in columns if column_name(made) in key) for key in keys
    )
