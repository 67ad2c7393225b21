"""What the description of a window says: which have slices, which are closed by watermarks."""

from __future__ import annotations

import math

from penstock.pb import graph_pb2


def slice_ms(spec: graph_pb2.WindowSpec) -> int:
    """Length of the slices of a tumbling or sliding window."""
    return math.gcd(spec.size_ms, spec.slide_ms)


def is_sliced(spec: graph_pb2.WindowSpec) -> bool:
    """True for tumbling and sliding windows."""
    return spec.kind in (graph_pb2.WINDOW_KIND_TUMBLING, graph_pb2.WINDOW_KIND_SLIDING)


def is_event_time(spec: graph_pb2.WindowSpec) -> bool:
    """True where watermarks close the window: event time, and not a count window."""
    return spec.time == graph_pb2.TIME_DOMAIN_EVENT and spec.kind != graph_pb2.WINDOW_KIND_COUNT
