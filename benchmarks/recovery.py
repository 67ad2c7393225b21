"""The workload ``recovery``: from SIGKILL to the first new output, and what the other subtasks notice.

A job of a paced source, columnar operators, a keyed exchange and a running aggregate is filled with
state; its sink notes when which subtask gives out rows. Then one of its TaskManagers is killed, and its
subtasks start again on a spare one. With ``pipelines`` the job consists of so many pipelines that have nothing to
do with each other, and the slot process of one of them is killed.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

import penstock as ps
from benchmarks.gated_job import TIMEOUT_S, GatedJob
from benchmarks.gated_source import rows_per_key
from benchmarks.measure import JobSettings, bench_cluster, result, summarize
from benchmarks.output_log import (
    Notes,
    NotingSink,
    first_outputs,
    largest_pause_ns,
    read_notes,
    read_rows,
)
from benchmarks.state_benchmarks import numbers
from penstock import col
from penstock.local.local_cluster import LocalCluster

TASKMANAGERS = 2
WINDOW_BEFORE_S = 2.0
WINDOW_AFTER_S = 10.0
"""Pauses of subtasks that go on count from so long before the kill until so long after it."""
_NUMBER_BYTES = 8
_NUMBERS = 8
_STATE_BYTES = 500_000_000
_PIPELINE_SCHEMA = pa.schema([("key", pa.int64()), ("rows", pa.int32())])


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What is measured.

    Attributes:
        state_keys: over all subtasks; None = 500 MB of state.
        rate: rows per second, over all subtasks.
        pipelines: None = one job with a keyed exchange.
        warm_s: how long the job runs at this rate before the kill.
        after_s: and after it.
    """

    job: JobSettings
    state_keys: int | None
    rate: int
    pipelines: int | None = None
    warm_s: float = 8.0
    after_s: float = WINDOW_AFTER_S

    @property
    def keys(self) -> int:
        """Different ones; in pipelines each row has its own."""
        if self.pipelines:
            return int(self.rate * (self.warm_s + WINDOW_BEFORE_S + self.after_s + 1.0))
        keys = self.state_keys or _STATE_BYTES // (_NUMBERS * _NUMBER_BYTES)
        return keys - keys % self.job.parallelism

    @property
    def state_bytes(self) -> int | None:
        """Keys and values as plain numbers; None = there are none."""
        return None if self.pipelines else self.keys * _NUMBERS * _NUMBER_BYTES


def run_recovery(settings: RecoverySettings, repeat: int) -> Iterator[dict[str, Any]]:
    """One result per repetition."""
    for _ in range(repeat):
        with _cluster(settings) as cluster, tempfile.TemporaryDirectory() as name:
            yield _measure(settings, cluster, Path(name))


