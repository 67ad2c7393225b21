"""Which streams are keyed: what leaves the key columns alone keeps a stream keyed, everything else ends it.

Invariant: rows that are said to be *placed* by keys lie in the subtask that ``key_by`` sent them to, with the
values that they had there. An operation that is not known to keep both gives a plain stream, and the
stream remembers: a window on it would silently be one for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph.column_checks import column_name
from penstock.graph.logical import (
    AssignEventTime,
    Filter,
    Node,
    NodeInput,
    Project,
    Routing,
    RowFunction,
    Union,
    is_key_function,
    is_spark,
)
from penstock.pb import graph_pb2


@dataclass(frozen=True, slots=True)
class LostKeys:
    """The keys that a stream had, and the call that ended them."""

    keys: tuple[str, ...]
    call: str

    @property
    def story(self) -> str:
        """In the user's words, without a full stop."""
        return (
            f"the stream was keyed by {', '.join(self.keys)}, and {self.call} may have changed the keys, or "
            "where their rows are"
        )


def output_of(node: Node, tag: str = "") -> NodeInput:
    """An output of a node, placed by keys where those of its input are left alone."""
    keys = _kept(node, tag)
    if not keys:
        return NodeInput(node, tag)
    return NodeInput(node, tag, Routing(graph_pb2.PARTITIONING_HASH, keys, is_placed=True))


def lost_keys(source: NodeInput) -> LostKeys | None:
    """The keys that the rows had on their way here; None where they still have them, or never had any.

    What a window, an aggregate, a join or Spark gives out is a stream of its own, which never had keys.
    """
    if source.routing.keys:
        return None
    seen = set()
    waiting = [source]
    while waiting:
        given = waiting.pop()
        node = given.node
        if given.routing.lost_keys:
            return LostKeys(given.routing.lost_keys, given.routing.call)
        is_new = node.is_grouping or is_spark(node.operation)
        if (node.index, given.tag) in seen or (is_new and not given.tag):
            continue
        seen.add((node.index, given.tag))
        for each in node.inputs:
            if each.routing.keys:
                return LostKeys(each.routing.keys, repr(node.name))
        waiting.extend(node.inputs)
    return None


def _kept(node: Node, tag: str) -> tuple[str, ...]:
    """The keys that an output has of the node's inputs, () = none."""
    if not node.inputs:
        return ()
    keys = node.inputs[0].routing.keys
    if tag:  # late rows and bad records are rows of the input
        return () if node.emits_any_tag else keys
    match node.operation:
        case Filter() | AssignEventTime():
            return keys
        case RowFunction(kind=graph_pb2.ROW_FUNCTION_KIND_FILTER):
            return keys
        case RowFunction() if is_key_function(node.operation):
            return keys
        case Project(columns=columns):
            computed = dict(columns)
            is_same = all(key in computed and column_name(computed[key]) == key for key in keys)
            return keys if is_same else ()
        case Union():
            return keys if all(each.routing.keys == keys for each in node.inputs) else ()
        case _:
            return ()
