"""The job of the golden set: every kind of state, and all that it emits it emits at the end of its data.

So whoever goes on from a checkpoint of it writes the whole result. What it holds must stay as it is: the set in
``tests/golden`` was made by it (``write_golden``).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from tests.support.jobs import canonical

KEYS, ROWS = 13, 2_600
DAY = "1d"
_FAR_MS = 10**9

NUMBERS = {"k": "int64", "n": "int64", "text": "string", "ts": "timestamp[ms, UTC]"}


def numbers(start: int, count: int) -> pa.RecordBatch:
    """Rows of the source."""
    places = range(start, start + count)
    columns = {
        "k": pa.array([n % KEYS for n in places], pa.int64()),
        "n": pa.array(places, pa.int64()),
        "text": pa.array([f"text {n % 7}" for n in places]),
        "ts": pa.array(list(places), pa.timestamp("ms", "UTC")),
    }
    return pa.record_batch(columns)


class SumOfRows(ps.WindowFunction):
    """Keeps the rows of a window."""

    def process(self, key: object, window: ps.WindowInfo, rows: Any, out: ps.Collector) -> None:
        out.emit(name="rows", key=key, number=sum(row.n for row in rows))


class States(ps.KeyedProcessFunction):
    """Keeps something in a state of every kind, and says what is there when its timer fires."""

    counts = ps.AggregatingState("counts", "count", pa.int64())
    sums = ps.ReducingState("sums", pa.int64(), lambda a, b: a + b)
    pairs = ps.ValueState("pairs", pa.struct([("low", pa.int64()), ("high", pa.int64())]))
    texts = ps.MapState("texts", pa.string(), pa.int64())
    halves = ps.ListState("halves", pa.float64())
    fresh = ps.MapState("fresh", pa.int64(), pa.int64(), ttl=ps.Ttl("36500d"))
    last = ps.ValueState("last", pa.int64(), default=0, ttl=ps.Ttl("36500d"))

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.counts.add(row.n)
        self.sums.add(row.n)
        pair = self.pairs.value() or {"low": row.n, "high": row.n}
        self.pairs.update({"low": min(pair["low"], row.n), "high": max(pair["high"], row.n)})
        self.texts.put(row.text, row.n)
        self.halves.add(row.n / 2)
        self.fresh.put(row.n % 5, row.n)
        self.last.update(max(row.n, self.last.value()))
        ctx.timers.event_time(_FAR_MS)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        pair = self.pairs.value()
        found = [
            self.counts.get(),
            self.sums.get(),
            pair["low"] + pair["high"],
            len(list(self.texts.keys())),
            int(sum(self.halves.get())),
            len(list(self.fresh.keys())),
            self.last.value(),
        ]
        for place, number in enumerate(found):
            out.emit(name=f"states {place}", key=ctx.key, number=number)


def build(env: ps.Environment, output: Path, rate: float | None = None) -> None:
    """Adds the job to an environment."""
    schema = {"name": "string", "key": "int64", "number": "int64"}
    source = env.generate(numbers, rows=ROWS, rate=rate, schema=NUMBERS).uid("numbers")
    rows = source.with_event_time("ts", out_of_orderness="0s").uid("time")
    window = ps.tumbling(DAY)

    def named(stream: ps.Stream, name: str, number: str, key: str = "k") -> None:
        chosen = stream.select(
            name=ps.lit(name), key=ps.col(key), number=ps.col(number).cast("int64")
        )
        chosen.uid(f"{name}-names").write_parquet(output / name).uid(f"{name}-files")

    tumbling = rows.key_by("k").window(window)
    named(tumbling.aggregate(number=ps.sum("n"), c=ps.count()).uid("sums"), "sums", "number")
    distinct = rows.key_by("k").window(window)
    named(distinct.aggregate(c=ps.count_distinct("text")).uid("distinct"), "distinct", "c")
    held = rows.key_by("k").window(window)
    held.process(SumOfRows(), schema=schema).uid("rows").write_parquet(output / "rows").uid(
        "rows-files"
    )
    sessions = rows.key_by("k").window(ps.session(DAY))
    named(sessions.aggregate(number=ps.max("n")).uid("sessions"), "sessions", "number")
    counts = rows.key_by("k").window(ps.count_window(ROWS // KEYS))
    named(counts.aggregate(number=ps.sum("n")).uid("counts"), "counts", "number")
    rows.key_by("k").process(States(), schema=schema).uid("states").write_parquet(
        output / "states"
    ).uid("states-files")
    early = rows.filter(ps.col("n") < 2 * KEYS).uid("early").select("k", low=ps.col("n"))
    late = rows.filter(ps.col("n") >= ROWS - 2 * KEYS).uid("late").select("k", high=ps.col("n"))
    early, late = early.uid("early-names"), late.uid("late-names")
    named(early.join(late, on="k", window=window).uid("joined"), "joined", "high")
    named(early.join(late, on="k", within=("-1d", "1d")).uid("within"), "within", "low")


def result(output: Path) -> Counter[Any]:
    """What was written."""
    files = [path for path in output.glob("*/*.parquet") if path.name[0] not in "._"]
    return Counter(canonical(row) for path in files for row in pq.read_table(path).to_pylist())
