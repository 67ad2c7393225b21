"""The workload ``rescale``: what a native savepoint costs a running job, how soon a job that is started from it with twice
as many subtasks gives out rows, and how long a job that has nothing to do takes to stop."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks.gated_job import ENDLESS, TIMEOUT_S, GatedJob
from benchmarks.gated_source import CountingSink, Gate, GatedSource
from benchmarks.measure import bench_cluster, live_slots_cpu_s, result
from benchmarks.state_benchmarks import StateSettings, numbers
from penstock.client.client import Client
from penstock.errors import JobCanceled

ALONE_S = 15.0
INTERVAL = "5s"
"""Of the running job's own checkpoints, which a savepoint comes on top of."""
_POLL_S = 0.005


def run_rescale(settings: StateSettings, repeat: int) -> Iterator[dict[str, Any]]:
    """One result per repetition."""
    for _ in range(repeat):
        slots = 2 * settings.job.parallelism
        memory = {"taskmanager.memory.managed.size": str(settings.memory_bytes)}
        with (
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
            bench_cluster(slots, memory) as cluster,
        ):
            directory = Path(name)
            config = {"execution.checkpointing.interval": INTERVAL}
            job = GatedJob(cluster, directory, settings.job, settings.keys, config, numbers)
            job.let(settings.keys)
            job.checkpoint()
            job.gate.limit = ENDLESS
            job.rate(ALONE_S)
            before = _Window(job)
            time.sleep(ALONE_S)
            before.end()
            saving = _Window(job)
            path = job.handle.savepoint(directory / "kept", timeout=TIMEOUT_S)
            saving.end()
            around = saving.copy()
            time.sleep(max(0.0, ALONE_S - saving.seconds))
            around.end()
            after = _Window(job)
            time.sleep(ALONE_S)
            after.end()
            alone = (before.rate + after.rate) / 2
            alone_cpu = (before.rows_per_cpu_s + after.rows_per_cpu_s) / 2
            job.gate.limit = 0
            job.close()
            yield {
                **result("rescale", settings.job, None, settings.keys, None, None),
                "state_bytes": settings.state_bytes,
                "savepoint_s": round(saving.seconds, 3),
                "rows_per_s_alone": round(alone),
                "rows_per_s_while_saving": round(saving.rate),
                "throughput_ratio": round(saving.rate / alone, 3),
                "throughput_ratio_with_savepoint": round(around.rate / alone, 3),
                "rows_per_cpu_s_ratio_with_savepoint": round(around.rows_per_cpu_s / alone_cpu, 3),
                **_started_again(cluster.address, directory, settings, path),
            }


class _Window:
    """What a job does in a time.

    Attributes:
        seconds: how long it was.
        rate: rows read per second.
        rows_per_cpu_s: rows read per CPU second of its slots, which other work disturbs less.
    """

    def __init__(self, job: GatedJob) -> None:
        self._job = job
        self._started, self._rows = time.monotonic(), job.gate.rows_read
        self._cpu_s = live_slots_cpu_s(job.cluster)
        self.seconds = self.rate = self.rows_per_cpu_s = 0.0

    def end(self) -> None:
        """It is over."""
        rows = self._job.gate.rows_read - self._rows
        self.seconds = time.monotonic() - self._started
        self.rate = rows / self.seconds
        self.rows_per_cpu_s = rows / (live_slots_cpu_s(self._job.cluster) - self._cpu_s)

    def copy(self) -> _Window:
        """Another one that has begun with it."""
        return copy.copy(self)


def _started_again(
    address: str, directory: Path, settings: StateSettings, path: str
) -> dict[str, Any]:
    """Starts it with twice as many subtasks, then stops it when it has nothing to do."""
    parts = settings.job.parallelism
    subtasks = 2 * parts
    gate_path = str(directory / "second")
    gate = Gate.create(directory / "second", subtasks)
    gate.limit = ENDLESS
    env = ps.Environment(
        address,
        parallelism=subtasks,
        config={**settings.job.config(), "execution.checkpointing.interval": "1h"},
    )
    with env, Client(address) as client:
        rows = env.source(GatedSource(parts, gate_path, settings.keys)).uid("gate")
        numbers(rows).sink(CountingSink(gate_path)).uid("counting")
        started = time.monotonic()
        handle = env.submit("again", from_savepoint=path)
        firsts: list[float] = []
        while len(firsts) < subtasks:
            time.sleep(_POLL_S)
            if time.monotonic() > started + TIMEOUT_S:
                raise TimeoutError("the job gives out nothing")
            writing = sum(count > 0 for count in gate.rows_written)
            firsts += [time.monotonic() - started] * (writing - len(firsts))
        gate.limit = 0
        handle.checkpoint(TIMEOUT_S)  # its own, which is whole
        restored = [
            subtask.metrics.restored_store_bytes
            for vertex in client.job(handle.job_id).vertices
            for subtask in vertex.subtasks
        ]
        stopping = time.monotonic()
        handle.stop(directory / "stopped", timeout=TIMEOUT_S)
        stop_s = time.monotonic() - stopping
        with suppress(JobCanceled):
            handle.wait(TIMEOUT_S)
    return {
        "first_output_s": round(firsts[0], 3),
        "all_subtasks_s": round(firsts[-1], 3),
        "restored_bytes": restored,
        "stop_s": round(stop_s, 3),
    }
