"""Runs a workload on a local cluster and measures it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock as ps
from benchmarks.input import read_batches, write_parts
from benchmarks.workloads import Workload
from penstock.client import Client
from penstock.local_cluster import LocalCluster

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_SLOTS_FREE_DEADLINE_S = 10.0


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=root) as name:
        yield Path(name)


@contextmanager
def bench_cluster(slots: int) -> Iterator[LocalCluster]:
    """A cluster with one TaskManager of this many slots."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        cluster = LocalCluster(Path(name))
        cluster.start(taskmanagers=1, slots=slots, overrides={"jobmanager.rpc.port": "0"})
        try:
            yield cluster
        finally:
            cluster.stop()


def measure_limit(workload: Workload, paths: list[Path]) -> float:
    """Seconds that plain pyarrow takes in one thread."""
    pa.set_cpu_count(1)
    started = time.perf_counter()
    workload.limit(read_batches(paths))
    return time.perf_counter() - started


def measure_job(
    workload: Workload, cluster: LocalCluster, directory: Path, parallelism: int
) -> tuple[float, float]:
    """Seconds from RUNNING to FINISHED, and CPU seconds of the slot processes."""
    address = cluster.address
    env = ps.Environment(address, parallelism=parallelism)
    workload.job(env.read_arrow(str(directory)))
    cpu_before = _slots_cpu_s(cluster)
    handle = env.submit(workload.name)
    handle.wait(timeout=600)
    with closing(Client(address)) as client:
        summary = client.job(handle.job_id).summary
        _await_free_slots(client)
    seconds = (summary.ended_at_ms - summary.running_at_ms) / 1000
    return seconds, _slots_cpu_s(cluster) - cpu_before


def run(
    workload: Workload,
    *,
    rows: int,
    keys: int,
    parallelism: int,
    skew: float,
    repeat: int,
) -> Iterator[dict[str, Any]]:
    """One result per repetition."""
    with memory_directory() as directory, bench_cluster(parallelism) as cluster:
        paths = write_parts(directory, rows, keys, parallelism, skew)
        measure_job(workload, cluster, directory, parallelism)  # warms cluster and page tables
        for _ in range(repeat):
            limit_s = measure_limit(workload, paths)
            seconds, cpu_s = measure_job(workload, cluster, directory, parallelism)
            yield {
                "workload": workload.name,
                "rows": rows,
                "keys": keys,
                "parallelism": parallelism,
                "skew": skew,
                "backend": None,
                "checkpoint_interval_s": None,
                "seconds": round(seconds, 3),
                "rows_per_s": round(rows / seconds),
                "cpu_s_per_million": round(cpu_s / rows * 1e6, 4),
                "checkpoints": None,
                "limit_rows_per_s": round(rows / limit_s),
            }


def run_limit(
    workload: Workload, *, rows: int, keys: int, skew: float, repeat: int
) -> Iterator[dict[str, Any]]:
    """The work of ``workload`` as plain pyarrow in one thread, without a cluster."""
    with memory_directory() as directory:
        paths = write_parts(directory, rows, keys, 1, skew)
        measure_limit(workload, paths)
        for _ in range(repeat):
            cpu_before = time.process_time()
            seconds = measure_limit(workload, paths)
            cpu_s = time.process_time() - cpu_before
            yield {
                "workload": "limit",
                "rows": rows,
                "keys": keys,
                "parallelism": 1,
                "skew": skew,
                "backend": None,
                "checkpoint_interval_s": None,
                "seconds": round(seconds, 3),
                "rows_per_s": round(rows / seconds),
                "cpu_s_per_million": round(cpu_s / rows * 1e6, 4),
                "checkpoints": None,
                "limit_rows_per_s": round(rows / seconds),
            }


def _await_free_slots(client: Client) -> None:
    deadline = time.monotonic() + _SLOTS_FREE_DEADLINE_S
    while True:
        details = client.cluster()
        if details.slots_free == details.slots_total:
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the slots of an ended job are still taken")


def _slots_cpu_s(cluster: LocalCluster) -> float:
    """CPU seconds of the slots that have ended: children that fork servers have waited for."""
    total = 0
    for daemon in cluster.daemons():
        if daemon.role == "taskmanager":
            for child in Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[13]) + int(fields[14])  # cutime, cstime
    return total / _CLOCK_TICKS
