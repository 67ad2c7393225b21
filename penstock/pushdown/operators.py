"""Operators as steps over frames, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.graph.logical import (
    ApplyWindowFunction,
    AssignEventTime,
    BatchFunction,
    Filter,
    Join,
    Node,
    Process,
    Project,
    RowFunction,
    RunningAggregate,
    Union,
    WindowAggregate,
)
from penstock.graph.window_schemas import WINDOW_END, WINDOW_START
from penstock.planner.needs import Need, pruned
from penstock.pushdown.aggregate_sql import aggregate_sql, check_key
from penstock.pushdown.frames import SparkFrame, Steps, as_they_are
from penstock.pushdown.join_steps import join_steps
from penstock.pushdown.scalars import scalar_sql
from penstock.pushdown.sql_text import NotCompiledError, quoted
from penstock.pushdown.steps import Column, GroupRows, Select, UnionAll, Where
from penstock.pushdown.window_sql import (
    check_window,
    event_time_sql,
    window_columns,
    window_starts,
)
from penstock.rows.schema import EVENT_TIME

_PYTHON = {
    RowFunction: "it is a Python function per row",
    BatchFunction: "it is a Python function per batch",
    ApplyWindowFunction: "it is a Python function per window",
    Process: "it is a process function",
}


def operator_frame(
    node: Node, inputs: Sequence[SparkFrame], need: Need, steps: Steps
) -> SparkFrame:
    """The frame of an operator's main output.

    Args:
        need: what is needed of it.
        steps: those of the operator are added.

    Raises:
        NotCompiledError: it does not compile.
    """
    _check_properties(node)
    given = inputs[0]
    match node.operation:
        case Project(columns=columns):
            made = tuple(
                (name, scalar_sql(expression, given.columns))
                for name, expression in columns
                if name in need.columns
            )
            kept = pa.schema(pruned(node.schema, need))
            number = steps.add(Select(given.number, (*made, *given.own(()))))
            return SparkFrame(number, kept, given.no_event_time)
        case Filter(predicate=predicate):
            number = steps.add(Where(given.number, scalar_sql(predicate, given.columns)))
            return SparkFrame(number, given.columns, given.no_event_time)
        case AssignEventTime(column=column):
            time = (EVENT_TIME, event_time_sql(column, given.columns.field(column).type))
            own = [each for each in given.own() if each[0] != EVENT_TIME]
            timed = steps.add(Select(given.number, (*own, time)))
            # A column that nobody needs is not computed; a row without event time is an error all the same.
            return SparkFrame(
                steps.add(Where(timed, f"{quoted(EVENT_TIME)} IS NOT NULL")), given.columns
            )
        case RunningAggregate():
            return _running(node.operation, node, given, steps)
        case WindowAggregate():
            return _windowed(node.operation, node, given, steps)
        case Join():
            for frame in inputs:
                _check_event_time(frame)
            output = pa.schema(_joined_fields(node.operation, node, need))
            left, right = inputs
            return SparkFrame(join_steps(node.operation, (left, right), output, steps), output)
        case Union():
            return _union(node, inputs, need, steps)
        case _:
            raise NotCompiledError(_PYTHON.get(type(node.operation), "it is none that does"))


def _check_properties(node: Node) -> None:
    if node.properties.on_error.ByteSize():
        raise NotCompiledError(
            ".on_error(...): what fails in Spark fails as a whole, and no single row can be left out"
        )
    for source in node.inputs:
        if source.routing.is_asked and source.routing.call == ".broadcast()":
            raise NotCompiledError(".broadcast() in front of it, which repeats rows")
        if source.is_rows:
            raise NotCompiledError(
                ".as_rows() in front of it: how many updates there are depends on how batches are cut"
            )


def _check_event_time(frame: SparkFrame) -> None:
    if frame.no_event_time:
        raise NotCompiledError(f"it needs event time, and {frame.no_event_time}")


def _aggregates(
    operation: RunningAggregate | WindowAggregate, given: SparkFrame
) -> tuple[Column, ...]:
    for key in operation.keys:
        check_key(key, given.columns.field(key).type)
    return tuple(
        (name, aggregate_sql(aggregate, given.columns)) for name, aggregate in operation.aggregates
    )


def _running(
    operation: RunningAggregate, node: Node, given: SparkFrame, steps: Steps
) -> SparkFrame:
    """The last values of every key: what a running aggregate gives out for a key whose rows are in one batch."""
    aggregates = _aggregates(operation, given)
    number = steps.add(GroupRows(given.number, operation.keys, aggregates))
    return SparkFrame(
        number,
        node.schema,
        "a running aggregate has that of the row that came last, which depends on the order of rows",
    )


def _windowed(
    operation: WindowAggregate, node: Node, given: SparkFrame, steps: Steps
) -> SparkFrame:
    check_window(operation.window)
    _check_event_time(given)
    aggregates = _aggregates(operation, given)
    own = as_they_are(given.columns.names)
    rows = steps.add(Select(given.number, (*own, (EVENT_TIME, window_starts(operation.window)))))
    groups = steps.add(GroupRows(rows, (*operation.keys, EVENT_TIME), aggregates))
    start, end, time = window_columns(operation.window, quoted(EVENT_TIME))
    texts = {WINDOW_START: start, WINDOW_END: end}
    made = tuple((name, texts.get(name, quoted(name))) for name in node.schema.names)
    return SparkFrame(steps.add(Select(groups, (*made, (EVENT_TIME, time)))), node.schema)


def _joined_fields(operation: Join, node: Node, need: Need) -> list[pa.Field]:
    """The columns of a join: keys and window always, of both sides what is needed."""
    of_sides = {name for _, name in (*operation.left, *operation.right)}
    return [f for f in node.schema if f.name not in of_sides or f.name in need.columns]


def _union(node: Node, inputs: Sequence[SparkFrame], need: Need, steps: Steps) -> SparkFrame:
    columns = pa.schema(pruned(node.schema, need))
    reasons = [frame.no_event_time for frame in inputs if frame.no_event_time]
    time = () if reasons else ((EVENT_TIME, quoted(EVENT_TIME)),)
    own = tuple((name, quoted(name)) for name in columns.names)
    numbers = tuple(steps.add(Select(frame.number, (*own, *time))) for frame in inputs)
    return SparkFrame(steps.add(UnionAll(numbers)), columns, reasons[0] if reasons else "")
