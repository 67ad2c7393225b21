"""Workloads whose work is a Python function, and the same work as a loop of plain Python or numpy."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
from typing_extensions import override

import penstock as ps
from benchmarks.workload import RATE, WINDOW_MS, Batches, with_time


class Converted(TypedDict):
    """A bid in another currency."""

    auction: int
    euro: float


def to_euro(bid: Any) -> Converted:
    """What w4 does per row before the key."""
    return {"auction": bid.auction, "euro": bid.price * RATE}


class BestSoFar(ps.KeyedProcessFunction):
    """Emits a bid that is better than all before it in its auction."""

    best = ps.ValueState("best", pa.float64())

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        best = self.best.value()
        if best is None or row.euro > best:
            self.best.update(row.euro)
            out.emit(auction=row.auction, euro=row.euro)


def w4(stream: ps.Stream) -> None:
    schema = pa.schema([("auction", pa.int64()), ("euro", pa.float64())])
    stream.map(to_euro).key_by("auction").process(BestSoFar(), schema=schema).uid(
        "w4-best"
    ).discard()


def w4_limit(batches: Batches) -> int:
    """The same work in plain Python over the same columns: a dict and a loop."""
    best: dict[int, float] = {}
    emitted = 0
    for batch in batches:
        prices = zip(batch["auction"].to_pylist(), batch["price"].to_pylist(), strict=True)
        for auction, price in prices:
            euro = price * RATE
            if euro > best.get(auction, 0.0):
                best[auction] = euro
                emitted += 1
    return emitted


class Totals(ps.KeyedBatchFunction):
    """Adds up prices per key, a batch at a time, and emits the new totals."""

    total = ps.ValueState("total", pa.int64(), default=0)

    @override
    def process_batch(self, keys: pa.Array, batch: pa.RecordBatch, out: Any) -> None:
        found, sums = _summed(keys, batch["price"])
        names = pa.array(found)
        totals = self.total.get_many(names).to_numpy() + sums
        self.total.put_many(names, pa.array(totals))
        out.emit(pa.record_batch([names, pa.array(totals)], names=["auction", "total"]))


def _summed(keys: pa.Array, prices: pa.Array) -> tuple[Any, Any]:
    found, places = np.unique(keys.to_numpy(), return_inverse=True)
    return found, np.bincount(places, prices.to_numpy()).astype(np.int64)


def w5(stream: ps.Stream) -> None:
    schema = pa.schema([("auction", pa.int64()), ("total", pa.int64())])
    stream.key_by("auction").process(Totals(), schema=schema).uid("w5-totals").discard()


def w5_limit(batches: Batches) -> int:
    """The same work with numpy alone; keys are small numbers, so that an array holds the totals."""
    totals = np.zeros(1 << 24, np.int64)
    rows = 0
    for batch in batches:
        found, sums = _summed(batch["auction"], batch["price"])
        totals[found] += sums
        rows += pa.record_batch(
            [pa.array(found), pa.array(totals[found])], names=["a", "t"]
        ).num_rows
    return rows


class CountedTotals(ps.KeyedProcessFunction):
    """Count and sum per key as in w3, a row at a time; emits the new ones for every row."""

    bids = ps.ValueState("bids", pa.int64(), default=0)
    total = ps.ValueState("total", pa.int64(), default=0)

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        bids = self.bids.value() + 1
        total = self.total.value() + row.price
        self.bids.update(bids)
        self.total.update(total)
        out.emit(auction=row.auction, bids=bids, total=total)


@ps.compiled
class CompiledTotals(CountedTotals):
    """The same, as one compiled loop."""


def w6(stream: ps.Stream) -> None:
    _count_totals(stream, CompiledTotals())


def w7(stream: ps.Stream) -> None:
    _count_totals(stream, CountedTotals())


def _count_totals(stream: ps.Stream, function: ps.KeyedProcessFunction) -> None:
    schema = pa.schema([("auction", pa.int64()), ("bids", pa.int64()), ("total", pa.int64())])
    stream.key_by("auction").process(function, schema=schema).uid("totals").discard()


def w7_limit(batches: Batches) -> int:
    """The same work in plain Python: two dicts, and lists that become columns."""
    bids: dict[int, int] = {}
    totals: dict[int, int] = {}
    rows = 0
    for batch in batches:
        counts, sums = [], []
        prices = zip(batch["auction"].to_pylist(), batch["price"].to_pylist(), strict=True)
        for auction, price in prices:
            bids[auction] = count = bids.get(auction, 0) + 1
            totals[auction] = total = totals.get(auction, 0) + price
            counts.append(count)
            sums.append(total)
        columns = [batch["auction"], pa.array(counts), pa.array(sums)]
        rows += pa.record_batch(columns, names=["auction", "bids", "total"]).num_rows
    return rows


def higher(one: Any, other: Any) -> Any:
    """The bid with the higher price."""
    return one if one.price >= other.price else other


def wr(stream: ps.Stream) -> None:
    (
        with_time(stream)
        .select("auction", "bidder", "price", "ts")
        .key_by("auction")
        .window(ps.tumbling(WINDOW_MS))
        .reduce(higher)
        .uid("wr-highest")
        .discard()
    )


def wr_limit(batches: Batches) -> int:
    """The same work in plain Python: a dict of rows per key and window."""
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for batch in batches:
        columns = (batch[name].to_pylist() for name in ("auction", "bidder", "price", "ts"))
        for auction, bidder, price, ts in zip(*columns, strict=True):
            key = auction, ts // WINDOW_MS
            held = best.get(key)
            if held is None or price > held[1]:
                best[key] = bidder, price, ts
    return len(best)
