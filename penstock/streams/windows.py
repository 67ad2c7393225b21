"""Windows: how a stream is cut into groups of rows that are evaluated together.

A window object says what kind it is and how long; the time domain, the lateness and the place of late
rows belong to one use of it and join it in ``Window.to_proto``. All lengths are whole milliseconds.

Tumbling and sliding windows are kept as *slices*, the longest pieces that every window either contains
or does not touch: ``slice_ms`` = gcd(size, slide).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from typing_extensions import override

from penstock.errors import JobRejected
from penstock.pb import graph_pb2
from penstock.state.base import Ttl
from penstock.units import argument_ms

Duration = str | int | float | timedelta

_SLICES_PER_WINDOW_MAX = 100_000
_COUNT_MAX = (1 << 63) - 1
_TIME_DOMAINS = {
    "event": graph_pb2.TIME_DOMAIN_EVENT,
    "processing": graph_pb2.TIME_DOMAIN_PROCESSING,
}


class Window(ABC):
    """One of ``tumbling``, ``sliding``, ``session``, ``count_window``."""

    @abstractmethod
    def _spec(self) -> graph_pb2.WindowSpec:
        """Kind and lengths, without a time domain."""

    def to_proto(
        self, time: str = "event", allowed_lateness: Duration = 0, late_tag: str = ""
    ) -> graph_pb2.WindowSpec:
        """The window as it travels.

        Args:
            time: "event" or "processing".
            allowed_lateness: how long after its end a window still takes rows and fires again.
            late_tag: side output for rows that come later still; "" = they are dropped and counted.

        Raises:
            JobRejected: the options do not fit each other or this kind of window.
        """
        if time not in _TIME_DOMAINS:
            raise JobRejected(f"window: time is {time!r}; it is 'event' or 'processing'")
        lateness_ms = argument_ms("window: allowed_lateness", allowed_lateness)
        spec = self._spec()
        spec.time = _TIME_DOMAINS[time]
        if lateness_ms or late_tag:
            option = "allowed_lateness" if lateness_ms else "late_to"
            if spec.kind == graph_pb2.WINDOW_KIND_COUNT:
                raise JobRejected(
                    f"window: {option} does not go with {self}: no row is late for a count window"
                )
            if spec.time == graph_pb2.TIME_DOMAIN_PROCESSING:
                raise JobRejected(
                    f"window: {option} does not go with time='processing': no row is late there"
                )
        spec.allowed_lateness_ms = lateness_ms
        spec.late_tag = late_tag
        return spec


@dataclass(frozen=True, slots=True)
class TumblingWindow(Window):
    """Windows [n * size + offset, (n + 1) * size + offset)."""

    size_ms: int
    offset_ms: int = 0

    @override
    def _spec(self) -> graph_pb2.WindowSpec:
        return graph_pb2.WindowSpec(
            kind=graph_pb2.WINDOW_KIND_TUMBLING,
            size_ms=self.size_ms,
            slide_ms=self.size_ms,
            offset_ms=self.offset_ms,
        )


@dataclass(frozen=True, slots=True)
class SlidingWindow(Window):
    """Windows [n * slide + offset, n * slide + offset + size); each row is in size / slide of them."""

    size_ms: int
    slide_ms: int
    offset_ms: int = 0

    @override
    def _spec(self) -> graph_pb2.WindowSpec:
        return graph_pb2.WindowSpec(
            kind=graph_pb2.WINDOW_KIND_SLIDING,
            size_ms=self.size_ms,
            slide_ms=self.slide_ms,
            offset_ms=self.offset_ms,
        )


@dataclass(frozen=True, slots=True)
class SessionWindow(Window):
    """Rows of one key that are at most ``gap`` apart; the window ends ``gap`` after its last row."""

    gap_ms: int

    @override
    def _spec(self) -> graph_pb2.WindowSpec:
        return graph_pb2.WindowSpec(kind=graph_pb2.WINDOW_KIND_SESSION, gap_ms=self.gap_ms)


@dataclass(frozen=True, slots=True)
class CountWindow(Window):
    """Every ``count`` rows of one key, in the order in which they arrive."""

    count: int
    ttl_ms: int = 0

    @override
    def _spec(self) -> graph_pb2.WindowSpec:
        return graph_pb2.WindowSpec(
            kind=graph_pb2.WINDOW_KIND_COUNT, count=self.count, ttl_ms=self.ttl_ms
        )


def tumbling(size: Duration, offset: Duration = 0) -> Window:
    """Windows of one size that follow each other without a gap.

    Args:
        size: length, for example "10s".
        offset: shifts the starts away from multiples of the size since the epoch (UTC); it may be
            negative: ``tumbling("1d", offset="-8h")`` are days of UTC+8.
    """
    size_ms = _positive("tumbling", "size", size)
    return TumblingWindow(size_ms, _offset("tumbling", "size", offset, size_ms))


def sliding(size: Duration, slide: Duration, offset: Duration = 0) -> Window:
    """Windows of one size of which a new one starts every ``slide``.

    Args:
        size: length, for example "1 min".
        slide: distance of two starts, at most ``size``.
        offset: as for ``tumbling``, below ``slide``.
    """
    size_ms = _positive("sliding", "size", size)
    slide_ms = _positive("sliding", "slide", slide)
    if slide_ms > size_ms:
        raise JobRejected(
            f"sliding: slide ({slide_ms} ms) is longer than size ({size_ms} ms): the rows between two "
            "windows would be in none; filter them out and use tumbling"
        )
    if size_ms // math.gcd(size_ms, slide_ms) > _SLICES_PER_WINDOW_MAX:
        raise JobRejected(
            f"sliding: size {size_ms} ms and slide {slide_ms} ms share no divisor above "
            f"{math.gcd(size_ms, slide_ms)} ms, which would cut each window into more than "
            f"{_SLICES_PER_WINDOW_MAX} slices; use a longer slide that divides the size"
        )
    return SlidingWindow(size_ms, slide_ms, _offset("sliding", "slide", offset, slide_ms))


def session(gap: Duration) -> Window:
    """Windows that end when a key has had no row for longer than ``gap``."""
    return SessionWindow(_positive("session", "gap", gap))


def count_window(n: int, ttl: Ttl | None = None) -> Window:
    """Windows of ``n`` rows per key; what is incomplete at the end of the data is not emitted.

    Args:
        n: rows of a window.
        ttl: a key that has had no row for so long, by the wall clock, is forgotten: the rows of its open
            window are dropped, and its next window is number 0 again. None = never.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise JobRejected(f"count_window: the number of rows is {n!r}; it must be an integer")
    if not 1 <= n <= _COUNT_MAX:
        limit = "at least 1" if n < 1 else f"at most {_COUNT_MAX}"
        raise JobRejected(f"count_window: the number of rows is {n}; it must be {limit}")
    if ttl is None:
        return CountWindow(n)
    if not isinstance(ttl, Ttl):
        raise JobRejected(f'count_window: ttl is {ttl!r}; it must be a ps.Ttl, as ps.Ttl("7d")')
    if ttl.visibility != "never_return_expired":
        raise JobRejected(
            f"count_window: a ttl with visibility={ttl.visibility!r} does not go with windows: what has "
            "expired is never part of a window"
        )
    return CountWindow(n, ttl.ttl_ms)


def _positive(window: str, name: str, value: Duration) -> int:
    milliseconds = argument_ms(f"{window}: {name}", value)
    if milliseconds < 1:
        raise JobRejected(f"{window}: {name} is {value!r}; it must be longer than zero")
    return milliseconds


def _offset(window: str, limit_name: str, value: Duration, limit_ms: int) -> int:
    """The offset, which may be negative, as its equal within [0, limit)."""
    milliseconds = argument_ms(f"{window}: offset", value, is_signed=True)
    if abs(milliseconds) >= limit_ms:
        raise JobRejected(
            f"{window}: offset ({milliseconds} ms) must be shorter than {limit_name} ({limit_ms} ms)"
        )
    return milliseconds % limit_ms
