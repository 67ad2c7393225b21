"""Aim: a TaskManager that is drained gets no more tasks and is emptied, jobs lose nothing and do nothing twice, and no
failure is counted; what cannot be done is refused with numbers.

Method: a JobManager and three TaskManagers as processes; numbers are counted per key into files, and every call of a
function is noted outside of any checkpoint, so that a row that is read twice shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.main import main
from penstock.client.client import Client
from penstock.errors import JobRejected, StreamError
from penstock.local.local_cluster import LocalCluster
from tests.support.elected_cluster import KEYS, RATE, await_written, stop, written
from tests.support.examples import RUNS_ALL
from tests.support.jobs import DEADLINE_S, await_details, cancel
from tests.support.processes import Deadline, wait_ended

pytestmark = pytest.mark.integration

TASKMANAGERS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    root = tmp_path_factory.mktemp("drains")
    cluster = LocalCluster(root / "cluster")
    cluster.configure(
        {
            "jobmanager.rpc.port": 0,
            "heartbeat.interval": "200ms",
            "execution.checkpointing.dir": str(root / "checkpoints"),
            "execution.checkpointing.interval": "300ms",
            "restart-strategy.type": "none",
        }
    )
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(made: LocalCluster) -> Iterator[LocalCluster]:
    """All of it runs and is in use, whatever the test before has done."""
    made.start(taskmanagers=TASKMANAGERS, slots=2)
    yield made
    with made.client() as client:
        for one in client.cluster().taskmanagers:
            if one.drained:
                client.undo_drain(one.taskmanager_id)


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Number(ps.KeyedProcessFunction):
    """Numbers the rows of each key, and notes each row in a file of its own process."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def open(self, ctx: Any) -> None:
        self.file = open(f"{self.notes}/{os.getpid()}-{id(self)}", "a")  # noqa: PTH123, SIM115

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        self.file.write(f"{row.n}\n")
        self.file.flush()
        out.emit(key=ctx.key, number=self.seen.value())

    def close(self) -> None:
        self.file.close()


def submitted(env: ps.Environment, root: Path, rows: int | None = None) -> ps.JobHandle:
    (root / "notes").mkdir()
    stream = env.generate(numbers, rate=RATE, rows=rows, schema={"n": "int64"}).uid("numbers")
    keyed = stream.parallelism(1).with_columns(key=ps.col("n") % KEYS).uid("keys").key_by("key")
    schema = {"key": "int64", "number": "int64"}
    counted = keyed.process(Number(str(root / "notes")), schema=schema).uid("counts")
    counted.write_parquet(root / "out").uid("files")
    return env.submit("counted")


def processed(root: Path) -> Counter[int]:
    """Row -> how often a function has seen it."""
    notes = (root / "notes").iterdir()
    return Counter(int(line) for file in notes for line in file.read_text().split())


def users(client: Client, job_id: str) -> dict[str, int]:
    """TaskManager -> slots that the job has there."""
    told = client.cluster().taskmanagers
    return {one.taskmanager_id: sum(slot.job_id == job_id for slot in one.slots) for one in told}


def is_empty(client: Client, taskmanager_id: str) -> bool:
    """Whether no job has any slot there."""
    told = {one.taskmanager_id: one for one in client.cluster().taskmanagers}
    return told[taskmanager_id].slots_free == told[taskmanager_id].slots_total


def user_of(client: Client, job_id: str) -> str:
    """A TaskManager that the job has slots of."""
    deadline = Deadline("a slot", DEADLINE_S)
    while not (used := [id for id, slots in users(client, job_id).items() if slots]):
        deadline.left()
        time.sleep(0.05)
    return used[0]


