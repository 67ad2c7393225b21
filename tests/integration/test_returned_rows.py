"""Aim: what process functions yield comes out of a job on a cluster (what they return otherwise: unit tests).

Method: the functions of PyFlink's documentation, which yield their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from tests.support.jobs import run

pytestmark = pytest.mark.integration

ROWS = [{"k": n % 5, "n": n, "ts": n} for n in range(1000)]


class Running(ps.KeyedProcessFunction):
    total = ps.ValueState("total", pa.int64())

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> Iterator[dict[str, int]]:
        self.total.update((self.total.value() or 0) + row.n)
        ctx.timers.event_time(5_000)
        yield {"k": row.k, "n": 1}

    @override
    def on_timer(self, timestamp: int, ctx: Any, out: ps.Collector) -> list[dict[str, int]]:
        return [{"k": ctx.key, "n": self.total.value()}]


def test_yielded_rows(env: ps.Environment) -> None:
    stream = env.from_rows(ROWS).with_event_time("ts")
    found = stream.key_by("k").process(Running(), schema={"k": "int64", "n": "int64"}).collect()
    run(env)
    rows = [(row.k, row.n) for row in found]
    totals = {k: sum(row["n"] for row in ROWS if row["k"] == k) for k in range(5)}
    assert sorted(row for row in rows if row[1] != 1) == sorted(totals.items())
    assert len(rows) == len(ROWS) + 5
