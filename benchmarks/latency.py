"""The workload ``latency``: how long rows are under way at a steady rate, from when each was due.

A source has a row due every so often and never leaves one out: one that comes late, because the source or what is behind it
was held up, counts from when it was due. Rows are dealt out by key to a Python function with state, which gives each out again, to a
sink that counts how many took how long. With ``kill`` there are pipelines that have nothing to do with each other instead; the slot of one of
them is killed in the middle, and the rows of the others count. A thread that only sleeps says what the machine itself adds.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

import penstock as ps
from benchmarks.gated_source import PartedSource
from benchmarks.measure import JobSettings, bench_cluster
from benchmarks.trickle import Count
from penstock.errors import JobCanceled
from penstock.local.local_cluster import LocalCluster

SCHEMA = pa.schema([("key", pa.int64()), ("sent_ns", pa.int64())])
QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99, "p99_9_ms": 0.999, "p99_99_ms": 0.9999, "max_ms": 1.0}

_BUCKETS_PER_DOUBLING = 32
_BUCKETS = 40 * _BUCKETS_PER_DOUBLING
_WAIT_S = 120.0
_NOTHING_RESTARTS = {
    "pipeline.operator-chaining.enabled": "false",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "infinite",
    "restart-strategy.fixed-delay.delay": "0ms",
}


@dataclass(frozen=True, slots=True)
class LatencySettings:
    """What is measured.

    Attributes:
        rate: rows per second, over all subtasks.
        keys: different ones.
        seconds: how long.
        warm_s: rows that are due before do not count.
        kill: a slot in the middle.
    """

    job: JobSettings
    rate: int
    keys: int
    seconds: float
    warm_s: float = 10.0
    kill: bool = False


@dataclass(frozen=True)
class PacedSource(PartedSource):
    """The rows of each split are due at equal distances.

    Attributes:
        start_ns: when the first rows are due, of the monotonic clock, which is one for all processes of a machine.
        step_ns: between two rows of a split.
        keys: different ones.
    """

    start_ns: int
    step_ns: float
    keys: int

    @property
    @override
    def schema(self) -> pa.Schema:
        """A key, and when the row was due."""
        return SCHEMA

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        """A reader that keeps to the clock."""
        return _PacedReader(self, int(position or 0))


class _PacedReader(ps.Reader):
    def __init__(self, source: PacedSource, start: int) -> None:
        self._source = source
        self._next = start

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """What was due at the last whole millisecond, None once that has been read."""
        source = self._source
        passed_ns = time.monotonic_ns() - source.start_ns
        due = int((passed_ns - passed_ns % 1_000_000) / source.step_ns)
        count = min(max_rows, due - self._next)
        if count <= 0:
            return None
        rows = np.arange(self._next, self._next + count)
        self._next += count
        sent_ns = source.start_ns + (rows * source.step_ns).astype(np.int64)
        columns = [pa.array(rows % source.keys), pa.array(sent_ns)]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    @override
    def next_read_at_ms(self) -> int:
        """In the next millisecond."""
        return time.time_ns() // 1_000_000 + 1

    @override
    def position(self) -> bytes:
        """Rows of the split that have been read."""
        return str(self._next).encode()


class HistogramSink(ps.Sink):
    """Counts how many rows took how long, in a file per subtask that says its process, too.

    Args:
        directory: for the files.
        from_ns: rows that were due before do not count.
    """

    def __init__(self, directory: str, from_ns: int) -> None:
        self._directory = Path(directory)
        self._from_ns = from_ns

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        """Nothing has come yet."""
        self._path = self._directory / f"{ctx.subtask_index}.npy"
        self._counts = np.zeros(_BUCKETS, np.int64)
        self.flush()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Compares what the rows say with the clock."""
        sent_ns = batch["sent_ns"].to_numpy()
        latency_ns = time.monotonic_ns() - sent_ns[sent_ns >= self._from_ns]
        self._counts += np.bincount(bucket_of(latency_ns), minlength=_BUCKETS)

    @override
    def flush(self) -> None:
        """Writes the file anew, at every checkpoint."""
        temporary = self._path.with_suffix(".new")
        with temporary.open("wb") as file:
            np.save(file, np.append(self._counts, os.getpid()))
        temporary.replace(self._path)


