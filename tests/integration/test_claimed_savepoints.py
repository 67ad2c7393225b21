"""Aim: the files of a savepoint that a job has claimed are that job's: it builds upon them, counts them, and removes
each when no checkpoint names it any more; whatever fails in between, every row counts once.

Method: a job with much state is stopped; another claims its savepoint. On a file system a copy that the store makes is
another name of the same file, so its number tells where the savepoint's files are. Rows are counted per key by both
jobs into one directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.conftest import NewEnvironment
from tests.integration.test_start_again import config, numbers, written
from tests.support.jobs import DEADLINE_S, await_details, started_from
from tests.support.processes import (
    DaemonCluster,
    Deadline,
    site,
    slot_pids,
    wait_ended,
    wait_gone,
    wait_in_directory,
)

pytestmark = pytest.mark.integration

KEYS, ROWS, REWRITTEN_AT = 200, 12_000, range(30, 60, 5)
ROWS_AT_ONCE, PAUSE_MS = 200, 50
ROWS_OF_A_CHECKPOINT = 2 * KEYS
"""Not more are read until the next checkpoint. RocksDB merges files when there are several, and each checkpoint makes one:
where all rows fit into a few checkpoints, as on a slow machine, the savepoint's files rightly stay."""
GATES = {"": 5 * KEYS, "some": 20 * KEYS, "most": ROWS - KEYS, "all": ROWS}
"""How many rows may be read once a file is there; nothing has to be for the first. What is large is written again behind
the second."""
PAD_BYTES = 2_000
"""The state is 400 KB, which is not kept inline."""


