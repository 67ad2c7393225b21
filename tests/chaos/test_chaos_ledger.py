"""Aim: a stateful job whose processes are killed at any moment goes on, with every row's effect exactly once.

Method: the ledger job (``tests/support/ledger.py``) on a cluster of real daemons; SIGKILL at random points
to slot processes, TaskManagers and the JobManager; its committed output, watched while it runs, is compared
with what was computed without the engine. Seeds are printed; ``make chaos SEED=n`` repeats a run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.killer import LedgerRun, plan
from tests.support.ledger import Ledger
from tests.support.processes import DaemonCluster, Site, site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TASKMANAGERS = 2
LONG_RUNS = [
    ("hashmap", 2, "exactly-once", 9, "caching"),
    ("rocksdb", 4, "exactly-once", 9, "caching"),
    ("hashmap", 4, "exactly-once", 9, "caching-memory"),
    ("hashmap", 2, "exactly-once", 9, "pipelined"),
    ("rocksdb", 2, "exactly-once", 9, "pipelined"),
    ("hashmap", 4, "exactly-once", 10, "pipelined"),
    ("rocksdb", 4, "exactly-once", 10, "pipelined"),
    ("hashmap", 4, "at-least-once", 6, "pipelined"),
    ("rocksdb", 2, "at-least-once", 6, "pipelined"),
]


def seed_of(default: int) -> int:
    """PENSTOCK_CHAOS_SEED, else the default."""
    return int(os.environ.get("PENSTOCK_CHAOS_SEED") or default)


def run_ledger(
    place: Site,
    rows: int,
    rate: float,
    kills: int,
    seed: int,
    backend: str,
    parallelism: int,
    mode: str,
    exchange: str = "pipelined",
) -> None:
    """A ledger job from its submission to the comparison."""
    print(f"SEED={seed}: {kills} kills, {backend}, parallelism {parallelism}, {mode}, {exchange}")
    cluster = DaemonCluster(place)
    cluster.start(
        taskmanagers=TASKMANAGERS,
        slots=parallelism // TASKMANAGERS,
        heartbeat_interval="200ms",
        heartbeat_timeout="3s",
    )
    ledger = Ledger(rows, rate, place.directory / "output")
    run = LedgerRun(cluster, ledger, seed, taskmanagers=TASKMANAGERS, mode=mode)
    config = {
        "execution.checkpointing.interval": "200ms",
        "execution.checkpointing.mode": mode,
        "execution.exchange.default": exchange,
        "state.backend.type": backend,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "infinite",
        "restart-strategy.fixed-delay.delay": "100ms",
    }
    run.submit(parallelism, config)
    run.run(plan(seed, kills, ledger.rows), seconds=60 + 10 * kills)
    cluster.stop()
    cluster.assert_nothing_left()
    place.assert_nothing_left()


@pytest.mark.parametrize(
    ("backend", "kills", "exchange"),
    [("hashmap", 3, "pipelined"), ("rocksdb", 2, "pipelined"), ("hashmap", 3, "caching")],
)
def test_some_kills(tmp_path: Path, backend: str, kills: int, exchange: str) -> None:
    with site(tmp_path) as place:
        run_ledger(place, 12_000, 4000, kills, seed_of(7), backend, 2, "exactly-once", exchange)


@pytest.mark.chaos
@pytest.mark.parametrize(("backend", "parallelism", "mode", "kills", "exchange"), LONG_RUNS)
def test_many_kills(
    tmp_path: Path, backend: str, parallelism: int, mode: str, kills: int, exchange: str
) -> None:
    seed = seed_of(int.from_bytes(os.urandom(3)))
    with site(tmp_path) as place:
        run_ledger(place, 60_000, 3000, kills, seed, backend, parallelism, mode, exchange)
