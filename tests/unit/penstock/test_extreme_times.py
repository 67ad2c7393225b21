"""Aim: rows at both ends of the range of event times count in every kind of window, also in windows of windows.

Method: one row at each end (and next to it) through the harness, which pre-aggregates as a cluster does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt

LIMIT = 2**62
Build = Callable[[Any], Any]


class AtItsTime(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(k=ctx.key)


def counted(window: Any, **options: Any) -> Build:
    """Aggregates that are taken apart in front of the exchange."""
    return lambda rows: rows.key_by("k").window(window, **options).aggregate(n=ps.count())


def listed(window: Any) -> Build:
    """Aggregates that are not."""
    return lambda rows: rows.key_by("k").window(window).aggregate(n=ps.collect_list("v"))


def joined(**options: Any) -> Build:
    return lambda rows: rows.key_by("k").join(rows.rename(v="w").key_by("k"), on="k", **options)


SHAPES: dict[str, Build] = {
    "tumbling": counted(ps.tumbling("7s", "1s")),
    "tumbling_ms": counted(ps.tumbling(1)),
    "tumbling_year": counted(ps.tumbling("365d")),
    "lateness": counted(ps.tumbling("7s"), allowed_lateness="1s"),
    "tumbling_list": listed(ps.tumbling("7s")),
    "sliding": counted(ps.sliding("6s", "4s")),
    "session": counted(ps.session("7s")),
    "session_list": listed(ps.session("7s")),
    "count": counted(ps.count_window(1)),
    "interval_join": joined(within=("-5s", "5s")),
    "window_join": joined(window=ps.tumbling("7s")),
    "timers": lambda rows: rows.key_by("k").process(
        AtItsTime(), schema=pa.schema([("k", pa.string())])
    ),
}


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_at_both_ends_of_time_count(shape: str, backend: Any) -> None:
    def build(rows: Any) -> Any:
        found = SHAPES[shape](rows).select("k")
        return found.key_by("k").window(ps.tumbling("11s")).aggregate(n=ps.count()).select("n")

    for time in (-LIMIT, -LIMIT + 1, LIMIT - 1, LIMIT):
        with pt.harness(build, schema=[{"k": "a", "v": 1}], backend=backend) as h:
            h.push_many([{"k": "a", "v": 1}], event_times=[time])
            h.watermark(time)
            h.end()
            assert sum(row["n"] for row in h.output) in ((1, 2) if shape == "sliding" else (1,))
            assert h.late_rows == 0
