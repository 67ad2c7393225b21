"""Aim: a text column may hold more bytes than 32-bit offsets can say, in one window of one subtask, on both backends.

Method: 2.4 GB of texts that carry their row's number; each is looked at where it comes out. Needs 10 GB of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps

pytestmark = [pytest.mark.large, pytest.mark.timeout(900)]

ROWS, WIDTH = 120_000, 20_000


def wide(start: int, count: int) -> pa.RecordBatch:
    numbers = range(start, start + count)
    texts = [f"{n:08}" + "x" * (WIDTH - 8) for n in numbers]
    return pa.record_batch({"n": numbers, "ts": numbers, "k": [0] * count, "text": texts})


class Look(ps.WindowFunction):
    def process(self, key: Any, window: ps.WindowInfo, rows: Sequence[Any], out: Any) -> None:
        right = sum(
            row.n == n == int(row.text[:8]) and len(row.text) == WIDTH for n, row in enumerate(rows)
        )
        out.emit(rows=len(rows), right=right)


@pytest.mark.parametrize("mode", ["streaming", "batch"])
@pytest.mark.parametrize(("backend", "managed"), [("rocksdb", "1gb"), ("hashmap", "6gb")])
def test_the_rows_of_one_window(backend: str, managed: str, mode: str) -> None:
    config = {
        "state.backend.type": backend,
        "taskmanager.memory.managed.size": managed,
        "execution.runtime-mode": mode,
    }
    with ps.Environment(parallelism=1, config=config) as env:
        stream = env.generate(wide, rows=ROWS).with_event_time("ts").key_by("k")
        looked = stream.window(ps.tumbling("1h")).process(
            Look(), schema={"rows": "int64", "right": "int64"}
        )
        assert [dict(row) for row in looked.collect()] == [{"rows": ROWS, "right": ROWS}]


@pytest.mark.parametrize(("backend", "managed"), [("rocksdb", "1gb"), ("hashmap", "6gb")])
def test_the_results_of_one_window(backend: str, managed: str, tmp_path: Path) -> None:
    config = {"state.backend.type": backend, "taskmanager.memory.managed.size": managed}
    with ps.Environment(parallelism=1, config=config) as env:
        stream = env.generate(wide, rows=ROWS).with_event_time("ts").key_by("n")
        most = stream.window(ps.tumbling("1h")).aggregate(text=ps.max("text"))
        most.select("n", "text").write_parquet(str(tmp_path / "out"))
        env.execute("more than 2 GiB of results")
    seen: set[int] = set()
    for file in (tmp_path / "out").rglob("*.parquet"):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1000):
            for n, text in zip(*(batch.column(i).to_pylist() for i in range(2)), strict=True):
                assert int(text[:8]) == n
                assert len(text) == WIDTH
                seen.add(n)
    assert seen == set(range(ROWS))
