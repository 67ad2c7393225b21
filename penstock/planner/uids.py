"""The uids of operators: given by the user, or derived from the place in the graph.

A derived uid depends on what kind of operator it is, on the uids of its inputs, and on how many such
operators came before it; not on names, functions, parallelism or what lies downstream.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from penstock.graph.logical import Join, Node, Process, ReadSource, RowFunction, WriteSink
from penstock.pb import graph_pb2

_LENGTH = 32


def assign_uids(nodes: Sequence[Node]) -> dict[int, str]:
    """Node index -> uid, for a job's nodes, inputs first."""
    uids: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for node in nodes:
        inputs = [f"{uids[source.node.index]}/{source.tag}" for source in node.inputs]
        place = derived_uid(_kind(node), *inputs)
        uids[node.index] = node.properties.uid or derived_uid(place, str(seen[place]))
        seen[place] += 1
    return uids


def derived_uid(*parts: str) -> str:
    """A uid that is the same for the same parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_LENGTH]


def _kind(node: Node) -> str:
    operation = node.operation
    kind = type(operation).__name__
    if isinstance(operation, (ReadSource, WriteSink)):
        return f"{kind}:{operation.spec.WhichOneof('kind')}"
    if isinstance(operation, RowFunction):
        return f"{kind}:{graph_pb2.RowFunctionKind.Name(operation.kind)}"
    if isinstance(operation, Process):
        return f"{kind}:{graph_pb2.ProcessKind.Name(operation.kind)}"
    if isinstance(operation, Join):
        window = operation.window
        return f"{kind}:{'interval' if window is None else graph_pb2.WindowKind.Name(window.kind)}"
    return kind
