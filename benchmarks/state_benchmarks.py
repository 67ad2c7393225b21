"""The workloads ``checkpoint``, ``restore`` and ``alignment``.

``checkpoint`` fills state, takes a full checkpoint, touches 1 % of the keys, all in few key-groups, takes
an incremental one, then changes keys all over and takes one more while the job works at full speed.
``restore`` takes the first two, kills the slot processes, and waits until every subtask has
emitted rows again. ``alignment`` runs three shuffles at half of the speed they reach (``load``), with checkpoints.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

import penstock as ps
from benchmarks.gated_job import ENDLESS, TIMEOUT_S, GatedJob
from benchmarks.gated_source import TOTALS_SCHEMA, Totals
from benchmarks.measure import (
    JobSettings,
    bench_cluster,
    result,
    slot_pids,
    summarize,
)
from penstock import col
from penstock.client.job_checkpoints import Checkpoint
from penstock.pb import client_pb2
from penstock.storage.hashing import hash_columns
from penstock.storage.key_groups import default_max_parallelism, key_group_of, key_group_range

TOUCHED_SHARE = 0.01
STEADY_S = 5.0
ALIGNED_S = 15.0
_NUMBER_BYTES = 8
_GROUPS = 1000


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What is measured.

    Attributes:
        keys: different ones, over all subtasks.
        state: "numbers" (seven per key, in a running aggregate) or "objects" (two values per key of a
            Python function).
        load: of ``alignment``: share of the largest rate.
    """

    job: JobSettings
    keys: int
    state: str
    load: float = 0.5

    @property
    def state_bytes(self) -> int:
        """Keys and values as plain numbers."""
        return self.keys * _NUMBER_BYTES * (8 if self.state == "numbers" else 3)

    @property
    def memory_bytes(self) -> int:
        """For the state of a slot: enough for all of it on hashmap; on rocksdb it does not fit the caches."""
        if self.job.backend == "rocksdb":
            return max(64 << 20, self.state_bytes)
        return 64 * self.state_bytes if self.state == "objects" else 8 * self.state_bytes


# ---------------------------------------------------------------- checkpoint and restore


def run_checkpoint(settings: StateSettings, repeat: int) -> Iterator[dict[str, Any]]:
    """Costs of full and incremental checkpoints, one result per repetition."""
    for _ in range(repeat):
        with _filled_job(settings) as filled:
            job = filled.job
            job.gate.limit = ENDLESS
            started, before = time.monotonic(), job.gate.rows_read
            alone = job.rate(STEADY_S)
            seconds, rows = time.monotonic() - started, job.gate.rows_read - before
            loaded_started, loaded_before = time.monotonic(), job.gate.rows_read
            under_load = job.checkpoint()
            loaded_s = time.monotonic() - loaded_started
            loaded = (job.gate.rows_read - loaded_before) / loaded_s
            all_rows = job.gate.rows_read
            checkpoints = summarize(job.handle.checkpoints())
            cpu_s = job.close()
            yield {
                **_result(settings, "checkpoint", rows, seconds, cpu_s / all_rows * 1e6),
                "checkpoints": checkpoints,
                **filled.figures(),
                "under_load": _figures(under_load),
                "rows_per_s_while_checkpointing": round(loaded),
                "throughput_ratio": round(loaded / alone, 3) if alone else None,
            }


