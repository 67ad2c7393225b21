"""A batch job of two stages whose second waits in the middle of its rows, so that a test can break something then.

Its output is compared with what plain Python makes of the input.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.client.client import Client
from tests.support.processes import DaemonCluster, wait_ended
from tests.support.watched_job import Placed, Subtask, WatchedJob, placed

DEADLINE_S = 90.0
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
        name: of the job, and of the directory of its files, where a test has several.
    """

    def __init__(self, directory: Path, name: str = "") -> None:
        self.name = name or "staged"
        directory = directory / name
        directory.mkdir(exist_ok=True)
        self.gate = directory / "gate"
        self.closed = directory / "first_gate.closed"
        self.begun = directory / "begun"
        self.output = directory / "output"
        self.begun.mkdir()

    def submit(
        self,
        cluster: DaemonCluster,
        client: Client,
        parallelism: int = 2,
        config: Mapping[str, object] = MappingProxyType({}),
    ) -> WatchedJob:
        """Starts it; the first stage holds in its rows while there is ``first_gate.closed``, the second one behind
        its first batch until there is ``gate``."""
        gate, begun, closed = str(self.gate), str(self.begun), str(self.closed)

        def hold_first(batch: pa.RecordBatch) -> pa.RecordBatch:
            while Path(closed).exists():
                Path(begun, f"first-{os.getpid()}").touch()
                time.sleep(0.02)
            return batch

        def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
            Path(begun, f"{os.getpid()}").touch()
            while not Path(gate).exists():
                time.sleep(0.02)
            return batch

        rows = {"n": "int64", "key": "string"}
        with ps.Environment(
            cluster.jobmanager, parallelism=parallelism, config={**CONFIG, **config}
        ) as env:
            made = env.generate(numbers, rows=ROWS).map_batches(hold_first, schema=rows)
            kept = made.key_by("key").map_batches(hold, schema=rows)
            kept.write_parquet(str(self.output))
            return WatchedJob(cluster, client, env.submit(self.name).job_id)

    def await_second_stage(self, job: WatchedJob) -> dict[Subtask, Placed]:
        """Waits until the first stage is complete and the second has read rows."""
        details = job.await_that(
            lambda details: (
                {one.state for key, one in placed(details).items() if key[0] == "v0"}
                == {"FINISHED"}
                and any(path.name.isdigit() for path in self.begun.iterdir())
            ),
            "that the second stage reads",
        )
        return placed(details)

    def await_first_stage(self, job: WatchedJob) -> None:
        """Waits until the first stage, which is held, has rows."""
        job.await_that(
            lambda _: any(path.name.startswith("first-") for path in self.begun.iterdir()),
            "that the first stage has rows",
        )

    def check(self) -> None:
        """Every row is there once."""
        rows = Counter(pq.read_table(self.output)["n"].to_pylist())
        assert rows == Counter(range(ROWS))


def kill_taskmanager(cluster: DaemonCluster, taskmanager_id: str) -> None:
    """Kills a TaskManager, and with it its slots."""
    found = {one["id"]: int(one["pid"]) for one in cluster.daemons("taskmanager")}
    os.kill(found[taskmanager_id], signal.SIGKILL)
    wait_ended(found[taskmanager_id])
