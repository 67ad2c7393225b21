"""Runs a workload on a local cluster and measures it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock as ps
from benchmarks.input import as_parquet, read_batches, read_parquet, write_parts
from benchmarks.workload import WINDOW_MS, Workload
from penstock.client.client import Client
from penstock.client.job_checkpoints import Checkpoint
from penstock.client.termination import terminates_as_exception
from penstock.local.local_cluster import LocalCluster
from penstock.units import duration_ms
from taskmanager.processes.fork_protocol import PARTITION_SERVER_NAME

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_SLOTS_FREE_DEADLINE_S = 10.0
_PARQUET_WINDOWS = 100


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=root) as name:
        yield Path(name)


@contextmanager
def bench_cluster(
    slots: int, overrides: Mapping[str, str] | None = None, *, taskmanagers: int = 1
) -> Iterator[LocalCluster]:
    """A cluster with TaskManagers of this many slots each; SIGTERM ends it as well."""
    with (
        terminates_as_exception(),
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
    ):
        cluster = LocalCluster(Path(name))
        options = {"jobmanager.rpc.port": "0", **(overrides or {})}
        cluster.configure({**options, "taskmanager.numberOfTaskSlots": slots})
        try:
            cluster.start(taskmanagers=taskmanagers)
            yield cluster
        finally:
            cluster.stop()


def measure_limit(workload: Workload, paths: list[Path]) -> float:
    """Seconds that plain pyarrow takes in one thread."""
    pa.set_cpu_count(1)
    started = time.perf_counter()
    workload.limit((read_parquet if workload.reads_parquet else read_batches)(paths))
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How a workload runs.

    Attributes:
        backend: where its state lives.
        checkpoint_interval: a duration, "none" = no checkpoints.
        exchange: type of the exchanges.
        pre_aggregation: in front of keyed exchanges: "auto" | "always" | "never".
    """

    parallelism: int
    backend: str = "hashmap"
    checkpoint_interval: str = "none"
    exchange: str = "pipelined"
    pre_aggregation: str = "auto"

    def config(self) -> dict[str, str]:
        """The job's configuration."""
        return {
            "state.backend.type": self.backend,
            "execution.checkpointing.interval": self.checkpoint_interval,
            "execution.exchange.default": self.exchange,
            "execution.pre-aggregation": self.pre_aggregation,
        }

    def counterparts(self) -> list[JobSettings]:
        """What these settings are compared with in pairs.

        A kept exchange with the pipelined one, both as they are planned, which may be without pre-aggregation
        where the exchange is kept; so also both without. Checkpoints otherwise with none.
        """
        if self.exchange != "pipelined":
            pipelined = replace(self, exchange="pipelined")
            return [
                pipelined,
                replace(pipelined, pre_aggregation="never"),
                replace(self, pre_aggregation="never"),
            ]
        return [replace(self, checkpoint_interval="none")]

    @property
    def checkpoint_interval_s(self) -> float | None:
        """Seconds between checkpoints, None = there are none."""
        if self.checkpoint_interval == "none":
            return None
        return duration_ms(self.checkpoint_interval) / 1000


@dataclass(frozen=True, slots=True)
class Measured:
    """What a job took: seconds from RUNNING to FINISHED, CPU seconds of its slot processes."""

    seconds: float
    cpu_s: float
    checkpoints: dict[str, float] | None


def measure_job(
    workload: Workload, cluster: LocalCluster, directory: Path, settings: JobSettings
) -> Measured:
    """Runs the workload once."""

    def build(env: ps.Environment) -> None:
        read = env.read_parquet if workload.reads_parquet else env.read_arrow
        workload.job(read(str(directory)))

    return run_job(workload.name, build, cluster, settings)


def run_job(
    name: str,
    build: Callable[[ps.Environment], None],
    cluster: LocalCluster,
    settings: JobSettings,
) -> Measured:
    """Runs the job that ``build`` adds to an environment once."""
    address = cluster.address
    env = ps.Environment(address, parallelism=settings.parallelism, config=settings.config())
    build(env)
    cpu_before = slots_cpu_s(cluster)
    handle = env.submit(name)
    handle.wait(timeout=600)
    checkpoints = None
    if settings.checkpoint_interval_s is not None:
        checkpoints = summarize(handle.checkpoints())
    with closing(Client(address)) as client:
        summary = client.job(handle.job_id).summary
        await_free_slots(client)
    seconds = (summary.ended_at_ms - summary.running_at_ms) / 1000
    return Measured(seconds, slots_cpu_s(cluster) - cpu_before, checkpoints)


def summarize(checkpoints: Iterable[Checkpoint]) -> dict[str, float]:
    """Count, durations and uploaded bytes of completed checkpoints."""
    completed = [one for one in checkpoints if one.status == "COMPLETED"]
    durations = sorted(one.duration_ms or 0 for one in completed)
    delays = sorted(one.start_delay_ms for one in completed)
    alignments = sorted(one.alignment_ms for one in completed)
    return {
        "count": len(completed),
        "p50_ms": _middle(durations),
        "max_ms": durations[-1] if durations else 0,
        "start_delay_p50_ms": _middle(delays),
        "alignment_p50_ms": _middle(alignments),
        "bytes_total": sum(one.uploaded_bytes for one in completed),
    }


