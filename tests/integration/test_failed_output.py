"""Aim: of a job that has failed nothing is left that nobody can ever commit, and all that one of its checkpoints names.

Method: it fails while a checkpoint is under way for which its sink has prepared files, or behind one that is complete
and not yet committed; then it is started again from what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from penstock.storage.fsck import check_store
from tests.integration.conftest import NewEnvironment
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S, await_details, cancel
from tests.support.processes import wait_in_directory

pytestmark = [pytest.mark.integration]


class Trap(ps.ProcessFunction):
    """Fails in the middle of a checkpoint, or behind one, when it is told to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @override
    def process(self, row: ps.Row, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(n=row.n)

    def snapshot(self, ctx: object) -> None:
        if (self._directory / "in-checkpoint").exists():
            while not any((self._directory / "out").glob(".*.pending")):
                time.sleep(0.01)
            raise RuntimeError("trapped in a checkpoint")

    @override
    def checkpoint_complete(self, checkpoint_id: int) -> None:
        if (self._directory / "behind-checkpoint").exists():
            raise RuntimeError("trapped behind a checkpoint")


def numbers_from(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": range(start, start + count)})


Submit = Callable[..., ps.JobHandle]


@pytest.fixture
def submit(new_env: NewEnvironment, tmp_path: Path) -> Submit:
    """A job whose files and trap are in other slots, or in one chain."""

    def run(*, is_chained: bool, path: str | None = None) -> ps.JobHandle:
        config = {
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.checkpointing.interval": "10 min",
            "restart-strategy.type": "none",
            "state.storage.fs.memory-threshold": "0b",
        }
        env = new_env(parallelism=1, config=config)
        schema = pa.schema([("n", pa.int64())])
        stream = env.generate(numbers_from, rate=1_000, schema=schema).uid("numbers")
        trapped = stream.process(Trap(tmp_path), schema={"n": "int64"}).uid("trap")
        if is_chained:
            trapped.write_parquet(str(tmp_path / "out")).uid("out")
        else:
            stream.rebalance().process(Trap(tmp_path), schema={"n": "int64"}).uid(
                "other trap"
            ).slot_group("other").discard()
            stream.write_parquet(str(tmp_path / "out")).uid("out")
        return env.submit("failed", from_savepoint=path)

    return run


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob(".*"))


def test_what_was_prepared_for_a_checkpoint_that_is_void_goes(
    submit: Submit, cluster: LocalCluster, tmp_path: Path
) -> None:
    handle = submit(is_chained=False)
    await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] > 1_000)
    handle.checkpoint(DEADLINE_S)
    out = tmp_path / "out"
    # The trap waits for what the sink prepares, and that has rows to prepare only where some came behind the first barrier.
    wait_in_directory(out, lambda: any(out.glob(".*.inprogress")), "rows behind the checkpoint")
    (tmp_path / "in-checkpoint").touch()
    with pytest.raises(ps.StreamError):
        handle.checkpoint(DEADLINE_S)
    with pytest.raises(ps.JobFailed, match="trapped in a checkpoint"):
        handle.wait(DEADLINE_S)
    wait_in_directory(tmp_path / "out", lambda: not hidden(tmp_path / "out"), "no hidden files")
    store = tmp_path / "checkpoints" / handle.job_id
    assert [path.name for path in store.glob("chk-*")] == ["chk-1"]
    asyncio.run(JobRecords(cluster.directory).until_clean())
    (report,) = check_store(str(store)).jobs
    assert (report.orphans, report.problems) == ((), ())


def test_what_a_checkpoint_names_stays(
    submit: Submit, cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    handle = submit(is_chained=True)
    await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] > 1_000)
    (tmp_path / "behind-checkpoint").touch()
    with contextlib.suppress(ps.StreamError):  # or it is answered before the job fails
        handle.checkpoint(DEADLINE_S)
    with pytest.raises(ps.JobFailed, match="trapped behind a checkpoint"):
        handle.wait(DEADLINE_S)
    (named,) = hidden(out)
    assert named.endswith(".pending")
    (tmp_path / "behind-checkpoint").unlink()
    asyncio.run(JobRecords(cluster.directory).until_clean())
    assert hidden(out) == [named]
    again = submit(is_chained=True, path=str(tmp_path / "checkpoints" / handle.job_id / "chk-1"))
    await_details(again, lambda metrics, _: metrics["totals"]["records_out"] > 1_000)
    again.checkpoint(DEADLINE_S)
    wait_in_directory(out, lambda: len(list(out.glob("part-*"))) > 1, "what comes behind")
    cancel(again)
    found = sorted(pq.read_table(out).column("n").to_pylist())
    assert found == list(range(len(found)))
    assert hidden(out) == []


def kill_at_500(row: ps.Row) -> dict[str, int]:
    if row.n >= 500:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": row.n}


def test_what_a_killed_slot_has_left_goes_where_there_are_no_checkpoints(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    config = {"execution.checkpointing.interval": "none", "restart-strategy.type": "none"}
    env = new_env(parallelism=1, config=config)
    numbers = env.generate(numbers_from, rate=1_000, schema=pa.schema([("n", pa.int64())]))
    numbers.map(kill_at_500, schema={"n": "int64"}).write_csv(str(out))
    handle = env.submit("killed")
    wait_in_directory(out, lambda: bool(hidden(out)), "hidden files")
    with pytest.raises(ps.JobFailed, match="SIGKILL"):
        handle.wait(DEADLINE_S)
    wait_in_directory(out, lambda: not hidden(out), "no hidden files")
