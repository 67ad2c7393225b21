"""Aim: a stateful job whose processes are killed at any moment goes on, with every row's effect exactly once.

Method: the ledger job (``tests/support/ledger.py``) on a cluster of real daemons; SIGKILL at random points
to slot processes, TaskManagers and the JobManager; its committed output, watched while it runs, is compared
with what was computed without the engine. Seeds are printed; ``make chaos SEED=n`` repeats a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.killer import WITH_PAUSES, LedgerRun, plan, plan_of_batch
from tests.support.ledger import Ledger
from tests.support.processes import DaemonCluster, Site, site

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.sampled(4)]

TASKMANAGERS = 2


@dataclass(frozen=True)
class Run:
    """One ledger job under kills.

    Attributes:
        mode: of its checkpoints; in batch mode it takes none.
        exchange: default type of its exchanges.
        targets: weights of what is killed.
        is_batch: it runs in batch mode.
        is_speculative: its subtasks get second attempts early and often.
    """

    backend: str
    parallelism: int
    kills: int
    mode: str = "exactly-once"
    exchange: str = "pipelined"
    targets: dict[str, int] | None = None
    is_batch: bool = False
    is_speculative: bool = False

    @override
    def __str__(self) -> str:
        kind = "batch" if self.is_batch else f"{self.mode}, {self.exchange}"
        kind += ", speculative" if self.is_speculative else ""
        pauses = ", pauses" if self.targets else ""
        return f"{self.backend}, {self.parallelism}, {kind}, {self.kills} kills{pauses}"


SHORT_RUNS = [
    Run("hashmap", 2, 3),
    Run("rocksdb", 2, 2),
    Run("hashmap", 2, 3, exchange="caching"),
]
LONG_RUNS = [
    Run("hashmap", 2, 9),
    Run("rocksdb", 2, 9),
    Run("hashmap", 4, 10),
    Run("rocksdb", 4, 10),
    Run("hashmap", 4, 6, mode="at-least-once"),
    Run("rocksdb", 2, 6, mode="at-least-once"),
    Run("hashmap", 2, 9, exchange="caching"),
    Run("rocksdb", 4, 9, exchange="caching"),
    Run("hashmap", 4, 9, exchange="caching-memory"),
    Run("hashmap", 4, 8, exchange="caching", targets=WITH_PAUSES),
    Run("hashmap", 4, 8, targets=WITH_PAUSES),
    Run("hashmap", 4, 6, is_batch=True),
    Run("rocksdb", 2, 6, is_batch=True),
    Run("hashmap", 4, 6, is_batch=True, is_speculative=True),
]


SPECULATIVE = {
    "execution.batch.speculative.enabled": "true",
    "slow-task-detector.check-interval": "20ms",
    "slow-task-detector.execution-time.baseline-lower-bound": "50ms",
    "slow-task-detector.execution-time.baseline-ratio": "0.25",
    "slow-task-detector.execution-time.baseline-multiplier": "0.5",
}


def seed_of(default: int) -> int:
    """PENSTOCK_CHAOS_SEED, else the default."""
    return int(os.environ.get("PENSTOCK_CHAOS_SEED") or default)


def run_ledger(place: Site, run: Run, rows: int, rate: float, seed: int) -> None:
    """A ledger job from its submission to the comparison."""
    print(f"SEED={seed}: {run}")
    cluster = DaemonCluster(place)
    cluster.start(
        taskmanagers=TASKMANAGERS,
        slots=run.parallelism // TASKMANAGERS + run.is_speculative,
        heartbeat_interval="200ms",
        heartbeat_timeout="3s",
    )
    ledger = Ledger(rows, rate, place.directory / "output")
    killed = LedgerRun(cluster, ledger, seed, taskmanagers=TASKMANAGERS, mode=run.mode)
    config = {
        "state.backend.type": run.backend,
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "infinite",
        "restart-strategy.fixed-delay.delay": "100ms",
    }
    if run.is_speculative:
        config |= SPECULATIVE
    if run.is_batch:
        killed.submit(run.parallelism, config, "batch")
        # Two of its sources have a subtask per slot; what writes waits for the end.
        kills = plan_of_batch(seed, run.kills, 2 * run.parallelism)
    else:
        config |= {
            "execution.checkpointing.interval": "200ms",
            "execution.checkpointing.mode": run.mode,
            "execution.exchange.default": run.exchange,
        }
        killed.submit(run.parallelism, config)
        kills = plan(seed, run.kills, ledger.rows, run.targets)
    killed.run(kills, seconds=60 + 25 * run.kills)
    cluster.wait_for_no_spilled_rows()
    cluster.stop()
    cluster.assert_nothing_left()
    place.assert_nothing_left()


@pytest.mark.parametrize("run", SHORT_RUNS, ids=str)
def test_some_kills(tmp_path: Path, run: Run) -> None:
    with site(tmp_path) as place:
        run_ledger(place, run, 12_000, 4000, seed_of(7))


@pytest.mark.chaos
@pytest.mark.timeout(420)
@pytest.mark.parametrize("run", LONG_RUNS, ids=str)
def test_many_kills(tmp_path: Path, run: Run) -> None:
    seed = seed_of(int.from_bytes(os.urandom(3)))
    # A batch begins anew with each JobManager: what it does in one go must not take too long.
    rows, rate = (12_000, 4000) if run.is_batch else (60_000, 3000)
    with site(tmp_path) as place:
        run_ledger(place, run, rows, rate, seed)
