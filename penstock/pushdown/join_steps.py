"""Joins as steps: the sides get names of their own, meet, and give out the columns of the join."""

from __future__ import annotations

import pyarrow as pa

from penstock.graph.logical import Join
from penstock.pb import graph_pb2
from penstock.pushdown.aggregate_sql import check_key
from penstock.pushdown.frames import SparkFrame, Steps
from penstock.pushdown.sql_text import quoted
from penstock.pushdown.steps import Column, JoinFrames, Select
from penstock.pushdown.window_sql import check_window, window_columns, window_starts
from penstock.rows.schema import EVENT_TIME

_HOW = {
    graph_pb2.JOIN_KIND_INNER: "inner",
    graph_pb2.JOIN_KIND_LEFT: "left",
    graph_pb2.JOIN_KIND_RIGHT: "right",
    graph_pb2.JOIN_KIND_FULL: "full",
}


def join_steps(
    operation: Join, sides: tuple[SparkFrame, SparkFrame], output: pa.Schema, steps: Steps
) -> int:
    """Adds a join; the number of the frame that it makes, with event time.

    Args:
        sides: both have event time.
        output: the columns of the join that are needed.

    Raises:
        NotCompiledError: its window, or a key, is none that compiles.
    """
    if operation.window is not None:
        check_window(operation.window)
    for key in operation.keys:
        check_key(key, sides[0].columns.field(key).type)
    left, right = (
        steps.add(Select(frame.number, _side(operation, frame, of_side, prefix)))
        for frame, of_side, prefix in zip(
            sides, (operation.left, operation.right), ("l.", "r."), strict=True
        )
    )
    conditions = [f"{quoted(f'l.{key}')} = {quoted(f'r.{key}')}" for key in operation.keys]
    conditions.append(_meeting(operation))
    joined = steps.add(JoinFrames(left, right, " AND ".join(conditions), _HOW[operation.how]))
    return steps.add(Select(joined, _output(operation, output)))


def _side(
    operation: Join, frame: SparkFrame, of_side: tuple[tuple[str, str], ...], prefix: str
) -> tuple[Column, ...]:
    """The columns of a side under names of its own, and what it is joined by beside the keys: the time, or the window's start."""
    names = [*operation.keys, *(name for name, _ in of_side if name in frame.columns.names)]
    time = quoted(EVENT_TIME) if operation.window is None else window_starts(operation.window)
    return (*((f"{prefix}{name}", quoted(name)) for name in names), (f"{prefix}{EVENT_TIME}", time))


def _meeting(operation: Join) -> str:
    """Which times go together."""
    left, right = quoted(f"l.{EVENT_TIME}"), quoted(f"r.{EVENT_TIME}")
    if operation.interval is None:
        return f"{left} = {right}"
    lower, upper = operation.interval
    return f"{right} - {left} BETWEEN {lower}L AND {upper}L"


def _output(operation: Join, output: pa.Schema) -> tuple[Column, ...]:
    texts = {key: _of_either(key) for key in operation.keys}
    if operation.window is None:
        time = f"greatest({quoted(f'l.{EVENT_TIME}')}, {quoted(f'r.{EVENT_TIME}')})"
    else:
        start, end, time = window_columns(operation.window, _of_either(EVENT_TIME))
        texts |= {"window_start": start, "window_end": end}
    texts |= {name: quoted(f"l.{column}") for column, name in operation.left}
    texts |= {name: quoted(f"r.{column}") for column, name in operation.right}
    return (*((name, texts[name]) for name in output.names), (EVENT_TIME, time))


def _of_either(column: str) -> str:
    return f"coalesce({quoted(f'l.{column}')}, {quoted(f'r.{column}')})"
