"""Small jobs one after another, and what a cluster has of them afterwards: files, processes, threads, descriptors, memory, nodes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from kazoo.client import KazooClient

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline
from tests.support.zookeeper import ensemble, quorum

ROWS = 100
_RETAINED = 8
_LOGS_MAX = 256 + 20
"""What ``taskmanager.logs.max-size`` of 1 MB holds in blocks of 4 KB, and the daemons' own."""
_THREADS_MORE = 4
"""Pools of threads make another one when all are busy, up to their bound: of all pools of a daemon that many may be late."""
_DESCRIPTORS_MORE = 4
_BYTES_MORE = 16 << 20
_PAUSE_S = 0.5
_UNIQUE = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8,}|\d+")


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Number(ps.KeyedProcessFunction):
    """Numbers the rows of each key."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        out.emit(key=ctx.key, number=self.seen.value())


def _keyed(env: ps.Environment, rows: int | None) -> ps.Stream:
    stream = env.generate(numbers, rows=rows, schema={"n": "int64"}).uid("numbers")
    keyed = stream.with_columns(key=ps.col("n") % 5).uid("keys").key_by("key")
    schema = {"key": "int64", "number": "int64"}
    return keyed.process(Number(), schema=schema).uid("counts")


def collected(address: str, out: Path) -> None:
    """Rows come back to the client; there are no checkpoints."""
    with ps.Environment(address, config={"execution.checkpointing.interval": "none"}) as env:
        rows = _keyed(env, ROWS).collect()
        env.submit("collected").wait(DEADLINE_S)
        assert len(list(rows)) == ROWS


def written(address: str, out: Path) -> None:
    """State in RocksDB, and files that the last checkpoint commits."""
    with ps.Environment(address, config={"state.backend.type": "rocksdb"}) as env:
        _keyed(env, ROWS).write_parquet(out).uid("files")
        env.submit("written").wait(DEADLINE_S)
    assert sum(1 for path in out.rglob("*") if path.is_file()) > 0


def staged(address: str, out: Path) -> None:
    """Batch mode: rows wait on disk for the next stage."""
    with ps.Environment(address, parallelism=2) as env:
        env.set_runtime_mode("batch")
        _keyed(env, ROWS).discard().uid("nowhere")
        env.submit("staged").wait(DEADLINE_S)


def cancelled(address: str, out: Path) -> None:
    """An endless job that is cancelled as soon as it has a checkpoint."""
    with ps.Environment(address) as env:
        _keyed(env, None).discard().uid("nowhere")
        handle = env.submit("cancelled")
        await_details(handle, lambda _, state: state == "RUNNING")
        handle.checkpoint()
        handle.cancel()
        with contextlib.suppress(ps.JobCanceled):
            handle.wait(DEADLINE_S)


KINDS: Sequence[Callable[[str, Path], None]] = (collected, written, staged, cancelled)


def run_jobs(address: str, out: Path, count: int) -> None:
    """Submits jobs of all kinds in turn, each when the one before has ended."""
    for number in range(count):
        KINDS[number % len(KINDS)](address, out / str(number))


@dataclass(frozen=True)
class Footprint:
    """What there is of a cluster.

    Attributes:
        nodes: below the root of ZooKeeper.
        files: path, jobs' ids and numbers left out -> how many files and directories; without logs.
        logs: how many files there are of logs.
        processes: daemon -> its own and those below it.
        threads: daemon -> of all these processes.
        descriptors: daemon -> of all these processes.
        resident: daemon -> bytes of its own process.
    """

    nodes: list[str]
    files: Counter[str]
    logs: int
    processes: Counter[str]
    threads: Counter[str]
    descriptors: Counter[str]
    resident: Counter[str]


def footprint(cluster: LocalCluster, directories: Sequence[Path], quorum: str) -> Footprint:
    """Looks at the cluster as it is now."""
    found = Footprint(_nodes(quorum), *(Counter(), 0), *(Counter() for _ in range(4)))
    sockets = []
    for daemon in cluster.daemons():
        process = psutil.Process(daemon.pid)
        found.resident[daemon.id] = process.memory_info().rss
        for one in (process, *process.children(recursive=True)):
            found.processes[daemon.id] += 1
            found.threads[daemon.id] += one.num_threads()
            found.descriptors[daemon.id] += one.num_fds()
        sockets += Path("/tmp").glob(f"penstock-{daemon.pid}-*")
    logs = cluster.directory / "logs"
    for directory in (*directories, *sockets):
        for at, directories_in, files in os.walk(directory):  # which bears that daemons remove some
            for path in (Path(at, name) for name in (*directories_in, *files)):
                if not path.is_relative_to(logs):
                    found.files[_UNIQUE.sub("*", str(path))] += 1
    return replace(found, logs=sum(1 for path in logs.rglob("*.log*")))


def assert_jobs_leave_nothing(root: Path, first: int, then: int) -> None:
    """Compares what there is after the first jobs with what there is after the others.

    Args:
        root: for everything.
        first: jobs until all threads of all pools are there, and ended jobs are forgotten.
        then: more jobs; as many of each kind.
    """
    directories = [root / "cluster", root / "checkpoints", root / "temporary"]
    directories[-1].mkdir()
    with ensemble(root) as servers, _cluster(root, quorum(servers)) as cluster:

        def look() -> Footprint:
            return footprint(cluster, directories, quorum(servers))

        run_jobs(cluster.address, root / "first", first)
        before = _settled(look, lambda found: found.logs <= _LOGS_MAX)
        run_jobs(cluster.address, root / "then", then)
        try:
            after = _settled(look, lambda found: _is_as_before(found, before))
        except AssertionError:
            after = look()
        for name in ("logs", "processes", "threads", "descriptors", "resident"):
            print(name, getattr(before, name), "->", getattr(after, name))
        assert after.nodes == before.nodes
        assert after.files == before.files
        assert after.logs <= _LOGS_MAX
        assert after.processes == before.processes
        assert _grown(after.threads, before.threads) <= _THREADS_MORE
        assert _grown(after.descriptors, before.descriptors) <= _DESCRIPTORS_MORE
        assert _grown(after.resident, before.resident) <= _BYTES_MORE
        with cluster.client() as client:
            assert len(client.jobs()) == _RETAINED


@contextlib.contextmanager
def _cluster(root: Path, servers: str) -> Iterator[LocalCluster]:
    cluster = LocalCluster(root / "cluster")
    cluster.configure(
        {
            "high-availability.type": "zookeeper",
            "high-availability.zookeeper.quorum": servers,
            "jobmanager.rpc.port": 0,
            "jobmanager.retained-jobs": str(_RETAINED),
            "taskmanager.logs.max-size": "1mb",
            "execution.checkpointing.dir": str(root / "checkpoints"),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(root / "temporary"))
        cluster.start(jobmanagers=2, taskmanagers=2, slots=2)
    try:
        yield cluster
    finally:
        cluster.stop()


def _settled(look: Callable[[], Footprint], condition: Callable[[Footprint], bool]) -> Footprint:
    """Waits until the condition holds of two looks in turn: slots end, and files go, behind a job's end."""
    deadline = Deadline("nothing is left to be done", DEADLINE_S)
    before = look()
    while True:
        time.sleep(_PAUSE_S)
        found = look()
        if condition(found) and replace(found, resident=before.resident) == before:
            return found
        before = found
        deadline.left()


def _is_as_before(found: Footprint, before: Footprint) -> bool:
    same = (found.nodes, found.files, found.processes)
    return found.logs <= _LOGS_MAX and same == (before.nodes, before.files, before.processes)


def _grown(after: Counter[str], before: Counter[str]) -> int:
    return max(after[name] - before[name] for name in before)


def _nodes(quorum: str) -> list[str]:
    client = KazooClient(quorum)
    client.start(timeout=DEADLINE_S)
    try:
        found, todo = [], ["/penstock"]
        while todo:
            path = todo.pop()
            found.append(path)
            todo.extend(f"{path}/{child}" for child in client.get_children(path))
        return sorted(found)
    finally:
        client.stop()
        client.close()
