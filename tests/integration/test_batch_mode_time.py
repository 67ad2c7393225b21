"""Aim: in batch mode no row is late, whatever the source, what stands behind it and how many subtasks read.

Method: rows in random order over an hour in windows of a minute; every source and every operator must count all
of them, without a side output for late rows getting one. What files say of the rows to come still lets windows
fire as the input is read.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import penstock as ps
from penstock import col
from tests.integration.conftest import NewEnvironment
from tests.support.examples import RUNS_ALL
from tests.support.jobs import rows_of, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

ROWS = 6_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
BATCH = {"execution.runtime-mode": "batch", "execution.batch-rows": 256}
OFTEN = {**BATCH, "pipeline.auto-watermark-interval": "0ms"}


def unsorted() -> pa.Table:
    numbers = random.Random(7)
    return pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()),
            "key": pa.array([f"k{numbers.randrange(50)}" for _ in range(ROWS)]),
            "ts": pa.array([numbers.randrange(HOUR_MS) for _ in range(ROWS)], pa.int64()),
        }
    )


TABLE = unsorted()


def _parquet(env: ps.Environment, directory: Path, **options: Any) -> ps.Stream:
    third = ROWS // 3
    for part in range(3):
        parquet.write_table(
            TABLE.slice(part * third, third),
            directory / f"{part}.parquet",
            row_group_size=500,
            **options,
        )
    return env.read_parquet(str(directory))


def _csv(env: ps.Environment, directory: Path) -> ps.Stream:
    csv.write_csv(TABLE.slice(0, 1000), directory / "0.csv")
    csv.write_csv(TABLE.slice(1000), directory / "1.csv")
    return env.read_csv(str(directory))


def _json(env: ps.Environment, directory: Path) -> ps.Stream:
    import json

    (directory / "0.json").write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    return env.read_json(str(directory))


def _arrow(env: ps.Environment, directory: Path) -> ps.Stream:
    with pa.ipc.new_file(directory / "0.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=700)
    return env.read_arrow(str(directory))


def _generate(env: ps.Environment, directory: Path) -> ps.Stream:
    table = TABLE.combine_chunks().to_batches()[0]
    return env.generate(table.slice, rows=ROWS, schema=TABLE.schema)


def _paced(env: ps.Environment, directory: Path) -> ps.Stream:
    table = TABLE.combine_chunks().to_batches()[0]
    return env.generate(table.slice, rows=ROWS, rate=8_000, schema=TABLE.schema)


class Mine(ps.Source):
    """Two splits of which one says from when on its rows are."""

    def __init__(self, table: pa.Table) -> None:
        self._batch = table.combine_chunks().to_batches()[0]

    @property
    def schema(self) -> pa.Schema:
        return self._batch.schema

    def discover(self, ctx: Any) -> list[Any]:
        return [ps.Split("a", b"0", min_event_time_ms=0), ps.Split("b", b"3000")]

    def open(self, split: Any, position: Any) -> Any:
        return MyReader(self._batch.slice(int(split.payload), ROWS // 2))


class MyReader(ps.Reader):
    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def read(self, max_rows: int) -> Any:
        if not self._batch.num_rows:
            return ps.END
        rows, self._batch = self._batch.slice(0, 100), self._batch.slice(100)
        return rows

    def position(self) -> bytes:
        return b""


SOURCES: dict[str, Callable[[ps.Environment, Path], ps.Stream]] = {
    "from_rows": lambda env, _: env.from_rows(TABLE.to_pylist()),
    "from_arrow": lambda env, _: env.from_arrow(TABLE),
    "parquet": _parquet,
    "parquet_without_statistics": lambda env, d: _parquet(env, d, write_statistics=False),
    "csv": _csv,
    "json": _json,
    "arrow": _arrow,
    "generate": _generate,
    "paced": _paced,
    "mine": lambda env, _: env.source(Mine(TABLE)),
}


def counted(stream: ps.Stream, **window: Any) -> ps.Stream:
    return (
        stream.key_by("key")
        .window(ps.tumbling("1 min"), late_to="late", **window)
        .aggregate(n=ps.count())
        .uid("counted")
    )


def expected() -> Counter[tuple[str, int]]:
    rows = TABLE.to_pylist()
    return Counter((row["key"], row["ts"] // MINUTE_MS * MINUTE_MS) for row in rows)


def found(rows: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    return Counter(
        {(row["key"], int(row["window_start"].timestamp() * 1000)): row["n"] for row in rows}
    )


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_every_row_of_every_source_counts(
    new_env: NewEnvironment, tmp_path: Path, source: str, parallelism: int
) -> None:
    env = new_env(parallelism=parallelism, config=OFTEN)
    stream = SOURCES[source](env, tmp_path).with_event_time("ts", idle_timeout="1ms")
    counts = counted(stream)
    late, rows = counts.side_output("late").collect(), counts.collect()
    totals = run(env).metrics["totals"]
    assert found(rows) == expected()
    assert list(late) == []
    assert totals["late_records"] == 0


def _behind_exchange(env: ps.Environment) -> ps.Stream:
    return env.from_arrow(TABLE).rebalance().filter(col("n") >= 0).with_event_time("ts")


def _behind_function(env: ps.Environment) -> ps.Stream:
    rows = env.from_arrow(TABLE).filter(lambda row: row.n >= 0)
    return rows.map(
        lambda row: {"n": row.n, "key": row.key, "ts": row.ts}, schema=TABLE.schema
    ).with_event_time("ts")


def _union(env: ps.Environment) -> ps.Stream:
    parts = [env.from_arrow(TABLE.slice(0, 1500)), env.from_arrow(TABLE.slice(1500))]
    first, second = (part.with_event_time("ts") for part in parts)
    return first.union(second)


def _persisted(env: ps.Environment) -> ps.Stream:
    return (
        env.from_arrow(TABLE).with_event_time("ts").key_by("key").rebalance().with_event_time("ts")
    )


class Same(ps.KeyedProcessFunction):
    seen = ps.ValueState("seen", pa.int64())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update((self.seen.value() or 0) + 1)
        out.emit(n=row.n, key=row.key, ts=row.ts)


def _processed(env: ps.Environment) -> ps.Stream:
    stream = env.from_arrow(TABLE).with_event_time("ts").key_by("key")
    return stream.process(Same(), schema=TABLE.schema).uid("same")


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize(
    "shape", [_behind_exchange, _behind_function, _union, _persisted, _processed]
)
def test_every_row_counts_behind(
    new_env: NewEnvironment, shape: Callable[[ps.Environment], ps.Stream], parallelism: int
) -> None:
    env = new_env(parallelism=parallelism, config=OFTEN)
    counts = counted(shape(env), allowed_lateness="1 min")
    late, rows = counts.side_output("late").collect(), counts.collect()
    run(env)
    assert found(rows) == expected()
    assert list(late) == []


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_joins_and_sessions_see_every_row(new_env: NewEnvironment, backend: str) -> None:
    env = new_env(parallelism=2, config={**OFTEN, "state.backend.type": backend})
    left = env.from_arrow(TABLE).with_event_time("ts")
    right = env.from_arrow(TABLE.select(["n", "ts"]).rename_columns(["n", "at"])).with_event_time(
        "at"
    )
    joined = left.key_by("n").join(right.key_by("n"), on="n", within=("0s", "1s"))
    windowed = left.key_by("n").join(right.key_by("n"), on="n", window=ps.tumbling("1s"))
    sessions = left.key_by("key").window(ps.session("1h"), late_to="late").aggregate(n=ps.count())
    collected = [joined.collect(), windowed.collect(), sessions.collect()]
    run(env)
    assert [len(list(collected[0])), len(list(collected[1]))] == [ROWS, ROWS]
    assert sum(row["n"] for row in collected[2]) == ROWS


def test_what_is_persisted_and_read_again_counts_in_full(new_env: NewEnvironment) -> None:
    env = new_env(parallelism=2, config=BATCH)
    env.from_arrow(TABLE).persist("unsorted")
    run(env)
    env = new_env(parallelism=3, config=OFTEN)
    rows = rows_of(env, counted(env.read_persisted("unsorted").with_event_time("ts")))
    assert found(rows) == expected()


def test_nexmark_loses_nothing(new_env: NewEnvironment) -> None:
    counts = []
    for parallelism in (1, 3):
        env = new_env(parallelism=parallelism, config=OFTEN)
        bids = env.nexmark(20_000).with_event_time("ts")
        rows = rows_of(
            env, bids.key_by("auction").window(ps.tumbling("1s")).aggregate(n=ps.count())
        )
        counts.append(sum(row["n"] for row in rows))
    assert counts[0] == counts[1]


class Watermarks(ps.ProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(n=row.n, watermark=ctx.watermark, ts=ctx.timestamp)


@pytest.mark.parametrize("chained", ["plain", "selected"])
def test_sorted_files_with_statistics_fire_as_they_go(
    new_env: NewEnvironment, tmp_path: Path, chained: str
) -> None:
    in_order = TABLE.sort_by("ts")
    parquet.write_table(in_order, tmp_path / "0.parquet", row_group_size=500)
    env = new_env(parallelism=1, config=BATCH)
    stream = env.read_parquet(str(tmp_path))
    if chained == "selected":
        stream = stream.filter(col("n") >= 0).select("n", at=col("ts")).with_event_time("at")
    else:
        stream = stream.with_event_time("ts")
    schema = pa.schema([("n", pa.int64()), ("watermark", pa.int64()), ("ts", pa.int64())])
    rows = rows_of(env, stream.process(Watermarks(), schema=schema))
    assert all(row["watermark"] < row["ts"] for row in rows)
    assert len({row["watermark"] for row in rows}) >= 10, "it advances from row group to row group"


class InThePast(ps.KeyedProcessFunction):
    """Emits a row at a time long before that of the row it stands for."""

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(ctx.timestamp - 10 * MINUTE_MS)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(key=ctx.key)


class InTheWallClocksPast(ps.KeyedProcessFunction):
    """Emits a row at a wall-clock time, which is before all rows."""

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.processing_time(-row.n)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(key=ctx.key)


@pytest.mark.parametrize("function", [InThePast(), InTheWallClocksPast()], ids=["event", "clock"])
def test_what_a_timer_in_the_past_emits_is_not_late(
    new_env: NewEnvironment, tmp_path: Path, function: ps.KeyedProcessFunction
) -> None:
    in_order = TABLE.sort_by("ts")
    parquet.write_table(in_order, tmp_path / "0.parquet", row_group_size=500)
    env = new_env(parallelism=1, config=OFTEN)
    keyed = env.read_parquet(str(tmp_path)).with_event_time("ts").key_by("key")
    emitted = keyed.process(function, schema={"key": str})
    windows = emitted.key_by("key").window(ps.tumbling("1 min"), late_to="late")
    counts = windows.aggregate(k=ps.count())
    late, found = counts.side_output("late").collect(), counts.collect()
    run(env)
    if isinstance(function, InThePast):
        timers = {(row["key"], row["ts"]) for row in TABLE.to_pylist()}
        wanted = Counter((key, (ts - 10 * MINUTE_MS) // MINUTE_MS) for key, ts in timers)
    else:
        wanted = Counter((row["key"], -row["n"] // MINUTE_MS) for row in TABLE.to_pylist())
    found_counts = {
        (row["key"], int(row["window_start"].timestamp()) // 60): row["k"] for row in found
    }
    assert (found_counts, list(late)) == (dict(wanted), [])


def test_statistics_of_other_times_than_the_rows_are_not_believed(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    seconds = pa.table(
        {"n": TABLE["n"], "ts": pa.array([-int(t) for t in TABLE["ts"].to_pylist()])}
    )
    parquet.write_table(seconds, tmp_path / "0.parquet", row_group_size=500)
    schema = pa.schema([("n", pa.int64()), ("ts", pa.timestamp("s"))])
    env = new_env(parallelism=1, config=OFTEN)
    rows = env.read_parquet(str(tmp_path), schema=schema).with_event_time("ts")
    counts = rows.key_by("n").window(ps.tumbling("1 min"), late_to="late").aggregate(k=ps.count())
    late, found = counts.side_output("late").collect(), counts.collect()
    run(env)
    assert (len(list(found)), list(late)) == (ROWS, [])


def test_names_of_directories_win_over_statistics(new_env: NewEnvironment, tmp_path: Path) -> None:
    for hour in (5, 1, 3):
        directory = tmp_path / f"ts={hour * HOUR_MS}"
        directory.mkdir()
        table = pa.table({"n": [hour], "ts": pa.array([10 * HOUR_MS], pa.int64())})
        parquet.write_table(table, directory / "0.parquet")
    env = new_env(parallelism=1, config=OFTEN)
    rows = env.read_parquet(str(tmp_path)).with_event_time("ts")
    counts = rows.key_by("n").window(ps.tumbling("1 min"), late_to="late").aggregate(k=ps.count())
    late, found = counts.side_output("late").collect(), counts.collect()
    run(env)
    assert (sorted(row["n"] for row in found), list(late)) == ([1, 3, 5], [])


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
@pytest.mark.parametrize("shape", ["count", "session", "process"])
def test_more_state_than_memory_names_operator_and_remedy(shape: str) -> None:
    rows = 400_000
    numbers = pa.array(range(rows), pa.int64())
    table = pa.table({"k": numbers, "ts": numbers})
    for backend, size in (("hashmap", "2mb"), ("rocksdb", "8mb")):
        config = {
            "execution.runtime-mode": "batch",
            "state.backend.type": backend,
            "taskmanager.memory.managed.size": size,
        }
        with ps.Environment(parallelism=1, config=config) as env:
            keyed = env.from_arrow(table).with_event_time("ts").key_by("k")
            counted = _of_all_keys(keyed, shape).uid("of-all-keys").name("of all keys")
            total = counted.key_by("one").aggregate(n=ps.count()).as_rows().collect()
            if backend == "rocksdb":
                env.submit("spills").wait(120)
                assert max(row["n"] for row in total) == rows
                continue
            with pytest.raises(ps.JobFailed, match="of all keys") as failed:
                env.submit("too large").wait(120)
            assert "taskmanager.memory.managed.size" in str(failed.value)
            assert "state.backend.type: rocksdb" in str(failed.value)


class OnTime(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(one=1)


def _of_all_keys(keyed: Any, shape: str) -> ps.Stream:
    if shape == "process":
        return keyed.process(OnTime(), schema={"one": int})
    window = ps.tumbling("1h") if shape == "count" else ps.session("1s")
    return keyed.window(window).aggregate(n=ps.count()).with_columns(one=ps.lit(1))


class InOrder(ps.KeyedProcessFunction):
    """Sets a timer per row, and in the first of each a later one."""

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        if timestamp % 2 == 0:
            ctx.timers.event_time(timestamp + 1001)
        out.emit(at=timestamp)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_timers_fire_in_order_of_time_at_the_end(new_env: NewEnvironment, backend: str) -> None:
    env = new_env(parallelism=1, config={**BATCH, "state.backend.type": backend})
    stream = env.from_arrow(TABLE).with_event_time("ts").key_by("key")
    times = [row["at"] for row in rows_of(env, stream.process(InOrder(), schema={"at": int}))]
    assert times == sorted(times)
    found = TABLE.to_pylist()
    set_by_rows = {(row["key"], row["ts"]) for row in found}
    set_later = {(key, time + 1001) for key, time in set_by_rows if time % 2 == 0}
    assert len(times) == len(set_by_rows | set_later)
