"""A cluster of several JobManagers as processes, and a job of which each row can be counted."""

from __future__ import annotations

import contextlib
import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.client.credentials import load_token, own_token_file
from penstock.local.local_cluster import Daemon, LocalCluster
from tests.support.jobs import DEADLINE_S
from tests.support.processes import Deadline

KEYS, RATE = 5, 4_000
SESSION_S = 2.0
LEADS = "leader; serving"
"""What the health path of a leader says."""


def epoch_of(cluster: LocalCluster) -> int:
    with cluster.client() as client:
        return client.cluster().leader_epoch


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Number(ps.KeyedProcessFunction):
    """Numbers the rows of each key."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        out.emit(key=ctx.key, number=self.seen.value())


def submitted(
    env: ps.Environment,
    out: Path,
    rows: int | None = None,
    number: type[Number] = Number,
    from_savepoint: str | None = None,
) -> ps.JobHandle:
    """Numbers that are counted into files."""
    stream = env.generate(numbers, rate=RATE, rows=rows, schema={"n": "int64"}).uid("numbers")
    keyed = stream.parallelism(1).with_columns(key=ps.col("n") % KEYS).uid("keys").key_by("key")
    schema = {"key": "int64", "number": "int64"}
    keyed.process(number(), schema=schema).uid("counts").write_parquet(out).uid("files")
    return env.submit("counted", from_savepoint=from_savepoint)


def written(out: Path) -> int:
    """How many rows are visible; fails unless each is there once and none before them is missing."""
    found: dict[int, list[int]] = {key: [] for key in range(KEYS)}
    for path in out.glob("[!._]*.parquet"):
        for key, number in _rows(path):
            found[key].append(number)
    assert all(sorted(rows) == list(range(1, len(rows) + 1)) for rows in found.values())
    return sum(map(len, found.values()))


@cache
def _rows(path: Path) -> list[tuple[int, int]]:
    """Key and number of each row: a file that is visible stays as it is."""
    table = pq.read_table(path)
    return list(zip(table["key"].to_pylist(), table["number"].to_pylist(), strict=True))


def stop(handle: ps.JobHandle, directory: Path) -> None:
    """Ends a job that is endless by itself; what is visible then is all that was read."""
    handle.stop(directory / "savepoints")
    handle.wait(DEADLINE_S)


def await_written(out: Path, rows: int) -> int:
    deadline = Deadline(f"{rows} rows in {out}", DEADLINE_S)
    while (count := written(out)) < rows:
        deadline.left()
        time.sleep(0.05)
    return count


def jobmanagers(cluster: LocalCluster) -> dict[str, Daemon]:
    return {one.id: one for one in cluster.daemons() if one.role == "jobmanager"}


def health(daemon: Daemon) -> str:
    """ "" where it does not answer."""
    with contextlib.suppress(OSError):
        return told_health(daemon)
    return ""


def told_health(daemon: Daemon) -> str:
    """What a daemon says of itself, whether it serves or not."""
    try:
        with urlopen(f"http://{daemon.metrics_address}/health", timeout=DEADLINE_S) as answer:
            return str(answer.read().decode().strip())
    except HTTPError as error:
        with error:
            return str(error.read().decode().strip())


def await_roles(cluster: LocalCluster) -> tuple[Daemon, Daemon]:
    """Who leads, and who stands by and knows it."""
    deadline = Deadline("a leader and a standby", DEADLINE_S)
    while True:
        deadline.left()
        told = {health(daemon): daemon for daemon in jobmanagers(cluster).values() if daemon.alive}
        leader = told.get(LEADS)
        if leader is not None:
            standby = told.get(f"standby; {leader.address} leads")
            if standby is not None:
                return leader, standby
        time.sleep(0.05)


def slots_of(cluster: LocalCluster, job_id: str) -> dict[str, int]:
    """Slot -> process."""
    with cluster.client() as client:
        told = client.cluster().taskmanagers
    return {slot.slot_id: slot.pid for one in told for slot in one.slots if slot.job_id == job_id}


def token_of(cluster: LocalCluster) -> str:
    return load_token(str(own_token_file(cluster.directory))).shown