def _middle(ordered: Sequence[int]) -> int:
    return ordered[len(ordered) // 2] if ordered else 0


def run(
    workload: Workload,
    *,
    rows: int,
    keys: int,
    settings: JobSettings,
    skew: float,
    repeat: int,
    pairs: bool = False,
) -> Iterator[dict[str, Any]]:
    """One result per repetition; with ``pairs`` those of the counterparts before each."""
    parallelism = settings.parallelism
    variants = [*(settings.counterparts() if pairs else ()), settings]
    with memory_directory() as directory, bench_cluster(parallelism) as cluster:
        paths = _write_input(workload, directory, rows, keys, parallelism, skew)
        measure_job(workload, cluster, directory, settings)  # warms cluster and page tables
        for _ in range(repeat):
            limit_s = measure_limit(workload, paths)
            for variant in variants:
                measured = measure_job(workload, cluster, directory, variant)
                cpu_s_per_million = measured.cpu_s / rows * 1e6
                yield {
                    **result(
                        workload.name, variant, rows, keys, measured.seconds, cpu_s_per_million
                    ),
                    "skew": skew,
                    "checkpoints": measured.checkpoints,
                    "limit_rows_per_s": round(rows / limit_s),
                }


def _write_input(
    workload: Workload, directory: Path, rows: int, keys: int, parts: int, skew: float
) -> list[Path]:
    if not workload.reads_parquet:
        return write_parts(directory, rows, keys, parts, skew)
    rows_per_ms = max(1, rows // (_PARQUET_WINDOWS * WINDOW_MS))
    return as_parquet(write_parts(directory, rows, keys, parts, skew, rows_per_ms))


def result(
    name: str,
    settings: JobSettings,
    rows: int | None,
    keys: int,
    seconds: float | None,
    cpu_s_per_million: float | None,
) -> dict[str, Any]:
    """The fields that every result has; None = does not apply."""
    return {
        "workload": name,
        "rows": rows,
        "keys": keys,
        "parallelism": settings.parallelism,
        "skew": None,
        "backend": settings.backend,
        "checkpoint_interval_s": settings.checkpoint_interval_s,
        "exchange": settings.exchange,
        "pre_aggregation": settings.pre_aggregation,
        "seconds": None if seconds is None else round(seconds, 3),
        "rows_per_s": None if rows is None or seconds is None else round(rows / seconds),
        "cpu_s_per_million": None if cpu_s_per_million is None else round(cpu_s_per_million, 4),
        "checkpoints": None,
        "limit_rows_per_s": None,
        "recovery_s": None,
        "other_subtasks_gap_s": None,
    }


def run_limit(
    workload: Workload, *, rows: int, keys: int, skew: float, repeat: int
) -> Iterator[dict[str, Any]]:
    """The work of ``workload`` as plain pyarrow in one thread, without a cluster."""
    with memory_directory() as directory:
        paths = _write_input(workload, directory, rows, keys, 1, skew)
        measure_limit(workload, paths)
        for _ in range(repeat):
            cpu_before = time.process_time()
            seconds = measure_limit(workload, paths)
            cpu_s = time.process_time() - cpu_before
            yield {
                **result("limit", JobSettings(1), rows, keys, seconds, cpu_s / rows * 1e6),
                "skew": skew,
                "backend": None,
                "limit_rows_per_s": round(rows / seconds),
            }


def await_free_slots(client: Client) -> None:
    """Waits until the slots of an ended job are free.

    Raises:
        TimeoutError: they are still taken.
    """
    deadline = time.monotonic() + _SLOTS_FREE_DEADLINE_S
    while True:
        details = client.cluster()
        if details.slots_free == details.slots_total:
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the slots of an ended job are still taken")


def slots_cpu_s(cluster: LocalCluster) -> float:
    """CPU seconds of the slots that have ended: children that fork servers have waited for."""
    total = 0
    for child in _forkservers(cluster):
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[13]) + int(fields[14])  # cutime, cstime
    return total / _CLOCK_TICKS


def live_slots_cpu_s(cluster: LocalCluster) -> float:
    """CPU seconds of the slots that run, so far."""
    total = 0
    for pid in slot_pids(cluster):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # utime, stime
    return total / _CLOCK_TICKS


def slot_pids(cluster: LocalCluster) -> list[int]:
    """The slot processes."""
    return [
        pid
        for forkserver in _forkservers(cluster)
        for pid in _children(forkserver)
        if Path(f"/proc/{pid}/comm").read_text().strip() != PARTITION_SERVER_NAME
    ]


def _forkservers(cluster: LocalCluster) -> Iterator[int]:
    for daemon in cluster.daemons():
        if daemon.role == "taskmanager":
            yield from _children(daemon.pid)


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
