"""Joins in the graph: what ``Stream.join`` was given, checked and made a node of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import JobRejected
from penstock.graph.column_checks import check_output_names
from penstock.graph.join_schemas import joined_columns
from penstock.graph.logical import (
    Join,
    NodeInput,
    Routing,
    input_has_event_time,
    input_schema,
)
from penstock.pb import graph_pb2
from penstock.streams.job_builder import JobBuilder
from penstock.streams.stream import Stream
from penstock.streams.windows import Duration, Window
from penstock.units import argument_ms

_HASH = graph_pb2.PARTITIONING_HASH

_JOIN_KINDS = {
    "inner": graph_pb2.JOIN_KIND_INNER,
    "left": graph_pb2.JOIN_KIND_LEFT,
    "right": graph_pb2.JOIN_KIND_RIGHT,
    "full": graph_pb2.JOIN_KIND_FULL,
}


def add_join(
    builder: JobBuilder,
    left: NodeInput,
    right: NodeInput,
    on: str | Sequence[str],
    within: tuple[Duration, Duration] | None,
    window: Window | None,
    how: str,
) -> Stream:
    """The output of a join; see ``Stream.join``.

    Raises:
        JobRejected: the arguments contradict each other or do not go with the streams.
    """
    keys = _join_keys(on)
    kind = _JOIN_KINDS.get(how) if isinstance(how, str) else None
    if kind is None:
        raise JobRejected(f"join: how={how!r}; it must be 'inner', 'left', 'right' or 'full'")
    for side, source in (("left", left), ("right", right)):
        _check_join_side(side, source)
    if (within is None) == (window is None):
        raise JobRejected(
            "join: give either within=('-5s', '5s') for rows whose times are so far apart, or "
            "window=ps.tumbling('10s') for rows in the same window"
        )
    interval = None if within is None else _interval(within, how)
    spec = None if window is None else _window_spec(window)
    joined = joined_columns(input_schema(left), input_schema(right), keys, kind, spec)
    check_output_names("join", joined.schema.names)
    node = builder.add(
        Join(keys, kind, interval, spec, joined.left, joined.right),
        (_keyed_by(keys, left), _keyed_by(keys, right)),
        label="interval_join" if spec is None else "window_join",
        schema=joined.schema,
        has_event_time=True,
    )
    return Stream(builder, NodeInput(node))


def _keyed_by(keys: tuple[str, ...], source: NodeInput) -> NodeInput:
    """The rows brought together by the join's keys; they stay where they lie by these already."""
    if source.routing.keys == keys:
        return source
    return replace(source, routing=Routing(_HASH, keys))


def _join_keys(on: str | Sequence[str]) -> tuple[str, ...]:
    keys = (on,) if isinstance(on, str) else tuple(on) if isinstance(on, (list, tuple)) else ()
    if not keys or not all(isinstance(key, str) for key in keys):
        raise JobRejected(
            f"join: on={on!r}; name the columns that must be equal on both sides: on='user' or "
            "on=['user', 'day']; where their names differ, call .rename(...) on one stream before"
        )
    if len(set(keys)) < len(keys):
        raise JobRejected(f"join: on= names a column twice: {', '.join(keys)}")
    return keys


def _check_join_side(side: str, source: NodeInput) -> None:
    if source.routing.is_asked and source.routing.partitioning != _HASH:
        raise JobRejected(
            f"join: the {side} stream is routed ({source.routing.call}), and a join brings "
            "the rows of a key together itself: leave the routing out"
        )
    if not input_has_event_time(source):
        raise JobRejected(
            f"join: the {side} stream has no event time, and both need it: call "
            ".with_event_time('ts') on it before the join"
        )


def _interval(within: tuple[Duration, Duration], how: str) -> tuple[int, int]:
    if not isinstance(within, (tuple, list)) or len(within) != 2:
        raise JobRejected(
            f"join: within={within!r}; it has two bounds: within=('-5s', '5s') joins right rows from "
            "5 s before to 5 s after the left row"
        )
    lower, upper = (argument_ms("join: within", bound, is_signed=True) for bound in within)
    if lower > upper:
        raise JobRejected(
            f"join: within=({within[0]!r}, {within[1]!r}) is empty: the first bound is the smaller one"
        )
    if how != "inner":
        raise JobRejected(
            f"join: how={how!r} goes with window=; an interval join is inner: it has only rows with a "
            "partner"
        )
    return lower, upper


def _window_spec(window: Window) -> graph_pb2.WindowSpec:
    if not isinstance(window, Window):
        raise JobRejected(
            f"join: window={window!r} is no window; write ps.tumbling('10s'), "
            "ps.sliding('1 min', '10s') or ps.session('30s')"
        )
    spec = window.to_proto("event", 0, "")
    if spec.kind == graph_pb2.WINDOW_KIND_COUNT:
        raise JobRejected(
            "join: count windows of two streams have nothing in common; use ps.tumbling, ps.sliding or "
            "ps.session"
        )
    return spec
