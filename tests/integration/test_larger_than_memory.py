"""Aim: a batch job on a cluster whose exchanges, unions and state are larger than the memory for them is right.

Method: two generated inputs of 700 MB in all are brought together, exchanged by key and spread again, with 16 MB for
state and 16 MB for kept rows in each slot; what comes out is compared with what each row says of itself, and the
largest memory of a slot process, which the last operator reads, stays below what the input takes.
"""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import dataset

import penstock as ps
from penstock import col
from tests.support.examples import RUNS_ALL

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not RUNS_ALL, reason="it moves gigabytes: make test-all runs it"),
]

ROWS, KEYS = 300_000, 30_000
WIDTH = 1_500
PEAK_MAX_MB = 600
DEADLINE_S = 240.0
SMALL = {
    "taskmanager.memory.managed.size": "16mb",
    "taskmanager.memory.exchange-cache.size": "16mb",
}


def rows_of(start: int, count: int) -> pa.RecordBatch:
    """Rows whose text is their number, wide; keys in an order that is not sorted."""
    numbers = pa.array(range(start, start + count), pa.int64())
    keys = pa.array(np.arange(start, start + count) * 7919 % KEYS)
    texts = pc.utf8_lpad(pc.cast(numbers, pa.string()), WIDTH, "0")
    return pa.record_batch({"n": numbers, "k": keys, "text": texts})


class WithPeak(ps.ProcessFunction):
    """Passes rows on with the largest memory this process has had."""

    def process(self, row, ctx, out):  # type: ignore[no-untyped-def]
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out.emit(k=row.k, count=row.count, last=row.last, peak_kb=peak_kb)


OUT = pa.schema(
    [("k", pa.int64()), ("count", pa.int64()), ("last", pa.string()), ("peak_kb", pa.int64())]
)


def job(environment: ps.Environment, out: Path) -> None:
    first = environment.generate(rows_of, rows=ROWS, schema=rows_of(0, 1).schema)
    second = environment.generate(rows_of, rows=ROWS, schema=rows_of(0, 1).schema)
    (
        first.union(second.filter(col("n") % 2 == 0))
        .rebalance()
        .key_by("k")
        .aggregate(count=ps.count(), last=ps.max("text"))
        .rebalance()
        .process(WithPeak(), schema=OUT)
        .write_parquet(str(out))
    )


@pytest.mark.parametrize("exchange", ["blocking", "pipelined", "caching"])
def test_unions_and_exchanges_beyond_memory_are_right(tmp_path: Path, exchange: str) -> None:
    config = {**SMALL, "state.backend.type": "rocksdb", "execution.exchange.default": exchange}
    with ps.Environment(parallelism=2, config=config) as environment:
        environment.set_runtime_mode("batch")
        job(environment, tmp_path / "out")
        environment.submit("beyond-memory").wait(DEADLINE_S)

    found = dataset.dataset(tmp_path / "out").to_table()
    by_key = found.group_by("k").aggregate([("count", "max"), ("last", "max")]).sort_by("k")
    numbers = [[n for n in range(ROWS) if n * 7919 % KEYS == key] for key in range(20)]
    assert by_key.num_rows == KEYS
    assert pc.sum(by_key["count_max"]).as_py() == ROWS + ROWS // 2
    assert by_key["count_max"].to_pylist()[:20] == [
        len(of_key) + sum(n % 2 == 0 for n in of_key) for of_key in numbers
    ]
    assert by_key["last_max"].to_pylist()[:20] == [
        str(max(of_key)).zfill(WIDTH) for of_key in numbers
    ]
    assert pc.max(found["peak_kb"]).as_py() / 1024 < PEAK_MAX_MB
