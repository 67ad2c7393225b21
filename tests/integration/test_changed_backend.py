"""Aim: a canonical savepoint takes a job from one state backend to the other, at another parallelism, whatever kind of
state it has.

Method: a job on real daemons takes a canonical savepoint and is cancelled; it is started from it on the other backend. What
the second job writes comes once each, and with what the first one had written it is the result of a job that ran through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.integration.test_nexmark_rescaled import (
    QUERIES,
    RATE,
    WINDOW_MS,
    Query,
    golden,
    read,
    rows_in,
)
from tests.support.jobs import DEADLINE_S, await_details, cancel, canonical

pytestmark = [pytest.mark.integration, pytest.mark.sampled(7)]

SUMMARY = {
    "auction": "int64",
    "bids": "int64",
    "prices": "int64",
    "highest": "int64",
    "bidders": "int64",
    "listed": "int64",
    "fresh": "int64",
}


class AllStates(ps.KeyedProcessFunction):
    """Keeps something of each bid in a state of every kind, and says what is there when there was none for a while."""

    bids = ps.AggregatingState("bids", "count", pa.int64())
    prices = ps.ReducingState("prices", pa.int64(), lambda a, b: a + b)
    highest = ps.ValueState("highest", pa.int64(), default=0)
    bidders = ps.MapState("bidders", pa.int64(), pa.string())
    listed = ps.ListState("listed", pa.float64())
    fresh = ps.MapState("fresh", pa.string(), pa.int64(), ttl=ps.Ttl("1h"))
    last = ps.ValueState("last", pa.int64(), default=0, ttl=ps.Ttl("1h"))

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.bids.add(row.price)
        self.prices.add(row.price)
        self.highest.update(max(row.price, self.highest.value()))
        self.bidders.put(row.bidder, "seen")
        self.listed.add(row.price / 2)
        self.fresh.put(str(row.price % 7), row.price)
        due = ctx.timestamp + WINDOW_MS
        self.last.update(max(due, self.last.value()))
        ctx.timers.event_time(due)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        if time == self.last.value():
            out.emit(
                auction=ctx.key,
                bids=self.bids.get(),
                prices=self.prices.get(),
                highest=self.highest.value(),
                bidders=len(list(self.bidders.keys())),
                listed=int(2 * sum(self.listed.get())),
                fresh=len(list(self.fresh.keys())),
            )


def states(env: ps.Environment, rate: float | None) -> ps.Stream:
    return read(env, "bid", rate).key_by("auction").process(AllStates(), schema=SUMMARY).uid("all")


def within(env: ps.Environment, rate: float | None) -> ps.Stream:
    bids = read(env, "bid", rate).select("auction", "price").uid("within-bids")
    auctions = read(env, "auction", rate).select(auction=ps.col("id"), seller=ps.col("seller"))
    pairs = bids.join(auctions.uid("within-auctions"), on="auction", within=("-2s", "2s"))
    return pairs.uid("within")


def collected(env: ps.Environment, rate: float | None) -> ps.Stream:
    keyed = read(env, "bid", rate).key_by("auction").window(ps.tumbling(WINDOW_MS))
    return keyed.aggregate(
        bidders=ps.count_distinct("bidder"), mean=ps.mean("price"), best=ps.max("price")
    ).uid("collected")


MORE: dict[str, Query] = {query.__name__: query for query in (states, within, collected)}
QUERIES.update(MORE)
WAYS = [("hashmap", "rocksdb", 3), ("rocksdb", "hashmap", 3), ("rocksdb", "rocksdb", 1)]


def counted(rows: list[dict[str, Any]]) -> Counter[Any]:
    return Counter(map(canonical, rows))


@pytest.mark.parametrize(("before", "after", "parallelism"), WAYS)
@pytest.mark.parametrize("query", [name for name in QUERIES if name != "q1"])
def test_goes_on_with_another_backend(
    new_env: NewEnvironment, tmp_path: Path, query: str, before: str, after: str, parallelism: int
) -> None:
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
    }
    build: Callable[..., ps.Stream] = QUERIES[query]
    wanted = counted(golden(new_env, tmp_path / "golden", query))
    assert wanted
    env = new_env(2, {**config, "state.backend.type": before})
    build(env, RATE).write_parquet(tmp_path / "first").uid("files")
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 2)
    path = handle.savepoint(tmp_path / "kept", "canonical", timeout=DEADLINE_S)
    cancel(handle)
    env = new_env(parallelism, {**config, "state.backend.type": after})
    build(env, None).write_parquet(tmp_path / "second").uid("files")
    assert env.submit("second", from_savepoint=path).wait(DEADLINE_S).status == "FINISHED"
    first, second = counted(rows_in(tmp_path / "first")), counted(rows_in(tmp_path / "second"))
    assert second, "the first job had not read everything"
    assert second <= wanted
    assert first | second == wanted