class Padded(ps.KeyedProcessFunction):
    """Numbers the rows of each key, and holds something large.

    It changes several times: what has changed once is not more than what was there, which stays.
    """

    seen = ps.ValueState("seen", pa.int64(), default=0)
    pad = ps.ValueState("pad", pa.string(), default="")

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        count = self.seen.value() + 1
        self.seen.update(count)
        if count == 1 or count in REWRITTEN_AT:
            self.pad.update(f"{ctx.key} {count} " + os.urandom(PAD_BYTES // 2).hex())
        out.emit(key=ctx.key, count=count)


class Numbers(ps.Source):
    """Some rows at a time, as far as the files that are there allow, and some for each checkpoint."""

    schema = pa.schema({"n": pa.int64()})

    def __init__(self, gates: Path) -> None:
        self.gates = gates

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split("all", b"", size=1)]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return _Reader(self.gates, int(position or b"0"))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class _Reader(ps.Reader):
    def __init__(self, gates: Path, given: int) -> None:
        self.gates, self.given, self.saved = gates, given, given
        self.next_ms = 0

    @override
    def read(self, max_rows: int) -> Any:
        if self.given == ROWS:
            return ps.END
        bound = max(rows for name, rows in GATES.items() if (self.gates / name).exists())
        bound = min(bound, self.saved + ROWS_OF_A_CHECKPOINT)
        count = min(ROWS_AT_ONCE, bound - self.given)
        if not count or now_ms() < self.next_ms:
            return None
        self.next_ms = now_ms() + PAUSE_MS
        rows = numbers(self.given, count)
        self.given += count
        return rows

    @override
    def next_read_at_ms(self) -> int | None:
        return max(self.next_ms, now_ms() + 10)

    @override
    def position(self) -> bytes:
        self.saved = self.given
        return b"%d" % self.given


def build(env: ps.Environment, output: Path) -> None:
    rows = env.source(Numbers(output.parent)).uid("numbers")
    keyed = rows.select(key=ps.col("n") % KEYS, n=ps.col("n")).uid("select").key_by("key")
    schema = {"key": "int64", "count": "int64"}
    keyed.process(Padded(), schema=schema).uid("counts").write_parquet(output).uid("files")


def assert_complete(output: Path) -> None:
    found = Counter((row["key"], row["count"]) for row in written(output))
    assert found == Counter((n % KEYS, n // KEYS + 1) for n in range(ROWS))


def inodes(directory: Path) -> set[tuple[int, int]]:
    """What a directory holds: a number alone is soon that of a new file."""
    found = set()
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # files come and go
                state = entry.stat()
                found.add((state.st_ino, state.st_mtime_ns))
    return found


def saved(env: ps.Environment, tmp_path: Path) -> Path:
    """A savepoint of a job that has been stopped early in its rows."""
    build(env, tmp_path / "out")
    handle = env.submit("first")
    await_details(handle, lambda metrics, _s: metrics["totals"]["records_out"] > 4 * KEYS)
    path = Path(handle.stop(tmp_path / "kept", timeout=DEADLINE_S))
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    return path


def claimed_by_one_of_two(
    new_env: NewEnvironment, tmp_path: Path, path: Path, more: dict[str, str]
) -> ps.JobHandle:
    """The job that has claimed a savepoint, of two at once; of the other one nothing stays."""

    def claim(env: ps.Environment) -> ps.JobHandle | ps.JobRejected:
        build(env, tmp_path / "out")
        try:
            return env.submit("second", from_savepoint=path, claim=True)
        except ps.JobRejected as error:
            return error

    before = set((tmp_path / "checkpoints").iterdir())
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(claim, [new_env(2, config(tmp_path, **more)) for _ in range(2)]))
    [handle] = [one for one in ends if isinstance(one, ps.JobHandle)]
    [refused] = [one for one in ends if isinstance(one, ps.JobRejected)]
    # Who comes when it has been taken over finds nothing there.
    told = str(refused)
    assert f"job {handle.job_id}" in told or (f"{path} is no directory that exists" in told), told
    assert set((tmp_path / "checkpoints").iterdir()) - before == {
        tmp_path / "checkpoints" / handle.job_id
    }
    return handle


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_files_of_a_claimed_savepoint_are_counted_and_go_when_nothing_names_them(
    new_env: NewEnvironment, cluster: LocalCluster, tmp_path: Path, backend: str
) -> None:
    more = {"state.backend.type": backend}
    env = new_env(2, config(tmp_path, **more))
    path = saved(env, tmp_path)
    (tmp_path / "some").touch()
    theirs = inodes(path / "state")
    assert theirs
    handle = claimed_by_one_of_two(new_env, tmp_path, path, more)
    own = tmp_path / "checkpoints" / handle.job_id / "shared"

    def left() -> set[tuple[int, int]]:
        return theirs & inodes(own)

    claimed = started_from(handle).checkpoint_id
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > claimed)
    wait_gone(path, Deadline(f"the end of {path}"))
    first = min((one for one in handle.checkpoints() if one.id > claimed), key=lambda one: one.id)
    assert first.uploaded_bytes < KEYS * PAD_BYTES / 2, "the state itself is not written again"
    assert left(), "the first own checkpoint names the files"
    taskmanagers = [one.pid for one in cluster.daemons() if one.role == "taskmanager"]
    os.kill(next(slot for pid in taskmanagers for slot in slot_pids(pid)), signal.SIGKILL)
    (tmp_path / "most").touch()
    wait_in_directory(own, lambda: not left(), "the end of the savepoint's files")
    (tmp_path / "all").touch()
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert handle.details().summary.restarts
    assert_complete(tmp_path / "out")
    wait_gone(own.parent, Deadline("the end of the job's directory"))


def test_a_jobmanager_that_is_killed_as_it_takes_a_savepoint_over_is_followed_by_one_that_does(
    tmp_path: Path,
) -> None:
    with site(tmp_path / "site") as place:
        daemons = DaemonCluster(place)
        daemons.start(taskmanagers=1, slots=2)
        with ps.Environment(daemons.jobmanager, parallelism=2, config=config(tmp_path)) as env:
            path = saved(env, tmp_path)
            build(env, tmp_path / "out")
            (tmp_path / "all").touch()
            handle = env.submit("second", from_savepoint=path, claim=True)
            jobmanager = daemons.pid("jobmanager")
            os.kill(jobmanager, signal.SIGKILL)
            wait_ended(jobmanager)
            daemons.start(taskmanagers=1, slots=2)
            assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert_complete(tmp_path / "out")
        wait_gone(path, Deadline(f"the end of {path}"))
        wait_gone(tmp_path / "checkpoints" / handle.job_id, Deadline("the job's directory"))
