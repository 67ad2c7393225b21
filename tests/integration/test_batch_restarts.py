"""Aim: a batch job whose slot dies while timers, windows and joins fire at the end gives what it gives undisturbed.

Method: functions that are called as the end of the data fires kill their own process (SIGKILL), each once, in the
middle of it; with and without checkpoints, with blocking and pipelined exchanges. The output, in files, is compared
with what plain Python makes of the input.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import penstock as ps
from tests.integration.conftest import NewEnvironment

pytestmark = [pytest.mark.integration, pytest.mark.sampled(7)]

ROWS = 4_000
MINUTE_MS = 60_000
DEADLINE_S = 180.0


def unsorted() -> pa.Table:
    numbers = random.Random(11)
    return pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()),
            "key": pa.array([f"k{numbers.randrange(200)}" for _ in range(ROWS)]),
            "ts": pa.array([numbers.randrange(60 * MINUTE_MS) for _ in range(ROWS)], pa.int64()),
        }
    )


TABLE = unsorted()


class Killer:
    """Ends the process at the n-th call of this attempt, if nobody has before."""

    def __init__(self, mark: Path, calls: int) -> None:
        self.mark = str(mark)
        self.calls = calls

    def call(self) -> None:
        self.calls -= 1
        if self.calls:
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Times(ps.KeyedProcessFunction):
    """Counts the rows before each, in the order of time."""

    count = ps.ValueState("count", pa.int64())

    def __init__(self, killer: Killer) -> None:
        self.killer = killer

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        ctx.timers.event_time(ctx.timestamp)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        self.killer.call()
        count = (self.count.value() or 0) + 1
        self.count.update(count)
        out.emit(key=ctx.key, ts=timestamp, count=count)


class Numbers(ps.WindowFunction):
    """The sum of a window's rows, and how many they are."""

    def __init__(self, killer: Killer) -> None:
        self.killer = killer

    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        self.killer.call()
        numbers = [row.n for row in rows]
        out.emit(key=key, count=len(numbers), total=sum(numbers))


class Passed(ps.MapFunction):
    def __init__(self, killer: Killer) -> None:
        self.killer = killer

    def __call__(self, row: Any) -> Any:
        self.killer.call()
        return row


def written(directory: Path) -> Counter[tuple[Any, ...]]:
    """The rows of the files that readers see."""
    return Counter(tuple(row.values()) for row in parquet.read_table(directory).to_pylist())


def timers() -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[str] = Counter()
    for ts, key in sorted({(row["ts"], row["key"]) for row in TABLE.to_pylist()}):
        counts[key] += 1
        found[key, ts, counts[key]] += 1
    return found


def windows() -> Counter[tuple[Any, ...]]:
    sums: dict[tuple[str, int], list[int]] = {}
    for row in TABLE.to_pylist():
        sums.setdefault((row["key"], row["ts"] // (10 * MINUTE_MS)), []).append(row["n"])
    return Counter((key, len(numbers), sum(numbers)) for (key, _), numbers in sums.items())


def sessions() -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    rows: dict[str, list[tuple[int, int]]] = {}
    for row in TABLE.to_pylist():
        rows.setdefault(row["key"], []).append((row["ts"], row["n"]))
    for key, of_key in rows.items():
        of_key.sort()
        open_, before = [of_key[0][1]], of_key[0][0]
        for ts, n in of_key[1:]:
            if ts - before >= 2 * MINUTE_MS:
                found[key, len(open_), sum(open_)] += 1
                open_ = []
            open_.append(n)
            before = ts
        found[key, len(open_), sum(open_)] += 1
    return found


def joins() -> Counter[tuple[Any, ...]]:
    sides: dict[tuple[str, int], list[int]] = {}
    for row in TABLE.to_pylist():
        sides.setdefault((row["key"], row["ts"] // (10 * MINUTE_MS)), []).append(row["n"])
    return Counter((one, two) for rows in sides.values() for one in rows for two in rows)


@pytest.mark.parametrize("exchange", ["blocking", "pipelined", "checkpoints"])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_a_slot_that_is_killed_while_the_end_fires_changes_nothing(
    new_env: NewEnvironment, tmp_path: Path, backend: str, parallelism: int, exchange: str
) -> None:
    config: dict[str, object] = {
        "execution.runtime-mode": "batch",
        "execution.batch-rows": 64,
        "state.backend.type": backend,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": 10,
        "restart-strategy.fixed-delay.delay": "50ms",
    }
    if exchange == "checkpoints":
        config["execution.checkpointing.interval"] = "50ms"
        config["execution.checkpointing.dir"] = str(tmp_path / "checkpoints")
    (tmp_path / "in").mkdir()
    for part in range(4):
        quarter = TABLE.slice(part * ROWS // 4, ROWS // 4)
        parquet.write_table(quarter, tmp_path / "in" / f"{part}.parquet")
    env = new_env(parallelism=parallelism, config=config)
    rows = env.read_parquet(str(tmp_path / "in")).with_event_time("ts")
    if exchange == "pipelined":
        rows = rows.exchange("pipelined")
    keyed = rows.key_by("key")

    def killer(name: str, calls: int) -> Killer:
        return Killer(tmp_path / name, calls)

    schema = {"key": str, "count": int, "total": int}
    tumbling, session = ps.tumbling("10 min"), ps.session("2 min")
    outputs = {
        "timers": keyed.process(
            Times(killer("t", 300)), schema={"key": str, "ts": int, "count": int}
        ).uid("timers"),
        "windows": keyed.window(tumbling)
        .process(Numbers(killer("w", 200)), schema=schema)
        .uid("windows"),
        "sessions": keyed.window(session)
        .process(Numbers(killer("s", 500)), schema=schema)
        .uid("sessions"),
        "joins": keyed.join(keyed.rename(n="m"), on="key", window=tumbling)
        .uid("joins")
        .select("n", "m")
        .map(Passed(killer("j", 2_000)), schema={"n": int, "m": int}),
    }
    for name, stream in outputs.items():
        stream.write_parquet(str(tmp_path / name))
    handle = env.submit("killed-at-the-end")
    handle.wait(DEADLINE_S)
    assert [(tmp_path / mark).exists() for mark in "twsj"] == [True] * 4
    assert written(tmp_path / "timers") == timers()
    assert written(tmp_path / "windows") == windows()
    assert written(tmp_path / "sessions") == sessions()
    assert written(tmp_path / "joins") == joins()