def run_restore(settings: StateSettings, repeat: int) -> Iterator[dict[str, Any]]:
    """Time from SIGKILL of all slot processes to rows from every subtask, one result per repetition."""
    for _ in range(repeat):
        with _filled_job(settings) as filled:
            job = filled.job
            checkpoints = summarize(job.handle.checkpoints())
            before = job.gate.rows_written
            job.gate.limit = ENDLESS
            attempts = attempts_of(job)
            killed_at = time.monotonic()
            for pid in slot_pids(job.cluster):
                os.kill(pid, signal.SIGKILL)
            # What the dead had written since is no sign of life of the new ones.
            initializing_at = when_all(job, client_pb2.ATTEMPT_STATE_INITIALIZING, attempts)
            before = job.gate.rows_written
            running_at = when_all(job, client_pb2.ATTEMPT_STATE_RUNNING, attempts)
            deadline = time.monotonic() + TIMEOUT_S
            while any(now <= then for now, then in zip(job.gate.rows_written, before, strict=True)):
                job.check(deadline)
            emitting_at = time.monotonic()
            job.close()
            yield {
                **_result(settings, "restore", None, None, None),
                "checkpoints": checkpoints,
                **filled.figures(),
                "restarts": job.handle.details().summary.restarts,
                "initializing_s": round(initializing_at - killed_at, 3),
                "running_s": round(running_at - initializing_at, 3),
                "restore_s": round(emitting_at - initializing_at, 3),
                "recovery_s": round(emitting_at - killed_at, 3),
            }


@dataclass(frozen=True, slots=True)
class _Filled:
    """A job whose state is filled, with two checkpoints."""

    job: GatedJob
    settings: StateSettings
    fill_s: float
    full: Checkpoint
    touched_keys: int
    incremental: Checkpoint

    def figures(self) -> dict[str, Any]:
        """Top-level fields of a result."""
        return {
            "state": self.settings.state,
            "state_bytes": self.settings.state_bytes,
            "fill_s": round(self.fill_s, 3),
            "full": _figures(self.full),
            "touched_keys": self.touched_keys,
            "incremental": _figures(self.incremental),
            "uploaded_share": round(self.incremental.uploaded_bytes / self.full.uploaded_bytes, 4),
        }


WHEN_ASKED: Final = {
    "execution.checkpointing.interval": "1h",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "infinite",
    "restart-strategy.fixed-delay.delay": "0ms",
}
"""Checkpoints are those that are asked for, and what is killed begins again at once."""


@contextmanager
def _filled_job(settings: StateSettings) -> Iterator[_Filled]:
    build = numbers if settings.state == "numbers" else _objects
    memory = {"taskmanager.memory.managed.size": str(settings.memory_bytes)}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        bench_cluster(settings.job.parallelism, memory) as cluster,
    ):
        directory = Path(name)
        touched = _touched_keys(settings)
        np.save(directory / "touched.npy", touched)
        started = time.monotonic()
        job = GatedJob(
            cluster,
            directory,
            settings.job,
            settings.keys,
            WHEN_ASKED,
            build,
            touched=str(directory / "touched.npy"),
        )
        job.let(settings.keys)
        fill_s = time.monotonic() - started
        full = job.checkpoint()
        job.let(settings.keys + len(touched))
        incremental = job.checkpoint()
        yield _Filled(job, settings, fill_s, full, len(touched), incremental)


