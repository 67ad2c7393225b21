"""Event time and windows of it in Spark's SQL: whole milliseconds since the epoch, as our engine has them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from penstock.graph.window_spec import is_event_time
from penstock.pb import graph_pb2
from penstock.pushdown.sql_text import NotCompiledError, cast, failing, quoted
from penstock.rows.schema import EVENT_TIME

_TIME_LIMIT_MS = 2**62
_MS_PER_DAY = 86_400_000
_REFUSED_KINDS = {
    graph_pb2.WINDOW_KIND_SESSION: "a session window, which depends on the order of rows",
    graph_pb2.WINDOW_KIND_COUNT: "a count window, which depends on the order of rows",
}


def event_time_sql(column: str, kind: pa.DataType) -> str:
    """The event time of a row; where it has none the stage ends with an error, as a bad record ends a job.

    Raises:
        NotCompiledError: values of this type are no times alike on both sides.
    """
    text = quoted(column)
    if pt.is_date32(kind) or pt.is_date64(kind):
        ms = f"(unix_date({text}) * {_MS_PER_DAY}L)"
    elif pt.is_integer(kind):
        ms = text
    elif pt.is_timestamp(kind):
        ms = f"unix_millis({cast(text, pa.timestamp('us', 'UTC'))})"
    else:
        raise NotCompiledError(f"event time of a {kind}")
    error = failing(f"column {column} is null, or no event time: beyond 2**62 ms")
    inside = f"{ms} BETWEEN -{_TIME_LIMIT_MS}L AND {_TIME_LIMIT_MS}L"
    return f"CASE WHEN {inside} THEN {cast(ms, pa.int64())} ELSE {error} END"


def check_window(window: graph_pb2.WindowSpec) -> None:
    """Checks that a window is one of event time, of rows alone.

    Raises:
        NotCompiledError: it is not.
    """
    refused = _REFUSED_KINDS.get(window.kind)
    if refused is not None:
        raise NotCompiledError(refused)
    if not is_event_time(window):
        raise NotCompiledError("a window of processing time; use event time")


def window_starts(window: graph_pb2.WindowSpec) -> str:
    """The starts of the windows that a row is in, in milliseconds: one per row of the result, which has it as its event time.

    Example: days from noon to noon.
        >>> day = graph_pb2.WindowSpec(size_ms=86400000, slide_ms=86400000, offset_ms=43200000)
        >>> window_starts(day)
        '(`__event_time` - pmod(`__event_time` - 43200000L, 86400000L))'
    """
    time = quoted(EVENT_TIME)
    last = f"({time} - pmod({time} - {window.offset_ms}L, {window.slide_ms}L))"
    if window.size_ms == window.slide_ms:
        return last
    first = f"{time} - {window.size_ms - 1}L"
    return f"explode(sequence({last}, {first}, -{window.slide_ms}L))"


def window_columns(window: graph_pb2.WindowSpec, start: str) -> tuple[str, str, str]:
    """Start and end of a window as times, and the event time of its result.

    Args:
        start: SQL of its start in milliseconds.
    """
    return (
        f"timestamp_millis({start})",
        f"timestamp_millis({start} + {window.size_ms}L)",
        f"({start} + {window.size_ms - 1}L)",
    )
