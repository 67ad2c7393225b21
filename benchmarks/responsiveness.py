"""How quick and how light a cluster is: ``python -m benchmarks.responsiveness``.

Prints one JSON object per figure: latency of single rows through a hash exchange between two slot
processes, time from ``submit`` to RUNNING on a warm cluster, private memory of an idle slot.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

import penstock as ps
from benchmarks.measure import bench_cluster, slot_pids
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster

ROWS_PER_S = 1000
SECONDS = 5
SUBMISSIONS = 7
_SCHEMA = pa.schema([("key", pa.int64()), ("sent_ns", pa.int64())])


class PacedReader(ps.Reader):
    """One row at a time, stamped when it leaves."""

    def __init__(self, first: int, step: int, rows: int, interval_ms: float) -> None:
        self._first, self._step, self._rows = first, step, rows
        self._interval_ms = interval_ms
        self._sent = 0
        self._started_ms = time.time_ns() // 1_000_000

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | ps.EndOfSplit | None:
        """The next row when it is its time."""
        if self._sent == self._rows:
            return ps.END
        if time.time_ns() // 1_000_000 < self.next_read_at_ms():
            return None
        key = self._first + self._sent * self._step
        self._sent += 1
        return pa.record_batch([pa.array([key]), pa.array([time.monotonic_ns()])], schema=_SCHEMA)

    @override
    def next_read_at_ms(self) -> int:
        """When the next row is due."""
        return int(self._started_ms + self._sent * self._interval_ms)

    @override
    def position(self) -> bytes:
        """Rows sent."""
        return str(self._sent).encode()


class PacedSource(ps.Source):
    """``ROWS_PER_S`` rows per second over all subtasks."""

    @property
    @override
    def schema(self) -> pa.Schema:
        """Key and time stamp."""
        return _SCHEMA

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        """One split per subtask."""
        parallelism = ctx.parallelism
        return [
            ps.Split(f"{index}", f"{index},{parallelism}".encode()) for index in range(parallelism)
        ]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        """A paced reader."""
        index, parallelism = map(int, split.payload.decode().split(","))
        rows = ROWS_PER_S * SECONDS // parallelism
        return PacedReader(index, parallelism, rows, 1000 * parallelism / ROWS_PER_S)


class LatencySink(ps.Sink):
    """Notes how long each row was under way."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._latencies_us: list[int] = []

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        """Remembers which subtask this is."""
        self._subtask_index = ctx.subtask_index

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Compares the stamps with the clock."""
        now_ns = time.monotonic_ns()
        self._latencies_us += [(now_ns - sent) // 1000 for sent in batch["sent_ns"].to_pylist()]

    @override
    def flush(self) -> None:
        """Nothing is buffered."""

    @override
    def close(self) -> None:
        """Leaves the result where the benchmark finds it."""
        path = Path(self._directory) / f"{self._subtask_index}.json"
        path.write_text(json.dumps(self._latencies_us))


def latency(address: str) -> dict[str, object]:
    """Latency of single rows, defaults, parallelism 2."""
    with tempfile.TemporaryDirectory() as directory:
        env = ps.Environment(address, parallelism=2)
        env.source(PacedSource()).key_by("key").sink(LatencySink(directory))
        env.execute("latency")
        latencies = sorted(
            value for path in Path(directory).iterdir() for value in json.loads(path.read_text())
        )
    return {
        "figure": "latency",
        "rows": len(latencies),
        "rows_per_s": ROWS_PER_S,
        "p50_ms": latencies[len(latencies) // 2] / 1000,
        "p99_ms": latencies[len(latencies) * 99 // 100] / 1000,
        "max_ms": latencies[-1] / 1000,
    }


def submit_to_running(address: str) -> dict[str, object]:
    """Time from ``submit`` to RUNNING on a warm cluster, client included."""
    times = []
    with closing(Client(address)) as client:
        for _ in range(SUBMISSIONS):
            env = ps.Environment(address, parallelism=2)
            rows = env.generate(_block, rate=10, schema=_block(0, 1).schema)
            rows.map(lambda row: row, schema=rows.schema).key_by("x").discard()
            started = time.monotonic()
            handle = env.submit("submit")
            for details in client.watch(handle.job_id):
                if details.summary.running_at_ms:
                    break
            times.append((time.monotonic() - started) * 1000)
            handle.cancel()
            for _ in client.watch(handle.job_id):
                pass
            env.close()
    return {
        "figure": "submit_to_running",
        "submissions": SUBMISSIONS,
        "median_ms": round(statistics.median(times), 1),
        "max_ms": round(max(times), 1),
    }


def _block(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(range(start, start + count), pa.int64())})


def idle_slot_memory(cluster: LocalCluster, address: str) -> dict[str, object]:
    """Private memory (USS) of a slot process whose subtasks have nothing to do."""
    env = ps.Environment(address, parallelism=2)
    rows = env.generate(_block, rate=1, schema=_block(0, 1).schema)
    rows.key_by("x").aggregate(rows=ps.count()).uid("idle").discard()
    handle = env.submit("idle")
    with closing(Client(address)) as client:
        for details in client.watch(handle.job_id):
            if details.summary.running_at_ms:
                break
        sizes = [_private_bytes(pid) / 1e6 for pid in slot_pids(cluster)]
        handle.cancel()
        for _ in client.watch(handle.job_id):
            pass
    return {"figure": "idle_slot_uss", "slots": len(sizes), "max_mb": round(max(sizes), 1)}


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def main() -> None:
    """Prints every figure."""
    with bench_cluster(2) as cluster:
        address = cluster.address
        for figure in (
            submit_to_running(address),
            idle_slot_memory(cluster, address),
            latency(address),
        ):
            print(json.dumps(figure))


if __name__ == "__main__":
    main()
