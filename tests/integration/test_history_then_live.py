"""Aim: a union with a stream behind a blocking exchange reads that first, and goes on with the others: each row once,
in every run, over failures, from savepoints and at another parallelism; no row of the others is read before, no
checkpoint is taken before, and none that is taken afterwards has the history read again.

Method: real cluster. Sources note each read in a file and wait for files that the test makes. What comes out is
compared with what follows from the rows.
"""

from __future__ import annotations

import collections
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import penstock as ps
from penstock.errors import StreamError
from tests.integration.conftest import NewEnvironment
from tests.integration.test_load_first import (
    Rows,
    await_checkpoint,
    await_running,
    lines,
    restarting,
)
from tests.support.jobs import DEADLINE_S, await_details, cancel, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(4)]

ROW = pa.schema([("n", pa.int64()), ("k", pa.int64()), ("ts", pa.int64())])
HISTORY, LIVE, KEYS, STEP_MS, WINDOW_MS = 2_000, 2_000, 7, 10, 1_000
LAST = HISTORY + LIVE


def made(first: int, end: int) -> list[dict[str, Any]]:
    return [{"n": n, "k": n % KEYS, "ts": n * STEP_MS} for n in range(first, end)]


def history_of(notes: Path, gates: dict[int, Path] | None = None, splits: int = 2) -> Rows:
    return Rows(ROW, made(0, HISTORY), notes, gates, splits)


def live_of(notes: Path, gates: dict[int, Path] | None = None, splits: int = 2) -> Rows:
    return Rows(ROW, made(HISTORY, LAST), notes, gates, splits)


class Order(ps.KeyedProcessFunction):
    """Hands on each row with the number of rows of the history that its key has seen; may fail once at a row."""

    history = ps.ValueState("history", pa.int64())

    def __init__(self, fails: tuple[int, Path] | None = None) -> None:
        self.fails = fails

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if self.fails is not None and row.n == self.fails[0] and not self.fails[1].exists():
            self.fails[1].touch()
            raise RuntimeError("as the test wants it")
        seen = (self.history.value() or 0) + (row.n < HISTORY)
        self.history.update(seen)
        out.emit(n=row.n, seen=seen)


SEEN = pa.schema([("n", pa.int64()), ("seen", pa.int64())])


def check(rows: list[Any], last: int = LAST) -> None:
    """Each row came once; those behind the history when it was whole."""
    assert sorted(row.n for row in rows) == list(range(last))
    whole = collections.Counter(n % KEYS for n in range(HISTORY))
    assert all(row.seen == whole[row.n % KEYS] for row in rows if row.n >= HISTORY)


def ordered(history: ps.Stream, live: ps.Stream, function: Order | None = None) -> ps.Stream:
    both = history.exchange("blocking").union(live)
    return both.key_by("k").process(function or Order(), schema=SEEN).uid("order")


@pytest.mark.parametrize("exchange", ["pipelined", "caching", "blocking"])
@pytest.mark.parametrize("is_first", [True, False])
def test_history_comes_first_wherever_it_stands(
    new_env: NewEnvironment, tmp_path: Path, exchange: str, is_first: bool
) -> None:
    env = new_env(2, config={"execution.exchange.default": exchange})
    history = env.source(history_of(tmp_path / "h", splits=3)).exchange("blocking")
    live = env.source(live_of(tmp_path / "l")).exchange("pipelined")
    both = history.union(live) if is_first else live.union(history)
    rows = both.key_by("k").process(Order(), schema=SEEN).collect()
    run(env)
    check(list(rows))


def test_windows_of_history_fire_while_live_waits(new_env: NewEnvironment, tmp_path: Path) -> None:
    """Live has brought nothing yet, and holds nothing back; its rows behind the cut are not late."""
    gate = tmp_path / "gate"
    env = new_env(2, config=restarting(tmp_path))
    history = env.source(history_of(tmp_path / "h")).with_event_time("ts", out_of_orderness="50ms")
    live = env.source(live_of(tmp_path / "l", {0: gate})).with_event_time("ts")
    both = history.exchange("blocking").union(live).key_by("k")
    counted = both.window(ps.tumbling(f"{WINDOW_MS}ms")).aggregate(n=ps.count(), sum=ps.sum("n"))
    rows = counted.uid("windows").collect()
    handle = env.submit("windows")
    closed = (HISTORY * STEP_MS) // WINDOW_MS - 1
    await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] >= closed * KEYS)
    gate.touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    expected: collections.Counter[tuple[int, int]] = collections.Counter()
    for row in made(0, LAST):
        expected[row["k"], row["ts"] // WINDOW_MS] += 1
    found = {(row.k, int(row.window_start.timestamp())): row.n for row in rows}
    assert found == dict(expected)


@pytest.mark.parametrize("fails_at", [HISTORY // 2, LAST - 50])
@pytest.mark.parametrize("strategy", ["region", "full"])
def test_a_failure_on_either_side_of_the_cut(
    new_env: NewEnvironment, tmp_path: Path, strategy: str, fails_at: int
) -> None:
    gate, failed = tmp_path / "gate", tmp_path / "failed"
    config = restarting(tmp_path)
    config["jobmanager.execution.failover-strategy"] = strategy
    env = new_env(2, config=config)
    history = env.source(history_of(tmp_path / "h"))
    live = env.source(live_of(tmp_path / "l", {500: gate}))
    rows = ordered(history, live, Order((fails_at, failed))).collect()
    handle = env.submit("fails")
    await_checkpoint(handle)
    read = lines(tmp_path / "h")
    gate.touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert failed.exists()
    assert lines(tmp_path / "h") == read, "history is not made again"
    check(list(rows))
    assert all(entry.status != "failed" for entry in handle.checkpoints()), handle.checkpoints()


def test_nothing_of_live_is_read_and_no_checkpoint_is_taken_before(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    env = new_env(2, config=restarting(tmp_path))
    history = env.source(history_of(tmp_path / "h", {500: gate}))
    ordered(history, env.source(live_of(tmp_path / "l"))).discard()
    handle = env.submit("waits")
    await_running(handle, may_wait=True)
    await_details(handle, lambda metrics, state: lines(tmp_path / "h") > 1)
    with pytest.raises(StreamError, match=r"load_first.*blocking exchange e0 \(v0 -> v2\)"):
        handle.checkpoint()
    with pytest.raises(StreamError, match=r"blocking exchange e0 \(v0 -> v2\)"):
        handle.savepoint(tmp_path / "savepoint")
    assert handle.checkpoints() == []
    assert not (tmp_path / "l").exists()
    cancel(handle)


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_savepoint_behind_the_cut_reads_no_history_again(
    new_env: NewEnvironment, tmp_path: Path, parallelism: int
) -> None:
    gate = tmp_path / "gate"

    def build(parallelism: int) -> ps.Environment:
        env = new_env(parallelism, config=restarting(tmp_path))
        history = env.source(history_of(tmp_path / "h")).uid("history")
        live = env.source(live_of(tmp_path / "l", {500: gate})).uid("live")
        ordered(history, live).write_json(tmp_path / "out").uid("out")
        return env

    handle = build(2).submit("first")
    await_checkpoint(handle)
    read = lines(tmp_path / "h")
    path = handle.stop(tmp_path / "savepoints")
    gate.touch()
    build(parallelism).submit("second", from_savepoint=path).wait(DEADLINE_S)
    assert lines(tmp_path / "h") == read, "history is not made again"
    table = ds.dataset(tmp_path / "out", format="json").to_table()
    check([SimpleNamespace(**row) for row in table.to_pylist()])
