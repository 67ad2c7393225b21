"""The workload ``trickle``: what few rows a second cost, and how long each is under way.

Rows come one by one at ``rate``, are dealt out by key, counted by Python functions with state, and noted by a sink
when they come out. After ``_WARM_S`` the CPU time of the slot processes is taken for ``_MEASURED_S``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow as pa
from typing_extensions import override

import penstock as ps
from benchmarks.measure import JobSettings, bench_cluster, slot_pids, summarize
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster

_KEYS = 97
_WARM_S = 3.0
_MEASURED_S = 15.0
_SCHEMA = pa.schema([("key", pa.int64()), ("sent_ns", pa.int64())])


class Count(ps.KeyedProcessFunction):
    """Rows per key."""

    rows = ps.ValueState("rows", pa.int64(), default=0)

    @override
    def process(self, row: ps.Row, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        """Passes the row on."""
        self.rows.update(self.rows.value() + 1)
        out.emit(key=row.key, sent_ns=row.sent_ns)


class LatencySink(ps.Sink):
    """Writes how long each row was under way, as nanoseconds of eight bytes."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        """One file per subtask."""
        self._file = (Path(self._directory) / str(ctx.subtask_index)).open("wb")

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Compares the stamps with the clock."""
        now_ns = time.monotonic_ns()
        for sent in batch["sent_ns"].to_pylist():
            self._file.write((now_ns - sent).to_bytes(8, "little"))

    @override
    def flush(self) -> None:
        """What is noted may be read."""
        self._file.flush()

    @override
    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def run_trickle(
    settings: JobSettings, rate: int, repeat: int, functions: int = 1
) -> Iterator[dict[str, Any]]:
    """One result per repetition.

    Args:
        settings: of the job.
        rate: rows per second over all subtasks.
        repeat: how often.
        functions: that rows pass one behind another, dealt out by key in front of each.
    """
    for _ in range(repeat):
        with bench_cluster(settings.parallelism) as cluster, TemporaryDirectory() as directory:
            yield _measure(settings, rate, functions, cluster, directory)


def _measure(
    settings: JobSettings, rate: int, functions: int, cluster: LocalCluster, directory: str
) -> dict[str, Any]:
    env = ps.Environment(
        cluster.address, parallelism=settings.parallelism, config=settings.config()
    )
    rows = env.generate(_stamped, rate=rate, schema=_SCHEMA)
    for index in range(functions):
        rows = rows.key_by("key").process(Count(), schema=_SCHEMA).uid(f"counted-{index}")
    rows.sink(LatencySink(directory))
    handle = env.submit("trickle")
    with closing(Client(cluster.address)) as client:
        for details in client.watch(handle.job_id):
            if details.summary.running_at_ms:
                break
        time.sleep(_WARM_S)
        slots = [psutil.Process(pid) for pid in slot_pids(cluster)]
        before, began = [_cpu_s(slot) for slot in slots], time.monotonic()
        time.sleep(_MEASURED_S)
        seconds = time.monotonic() - began
        shares = [(_cpu_s(slot) - cpu) / seconds for slot, cpu in zip(slots, before, strict=True)]
        checkpoints = summarize(handle.checkpoints())
        handle.cancel()
        for _ in client.watch(handle.job_id):
            pass
    latencies = sorted(
        int.from_bytes(data[at : at + 8], "little")
        for path in Path(directory).iterdir()
        for data in (path.read_bytes(),)
        for at in range(0, len(data) - 7, 8)
    )
    return {
        "workload": "trickle",
        "rate": rate,
        "functions": functions,
        "parallelism": settings.parallelism,
        "backend": settings.backend,
        "checkpoint_interval_s": settings.checkpoint_interval_s,
        "checkpoints": checkpoints,
        "rows": len(latencies),
        "cores_per_slot": [round(share, 3) for share in shares],
        "p50_ms": round(latencies[len(latencies) // 2] / 1e6, 2),
        "p99_ms": round(latencies[len(latencies) * 99 // 100] / 1e6, 2),
    }


def _stamped(start: int, count: int) -> pa.RecordBatch:
    """Rows, and when they were made."""
    keys = pa.array([row % _KEYS for row in range(start, start + count)], pa.int64())
    return pa.record_batch([keys, pa.array([time.monotonic_ns()] * count)], schema=_SCHEMA)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