def bucket_of(latency_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of each latency; a bucket is 2 % wide.

    Example:
        >>> bucket_of(np.array([0, 1_000, 2_000, 3_600_000_000_000])).tolist()
        [0, 0, 32, 1015]
    """
    microseconds = np.maximum(latency_ns / 1_000, 1.0)
    buckets: npt.NDArray[np.int64] = (np.log2(microseconds) * _BUCKETS_PER_DOUBLING).astype(
        np.int64
    )
    return np.minimum(buckets, _BUCKETS - 1)


def quantiles_ms(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """Of all that was counted, rounded up to the end of its bucket.

    Example:
        >>> counts = np.bincount(bucket_of(np.array([1_000_000] * 98 + [50_000_000] * 2)))
        >>> quantiles_ms(counts)["p50_ms"], quantiles_ms(counts)["p99_ms"]
        (1.0, 50.54)
    """
    ranks = np.cumsum(counts)
    found = {}
    for name, share in QUANTILES.items():
        bucket = int(np.searchsorted(ranks, max(1.0, share * ranks[-1])))
        found[name] = round(2 ** ((bucket + 1) / _BUCKETS_PER_DOUBLING) / 1_000, 2)
    return found


@contextmanager
def _sleeping() -> Iterator[npt.NDArray[np.int64]]:
    """How much longer than a millisecond a thread sleeps that does nothing else, in buckets."""
    counts = np.zeros(_BUCKETS, np.int64)
    is_over = threading.Event()

    def sleep() -> None:
        while not is_over.is_set():
            due_ns = time.monotonic_ns() + 1_000_000
            time.sleep(0.001)
            counts[bucket_of(np.array([time.monotonic_ns() - due_ns]))] += 1

    thread = threading.Thread(target=sleep, name="sleeping")
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join(_WAIT_S)


def run_latency(settings: LatencySettings, repeat: int) -> Iterator[dict[str, Any]]:
    """One result per repetition."""
    for _ in range(repeat):
        with (
            bench_cluster(settings.job.parallelism) as cluster,
            tempfile.TemporaryDirectory() as directory,
        ):
            yield _measure(settings, cluster, Path(directory))


def _measure(settings: LatencySettings, cluster: LocalCluster, directory: Path) -> dict[str, Any]:
    parts = settings.job.parallelism
    start_ns = time.monotonic_ns()
    from_ns = start_ns + int(settings.warm_s * 1e9)
    source = PacedSource(parts, start_ns, 1e9 * parts / settings.rate, settings.keys)
    own = _NOTHING_RESTARTS if settings.kill else {}
    env = ps.Environment(
        cluster.address, parallelism=parts, config={**settings.job.config(), **own}
    )
    rows = env.source(source).uid("paced")
    if settings.kill:
        passed = rows.map_batches(_same, schema=SCHEMA)
    else:
        passed = rows.key_by("key").process(Count(), schema=SCHEMA).uid("counted")
    passed.sink(HistogramSink(str(directory), from_ns)).uid("histogram")
    handle = env.submit("latency")
    _sleep_until(from_ns)
    stop_ns = from_ns + int(settings.seconds * 1e9)
    with _sleeping() as machine:
        if settings.kill:
            _sleep_until((from_ns + stop_ns) // 2)
            os.kill(int(np.load(directory / "0.npy")[-1]), signal.SIGKILL)
        _sleep_until(stop_ns)
    handle.checkpoint(_WAIT_S)  # sinks write down what they have
    restarts = handle.details().summary.restarts
    counts = sum(
        (np.load(directory / f"{part}.npy")[:-1] for part in range(int(settings.kill), parts)),
        np.zeros(_BUCKETS, np.int64),
    )
    handle.cancel()
    with suppress(JobCanceled):
        handle.wait(_WAIT_S)
    return {
        "workload": "latency",
        "offered_rows_per_s": settings.rate,
        "keys": settings.keys,
        "parallelism": parts,
        "backend": settings.job.backend,
        "checkpoint_interval_s": settings.job.checkpoint_interval_s,
        "seconds": settings.seconds,
        "restarts": restarts,
        "rows": int(counts.sum()),
        **quantiles_ms(counts),
        **{f"machine_{name}": value for name, value in quantiles_ms(machine).items()},
    }


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def _sleep_until(monotonic_ns: int) -> None:
    time.sleep(max(0.0, (monotonic_ns - time.monotonic_ns()) / 1e9))
