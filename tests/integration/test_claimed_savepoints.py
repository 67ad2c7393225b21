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
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.integration.conftest import NewEnvironment
from tests.integration.test_start_again import config, numbers, written
from tests.support.jobs import DEADLINE_S, await_details
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

KEYS, ROWS, RATE, REWRITTEN_AT = 200, 12_000, 4_000, 30
PAD_BYTES = 2_000
"""The state is 400 KB, which is not kept inline."""


class Padded(ps.KeyedProcessFunction):
    """Numbers the rows of each key, and holds something large that changes once."""

    seen = ps.ValueState("seen", pa.int64(), default=0)
    pad = ps.ValueState("pad", pa.string(), default="")

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        count = self.seen.value() + 1
        self.seen.update(count)
        if count in (1, REWRITTEN_AT):
            self.pad.update(f"{ctx.key} {count} " + os.urandom(PAD_BYTES // 2).hex())
        out.emit(key=ctx.key, count=count)


def build(env: ps.Environment, output: Path, rate: float | None) -> None:
    rows = env.generate(numbers, rows=ROWS, rate=rate, schema={"n": "int64"}).uid("numbers")
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
    build(env, tmp_path / "out", RATE)
    handle = env.submit("first")
    await_details(handle, lambda metrics, _s: metrics["totals"]["records_out"] > 4 * KEYS)
    path = Path(handle.stop(tmp_path / "kept", timeout=DEADLINE_S))
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    return path


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_files_of_a_claimed_savepoint_are_counted_and_go_when_nothing_names_them(
    new_env: NewEnvironment, cluster: LocalCluster, tmp_path: Path, backend: str
) -> None:
    more = {"state.backend.type": backend}
    env = new_env(2, config(tmp_path, **more))
    path = saved(env, tmp_path)
    theirs = inodes(path / "state")
    assert theirs
    build(env, tmp_path / "out", RATE / 4)
    handle = env.submit("second", from_savepoint=path, claim=True)
    own = tmp_path / "checkpoints" / handle.job_id / "shared"

    def left() -> set[tuple[int, int]]:
        return theirs & inodes(own)

    claimed = handle.details().started_from.checkpoint_id
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > claimed)
    wait_gone(path, Deadline(f"the end of {path}"))
    first = min((one for one in handle.checkpoints() if one.id > claimed), key=lambda one: one.id)
    assert first.uploaded_bytes < KEYS * PAD_BYTES / 2, "the state itself is not written again"
    assert left(), "the first own checkpoint names the files"
    taskmanagers = [one.pid for one in cluster.daemons() if one.role == "taskmanager"]
    os.kill(next(slot for pid in taskmanagers for slot in slot_pids(pid)), signal.SIGKILL)
    wait_in_directory(own, lambda: not left(), "the end of the savepoint's files")
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
            build(env, tmp_path / "out", None)
            handle = env.submit("second", from_savepoint=path, claim=True)
            jobmanager = daemons.pid("jobmanager")
            os.kill(jobmanager, signal.SIGKILL)
            wait_ended(jobmanager)
            daemons.start(taskmanagers=1, slots=2)
            assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert_complete(tmp_path / "out")
        wait_gone(path, Deadline(f"the end of {path}"))
        wait_gone(tmp_path / "checkpoints" / handle.job_id, Deadline("the job's directory"))
