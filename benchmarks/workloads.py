"""The workloads: each as a job, and its own work as plain pyarrow in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

import penstock as ps
from penstock import col

WINDOW_MS = 10_000
SLIDE_MS = 2_000
MIN_PRICE = 1000
RATE = 0.908

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        job: adds the job to an environment, from its input stream.
        limit: does the same work over batches with pyarrow alone.
    """

    name: str
    description: str
    job: Callable[[ps.Stream], None]
    limit: Callable[[Batches], object]


# ---------------------------------------------------------------- w0 to w2


def w0(stream: ps.Stream) -> None:
    stream.discard()


def w0_limit(batches: Batches) -> int:
    return sum(batch.num_rows for batch in batches)


def w1(stream: ps.Stream) -> None:
    stream.filter(col("price") > MIN_PRICE).select(
        "auction", "bidder", euro=col("price") * RATE
    ).discard()


def w1_limit(batches: Batches) -> int:
    rows = 0
    for batch in batches:
        kept = batch.filter(pc.greater(batch["price"], MIN_PRICE))
        projected = pa.record_batch(
            [kept["auction"], kept["bidder"], pc.multiply(kept["price"], RATE)],
            names=["auction", "bidder", "euro"],
        )
        rows += projected.num_rows
    return rows


def w2(stream: ps.Stream) -> None:
    (
        _with_time(stream)
        .key_by("auction")
        .window(ps.tumbling(WINDOW_MS))
        .aggregate(bids=ps.count(), total=ps.sum("price"), best=ps.max("price"))
        .uid("w2-windows")
        .discard()
    )


def w2_limit(batches: Batches) -> pa.Table:
    partials = [
        _group(
            _with_slices(batch, WINDOW_MS),
            ["auction", "slice"],
            [("price", "count"), ("price", "sum"), ("price", "max")],
        )
        for batch in batches
    ]
    return _group(
        pa.concat_tables(partials),
        ["auction", "slice"],
        [("price_count", "sum"), ("price_sum", "sum"), ("price_max", "max")],
    )


# ---------------------------------------------------------------- Nexmark


def q1(stream: ps.Stream) -> None:
    stream.select("auction", "bidder", "ts", "extra", euro=col("price") * RATE).discard()


def q1_limit(batches: Batches) -> int:
    rows = 0
    for batch in batches:
        names = ["auction", "bidder", "ts", "extra"]
        euro = pc.multiply(batch["price"], RATE)
        rows += pa.record_batch(
            [*(batch[name] for name in names), euro], names=[*names, "euro"]
        ).num_rows
    return rows


def q2(stream: ps.Stream) -> None:
    stream.filter(col("auction").isin(_Q2_AUCTIONS)).select("auction", "price").discard()


def q2_limit(batches: Batches) -> int:
    wanted = pa.array(_Q2_AUCTIONS, pa.int64())
    return sum(
        batch.filter(pc.is_in(batch["auction"], wanted)).select(["auction", "price"]).num_rows
        for batch in batches
    )


_Q2_AUCTIONS = [7, 20, 101, 219, 587]


def q5(stream: ps.Stream) -> None:
    """Auctions with the most bids in sliding windows."""
    counts = (
        _with_time(stream)
        .key_by("auction")
        .window(ps.sliding(WINDOW_MS, SLIDE_MS))
        .aggregate(bids=ps.count())
        .uid("q5-counts")
        .rename(window_start="starts", window_end="ends")
    )
    counts.window(ps.tumbling(SLIDE_MS)).process(MostBids(), schema=counts.schema).uid(
        "q5-most"
    ).discard()


class MostBids(ps.WindowFunction):
    """The rows of a window that have the largest count."""

    @override
    def process(
        self, key: object, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        """Emits the best of the window."""
        best = max(row.bids for row in rows)
        for row in rows:
            if row.bids == best:
                out.emit(row)


def q5_limit(batches: Batches) -> pa.Table:
    slices = [
        _group(_with_slices(batch, SLIDE_MS), ["auction", "slice"], [("price", "count")])
        for batch in batches
    ]
    counts = _group(pa.concat_tables(slices), ["auction", "slice"], [("price_count", "sum")])
    shifted = [
        counts.set_column(
            counts.schema.get_field_index("slice"), "slice", pc.subtract(counts["slice"], back)
        )
        for back in range(0, WINDOW_MS, SLIDE_MS)
    ]
    windows = _group(pa.concat_tables(shifted), ["auction", "slice"], [("price_count_sum", "sum")])
    return keep_largest(windows, "slice", "price_count_sum_sum")


def q7(stream: ps.Stream) -> None:
    """The bids with the highest price of each window."""
    schema = pa.schema([(name, pa.int64()) for name in ("auction", "bidder", "price", "ts")])
    best = stream.select("auction", "bidder", "price", "ts").map_batches(_highest, schema=schema)
    _with_time(best).window(ps.tumbling(WINDOW_MS)).process(Highest(), schema=schema).uid(
        "q7-highest"
    ).discard()


def _highest(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A bid that is not the highest of its window in its own batch cannot be so in the window."""
    start = pc.multiply(pc.divide(batch["ts"], WINDOW_MS), WINDOW_MS)
    kept = keep_largest(batch.append_column("start", start), "start", "price")
    return kept.drop_columns(["start"])


class Highest(ps.WindowFunction):
    """The rows of a window that have the highest price."""

    @override
    def process(
        self, key: object, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        """Emits the best of the window."""
        best = max(row.price for row in rows)
        for row in rows:
            if row.price == best:
                out.emit(row)


def q7_limit(batches: Batches) -> pa.Table:
    candidates = [
        keep_largest(_with_slices(batch, WINDOW_MS), "slice", "price") for batch in batches
    ]
    return keep_largest(pa.concat_tables(candidates), "slice", "price")


# ---------------------------------------------------------------- shared


def _with_time(stream: ps.Stream) -> ps.Stream:
    return stream.with_event_time("ts", out_of_orderness="100ms")


def _with_slices(batch: pa.RecordBatch, size_ms: int) -> pa.Table:
    start = pc.multiply(pc.divide(batch["ts"], size_ms), size_ms)
    return pa.table({"auction": batch["auction"], "price": batch["price"], "slice": start})


def _group(table: pa.Table, keys: list[str], aggregates: list[tuple[str, str]]) -> pa.Table:
    return table.group_by(keys, use_threads=False).aggregate(aggregates)


def keep_largest(rows: pa.RecordBatch, group: str, value: str) -> pa.RecordBatch:
    """The rows of a batch or table that have the largest ``value`` of their ``group``."""
    table = pa.table({"group": rows[group], "value": rows[value]})
    best = _group(table, ["group"], [("value", "max")])
    index = pc.index_in(table["group"].combine_chunks(), best["group"].combine_chunks())
    return rows.filter(pc.equal(rows[value], best["value_max"].combine_chunks().take(index)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w0", "read and discard", w0, w0_limit),
        Workload("w1", "filter and project", w1, w1_limit),
        Workload("w2", "10 s tumbling count, sum, max per key", w2, w2_limit),
        Workload("q1", "currency conversion", q1, q1_limit),
        Workload("q2", "bids of five auctions", q2, q2_limit),
        Workload("q5", "auctions with the most bids in sliding windows", q5, q5_limit),
        Workload("q7", "highest bids per window", q7, q7_limit),
    )
}
