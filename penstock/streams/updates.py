"""Which streams carry updates: values that replace earlier ones, and are no rows to be counted.

A running aggregate gives out the new values of a key again and again, as often as batches happen to be cut. Whatever is
made of these, row by row, are updates again, in a later job that reads them persisted too. An aggregate or a window
over them would take each for one more row, so it is refused until the user says that it is meant.

A window with allowed lateness gives out its result again too, but only for rows that come late, which its user has
asked for: what is made of it is not refused (``docs/api.md`` says what comes of it).
"""

from __future__ import annotations

from penstock.errors import JobRejected
from penstock.graph.logical import (
    Node,
    NodeInput,
    Operation,
    ReadSource,
    RunningAggregate,
)


def check_no_updates(call: str, source: NodeInput) -> None:
    """Checks that what a call takes together are rows.

    Raises:
        JobRejected: they are updates.
    """
    maker = _find_maker(source)
    if maker is None:
        return
    name = repr(maker.name)
    match maker.operation:
        case ReadSource(updates_of=operator, spec=spec):
            why = (
                f"an earlier job has persisted the updates of {operator!r} as {spec.persisted.name!r}, and "
                "here each would count as one more row. Persist the results of windows in place of them, "
                "or the rows that they were made of"
            )
        case _:
            why = (
                f"{name} gives out the new values of a key whenever they change, and here each would count "
                f"as one more row. Aggregate the rows that {name} reads; or give {name} a window, "
                ".window(...).aggregate(...), which has one result per key and window"
            )
    raise JobRejected(
        f"{call}: what comes are updates, not rows: {why}; or, if updates are what is to be counted, call "
        f".as_rows() behind {name}"
    )


def maker_of_updates(source: NodeInput) -> str:
    """The operator whose updates, or what was made of them, come by an input; "" = rows come."""
    maker = _find_maker(source)
    if maker is None:
        return ""
    operation = maker.operation
    return operation.updates_of if isinstance(operation, ReadSource) else maker.name


def _find_maker(source: NodeInput) -> Node | None:
    seen: set[tuple[int, str]] = set()
    waiting = [source]
    while waiting:
        given = waiting.pop()
        node = given.node
        if given.is_rows or (node.index, given.tag) in seen:
            continue
        seen.add((node.index, given.tag))
        if _makes_updates(node.operation):
            return node
        waiting.extend(node.inputs)
    return None


def _makes_updates(operation: Operation) -> bool:
    """Whether they come out of an operation where only rows go into it."""
    match operation:
        case RunningAggregate():
            return True
        case ReadSource(updates_of=operator):
            return bool(operator)
        case _:
            return False
