"""Which streams carry updates: values that replace earlier ones, and are no rows to be counted.

A running aggregate gives out the new values of a key again and again, as often as batches happen to be cut. Whatever is
made of these, row by row, are updates again. An aggregate or a window over them would take each for
one more row, so it is refused until the user says that it is meant.
"""

from __future__ import annotations

from penstock.errors import JobRejected
from penstock.graph.logical import Node, NodeInput, RunningAggregate


def check_no_updates(call: str, source: NodeInput) -> None:
    """Checks that what a call takes together are rows.

    Raises:
        JobRejected: they are updates.
    """
    maker = _maker_of_updates(source)
    if maker is None:
        return
    name = repr(maker.name)
    raise JobRejected(
        f"{call}: what comes are updates, not rows: {name} gives out the new values of a key whenever they "
        f"change, and here each would count as one more row. Aggregate the rows that {name} reads; or give "
        f"{name} a window, .window(...).aggregate(...), which has one result per key and window; or, if "
        f"updates are what is to be counted, call .as_rows() behind {name}"
    )


def _maker_of_updates(source: NodeInput) -> Node | None:
    """The running aggregate whose updates, or what was made of them, come by an input; None = rows come."""
    seen: set[int] = set()
    waiting = [source]
    while waiting:
        given = waiting.pop()
        node = given.node
        if given.is_rows or node.index in seen:
            continue
        seen.add(node.index)
        if isinstance(node.operation, RunningAggregate):
            return node
        waiting.extend(node.inputs)
    return None
