"""Connected parts of graphs: what belongs together, and what depends on itself.

Both functions take time that is linear in nodes and connections, but for a factor that no real graph makes
felt, and neither recurses. Their results depend on the order of their arguments alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def connected(nodes: Sequence[Node], groups: Iterable[Iterable[Node]]) -> list[list[Node]]:
    """The parts into which nodes fall when all nodes of each group are joined.

    Returns:
        The parts in the order of their first nodes; within a part the order of ``nodes``.

    Source: union-find with path halving.
    """
    parent = {node: node for node in nodes}

    def root_of(node: Node) -> Node:
        while (above := parent[node]) != node:
            parent[node] = parent[above]
            node = parent[node]
        return node

    for group in groups:
        members = iter(group)
        first = next(members, None)
        if first is None:
            continue
        root = root_of(first)
        for member in members:
            parent[root_of(member)] = root
    parts: dict[Node, list[Node]] = {}
    for node in nodes:
        parts.setdefault(root_of(node), []).append(node)
    return list(parts.values())


def strongly_connected(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components of a directed graph.

    Args:
        successors: node -> the nodes that its edges lead to.

    Returns:
        Components in topological order, each with its nodes in ascending order. Nodes that were numbered
        in a topological order mostly keep it: the search takes the last first.

    Source: Tarjan 1972, with a stack of its own in the place of recursion.
    """
    count = len(successors)
    found_at = [-1] * count  # order of discovery; -1 = not yet found
    lowest = [0] * count
    is_open = [False] * count  # found, and its component is not complete
    open_nodes: list[int] = []
    path: list[tuple[int, Iterator[int]]] = []
    components: list[list[int]] = []
    found = 0

    def enter(node: int) -> None:
        nonlocal found
        found_at[node] = lowest[node] = found
        found += 1
        is_open[node] = True
        open_nodes.append(node)
        path.append((node, reversed(successors[node])))

    def leave(node: int) -> None:
        if path:
            above = path[-1][0]
            lowest[above] = min(lowest[above], lowest[node])
        if lowest[node] == found_at[node]:
            component = []
            while is_open[node]:
                member = open_nodes.pop()
                is_open[member] = False
                component.append(member)
            components.append(sorted(component))

    for start in reversed(range(count)):
        if found_at[start] < 0:
            enter(start)
        while path:
            node, rest = path[-1]
            for successor in rest:
                if found_at[successor] < 0:
                    enter(successor)
                    break
                if is_open[successor]:
                    lowest[node] = min(lowest[node], found_at[successor])
            else:
                path.pop()
                leave(node)
    components.reverse()
    return components
