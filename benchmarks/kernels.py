"""Rates of the kernels, in million rows per second, by number of keys: ``python -m benchmarks.kernels``.

Batches of 8,192 rows, the best of a few repetitions, one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.storage.key_groups import owners
from taskmanager.kernels import (
    AccumulatorKind,
    RecordTable,
    distinct,
    encode_keys,
    hash_columns,
    partition_order,
    slice_starts,
    split_by_slice,
    time_bounds,
    warm_up,
)

BATCH_ROWS = 8192
REPETITIONS = 3


def rate(run: Callable[[Any], object], batches: list[Any]) -> float:
    """Million rows per second of the fastest pass over all batches."""
    best = float("inf")
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        for batch in batches:
            run(batch)
        best = min(best, time.perf_counter() - start)
    return len(batches) * BATCH_ROWS / best / 1e6


def table_rates(key_count: int, make_key: Callable[[Any], pa.Array]) -> Iterator[tuple[str, float]]:
    """Encoding, hashing, grouping and count/sum/max of keys drawn uniformly from ``key_count``."""
    generator = np.random.default_rng(7)
    pool = make_key(generator.permutation(np.arange(1, 1 + 3 * key_count, 3)))
    batch_count = 320 if key_count > 10_000 else 60
    columns = [
        pool.take(pa.array(generator.integers(0, key_count, BATCH_ROWS)))
        for _ in range(batch_count)
    ]
    values = generator.integers(0, 1_000_000, BATCH_ROWS)
    kinds = [AccumulatorKind.COUNT, AccumulatorKind.SUM_INT64, AccumulatorKind.MAX_INT64]
    table = RecordTable([pool.type], kinds)

    def accumulate(column: pa.Array) -> None:
        table.accumulate(encode_keys([column]), [None, values, values], [None] * 3)

    def new_keys(column: pa.Array) -> None:
        fresh.accumulate(encode_keys([column]), [None, values, values], [None] * 3)

    def pre_aggregate(column: pa.Array) -> None:
        per_batch.accumulate(encode_keys([column]), [None, values, values], [None] * 3)
        per_batch.rows()
        per_batch.clear()

    yield "hash", rate(lambda column: hash_columns([column]), columns)
    yield "encode", rate(lambda column: encode_keys([column]), columns)
    yield "encode + distinct", rate(lambda column: distinct(encode_keys([column])), columns)
    yield "count/sum/max", rate(accumulate, columns)
    per_batch = RecordTable([pool.type], kinds)
    yield "pre-aggregation", rate(pre_aggregate, columns)
    if key_count > 10_000:
        fresh = RecordTable([pool.type], kinds)
        start = time.perf_counter()
        whole = [pool.slice(at, BATCH_ROWS) for at in range(0, key_count - BATCH_ROWS, BATCH_ROWS)]
        for column in whole:
            new_keys(column)
        yield "new keys", len(whole) * BATCH_ROWS / (time.perf_counter() - start) / 1e6


def row_rates() -> Iterator[tuple[str, float]]:
    """Slices of time and partitioning."""
    generator = np.random.default_rng(7)
    times = [
        np.sort(generator.integers(at * 1000, at * 1000 + 1500, BATCH_ROWS)) for at in range(60)
    ]
    hashes = [generator.integers(0, 2**64, BATCH_ROWS, dtype=np.uint64) for _ in range(60)]
    channels = [owners(batch, 8, 128) for batch in hashes]
    yield "slice_starts", rate(lambda batch: slice_starts(batch, 10_000), times)
    yield "time_bounds", rate(time_bounds, times)
    yield "split_by_slice", rate(lambda batch: split_by_slice(batch, 500), times)
    yield "owners", rate(lambda batch: owners(batch, 8, 128), hashes)
    yield "partition_order", rate(lambda batch: partition_order(batch, 8), channels)


def main() -> None:
    """Prints one line per kernel and number of keys."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    start = time.perf_counter()
    warm_up()
    print(f"warm-up {time.perf_counter() - start:.2f} s")
    for name, million in row_rates():
        print(f"{name:24} {million:8.1f} M rows/s")
    makers: list[tuple[str, Callable[[Any], pa.Array], tuple[int, ...]]] = [
        ("int64", pa.array, (1_000, 100_000, 1_000_000)),
        (
            "string",
            lambda ids: pa.array([f"user-{i}" for i in ids.tolist()]),
            (1_000, 100_000),
        ),
    ]
    for type_name, make_key, key_counts in makers:
        for key_count in key_counts:
            for name, million in table_rates(key_count, make_key):
                print(f"{type_name:8} {key_count:9,} keys {name:20} {million:8.1f} M rows/s")


if __name__ == "__main__":
    main()
