"""The workload ``restore-s3``: the same chain of incremental checkpoints restored from files and from S3, beside the plain
download of what lies on S3, in turns.

Two clusters hold the same job, one with its checkpoints on the local disk. Slot processes are killed as in ``restore``;
``ratio`` is the restore from S3 by the longer of the others, of the medians.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import boto3
from botocore.config import Config

from benchmarks.gated_job import ENDLESS, TIMEOUT_S, GatedJob
from benchmarks.measure import bench_cluster, live_slots_cpu_s, result, slot_pids
from benchmarks.state_benchmarks import (
    WHEN_ASKED,
    StateSettings,
    attempts_of,
    numbers,
    when_all,
)
from penstock.pb import client_pb2
from penstock.storage.manifest import references
from penstock.storage.object_store import ranges_of
from penstock.storage.restore_point import open_restore_point

INCREMENTS: Final = 4
CHANGED_SHARE: Final = 0.05
"""Of the keys, by each of them."""
ROUNDS: Final = 3
THREADS: Final = 8
"""Of each process of the plain download."""


def run_store_restore(settings: StateSettings, s3: str, repeat: int) -> Iterator[dict[str, Any]]:
    """One result per repetition, of ``ROUNDS`` rounds.

    Args:
        s3: where on S3: ``s3://bucket/prefix``; reached as the environment says.
    """
    parallelism = settings.job.parallelism
    for number in range(repeat):
        with (
            ExitStack() as ended,
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        ):
            place = f"{s3.rstrip('/')}/{os.getpid()}-{number}"
            local = ended.enter_context(_restorable(settings, str(Path(name) / "kept")))
            stored = ended.enter_context(_restorable(settings, place))
            workers = ended.enter_context(
                ProcessPoolExecutor(parallelism, get_context("spawn"), initializer=_connect)
            )
            pieces, bucket = _pieces(f"{place}/{stored.handle.job_id}"), place.split("/")[2]
            _download(workers, bucket, pieces, parallelism)  # makes the connections
            raw: list[float] = []
            of_local: list[_Restored] = []
            of_stored: list[_Restored] = []
            for _ in range(ROUNDS):
                of_local.append(_restored(local))
                raw.append(_download(workers, bucket, pieces, parallelism))
                of_stored.append(_restored(stored))
            local.close()
            stored.close()
        local_s, raw_s, s3_s = (
            statistics.median(found)
            for found in (
                [one.seconds for one in of_local],
                raw,
                [one.seconds for one in of_stored],
            )
        )
        yield {
            **result("restore-s3", settings.job, None, settings.keys, None, None),
            "checkpoint_interval_s": None,
            "state_bytes": settings.state_bytes,
            "checkpoints_in_chain": INCREMENTS + 1,
            "downloaded_bytes": sum(size for _, _, size in pieces),
            "restored_bytes": of_stored[-1].store_bytes,
            "local_s": [one.seconds for one in of_local],
            "raw_download_s": raw,
            "restore_s": [one.seconds for one in of_stored],
            "recovery_s": [one.since_kill_s for one in of_stored],
            "slots_cpu_s": [one.cpu_s for one in of_stored],
            "slots_cpu_s_local": [one.cpu_s for one in of_local],
            "ratio": round(s3_s / max(local_s, raw_s), 3),
        }


# ---------------------------------------------------------------- the job


@contextmanager
def _restorable(settings: StateSettings, place: str) -> Iterator[GatedJob]:
    """A job whose newest checkpoint is the last of a chain."""
    config = {**WHEN_ASKED, "execution.checkpointing.dir": place}
    memory = {"taskmanager.memory.managed.size": str(settings.memory_bytes)}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        bench_cluster(settings.job.parallelism, memory) as cluster,
    ):
        job = GatedJob(cluster, Path(name), settings.job, settings.keys, config, numbers)
        rows = settings.keys
        job.let(rows)
        job.checkpoint()
        for _ in range(INCREMENTS):
            rows += int(settings.keys * CHANGED_SHARE)
            job.let(rows)
            job.checkpoint()
        yield job


@dataclass(frozen=True, slots=True)
class _Restored:
    """One restore.

    Attributes:
        seconds: from when all attempts were INITIALIZING until every subtask has given out rows.
        since_kill_s: from the kill.
        cpu_s: of the new slot processes until then.
        store_bytes: that they have read.
    """

    seconds: float
    since_kill_s: float
    cpu_s: float
    store_bytes: int


def _restored(job: GatedJob) -> _Restored:
    job.gate.limit = 0
    attempts = attempts_of(job)
    killed_at = time.monotonic()
    for pid in slot_pids(job.cluster):
        os.kill(pid, signal.SIGKILL)
    initializing_at = when_all(job, client_pb2.ATTEMPT_STATE_INITIALIZING, attempts)
    before = job.gate.rows_written
    job.gate.limit = ENDLESS
    deadline = time.monotonic() + TIMEOUT_S
    while any(now <= then for now, then in zip(job.gate.rows_written, before, strict=True)):
        job.check(deadline)
    emitting_at = time.monotonic()
    cpu_s = live_slots_cpu_s(job.cluster)
    job.gate.limit = 0
    while not (store_bytes := _store_bytes(job)):  # they are told now and then
        job.check(deadline)
    return _Restored(
        round(emitting_at - initializing_at, 3),
        round(emitting_at - killed_at, 3),
        round(cpu_s, 2),
        store_bytes,
    )


def _store_bytes(job: GatedJob) -> int:
    """That all subtasks have read to be restored; 0 = one with state has not told yet."""
    told = [
        [subtask.metrics.restored_store_bytes for subtask in vertex.subtasks]
        for vertex in job.details().vertices
    ]
    with_state = [subtasks for subtasks in told if any(subtasks)]
    return sum(map(sum, with_state)) if with_state and all(map(all, with_state)) else 0


# ---------------------------------------------------------------- the plain download

_Piece = tuple[str, int, int]
"""Key, offset and size of a range of an object."""

_client: Any = None


def _connect() -> None:
    global _client  # noqa: PLW0603 - of the worker process
    config = Config(
        max_pool_connections=THREADS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    _client = boto3.session.Session().client("s3", config=config)


def _pieces(directory: str) -> list[_Piece]:
    """All that a job's newest checkpoint names, cut into ranges."""
    found = []
    prefix = directory.removeprefix("s3://").partition("/")[2]
    for reference in references(open_restore_point(directory).manifest):
        one = reference.location
        for _, start, size in ranges_of(one.path, one.offset, one.size_bytes):
            found.append((f"{prefix}/{one.path}", start, size))
    return found


def _download(
    workers: ProcessPoolExecutor, bucket: str, pieces: list[_Piece], processes: int
) -> float:
    """Seconds that reading and throwing away all of it takes."""
    started = time.monotonic()
    begun = [
        workers.submit(_read_all, bucket, pieces[index::processes]) for index in range(processes)
    ]
    received = sum(one.result() for one in begun)
    assert received == sum(size for _, _, size in pieces)
    return round(time.monotonic() - started, 3)


def _read_all(bucket: str, pieces: list[_Piece]) -> int:
    def size_of(piece: _Piece) -> int:
        key, offset, size = piece
        wanted = f"bytes={offset}-{offset + size - 1}"
        return len(_client.get_object(Bucket=bucket, Key=key, Range=wanted)["Body"].read())

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(size_of, pieces))
