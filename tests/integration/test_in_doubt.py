"""Aim: rows that a savepoint covers come once, also where its job is away while a job of another cluster commits them, and comes back.

Method: two clusters of real daemons on one storage; the first is killed between a savepoint and the checkpoint that was to
commit it, which a sink holds up. Each branch writes its rows to files and to a two-phase sink.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

import penstock as ps
from penstock.client.client import Client
from penstock.client.job import JobHandle
from penstock.errors import StreamError
from tests.support.examples import RUNS_ALL
from tests.support.jobs import DEADLINE_S, await_details, cancel
from tests.support.processes import DaemonCluster, site, wait_ended, wait_in_directory
from tests.support.trapped_ledger import TrappedLedger

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not RUNS_ALL, reason="two clusters; unit tests do the same with one"),
]

IN_DOUBT = "execution.state-recovery.in-doubt"


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Ledger(TrappedLedger):
    """Is held up in the trap."""

    @override
    def spring(self) -> None:
        self.trap.with_name("held").touch()
        threading.Event().wait()


class Site:
    """One storage, and the jobs on it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.kept, self.trap = directory / "kept", directory / "trap"

    def submit(
        self, cluster: DaemonCluster, name: str, path: str = "", in_doubt: str = ""
    ) -> JobHandle:
        """Starts a job, and waits until it reads."""
        config = {
            "execution.checkpointing.interval": "1h",
            "execution.checkpointing.dir": str(self._directory / "checkpoints"),
            **({IN_DOUBT: in_doubt} if in_doubt else {}),
        }
        with ps.Environment(cluster.jobmanager, parallelism=1, config=config) as env:
            rows = env.generate(numbers, rate=2_000, schema={"n": "int64"}).uid("numbers")
            rows.write_parquet(str(self._directory / name / "files")).uid("files")
            rows.sink(Ledger(self._directory / name / "ledger", self.kept, self.trap)).uid("ledger")
            job_id = env.submit(name, from_savepoint=path or None).job_id
        handle = JobHandle(Client(cluster.jobmanager), job_id)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 500)
        return handle

    def published(self, *names: str) -> list[int]:
        """The numbers that these jobs show, the same in either sink."""
        files = [one for name in names for one in (self._directory / name / "files").glob("part-*")]
        shown = sorted(row["n"] for one in files for row in pq.read_table(one).to_pylist())
        ledger = [one for n in names for one in (self._directory / n / "ledger").glob("[!.]*")]
        assert shown == sorted(row["n"] for one in ledger for row in json.loads(one.read_text()))
        return shown


def kill(cluster: DaemonCluster) -> None:
    """All of it at once."""
    processes = [cluster.pid("jobmanager"), taskmanager := cluster.pid("taskmanager")]
    processes += [one.pid for one in psutil.Process(taskmanager).children(recursive=True)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in processes[:2]:
        wait_ended(process)


@pytest.mark.parametrize("claims", ["branch", "branch of a moved one", "nobody"])
def test_an_original_that_comes_back_publishes_what_nobody_has_committed(
    tmp_path: Path, claims: str
) -> None:
    with site(tmp_path / "site") as place:
        one, other = DaemonCluster(place, "one"), DaemonCluster(place, "other")
        one.start(slots=2)
        jobs = Site(tmp_path)
        original = jobs.submit(one, "original")
        original.checkpoint(DEADLINE_S)
        jobs.trap.touch()

        def ask() -> None:
            with contextlib.suppress(StreamError):
                original.savepoint(jobs.kept, format="canonical", timeout=DEADLINE_S)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_in_directory(tmp_path, (tmp_path / "held").exists, "the checkpoint behind a savepoint")
        (manifest,) = jobs.kept.glob("*/manifest")
        path = str(manifest.parent)
        kill(one)
        jobs.trap.unlink()
        if claims != "nobody":
            start = path
            if claims != "branch":
                start = str(jobs.kept / "moved")
                manifest.parent.rename(start)
            other.start(slots=2)
            branch = jobs.submit(other, "branch", start, "commit")
            branch.checkpoint(DEADLINE_S)
            cancel(branch)
        one.start(slots=2)
        again = JobHandle(Client(one.jobmanager), original.job_id)
        if claims != "nobody":
            told = f"job {branch.job_id}.*start from {path} with --in-doubt leave"
            if claims != "branch":
                with contextlib.suppress(StreamError):  # nobody looks before that
                    again.checkpoint(DEADLINE_S)
            with pytest.raises(ps.JobFailed, match=told):
                again.wait(DEADLINE_S)
            command = f"env.submit('original', from_savepoint={path!r}) with {IN_DOUBT}: leave"
            assert again.details().start_again == (command if claims == "branch" else "")
            shown = jobs.published("original", "branch")
            assert shown == [*range(len(shown))]
        else:
            await_details(again, lambda _, state: state == "RUNNING")
            again.checkpoint(DEADLINE_S)
            with pytest.raises(StreamError, match="has gone back behind it"):
                jobs.submit(one, "late", path, "commit")
            again.stop(tmp_path / "stopped", timeout=DEADLINE_S)
            shown = jobs.published("original")
            assert shown == [*range(len(shown))]
        asking.join(DEADLINE_S)
        one.stop()
        if claims != "nobody":
            other.stop()
