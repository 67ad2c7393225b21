"""Aim: jobs that go on from one savepoint share nothing but what was before it: rows up to it are published once, those behind
it once by each, and whatever ends or is removed, the others go on, and come back from a failure.

Method: numbers, each with how many of its key have come, which follows from the number alone; into files and into a two-phase
sink. Output that is in doubt is that of a job whose sink fails as soon as a savepoint that is no checkpoint is complete. Each job that is left makes
a checkpoint, fails once, and is stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from typing_extensions import override

import penstock as ps
from penstock.cli.main import main
from penstock.client.job import JobHandle
from penstock.errors import JobRejected, StreamError
from penstock.pb import client_pb2
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details, cancel, started_from
from tests.support.processes import Deadline, wait_gone, wait_in_directory
from tests.support.trapped_ledger import TrappedLedger

pytestmark = pytest.mark.integration

KEYS, RATE = 7, 5_000
RETAINED = {"execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION"}
ROW = {"n": "int64", "seen": "int64"}


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Count(ps.KeyedProcessFunction):
    """Numbers the rows of each key; fails once where a file is there."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def __init__(self, fail: Path) -> None:
        self.fail = fail

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if row.n % 256 == 0 and self.fail.exists():
            self.fail.unlink()
            raise OSError("once")
        self.seen.update(self.seen.value() + 1)
        out.emit(n=row.n, seen=self.seen.value())


class Ledger(TrappedLedger):
    """Fails in the trap."""

    @override
    def spring(self) -> None:
        raise OSError("trapped")


def _has_two(directory: Path) -> bool:
    return len(list(directory.glob("[!.]*"))) >= 2