def test_what_runs_there_moves_and_nothing_is_lost_repeated_or_read_twice(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(cluster.address, parallelism=2) as env, cluster.client() as client:
        handle = submitted(env, tmp_path)
        await_written(tmp_path / "out", RATE)
        drained = user_of(client, handle.job_id)
        command = ["drain", drained, "--operation-id", "first", "--json"]
        address = ["--jobmanager", cluster.address]
        result = CliRunner().invoke(main, [*command, *address], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == {
            "taskmanager_id": drained,
            "operation_id": "first",
            "drained": True,
        }
        [shown] = [o for o in client.cluster().taskmanagers if o.taskmanager_id == drained]
        assert shown.drained
        assert is_empty(client, drained)
        # Asked for once more it is the same; and what has become of it can be asked for.
        client.drain(drained, "first")
        told = CliRunner().invoke(main, ["operation", drained, "first", *address])
        assert told.output.split() == ["drain", "first", "COMPLETED", drained]
        with pytest.raises(JobRejected, match="operation first of the cluster is a drain"):
            client.drain(next(id for id in users(client, "") if id != drained), "first")
        await_written(tmp_path / "out", written(tmp_path / "out") + RATE)
        assert is_empty(client, drained)
        stop(handle, tmp_path)
        assert written(tmp_path / "out") > 2 * RATE
        assert set(processed(tmp_path).values()) == {1}, "every row was processed once"
        assert client.job(handle.job_id).summary.restarts == 0
        assert not client.exceptions(handle.job_id).entries


def test_where_there_is_no_room_it_is_refused_with_numbers_and_stays_in_use(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(cluster.address, parallelism=6) as env, cluster.client() as client:
        handle = submitted(env, tmp_path)
        await_written(tmp_path / "out", 100)
        drained = user_of(client, handle.job_id)
        with pytest.raises(JobRejected) as refused:
            client.drain(drained, "no-room")
        assert "its 2 slots with tasks that move" in str(refused.value)
        assert "of 4 there 0 are free" in str(refused.value)
        assert not any(one.drained for one in client.cluster().taskmanagers)
        with pytest.raises(JobRejected, match="no TaskManager 'nobody' is registered"):
            client.drain("nobody", "n")
        cancel(handle)


def test_of_drains_at_once_those_for_which_there_is_room_are_done(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(cluster.address, parallelism=4) as env, cluster.client() as client:
        spare, *used = users(client, "")
        client.drain(spare, "spare")
        handle = submitted(env, tmp_path)
        await_written(tmp_path / "out", 100)
        client.undo_drain(spare)

        def drained(asked: tuple[str, str]) -> str:
            try:
                client.drain(*asked)
            except JobRejected as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(4) as threads:
            asked = [(id, f"{id}-{number}") for id in used for number in (1, 2)]
            answers = dict(zip(asked, threads.map(drained, asked), strict=True))
        told = {id: {answers[id, f"{id}-{number}"] for number in (1, 2)} for id in used}
        [empty] = [id for id in used if told[id] == {""}]
        [other] = [id for id in used if id != empty]
        assert all(f"TaskManager {empty} is drained" in answer for answer in told[other]), told
        assert [o.taskmanager_id for o in client.cluster().taskmanagers if o.drained] == [empty]
        assert is_empty(client, empty)
        await_written(tmp_path / "out", written(tmp_path / "out") + RATE)
        assert client.job(handle.job_id).summary.restarts == 0
        stop(handle, tmp_path)
        assert set(processed(tmp_path).values()) == {1}, "every row was processed once"


def test_no_new_task_begins_there_until_it_is_taken_in_use_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(cluster.address, parallelism=4) as env, cluster.client() as client:
        drained = client.cluster().taskmanagers[0].taskmanager_id
        client.drain(drained, "empty")
        handle = submitted(env, tmp_path)
        await_written(tmp_path / "out", 100)
        assert is_empty(client, drained)
        second = client.cluster().taskmanagers[1].taskmanager_id
        undo = (
            f"TaskManager {drained} is drained \\(`penstock drain {drained} --undo` takes it in use"
        )
        with pytest.raises(JobRejected, match=f"of 2 there 0 are free, and {undo}"):
            client.drain(second, "second")
        CliRunner().invoke(main, ["drain", drained, "--undo", "--jobmanager", cluster.address])
        client.drain(second, "third")
        assert is_empty(client, second)
        await_written(tmp_path / "out", written(tmp_path / "out") + RATE)
        assert client.job(handle.job_id).summary.restarts == 0
        cancel(handle)


def test_the_last_one_can_be_drained_and_a_job_that_waits_then_says_so(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(cluster.address, parallelism=1) as env, cluster.client() as client:
        all_of_them = [one.taskmanager_id for one in client.cluster().taskmanagers]
        for id in all_of_them:
            client.drain(id, f"all-{id}")
        handle = submitted(env, tmp_path)
        deadline = Deadline("a job that waits for slots", DEADLINE_S)
        while not (details := client.job(handle.job_id)).HasField("slot_wait"):
            deadline.left()
            time.sleep(0.05)
        wait = details.slot_wait
        assert (wait.total, wait.drained_taskmanagers) == (0, TASKMANAGERS)
        shown = CliRunner().invoke(main, ["info", handle.job_id, "--jobmanager", cluster.address])
        assert "0 of 0 are free, 3 TaskManagers are drained" in shown.output
        client.undo_drain(all_of_them[0])
        await_written(tmp_path / "out", 100)
        cancel(handle)


def test_a_job_without_checkpoints_is_refused_or_begins_again_by_choice(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    off = {"execution.checkpointing.interval": "none"}
    with (
        ps.Environment(cluster.address, parallelism=1, config=off) as env,
        cluster.client() as client,
    ):
        stream = env.generate(numbers, rate=RATE, schema={"n": "int64"})
        stream.map(lambda row: row, schema={"n": "int64"}).discard()
        handle = env.submit("endless")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 100)
        drained = user_of(client, handle.job_id)
        with pytest.raises(JobRejected, match="takes no checkpoints"):
            client.drain(drained, "wait")
        client.drain(drained, "remake", makes_again=True)
        assert is_empty(client, drained)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 100)
        cancel(handle)


def kept_job(env: ps.Environment, gate: Path) -> ps.JobHandle:
    """A batch job whose first stage is done, and whose second one waits for a file."""

    def held(row: Any) -> Any:
        while not gate.exists():
            time.sleep(0.02)
        return {"n": row.n}

    env.set_runtime_mode("batch")
    source = env.generate(numbers, rows=1_000, schema={"n": "int64"}).slot_group("made")
    keyed = source.with_columns(key=ps.col("n") % KEYS).key_by("key")
    # One that reads alone would run where its input lies.
    read = keyed.map(held, schema={"n": "int64"}).slot_group("read").parallelism(2)
    read.write_parquet(gate.parent / "out")
    return env.submit("kept")


def holder_of(client: Client, job_id: str) -> str:
    """The TaskManager that keeps a partition of a job: one of an earlier job may still be there."""
    deadline = Deadline("a kept partition", DEADLINE_S)
    while not (kept := kept_of(client, job_id)):
        deadline.left()
        time.sleep(0.05)
    return kept[0].taskmanager_id


def drain_in_vain(client: Client, taskmanager_id: str, operation_id: str, job_id: str) -> None:
    """Nobody waits long enough for a drain, which goes on and waits for a job; it may have been asked for too late at first."""
    deadline = Deadline(f"a drain that waits for job {job_id}", DEADLINE_S)
    progress = ""
    while job_id not in progress:
        deadline.left()
        with pytest.raises(StreamError):
            client.drain(taskmanager_id, operation_id, timeout_s=1.0)
        with contextlib.suppress(StreamError):
            progress = client.operation(taskmanager_id, operation_id).progress


def rows_of(out: Path) -> list[int]:
    files = out.glob("[!._]*.parquet")
    return sorted(n for file in files for n in pq.read_table(file)["n"].to_pylist())


def test_partitions_are_kept_until_they_are_read_or_made_again_by_choice(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ps.Environment(cluster.address, parallelism=1) as env, cluster.client() as client:
        handle = kept_job(env, gate)
        holder = holder_of(client, handle.job_id)
        drain_in_vain(client, holder, "waits", handle.job_id)
        client.undo_drain(holder)
        client.drain(holder, "again", makes_again=True)
        assert is_empty(client, holder)
        gate.touch()
        handle.wait(DEADLINE_S)
        assert rows_of(tmp_path / "out") == list(range(1_000))
        assert client.job(handle.job_id).summary.restarts == 0


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
@pytest.mark.parametrize("dies", [False, True])
def test_a_history_that_checkpoints_are_behind_is_kept_nowhere_and_holds_up_no_drain(
    cluster: LocalCluster, tmp_path: Path, dies: bool
) -> None:
    """Whether the JobManager dies that has had it read; the job goes on from its checkpoints all the same."""
    with ps.Environment(cluster.address, parallelism=2) as env, cluster.client() as client:
        (tmp_path / "notes").mkdir()
        schema = {"n": "int64"}
        past = env.generate(numbers, rows=1_000, schema=schema).uid("past").parallelism(1)
        live = env.generate(numbers, rate=RATE, schema=schema).uid("live").parallelism(1)
        both = past.exchange("blocking").union(live)
        keyed = both.with_columns(key=ps.col("n") % KEYS).uid("keys").key_by("key")
        made = {"key": "int64", "number": "int64"}
        counted = keyed.process(Number(str(tmp_path / "notes")), schema=made).uid("counts")
        counted.write_parquet(tmp_path / "out").uid("files")
        handle = env.submit("history")
        if dies:
            await_written(tmp_path / "out", 1_100)
            killed(cluster)
        deadline = Deadline("the end of what is kept", DEADLINE_S)
        while not handle.checkpoints() or kept_of(client, handle.job_id):
            deadline.left()
            time.sleep(0.05)
        for drained in [one.taskmanager_id for one in client.cluster().taskmanagers]:
            client.drain(drained, f"off-{drained}-{dies}")
            assert is_empty(client, drained)
            client.undo_drain(drained)
        cancel(handle)
    twice = [n for n, times in processed(tmp_path).items() if times > 1 + (n < 1_000)]
    assert not twice, "history and live have the first numbers, once each"


def kept_of(client: Client, job_id: str) -> list[Any]:
    return [one for one in client.partitions() if one.job_id == job_id]


def killed(cluster: LocalCluster) -> None:
    """The JobManager is killed, and started again."""
    [jobmanager] = [one for one in cluster.daemons() if one.role == "jobmanager"]
    os.kill(jobmanager.pid, signal.SIGKILL)
    wait_ended(jobmanager.pid)
    cluster.start(taskmanagers=TASKMANAGERS)


def test_a_jobmanager_that_dies_leaves_its_drains_to_the_next(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ps.Environment(cluster.address, parallelism=1) as env, cluster.client() as client:
        handle = kept_job(env, gate)
        holder = holder_of(client, handle.job_id)
        drain_in_vain(client, holder, "over", handle.job_id)
        for _ in range(2):  # while it is under way, and when it is done
            killed(cluster)
            gate.touch()
            deadline = Deadline("the end of the drain", DEADLINE_S)
            while (told := client.operation(holder, "over")).status == 0:
                deadline.left()
                time.sleep(0.05)
            assert told.status == 1, told.message
        while len(shown := client.cluster().taskmanagers) < TASKMANAGERS:
            deadline.left()
            time.sleep(0.05)
        assert [one.taskmanager_id for one in shown if one.drained] == [holder]
        handle.wait(DEADLINE_S)
        assert rows_of(tmp_path / "out") == list(range(1_000))