def _touched_keys(settings: StateSettings) -> np.ndarray[Any, Any]:
    """1 % of the keys, all of one key-group of each subtask or a few."""
    parallelism = settings.job.parallelism
    max_parallelism = default_max_parallelism(parallelism)
    keys = np.arange(settings.keys, dtype=np.int64)
    groups = key_group_of(hash_columns([pa.array(keys)]), max_parallelism)
    wanted = max(1, int(settings.keys * TOUCHED_SHARE) // parallelism)
    chosen = []
    for subtask in range(parallelism):
        first = key_group_range(subtask, parallelism, max_parallelism).start
        order = np.flatnonzero((groups >= first) & (groups < first + 4))
        chosen.append(order[np.argsort(groups[order], kind="stable")][:wanted])
    touched = np.concatenate(chosen)
    return touched[: len(touched) - len(touched) % parallelism]


def numbers(rows: ps.Stream) -> ps.Stream:
    """Seven numbers of state per key."""
    return (
        rows.key_by("key")
        .aggregate(
            rows=ps.count(),
            first_sum=ps.sum("first"),
            first_min=ps.min("first"),
            first_max=ps.max("first"),
            second_sum=ps.sum("second"),
            second_min=ps.min("second"),
            second_max=ps.max("second"),
        )
        .uid("state")
    )


def _objects(rows: ps.Stream) -> ps.Stream:
    return rows.key_by("key").process(Totals(), schema=TOTALS_SCHEMA).uid("state")


def attempts_of(job: GatedJob) -> list[int]:
    """The numbers of the attempts of all subtasks."""
    return [subtask.attempt for vertex in job.details().vertices for subtask in vertex.subtasks]


def when_all(
    job: GatedJob, state: client_pb2.AttemptState.ValueType, attempts: Sequence[int]
) -> float:
    """When an attempt of each subtask has come this far.

    Args:
        attempts: that do not count, nor do older ones.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        subtasks = [one for vertex in job.details().vertices for one in vertex.subtasks]
        if all(
            one.attempt > old and one.state >= state
            for one, old in zip(subtasks, attempts, strict=True)
        ):
            return time.monotonic()
        job.check(deadline)


# ---------------------------------------------------------------- alignment


def run_alignment(settings: StateSettings, repeat: int) -> Iterator[dict[str, Any]]:
    """Alignment with three shuffles at half load, one result per repetition."""
    for _ in range(repeat):
        with (
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
            bench_cluster(settings.job.parallelism) as cluster,
        ):
            directory = Path(name)
            job = GatedJob(cluster, directory, settings.job, settings.keys, {}, three_shuffles)
            job.let(settings.keys)
            job.gate.limit = ENDLESS
            most = job.rate(STEADY_S)
            job.gate.limit = job.gate.rows_read
            job.feed(most * settings.load, 1.0)
            begun_ms = time.time_ns() // 1_000_000
            started, before = time.monotonic(), job.gate.rows_read
            job.feed(most * settings.load, ALIGNED_S)
            seconds, rows = time.monotonic() - started, job.gate.rows_read - before
            taken = [one for one in job.handle.checkpoints() if one.triggered_at_ms >= begun_ms]
            completed = [one for one in taken if one.status == "COMPLETED"]
            job.close()
            yield {
                **_result(settings, "alignment", rows, seconds, None),
                "checkpoint_interval_s": settings.job.checkpoint_interval_s,
                "checkpoints": summarize(completed),
                "max_rows_per_s": round(most),
                "offered_rows_per_s": round(most * settings.load),
                "alignment_ms": sorted(one.alignment_ms for one in completed),
                "max_alignment_ms": max((one.alignment_ms for one in completed), default=None),
                "max_start_delay_ms": max((one.start_delay_ms for one in completed), default=None),
                "max_sync_ms": max((one.sync_ms for one in completed), default=None),
            }


def three_shuffles(rows: ps.Stream) -> ps.Stream:
    """Rows dealt out, counted by key, and what changes of that counted by group."""
    return (
        rows.rebalance()
        .filter(col("first") > 0)
        .key_by("key")
        .aggregate(rows=ps.count(), total=ps.sum("first"))
        .uid("per-key")
        .as_rows()  # of the updates
        .select("rows", "total", group=col("key") % _GROUPS)
        .key_by("group")
        .aggregate(updates=ps.count(), total=ps.sum("total"))
        .uid("per-group")
    )


# ---------------------------------------------------------------- shared


def _result(
    settings: StateSettings,
    name: str,
    rows: int | None,
    seconds: float | None,
    cpu_s_per_million: float | None,
) -> dict[str, Any]:
    found = result(name, settings.job, rows, settings.keys, seconds, cpu_s_per_million)
    return {**found, "checkpoint_interval_s": None}


def _figures(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "duration_ms": checkpoint.duration_ms,
        "sync_ms": round(checkpoint.sync_ms, 2),
        "async_ms": checkpoint.async_ms,
        "uploaded_bytes": checkpoint.uploaded_bytes,
        "state_bytes": checkpoint.state_bytes,
    }