class Branches:
    """Jobs of one graph, each with its own output, and a savepoint of the first of them."""

    def __init__(self, new_env: NewEnvironment, directory: Path) -> None:
        self._new_env = new_env
        self._directory = directory
        self.kept = directory / "kept"

    def submit(
        self,
        name: str,
        path: str = "",
        config: Mapping[str, str] = MappingProxyType({}),
        *,
        claim: bool = False,
    ) -> JobHandle:
        """Starts a job, from this savepoint on, and waits until it reads."""
        handle = self.start(name, path, config, claim=claim)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 1_000)
        return handle

    def start(
        self,
        name: str,
        path: str = "",
        config: Mapping[str, str] = MappingProxyType({}),
        *,
        claim: bool = False,
    ) -> JobHandle:
        """The same, without waiting."""
        own = {
            "execution.checkpointing.interval": "1h",
            "execution.checkpointing.dir": str(self._directory / "checkpoints"),
        }
        env = self._new_env(2, {**own, **config})
        rows = env.generate(numbers, rate=RATE, schema={"n": "int64"}).uid("numbers").parallelism(1)
        keyed = rows.select(key=ps.col("n") % KEYS, n=ps.col("n")).parallelism(1).key_by("key")
        counted = keyed.process(Count(self._directory / f"fail-{name}"), schema=ROW).uid("counts")
        counted.write_parquet(str(self._directory / name / "files")).uid("files")
        ledger = Ledger(self._directory / name / "ledger", self.kept, self.trap(name))
        counted.sink(ledger).uid("ledger")
        return env.submit(name, from_savepoint=path or None, claim=claim)

    def check_that_prepared_output_is_looked_at(self, path: str, said: Mapping[str, str]) -> None:
        """What a savepoint has prepared is no part of any branch where it is not what was prepared."""
        held, *_ = sorted((self._directory / "original" / "files").glob(".held-*"))
        content = held.read_bytes()
        held.write_bytes(content[:-1])
        with pytest.raises(ps.JobFailed, match=re.escape(f"{held}: {len(content)} bytes")):
            self.start("refused", path, said).wait(DEADLINE_S)
        held.unlink()
        with pytest.raises(ps.JobFailed, match=r"/part-.* neither under this name nor hidden"):
            self.start("refused", path, said).wait(DEADLINE_S)
        held.write_bytes(content)

    def trap(self, name: str) -> Path:
        """What has the job's sink fail behind a savepoint."""
        return self._directory / f"trap-{name}"

    def original(self, doubt: str) -> tuple[JobHandle, str]:
        """A job and its savepoint, whose output is committed, or in doubt."""
        never = {"restart-strategy.type": "none"} if doubt else {}
        handle = self.submit("original", config=never)
        handle.checkpoint(DEADLINE_S)
        if not doubt:
            return handle, handle.savepoint(self.kept, timeout=DEADLINE_S)
        self.trap("original").touch()
        with pytest.raises(StreamError, match="--in-doubt commit"):
            handle.savepoint(self.kept, format="canonical", timeout=DEADLINE_S)
        with pytest.raises(ps.JobFailed, match="trapped"):
            handle.wait(DEADLINE_S)
        (manifest,) = self.kept.glob("*/manifest")
        assert not (manifest.parent / "committed").exists()
        return handle, str(manifest.parent)

    def fail(self, name: str, handle: JobHandle) -> None:
        """Has a job go back to its newest checkpoint."""
        restarts = handle.details().summary.restarts
        (self._directory / f"fail-{name}").touch()

        def runs_again(_metrics: object, state: str) -> bool:
            details = handle.details()
            states = {one.state for vertex in details.vertices for one in vertex.subtasks}
            is_again = state == "RUNNING" and details.summary.restarts > restarts
            return is_again and states == {client_pb2.ATTEMPT_STATE_RUNNING}

        await_details(handle, runs_again)

    def checkpoint(self, name: str, handle: JobHandle) -> None:
        """Takes a job's first one, and waits until both subtasks of each sink have heard of it."""
        handle.checkpoint(DEADLINE_S)
        for sink in ("files", "ledger"):
            directory = self._directory / name / sink
            wait_in_directory(directory, partial(_has_two, directory), f"rows of {name} in {sink}")

    def stop(self, name: str, handle: JobHandle) -> None:
        """Stops a job that has shown something more."""
        deadline = Deadline(f"rows of {name}")
        ledger = self._directory / name / "ledger"
        before = set(ledger.glob("[!.]*"))
        while set(ledger.glob("[!.]*")) == before:
            assert deadline.left()
            handle.checkpoint(DEADLINE_S)
        handle.stop(self._directory / "stopped", timeout=DEADLINE_S)

    def published(self, name: str) -> range:
        """The numbers that a job shows, which follow each other, once in either sink."""
        files = [
            row
            for file in (self._directory / name / "files").glob("part-*")
            for row in pq.read_table(file).to_pylist()
        ]
        ledger = [
            row
            for file in (self._directory / name / "ledger").glob("[!.]*")
            for row in json.loads(file.read_text())
        ]
        shown = sorted(row["n"] for row in files)
        assert shown == sorted(row["n"] for row in ledger)
        assert all(row["seen"] == row["n"] // KEYS + 1 for row in files + ledger)
        found = range(shown[0], shown[0] + len(shown))
        assert shown == list(found)
        return found


@pytest.fixture
def branches(new_env: NewEnvironment, tmp_path: Path) -> Branches:
    return Branches(new_env, tmp_path)


@pytest.fixture
def dispose(address: str) -> Callable[[str], tuple[int, str]]:
    def run(path: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["dispose", path, "--jobmanager", address])
        return result.exit_code, result.output

    return run


@pytest.mark.sampled(5)
@pytest.mark.parametrize("first_to_end", ["one", "other"])
@pytest.mark.parametrize("claim", [False, True])
@pytest.mark.parametrize("doubt", ["", "commit", "leave"])
def test_two_forks_share_nothing_but_what_was_before(
    branches: Branches,
    dispose: Callable[[str], tuple[int, str]],
    doubt: str,
    claim: bool,
    first_to_end: str,
) -> None:
    original, path = branches.original(doubt)
    committed = branches.published("original") if doubt else range(0)
    if doubt == "commit":
        branches.check_that_prepared_output_is_looked_at(
            path, {"execution.state-recovery.in-doubt": doubt}
        )
    said = {"execution.state-recovery.in-doubt": doubt} if doubt else {}
    forks = {"one": branches.submit("one", path, said)}
    branches.checkpoint("one", forks["one"])
    if doubt == "commit":  # one of them does
        with pytest.raises(JobRejected, match=f"is committed by job {forks['one'].job_id}"):
            branches.submit("other", path, said)
        said = {"execution.state-recovery.in-doubt": "leave"}
    forks["other"] = branches.submit("other", path, said, claim=claim)
    if claim:  # it is the first checkpoint of that job now
        wait_gone(Path(path) / "manifest", Deadline(f"the end of {path}"))
        gone = "neither a manifest nor" if doubt == "commit" else "is no directory that exists"
        with pytest.raises(JobRejected, match=gone):
            branches.submit("third", path, said)
    branches.checkpoint("other", forks["other"])
    cancel(forks[first_to_end])
    (left,) = set(forks) - {first_to_end}
    if not claim:
        assert dispose(path) == (0, f"removed savepoint {path}\n")
    for _ in range(2):
        forks[left].checkpoint(DEADLINE_S)
    branches.fail(left, forks[left])
    branches.stop(left, forks[left])
    one, other = branches.published("one"), branches.published("other")
    assert one.start == other.start
    if not doubt:
        branches.fail("original", original)
        branches.stop("original", original)
    shown = branches.published("original")
    assert shown.start == 0
    if doubt == "leave":  # only the checkpoint before the savepoint
        assert shown == committed
        assert shown.stop < one.start
    elif doubt == "commit":
        assert committed.stop < shown.stop == one.start
    else:
        assert shown.stop > one.start


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of", ["savepoint", "checkpoint"])
def test_what_a_fork_still_needs_is_neither_claimed_nor_disposed_of(
    branches: Branches, dispose: Callable[[str], tuple[int, str]], of: str
) -> None:
    original, path = branches.original("")
    if of == "checkpoint":
        cancel(original)
        original = branches.submit("kept", path, RETAINED)
        original.checkpoint(DEADLINE_S)
        path = str(Path(original.checkpoints()[0].path).parents[1])
    cancel(original)
    link = branches.kept / "link"
    link.symlink_to(path)
    fork = branches.submit("fork", str(link))
    assert started_from(fork).path.startswith(path)
    with pytest.raises(JobRejected, match=f"job {fork.job_id} was started from there"):
        branches.submit("third", path, claim=True)
    for spelt in (path, f"{path}/", f"file://{path}", str(link)):
        status, told = dispose(spelt)
        assert status == 1
        assert f"job {fork.job_id} was started from {path}" in told
    with pytest.raises(JobRejected, match=f"job {fork.job_id} was started from there"):
        branches.submit("third", str(link), claim=True)
    link.unlink()
    branches.fail("fork", fork)
    fork.checkpoint(DEADLINE_S)
    owner = branches.submit("owner", path, claim=True)
    cancel(owner)
    wait_gone(Path(path), Deadline(f"the end of {path}"))
    branches.fail("fork", fork)
    branches.stop("fork", fork)
    branches.published("fork")
