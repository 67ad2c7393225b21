"""Aim: what is computed per key behind operators that leave keys alone is right on a cluster.

Method: plain Python over the same rows; more keys than subtasks, several subtasks, chained and not, exchanges
kept and not, so that a row in a wrong subtask gives a wrong total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

ROWS = [{"k": f"key-{i % 37}", "n": i, "ts": i} for i in range(3_000)]
EXPECTED = Counter[str]()
for _row in ROWS:
    if _row["n"] % 3:
        EXPECTED[str(_row["k"])] += int(str(_row["n"]))


class Totals(ps.KeyedProcessFunction):
    total = ps.ValueState("total", pa.int64())

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        self.total.update((self.total.value() or 0) + row.n)
        ctx.timers.event_time(10_000)

    @override
    def on_timer(self, timestamp: int, ctx: Any, out: ps.Collector) -> None:
        out.emit(k=ctx.key, total=self.total.value())


class BothTotals(ps.KeyedCoProcessFunction):
    total = ps.ValueState("total", pa.int64())

    @override
    def process_left(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        self.total.update((self.total.value() or 0) + row.n)
        ctx.timers.event_time(10_000)

    process_right = process_left

    @override
    def on_timer(self, timestamp: int, ctx: Any, out: ps.Collector) -> None:
        out.emit(k=ctx.key, total=self.total.value())


TOTALS = {"k": "string", "total": "int64"}
WINDOW = ps.tumbling("10s")

CONSUMERS: dict[str, Callable[[Any], ps.Stream]] = {
    "window": lambda s: s.window(WINDOW).aggregate(total=ps.sum("n")),
    "expression": lambda s: s.window(WINDOW).aggregate(total=ps.sum(col("n") + 0)),
    "reduce": lambda s: (
        s.window(WINDOW).reduce(lambda x, y: {**x, "n": x.n + y.n}).select("k", total=col("n"))
    ),
    "process": lambda s: s.process(Totals(), schema=TOTALS),
    "twice": lambda s: s.filter(col("n") >= 0).with_columns(m=1).process(Totals(), schema=TOTALS),
}


@pytest.mark.parametrize("mode", ["streaming", "batch"])
@pytest.mark.parametrize("chaining", [True, False])
def test_totals_per_key(new_env: NewEnvironment, mode: Any, *, chaining: bool) -> None:
    env = new_env(
        3, {"pipeline.operator-chaining.enabled": chaining, "pipeline.max-parallelism": 16}
    )
    env.set_runtime_mode(mode)
    kept = (
        env.from_rows(ROWS)
        .rebalance()
        .key_by("k")
        .filter(lambda row: row.n % 3 != 0)
        .with_event_time("ts", "5s")
        .with_columns(extra=col("n") * 2)
        .drop("extra")
        .name("kept")
    )
    found = {name: consumer(kept).collect() for name, consumer in CONSUMERS.items()}
    found["other subtasks"] = kept.process(Totals(), schema=TOTALS).parallelism(2).collect()
    found["other groups"] = kept.process(Totals(), schema=TOTALS).max_parallelism(5).collect()
    run(env)
    for name, rows in found.items():
        totals = [(row.k, row.total) for row in rows]
        assert dict(totals) == EXPECTED, name
        assert len(totals) == len(EXPECTED), name


@pytest.mark.parametrize("exchange", ["pipelined", "caching", "caching-memory"])
def test_two_inputs_and_unions_per_key(new_env: NewEnvironment, exchange: str) -> None:
    env = new_env(3)
    rows = env.from_rows(ROWS).rebalance().with_event_time("ts", "5s")
    one = rows.key_by("k").filter(col("n") % 3 == 1).exchange(exchange)
    two = rows.key_by("k").filter(lambda row: row.n % 3 == 2)
    both = one.connect(two).process(BothTotals(), schema=TOTALS).collect()
    union = one.union(two).process(Totals(), schema=TOTALS).collect()
    mixed = one.union(rows.filter(col("n") % 3 == 2).key_by("k")).process(Totals(), schema=TOTALS)
    united = mixed.collect()
    joined = one.join(two, on="k", window=WINDOW).collect()
    run(env)
    for found in (both, union, united):
        assert {row.k: row.total for row in found} == EXPECTED
        assert len(found) == len(EXPECTED)
    left = Counter(r["k"] for r in ROWS if int(str(r["n"])) % 3 == 1)
    right = Counter(r["k"] for r in ROWS if int(str(r["n"])) % 3 == 2)
    assert Counter(row.k for row in joined) == {k: left[k] * right[k] for k in left}
