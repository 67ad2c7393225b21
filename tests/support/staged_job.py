"""A batch job of two stages whose second waits in the middle of its rows, so that a test can break something then.

Its output is compared with what plain Python makes of the input.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.client.client import Client
from tests.support.processes import DaemonCluster, wait_ended
from tests.support.watched_job import Placed, Subtask, WatchedJob, placed

DEADLINE_S = 60.0
ROWS = 40_000
KEYS = 11
CONFIG = {
    "execution.runtime-mode": "batch",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 5,
    "restart-strategy.fixed-delay.delay": "10ms",
}


def numbers(start: int, count: int) -> pa.RecordBatch:
    n = range(start, start + count)
    return pa.RecordBatch.from_pydict({"n": n, "key": [f"k{i % KEYS}" for i in n]})


class StagedJob:
    """One job.

    Args:
        directory: of a test; its own files go there.
    """

    def __init__(self, directory: Path) -> None:
        self.gate = directory / "gate"
        self.begun = directory / "begun"
        self.output = directory / "output"
        self.begun.mkdir()

    def submit(self, cluster: DaemonCluster, client: Client, parallelism: int = 2) -> WatchedJob:
        """Starts it; the second stage holds behind its first batch."""
        gate, begun = str(self.gate), str(self.begun)

        def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
            Path(begun, f"{os.getpid()}").touch()
            while not Path(gate).exists():
                time.sleep(0.02)
            return batch

        with ps.Environment(cluster.jobmanager, parallelism=parallelism, config=CONFIG) as env:
            made = env.generate(numbers, rows=ROWS).filter(ps.col("n") >= 0)
            kept = made.key_by("key").map_batches(hold, schema={"n": "int64", "key": "string"})
            kept.write_parquet(str(self.output))
            return WatchedJob(cluster, client, env.submit("staged").job_id)

    def await_second_stage(self, job: WatchedJob) -> dict[Subtask, Placed]:
        """Waits until the first stage is complete and the second has read rows."""
        details = job.await_that(
            lambda details: (
                {one.state for key, one in placed(details).items() if key[0] == "v0"}
                == {"FINISHED"}
                and any(self.begun.iterdir())
            ),
            "that the second stage reads",
        )
        return placed(details)

    def check(self) -> None:
        """Every row is there once."""
        rows = Counter(pq.read_table(self.output)["n"].to_pylist())
        assert rows == Counter(range(ROWS))


def kill_taskmanager(cluster: DaemonCluster, taskmanager_id: str) -> None:
    """Kills a TaskManager, and with it its slots."""
    found = {one["id"]: int(one["pid"]) for one in cluster.daemons("taskmanager")}
    os.kill(found[taskmanager_id], signal.SIGKILL)
    wait_ended(found[taskmanager_id])