@contextmanager
def _cluster(settings: RecoverySettings) -> Iterator[LocalCluster]:
    slots = -(-settings.job.parallelism // TASKMANAGERS)
    memory = max(128 << 20, 8 * (settings.state_bytes or 0))
    overrides = {"taskmanager.memory.managed.size": str(memory)}
    with bench_cluster(slots, overrides, taskmanagers=TASKMANAGERS) as cluster:
        yield cluster


def _measure(settings: RecoverySettings, cluster: LocalCluster, directory: Path) -> dict[str, Any]:
    job = _start(settings, cluster, directory)
    if not settings.pipelines:
        cluster.start(
            taskmanagers=TASKMANAGERS + 1
        )  # the spare: it came when the job had its slots
        job.let(settings.keys)
        job.checkpoint()
    job.feed(settings.rate, settings.warm_s)
    victim = _victim(settings, job, directory)
    pids = {int(own["pid"][-1]) for own in read_notes(directory).values()}
    cpu_before, began = _cpu_s(pids), time.monotonic()
    job.feed(settings.rate, WINDOW_BEFORE_S)
    cores = (_cpu_s(pids) - cpu_before) / (time.monotonic() - began)
    killed_at_ns, killed_at_ms = time.monotonic_ns(), time.time_ns() // 1_000_000
    os.kill(victim, signal.SIGKILL)
    job.feed(settings.rate, settings.after_s)
    job.let(job.gate.limit)
    is_exact = _await_all(settings, job, directory)
    notes = read_notes(directory)
    restarted = first_outputs(notes, killed_at_ns)
    others = [own for subtask, own in notes.items() if subtask not in restarted]
    detected_at_ms = job.handle.exceptions()[0].root_cause.timestamp_ms
    checkpoints = summarize(job.handle.checkpoints())
    job.close()
    return {
        **result("recovery", settings.job, None, settings.keys, None, None),
        "pipelines": settings.pipelines,
        "state_bytes": settings.state_bytes,
        "offered_rows_per_s": settings.rate,
        "cores_used": round(cores, 2),
        "checkpoints": checkpoints,
        "restarted_subtasks": len(restarted),
        "other_subtasks": len(others),
        "detected_s": round((detected_at_ms - killed_at_ms) / 1000, 3),
        "recovery_s": round((max(restarted.values()) - killed_at_ns) / 1e9, 3),
        "other_subtasks_gap_s": _gap_s(others, killed_at_ns, settings.after_s),
        "gap_before_s": _gap_s(list(notes.values()), killed_at_ns, 0),
        "is_exact": is_exact,
    }


def _start(settings: RecoverySettings, cluster: LocalCluster, directory: Path) -> GatedJob:
    config = {
        "pipeline.deterministic": "true",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "infinite",
        "restart-strategy.fixed-delay.delay": "0ms",
    }
    if settings.pipelines:
        config["pipeline.operator-chaining.enabled"] = "false"
    NotingSink.prepare(directory, settings.keys)
    return GatedJob(
        cluster,
        directory,
        settings.job,
        settings.keys,
        config,
        _pipelines if settings.pipelines else _keyed,
        sink=NotingSink(str(directory), settings.keys),
    )


def _keyed(rows: ps.Stream) -> ps.Stream:
    positive = rows.filter(col("first") >= 0).with_columns(second=col("second") * 2)
    return numbers(positive)


def _pipelines(rows: ps.Stream) -> ps.Stream:
    return rows.map_batches(_one_row_per_key, schema=_PIPELINE_SCHEMA)


def _one_row_per_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    ones = pa.array(np.ones(batch.num_rows, np.int32))
    return pa.RecordBatch.from_arrays([batch["key"], ones], schema=_PIPELINE_SCHEMA)


def _victim(settings: RecoverySettings, job: GatedJob, directory: Path) -> int:
    """The process that is killed: the slot of pipeline 0, or the TaskManager of subtask 0."""
    if settings.pipelines:
        return int(read_notes(directory)[0]["pid"][-1])
    home = job.details().vertices[0].subtasks[0].taskmanager_id
    return next(daemon.pid for daemon in job.cluster.daemons() if daemon.id == home)


def _await_all(settings: RecoverySettings, job: GatedJob, directory: Path) -> bool:
    """Waits for the output of all that was read; False when it is not what was expected."""
    expected = rows_per_key(job.gate.limit, settings.keys)
    deadline = time.monotonic() + TIMEOUT_S
    while read_rows(directory).sum(dtype=np.int64) < job.gate.limit:
        job.check(deadline)
    return bool(np.array_equal(read_rows(directory), expected))


def _gap_s(subtasks: list[Notes], killed_at_ns: int, seconds: float) -> float | None:
    """The largest pause of any of them; None = there are none."""
    start_ns = killed_at_ns - int(WINDOW_BEFORE_S * 1e9)
    stop_ns = killed_at_ns + int(seconds * 1e9)
    pauses = [largest_pause_ns(own, start_ns, stop_ns) for own in subtasks]
    return round(max(pauses) / 1e9, 3) if pauses else None


def _cpu_s(pids: set[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
