"""Aim: a job that is started from another one's checkpoint at another parallelism gives what one that was never
stopped gives, whatever kind of state it has.

Method: queries of Nexmark write files; of a job at parallelism 2 all processes are killed behind its third checkpoint, which
ends it, and it is started again at 3 and at 1, with both backends. The rows of both together are those of a job that ran
through.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, assert_same_rows, await_details
from tests.support.processes import slot_pids

pytestmark = [pytest.mark.integration, pytest.mark.sampled(9)]

EVENTS, RATE = 40_000, 6_000
SHARES = {"bid": 1.0, "auction": 0.06, "person": 0.02}
WINDOW_MS, SLIDE_MS = 2_000, 500
COUNTS = {"auction": "int64", "bids": "int64"}
Query = Callable[[ps.Environment, float | None], ps.Stream]


def read(env: ps.Environment, kind: str, rate: float | None) -> ps.Stream:
    rate = None if rate is None else rate * SHARES[kind]
    rows = env.nexmark(EVENTS, kind=kind, rate=rate, event_interval_us=1_000).uid(f"read-{kind}")
    return rows.with_event_time("ts", out_of_orderness="0s").uid(f"time-{kind}")


class MostBids(ps.WindowFunction):
    def process(
        self, key: object, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        best = max(row.bids for row in rows)
        for row in rows:
            if row.bids == best:
                out.emit(row)


class Highest(ps.WindowFunction):
    def process(
        self, key: object, window: ps.WindowInfo, rows: Sequence[ps.Row], out: ps.Collector
    ) -> None:
        out.emit(start=window.start, price=max(row.price for row in rows))


class Quiet(ps.KeyedProcessFunction):
    """Says of each auction how many bids it had when there was none for a while, by timers."""

    seen = ps.ValueState("seen", pa.int64(), default=0)
    last = ps.ValueState("last", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        due = ctx.timestamp + WINDOW_MS
        self.last.update(max(due, self.last.value()))
        ctx.timers.event_time(due)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        if time == self.last.value():
            out.emit(auction=ctx.key, bids=self.seen.value())


def q1(env: ps.Environment, rate: float | None) -> ps.Stream:
    bids = read(env, "bid", rate)
    return bids.select("auction", "bidder", price=ps.col("price") * 2).uid("q1")


def q5(env: ps.Environment, rate: float | None) -> ps.Stream:
    counts = (
        read(env, "bid", rate)
        .key_by("auction")
        .window(ps.sliding(WINDOW_MS, SLIDE_MS))
        .aggregate(bids=ps.count())
        .uid("q5-counts")
        .rename(window_start="starts", window_end="ends")
        .uid("q5-names")
    )
    return (
        counts.key_by("ends")
        .window(ps.tumbling(SLIDE_MS))
        .process(MostBids(), schema=counts.schema)
        .uid("q5-most")
    )


def q7(env: ps.Environment, rate: float | None) -> ps.Stream:
    bids = read(env, "bid", rate).select("auction", "price").uid("q7-select")
    schema = {"start": "timestamp[ms, UTC]", "price": "int64"}
    keyed = bids.key_by("auction").window(ps.tumbling(WINDOW_MS))
    return keyed.process(Highest(), schema=schema).uid("q7")


def q8(env: ps.Environment, rate: float | None) -> ps.Stream:
    persons = read(env, "person", rate).select(person=ps.col("id")).uid("q8-persons")
    auctions = read(env, "auction", rate).select(auction=ps.col("id"), person=ps.col("seller"))
    return persons.join(
        auctions.uid("q8-auctions"), on="person", window=ps.tumbling(WINDOW_MS)
    ).uid("q8")


def q11(env: ps.Environment, rate: float | None) -> ps.Stream:
    keyed = read(env, "bid", rate).key_by("bidder").window(ps.session("300ms"))
    return keyed.aggregate(bids=ps.count()).uid("q11")


def counted(env: ps.Environment, rate: float | None) -> ps.Stream:
    keyed = read(env, "bid", rate).key_by("auction").window(ps.count_window(10))
    return keyed.aggregate(bids=ps.count()).uid("counted")


def quiet(env: ps.Environment, rate: float | None) -> ps.Stream:
    return read(env, "bid", rate).key_by("auction").process(Quiet(), schema=COUNTS).uid("quiet")


QUERIES: dict[str, Query] = {
    query.__name__: query for query in (q1, q5, q7, q8, q11, counted, quiet)
}


def rows_in(output: Path) -> list[dict[str, Any]]:
    files = [path for path in output.glob("*.parquet") if not path.name.startswith((".", "_"))]
    return [row for path in files for row in pq.read_table(path).to_pylist()]


@cache
def golden(new_env: NewEnvironment, output: Path, query: str) -> list[dict[str, Any]]:
    env = new_env(2)
    QUERIES[query](env, None).write_parquet(output).uid("files")
    assert env.submit("golden").wait(DEADLINE_S).status == "FINISHED"
    return rows_in(output)


def kill_slots(cluster: LocalCluster) -> None:
    """Kills the processes of all jobs."""
    for daemon in cluster.daemons():
        if daemon.role == "taskmanager":
            for pid in slot_pids(daemon.pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("parallelism", [3, 1])
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("query", QUERIES)
def test_one_result_whatever_the_parallelism(
    new_env: NewEnvironment,
    cluster: LocalCluster,
    tmp_path: Path,
    query: str,
    backend: str,
    parallelism: int,
) -> None:
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
        "restart-strategy.type": "none",
        "state.backend.type": backend,
    }
    wanted = golden(new_env, tmp_path / "golden", query)
    assert wanted
    env = new_env(2, config)
    QUERIES[query](env, RATE).write_parquet(tmp_path / "out").uid("files")
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 2)
    kill_slots(cluster)
    with pytest.raises(ps.JobFailed):
        handle.wait(DEADLINE_S)
    env = new_env(parallelism, config)
    QUERIES[query](env, None).write_parquet(tmp_path / "out").uid("files")
    path = tmp_path / "checkpoints" / handle.job_id
    assert env.submit("second", from_savepoint=path).wait(DEADLINE_S).status == "FINISHED"
    assert_same_rows(rows_in(tmp_path / "out"), wanted)
