"""A job of event-time windows whose output can be worked out: how many rows of each key lie in each window, and
what they sum up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock as ps
from tests.support.committed_files import Table

KEYS = 40
WINDOW_MS = 500
OUT_OF_ORDERNESS_MS = 200
EPOCH_MS = 1_700_000_000_000
ROW = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("ts", pa.int64())])


def rows_of(start: int, count: int) -> pa.RecordBatch:
    """Rows of which two come in a millisecond of event time, out of order."""
    n = np.arange(start, start + count, dtype=np.int64)
    ts = EPOCH_MS + n // 2 - n * 7919 % OUT_OF_ORDERNESS_MS
    return pa.record_batch([pa.array(n * 31 % KEYS), pa.array(n), pa.array(ts)], schema=ROW)


@dataclass(frozen=True)
class WindowedJob:
    """One job and its output.

    Attributes:
        rows: of the source.
        rate: rows per second of the source; None = as fast as it goes.
        output: directory of its output.
    """

    rows: int
    rate: float | None
    output: Path

    @property
    def windows(self) -> str:
        return str(self.output / "windows")

    def build(self, env: ps.Environment) -> None:
        """rows -> key_by -> windows -> sink."""
        rows = env.generate(rows_of, rows=self.rows, rate=self.rate, schema=ROW).uid("rows")
        timed = rows.with_event_time("ts", out_of_orderness=f"{OUT_OF_ORDERNESS_MS}ms")
        windows = timed.key_by("key").window(ps.tumbling(f"{WINDOW_MS}ms"))
        totals = windows.aggregate(rows=ps.count(), total=ps.sum("n")).uid("windows")
        start_ms = (ps.col("window_start").cast("int64") - EPOCH_MS) // WINDOW_MS
        totals.select("key", "rows", "total", window=start_ms).write_json(self.windows).uid("sink")

    def check(self) -> None:
        """Every row has been counted once, in its window.

        Raises:
            AssertionError: one has not.
        """
        made = rows_of(0, self.rows)
        keys, numbers, times = (column.to_numpy() for column in made.columns)
        windows = (times - EPOCH_MS) // WINDOW_MS
        counts: Counter[tuple[int, int]] = Counter()
        totals: Counter[tuple[int, int]] = Counter()
        for key, n, window in zip(keys.tolist(), numbers.tolist(), windows.tolist(), strict=True):
            counts[key, window] += 1
            totals[key, window] += n
        table = Table(self.windows, lambda row: (row["key"], row["window"]))
        table.look()
        found = {(row["key"], row["window"]): (row["rows"], row["total"]) for row in table.rows()}
        assert found == {at: (counts[at], totals[at]) for at in counts}
