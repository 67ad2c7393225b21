"""The workloads: each as a job, and its own work as plain pyarrow in one thread."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

import penstock as ps
from benchmarks import function_workloads as functions
from benchmarks.workload import (
    RATE,
    WINDOW_MS,
    Batches,
    Workload,
    group,
    keep_largest,
    with_slices,
    with_time,
)
from penstock import col

SLIDE_MS = 2_000
SESSION_GAP_MS = 10_000
MIN_PRICE = 1000


# ---------------------------------------------------------------- columns


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
        with_time(stream)
        .key_by("auction")
        .window(ps.tumbling(WINDOW_MS))
        .aggregate(bids=ps.count(), total=ps.sum("price"), best=ps.max("price"))
        .uid("w2-windows")
        .discard()
    )


def w2_limit(batches: Batches) -> pa.Table:
    partials = [
        group(
            with_slices(batch, WINDOW_MS),
            ["auction", "slice"],
            [("price", "count"), ("price", "sum"), ("price", "max")],
        )
        for batch in batches
    ]
    return group(
        pa.concat_tables(partials),
        ["auction", "slice"],
        [("price_count", "sum"), ("price_sum", "sum"), ("price_max", "max")],
    )


def w3(stream: ps.Stream) -> None:
    stream.key_by("auction").aggregate(bids=ps.count(), total=ps.sum("price")).uid(
        "w3-totals"
    ).discard()


def w3_limit(batches: Batches) -> pa.Table:
    partials = [
        group(pa.table(batch), ["auction"], [("price", "count"), ("price", "sum")])
        for batch in batches
    ]
    return group(
        pa.concat_tables(partials), ["auction"], [("price_count", "sum"), ("price_sum", "sum")]
    )


def count_distinct(stream: ps.Stream) -> None:
    """Different bidders of an auction so far."""
    stream.key_by("auction").aggregate(bidders=ps.count_distinct("bidder")).uid("cd").discard()


def count_distinct_limit(batches: Batches) -> pa.Table:
    rows = pa.concat_tables([pa.table(batch) for batch in batches])
    return group(rows, ["auction"], [("bidder", "count_distinct")])


def collect_list(stream: ps.Stream) -> None:
    """All prices of an auction so far."""
    stream.key_by("auction").aggregate(prices=ps.collect_list("price")).uid("cl").discard()


def collect_list_limit(batches: Batches) -> pa.Table:
    rows = pa.concat_tables([pa.table(batch) for batch in batches])
    return group(rows, ["auction"], [("price", "list")])


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
        with_time(stream)
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
        group(with_slices(batch, SLIDE_MS), ["auction", "slice"], [("price", "count")])
        for batch in batches
    ]
    counts = group(pa.concat_tables(slices), ["auction", "slice"], [("price_count", "sum")])
    shifted = [
        counts.set_column(
            counts.schema.get_field_index("slice"), "slice", pc.subtract(counts["slice"], back)
        )
        for back in range(0, WINDOW_MS, SLIDE_MS)
    ]
    windows = group(pa.concat_tables(shifted), ["auction", "slice"], [("price_count_sum", "sum")])
    return keep_largest(windows, "slice", "price_count_sum_sum")


def sliding(slices: int) -> Workload:
    """Windows of so many seconds that slide by one; 33,000 rows to a second of event time."""

    def job(stream: ps.Stream) -> None:
        (
            stream.with_columns(ts=col("ts") * _STRETCH)
            .with_event_time("ts", out_of_orderness="3s")
            .key_by("auction")
            .window(ps.sliding(f"{slices}s", "1s"))
            .aggregate(bids=ps.count(), total=ps.sum("price"), best=ps.max("price"))
            .uid("sliding")
            .discard()
        )

    def limit(batches: Batches) -> pa.Table:
        """The rows by second alone, which is the same for windows of any length."""
        stretched = (
            batch.set_column(
                batch.schema.get_field_index("ts"), "ts", pc.multiply(batch["ts"], _STRETCH)
            )
            for batch in batches
        )
        names = [("price", "count"), ("price", "sum"), ("price", "max")]
        parts = [
            group(with_slices(batch, 1_000), ["auction", "slice"], names) for batch in stretched
        ]
        sums = [("price_count", "sum"), ("price_sum", "sum"), ("price_max", "max")]
        return group(pa.concat_tables(parts), ["auction", "slice"], sums)

    return Workload(f"s{slices}", f"windows of {slices} s that slide by 1 s", job, limit)


_STRETCH = 30


def q7(stream: ps.Stream) -> None:
    """The bids with the highest price of each window."""
    schema = pa.schema([(name, pa.int64()) for name in ("auction", "bidder", "price", "ts")])
    best = stream.select("auction", "bidder", "price", "ts").map_batches(_highest, schema=schema)
    with_time(best).window(ps.tumbling(WINDOW_MS)).process(Highest(), schema=schema).uid(
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
        keep_largest(with_slices(batch, WINDOW_MS), "slice", "price") for batch in batches
    ]
    return keep_largest(pa.concat_tables(candidates), "slice", "price")


def q8(stream: ps.Stream) -> None:
    """Persons who opened auctions in the 10 s in which they registered.

    The one input stands for Nexmark's three streams, in its proportions: 2 % of the rows are persons, 6 %
    are auctions (their price says which), the rest are bids that the query does not read.
    """
    rows = with_time(stream)
    persons = rows.filter(col("price") < _Q8_PERSONS_BELOW).select(person=col("bidder"))
    auctions = rows.filter(
        (col("price") >= _Q8_PERSONS_BELOW) & (col("price") < _Q8_AUCTIONS_BELOW)
    ).select("auction", person=col("bidder"))
    persons.join(auctions, on="person", window=ps.tumbling(WINDOW_MS)).uid("q8-join").discard()


def q8_limit(batches: Batches) -> int:
    persons, auctions = [], []
    for batch in batches:
        slices = pc.multiply(pc.divide(batch["ts"], WINDOW_MS), WINDOW_MS)
        columns = {"person": batch["bidder"], "slice": slices}
        is_person = pc.less(batch["price"], _Q8_PERSONS_BELOW)
        is_auction = pc.and_(pc.invert(is_person), pc.less(batch["price"], _Q8_AUCTIONS_BELOW))
        persons.append(pa.table(columns).filter(is_person))
        auctions.append(pa.table({**columns, "auction": batch["auction"]}).filter(is_auction))
    joined = pa.concat_tables(persons).join(
        pa.concat_tables(auctions), ["person", "slice"], join_type="inner", use_threads=False
    )
    return joined.num_rows


_Q8_PERSONS_BELOW = 200
_Q8_AUCTIONS_BELOW = 800


def q11(stream: ps.Stream) -> None:
    """Bids per bidder in sessions of activity."""
    (
        with_time(stream)
        .key_by("bidder")
        .window(ps.session(SESSION_GAP_MS))
        .aggregate(bids=ps.count())
        .uid("q11-sessions")
        .discard()
    )


def q11_limit(batches: Batches) -> int:
    rows = pa.concat_tables([pa.table(batch).select(["bidder", "ts"]) for batch in batches])
    rows = rows.sort_by([("bidder", "ascending"), ("ts", "ascending")])
    bidder, ts = rows["bidder"].combine_chunks(), rows["ts"].combine_chunks()
    is_new = pc.or_(
        pc.not_equal(bidder[1:], bidder[:-1]),
        pc.greater_equal(pc.subtract(ts[1:], ts[:-1]), SESSION_GAP_MS),
    )
    sessions = pc.cumulative_sum(pa.concat_arrays([pa.array([0]), is_new.cast(pa.int64())]))
    return group(pa.table({"session": sessions}), ["session"], [("session", "count")]).num_rows


# ---------------------------------------------------------------- joins


def _halves(stream: ps.Stream) -> tuple[ps.Stream, ps.Stream]:
    """The rows with low and with high prices, about as many of each."""
    rows = with_time(stream)
    low = rows.filter(col("price") < _MIDDLE_PRICE).select("auction", "ts", bid=col("price"))
    high = rows.filter(col("price") >= _MIDDLE_PRICE).select("auction", ask=col("price"))
    return low, high


def interval_join(stream: ps.Stream) -> None:
    """Rows of two streams that are at most so far apart."""
    low, high = _halves(stream)
    within = f"-{JOIN_MS}ms", f"{JOIN_MS}ms"
    low.join(high, on="auction", within=within).uid("join").discard()


def window_join(stream: ps.Stream) -> None:
    """Rows of two streams in the same windows."""
    low, high = _halves(stream)
    low.join(high, on="auction", window=ps.tumbling(JOIN_MS)).uid("join").discard()


def _joined_by_duckdb(batches: Batches, condition: str) -> int:
    rows = pa.concat_tables([pa.table(batch) for batch in batches])
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("bids", rows)
        found = connection.execute(
            f"SELECT count(*) FROM bids l JOIN bids r ON l.auction = r.auction AND {condition} "
            f"WHERE l.price < {_MIDDLE_PRICE} AND r.price >= {_MIDDLE_PRICE}"
        ).fetchone()
    assert found is not None, "a count has a row"
    return int(found[0])


def interval_join_limit(batches: Batches) -> int:
    return _joined_by_duckdb(batches, f"r.ts BETWEEN l.ts - {JOIN_MS} AND l.ts + {JOIN_MS}")


def window_join_limit(batches: Batches) -> int:
    return _joined_by_duckdb(batches, f"l.ts // {JOIN_MS} = r.ts // {JOIN_MS}")


JOIN_MS = 100
_MIDDLE_PRICE = 5_000


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w0", "read and discard", w0, w0_limit),
        Workload("w1", "filter and project", w1, w1_limit),
        Workload("w2", "10 s tumbling count, sum, max per key", w2, w2_limit),
        Workload("w3", "running count and sum per key", w3, w3_limit),
        Workload(
            "w4",
            "Python map, key_by, Python function with a value per key",
            functions.w4,
            functions.w4_limit,
        ),
        Workload(
            "w5",
            "numpy function with a number per key, a batch at a time",
            functions.w5,
            functions.w5_limit,
        ),
        Workload("w6", "compiled function with two numbers per key", functions.w6, w3_limit),
        Workload(
            "w7", "Python function with two numbers per key", functions.w7, functions.w7_limit
        ),
        Workload("w2p", "w2 from Parquet, 100 windows", w2, w2_limit, reads_parquet=True),
        Workload(
            "wr", "highest bid per window, reduced in Python", functions.wr, functions.wr_limit
        ),
        Workload("cd", "different bidders per key", count_distinct, count_distinct_limit),
        Workload("cl", "all prices per key", collect_list, collect_list_limit),
        *(sliding(slices) for slices in (10, 60, 300, 3600)),
        Workload("q1", "currency conversion", q1, q1_limit),
        Workload("q2", "bids of five auctions", q2, q2_limit),
        Workload("q5", "auctions with the most bids in sliding windows", q5, q5_limit),
        Workload("q7", "highest bids per window", q7, q7_limit),
        Workload("q8", "persons who opened auctions: window join", q8, q8_limit),
        Workload("ij", "interval join of two halves", interval_join, interval_join_limit),
        Workload("wj", "window join of two halves", window_join, window_join_limit),
        Workload("q11", "bids per bidder and session", q11, q11_limit),
    )
}
