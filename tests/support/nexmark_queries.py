"""Queries of Nexmark over every kind of state, of which one result is right: rows that windows, joins and timers emit, whatever
the order in which they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

import penstock as ps

EVENTS, RATE = 40_000, 1_500
"""At this rate, per second, a job is stopped or killed long before its end, however slow the machine."""
SHARES = {"bid": 1.0, "auction": 0.06, "person": 0.02}
WINDOW_MS, SLIDE_MS = 2_000, 500
COUNTS = {"auction": "int64", "bids": "int64"}
Query = Callable[[ps.Environment, float | None], ps.Stream]


def read(env: ps.Environment, kind: str, rate: float | None) -> ps.Stream:
    rate = None if rate is None else rate * SHARES[kind]
    rows = env.nexmark(EVENTS, kind=kind, rate=rate, event_interval_us=1_000).uid(f"read-{kind}")
    return rows.with_event_time("ts", out_of_orderness="0s").uid(f"time-{kind}")


class MostBids(ps.WindowFunction):
    def process(
        self, key: object, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        best = max(row.bids for row in rows)
        for row in rows:
            if row.bids == best:
                out.emit(row)


class Highest(ps.WindowFunction):
    def process(
        self, key: object, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        out.emit(start=window.start, price=max(row.price for row in rows))


class Quiet(ps.KeyedProcessFunction):
    """Says of each auction how many bids it had when there was none for a while, by timers."""

    seen = ps.ValueState("seen", pa.int64(), default=0)
    last = ps.ValueState("last", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        due = ctx.timestamp + WINDOW_MS
        self.last.update(max(due, self.last.value()))
        ctx.timers.event_time(due)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        if time == self.last.value():
            out.emit(auction=ctx.key, bids=self.seen.value())


def q1(env: ps.Environment, rate: float | None) -> ps.Stream:
    bids = read(env, "bid", rate)
    return bids.select("auction", "bidder", price=ps.col("price") * 2).uid("q1")


def q5(env: ps.Environment, rate: float | None) -> ps.Stream:
    counts = (
        read(env, "bid", rate)
        .key_by("auction")
        .window(ps.sliding(WINDOW_MS, SLIDE_MS))
        .aggregate(bids=ps.count())
        .uid("q5-counts")
        .rename(window_start="starts", window_end="ends")
        .uid("q5-names")
    )
    return (
        counts.key_by("ends")
        .window(ps.tumbling(SLIDE_MS))
        .process(MostBids(), schema=counts.schema)
        .uid("q5-most")
    )


def q7(env: ps.Environment, rate: float | None) -> ps.Stream:
    bids = read(env, "bid", rate).select("auction", "price").uid("q7-select")
    schema = {"start": "timestamp[ms, UTC]", "price": "int64"}
    keyed = bids.key_by("auction").window(ps.tumbling(WINDOW_MS))
    return keyed.process(Highest(), schema=schema).uid("q7")


def q8(env: ps.Environment, rate: float | None) -> ps.Stream:
    persons = read(env, "person", rate).select(person=ps.col("id")).uid("q8-persons")
    auctions = read(env, "auction", rate).select(auction=ps.col("id"), person=ps.col("seller"))
    return persons.join(
        auctions.uid("q8-auctions"), on="person", window=ps.tumbling(WINDOW_MS)
    ).uid("q8")


def q11(env: ps.Environment, rate: float | None) -> ps.Stream:
    keyed = read(env, "bid", rate).key_by("bidder").window(ps.session("300ms"))
    return keyed.aggregate(bids=ps.count()).uid("q11")


def counted(env: ps.Environment, rate: float | None) -> ps.Stream:
    keyed = read(env, "bid", rate).key_by("auction").window(ps.count_window(10))
    return keyed.aggregate(bids=ps.count()).uid("counted")


def quiet(env: ps.Environment, rate: float | None) -> ps.Stream:
    return read(env, "bid", rate).key_by("auction").process(Quiet(), schema=COUNTS).uid("quiet")


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


QUERIES: dict[str, Query] = {
    query.__name__: query
    for query in (q1, q5, q7, q8, q11, counted, quiet, states, within, collected)
}
