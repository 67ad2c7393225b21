"""Aim: whatever is killed while a job is being stopped, it has either ended behind its savepoint or runs on, and says which;
what it has written is there once, and the next job goes on from the savepoint exactly there.

Method: numbers in order, counted through a keyed state into files by jobs that are stopped and started again from their
savepoints; at a seeded moment of each stop a process is killed, and started again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import JobHandle
from penstock.errors import JobNotFound, StreamError
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import DaemonCluster, Deadline, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(4)]

KEYS, RATE, ROUNDS = 5, 5_000, 3
KILL_WITHIN_S = 0.4
"""A stop of this job takes about so long."""


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Number(ps.KeyedProcessFunction):
    """Numbers the rows of each key."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        out.emit(key=ctx.key, number=self.seen.value())


def started(cluster: DaemonCluster, out: Path, path: str, job: int) -> str:
    config = {
        "execution.checkpointing.dir": str(out.parent / "checkpoints"),
        "execution.checkpointing.interval": "200ms",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.delay": "100ms",
        "restart-strategy.fixed-delay.attempts": "100",
    }
    with ps.Environment(cluster.jobmanager, parallelism=2, config=config) as env:
        stream = env.generate(numbers, rate=RATE, schema={"n": "int64"}).uid("numbers")
        keyed = stream.parallelism(1).with_columns(key=ps.col("n") % KEYS).uid("keys").key_by("key")
        schema = {"key": "int64", "number": "int64"}
        keyed.process(Number(), schema=schema).uid("counts").write_parquet(out).uid("files")
        handle = env.submit(f"stopped {job}", from_savepoint=path or None)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > RATE // 5)
        return handle.job_id


def written(out: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {key: [] for key in range(KEYS)}
    for path in out.glob("[!._]*.parquet"):
        for row in pq.read_table(path).to_pylist():
            found[row["key"]].append(row["number"])
    return {key: sorted(rows) for key, rows in found.items()}


def assert_each_once(out: Path) -> int:
    """Numbers without a gap and without a repetition; how many."""
    found = written(out)
    assert all(rows == list(range(1, len(rows) + 1)) for rows in found.values())
    lengths = [len(rows) for rows in found.values()]
    assert max(lengths) - min(lengths) <= 1  # the rows of the first so many numbers, all of them
    return sum(lengths)


@contextlib.contextmanager
def being_stopped(
    cluster: DaemonCluster, job_id: str, directory: Path, name: str
) -> Iterator[None]:
    """A stop that is under way; nobody looks at what it answers."""
    has_begun = Event()

    def stop() -> None:
        with Client(cluster.jobmanager) as client, contextlib.suppress(StreamError, TimeoutError):
            has_begun.set()
            JobHandle(client, job_id).stop(directory, timeout=DEADLINE_S, operation_id=name)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stop)
        has_begun.wait(DEADLINE_S)
        yield
        asked.result()


def kill(cluster: DaemonCluster, target: str) -> None:
    if target == "slot":
        pids = [
            pid
            for daemon in cluster.daemons("taskmanager")
            for pid in cluster.slot_pids(daemon["pid"])
        ][:1]
    elif target == "everything":
        pids = [daemon["pid"] for daemon in cluster.daemons()]
    else:
        pids = [cluster.pid(target)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a slot whose job has ended
            os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
    cluster.start(taskmanagers=2)


def outcome(cluster: DaemonCluster, job_id: str, kept: Path, name: str) -> str:
    """Where the savepoint is; "" = the job was not stopped, and runs on."""
    path = kept / f"savepoint-{job_id[:8]}-{name}"
    deadline = Deadline(f"the outcome of {name}", DEADLINE_S)
    while True:
        deadline.left()
        with Client(cluster.jobmanager) as client:
            handle = JobHandle(client, job_id)
            try:
                operation = handle.operation(name)
            except JobNotFound:
                if all(summary.job_id != job_id for summary in client.jobs()):
                    # Of a job that has finished the next JobManager knows nothing.
                    assert (path / "committed").exists()
                    return str(path)
                return ""  # the stop was never heard of
            if operation.status == "COMPLETED":
                assert handle.wait(DEADLINE_S).status == "FINISHED"
                assert operation.path == str(path)
                return operation.path
            if operation.status == "FAILED":
                await_details(handle, lambda _metrics, state: state == "RUNNING")
                return ""


@pytest.mark.parametrize("target", ["slot", "taskmanager", "jobmanager", "everything"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stop_is_done_or_the_job_runs_on(
    cluster: DaemonCluster, tmp_path: Path, target: str, seed: int
) -> None:
    chance = random.Random(f"{target} {seed}")
    out, kept, path, before = tmp_path / "out", tmp_path / "kept", "", 0
    for round_ in range(ROUNDS):
        job_id = started(cluster, out, path, round_)
        with being_stopped(cluster, job_id, kept, "killed"):
            Event().wait(chance.uniform(0, KILL_WITHIN_S))
            kill(cluster, target)
        path = outcome(cluster, job_id, kept, "killed")
        if not path:
            with Client(cluster.jobmanager) as client:
                path = JobHandle(client, job_id).stop(kept, timeout=DEADLINE_S)
        rows = assert_each_once(out)
        assert rows > before
        before = rows
        assert not [one.name for one in out.iterdir() if one.name.startswith(".")]
