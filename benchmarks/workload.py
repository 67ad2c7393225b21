"""What a workload is, and what several of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import penstock as ps

WINDOW_MS = 10_000
RATE = 0.908

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        job: adds the job to an environment, from its input stream.
        limit: does the same work over batches with pyarrow alone.
        reads_parquet: its input is Parquet, with 100 windows of ``WINDOW_MS`` in it, instead of Arrow in memory.
    """

    name: str
    description: str
    job: Callable[[ps.Stream], None]
    limit: Callable[[Batches], object]
    reads_parquet: bool = False


def with_time(stream: ps.Stream) -> ps.Stream:
    """With the event time that the input has."""
    return stream.with_event_time("ts", out_of_orderness="100ms")


def with_slices(batch: pa.RecordBatch, size_ms: int) -> pa.Table:
    """Keys, prices and the beginnings of the windows of this size that rows lie in."""
    start = pc.multiply(pc.divide(batch["ts"], size_ms), size_ms)
    return pa.table({"auction": batch["auction"], "price": batch["price"], "slice": start})


def group(table: pa.Table, keys: list[str], aggregates: list[tuple[str, str]]) -> pa.Table:
    """Aggregates per key, in one thread."""
    return table.group_by(keys, use_threads=False).aggregate(aggregates)


def keep_largest(rows: pa.RecordBatch, within: str, value: str) -> pa.RecordBatch:
    """The rows of a batch or table that have the largest ``value`` of their ``within``."""
    table = pa.table({"group": rows[within], "value": rows[value]})
    best = group(table, ["group"], [("value", "max")])
    index = pc.index_in(table["group"].combine_chunks(), best["group"].combine_chunks())
    return rows.filter(pc.equal(rows[value], best["value_max"].combine_chunks().take(index)))
