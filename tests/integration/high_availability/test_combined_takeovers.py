"""Aim: a leader that dies in the middle of something else leaves it to the next one, which does it once.

Method: as in ``test_takeovers``; leaders are killed while a restart waits for its delay, together with a TaskManager,
while a savepoint is taken or a job is stopped, before a submission is answered, and while a part of the job cannot be read.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import penstock as ps
from common.clock import SystemClock
from jobmanager.stores.stored_job import decode_record
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2
from tests.support.elected_cluster import (
    RATE,
    Number,
    await_roles,
    await_written,
    numbers,
    stop,
    submitted,
    written,
)
from tests.support.fault_point_cluster import beside as begun_beside
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline, wait_ended, wait_in_directory

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

DELAY_MS = 4_000


def restarts(handle: ps.JobHandle) -> int:
    return handle.details().summary.restarts


def kill_leader(cluster: LocalCluster) -> None:
    leader, _ = await_roles(cluster)
    os.kill(leader.pid, signal.SIGKILL)
    wait_ended(leader.pid)


class FailingNumber(Number):
    """Fails once, as soon as its file is there."""

    path = ""

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if row["n"] % 100 == 0 and Path(self.path).exists():
            Path(self.path).unlink()
            raise ValueError("told to fail")
        super().process(row, ctx, out)


def history_of(cluster: LocalCluster, job_id: str) -> tuple[Any, Any, Any]:
    with cluster.client() as client:
        return client.job(job_id), client.exceptions(job_id), client.checkpoints(job_id)


def await_noted(cluster: LocalCluster, job_id: str, completed: int = 0) -> None:
    """Waits until the job's record tells of its failure, and of so many completed checkpoints; the job does not wait for that."""
    record = cluster.directory / "shared" / "default" / "jobs" / job_id / "record"

    def is_noted() -> bool:
        history = decode_record(record.read_bytes(), str(record)).history
        return bool(history.exceptions) and history.checkpoint_numbers.completed >= completed

    wait_in_directory(record.parent, is_noted, "a record that tells of the failure")


def test_the_rest_of_a_delay_runs_under_the_next_leader_and_counts_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out, told = tmp_path / "out", tmp_path / "fail"
    failing = type("Failing", (FailingNumber,), {"path": str(told)})
    config = {
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "2",
        "restart-strategy.fixed-delay.delay": f"{DELAY_MS}ms",
    }
    with ps.Environment(cluster.address, parallelism=2, config=config) as env:
        handle = submitted(env, out, number=failing)
        await_written(out, RATE)
        told.touch()
        await_details(handle, lambda _, state: state == "RESTARTING")
        _, exceptions, checkpoints = history_of(cluster, handle.job_id)
        [entry] = exceptions.entries
        await_noted(cluster, handle.job_id)
        kill_leader(cluster)
        await_details(handle, lambda _, state: state == "RUNNING")
        failed_ms = entry.root_cause.timestamp_ms
        waited_ms = SystemClock().now_ms() - failed_ms
        assert waited_ms >= DELAY_MS - 50, "what is left of the delay is waited for"
        await_written(out, written(out) + RATE)
        now, same, more = history_of(cluster, handle.job_id)
        assert now.summary.restarts == 1
        assert same == exceptions
        await_noted(cluster, handle.job_id, more.completed_count)
        # Another leader: nothing begins again, and nothing is forgotten.
        cluster.start(jobmanagers=2, taskmanagers=2)
        kill_leader(cluster)
        await_written(out, written(out) + RATE)
        await_details(handle, lambda _, state: state == "RUNNING")
        last, same, latest = history_of(cluster, handle.job_id)
        assert last.summary.restarts == 1
        assert last.failure == now.failure
        assert last.summary.running_at_ms == now.summary.running_at_ms
        assert same == exceptions
        known = {one.checkpoint_id: one.acknowledged_subtasks for one in latest.checkpoints}
        # What ended behind the failure was noted by nobody before the leader was killed.
        noted = [one for one in checkpoints.checkpoints if one.ended_at_ms < failed_ms]
        for one in (*more.checkpoints[20:], *noted):
            if one.status == client_pb2.CHECKPOINT_STATUS_COMPLETED and one.checkpoint_id in known:
                assert known[one.checkpoint_id] == one.acknowledged_subtasks > 0
        assert latest.completed_count > more.completed_count > checkpoints.completed_count > 0
        handle.cancel()


def attempts_of(cluster: LocalCluster, job_id: str) -> dict[int, tuple[str, int]]:
    """Subtask -> its TaskManager and the number of its attempt, of the first vertex."""
    with cluster.client() as client:
        vertex = client.job(job_id).vertices[0]
    return {one.subtask_index: (one.taskmanager_id, one.attempt) for one in vertex.subtasks}


def test_leader_and_taskmanager_die_at_once_and_what_ran_elsewhere_goes_on(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=4) as env:
        stream = env.generate(numbers, rate=RATE, schema={"n": "int64"})
        stream.uid("numbers").write_parquet(out).uid("files")
        handle = env.submit("four pipelines")
        await_details(handle, lambda metrics, state: metrics["totals"]["records_in"] > RATE)
        before = attempts_of(cluster, handle.job_id)
        assert len({taskmanager for taskmanager, _ in before.values()}) == 2
        leader, _ = await_roles(cluster)
        dead = next(one for one in cluster.daemons() if one.role == "taskmanager")
        for daemon in (leader, dead):
            os.kill(daemon.pid, signal.SIGKILL)
        for daemon in (leader, dead):
            wait_ended(daemon.pid)
        cluster.start(jobmanagers=2, taskmanagers=2, slots=2)
        await_details(handle, lambda _, state: state == "RUNNING" and restarts(handle) == 1)
        stop(handle, tmp_path)
        after = attempts_of(cluster, handle.job_id)
        for subtask, (taskmanager, attempt) in before.items():
            if taskmanager == dead.id:
                assert after[subtask][1] > attempt, "what ran there begins again"
            else:
                assert after[subtask] == (taskmanager, attempt), "what ran elsewhere goes on"
        assert restarts(handle) == 1
    rows = sorted(row for path in out.glob("[!._]*.parquet") for row in values(path))
    assert rows == list(range(len(rows)))
    assert len(rows) > RATE


def values(path: Path) -> list[int]:
    import pyarrow.parquet as pq

    found: list[int] = pq.read_table(path)["n"].to_pylist()
    return found


def beside(work: Callable[[], Any], then: Callable[[], None]) -> Any:
    """What ``work`` returns or raises, while something else happens."""
    result = begun_beside(work)
    then()
    return result()


def has_asked(cluster: LocalCluster, job_id: str, operation_id: str) -> None:
    """Waits until an operation is known."""
    deadline = Deadline(f"operation {operation_id}", DEADLINE_S)
    while True:
        deadline.left()
        try:
            with cluster.client() as client:
                client.operation(job_id, operation_id)
        except ps.JobNotFound:
            time.sleep(0.002)
        else:
            return


def test_savepoint_and_stop_go_on_under_the_next_leader(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out, place = tmp_path / "out", str(tmp_path / "savepoints")
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)

        def die(operation_id: str) -> None:
            has_asked(cluster, handle.job_id, operation_id)
            kill_leader(cluster)

        beside(lambda: handle.savepoint(place, operation_id="mine"), lambda: die("mine"))
        deadline = Deadline("the job to run under the next leader", DEADLINE_S)
        while handle.status() != "RUNNING":
            deadline.left()
            time.sleep(0.01)
        (path,) = Path(place).glob("savepoint-*")
        assert (path / "manifest").exists()
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
            operation = client.operation(handle.job_id, "mine")
            assert operation.status == client_pb2.OPERATION_STATUS_COMPLETED
        cluster.start(jobmanagers=2, taskmanagers=2)
        try:
            beside(lambda: handle.stop(place, operation_id="end"), lambda: die("end"))
        except ps.StreamError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:  # its manifest had not been written: what was held goes on
            assert "runs on" in refusal
            await_written(out, written(out) + RATE)
            handle.stop(place, operation_id="again")
        handle.wait(DEADLINE_S)
        assert handle.status() == "FINISHED"
        assert len(list(Path(place).glob("*/manifest"))) == 2
        with cluster.client() as client:
            assert client.job(handle.job_id).summary.restarts == 0
    written(out)
    cluster.start(jobmanagers=2, taskmanagers=2)


def test_a_job_that_is_submitted_while_the_leader_dies_runs_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = beside(lambda: submitted(env, out, rows=RATE), lambda: kill_leader(cluster))
        handle.wait(DEADLINE_S)
        assert written(out) == RATE
        with cluster.client() as client:
            named = [job for job in client.jobs() if job.job_id == handle.job_id]
        assert len(named) == 1


def test_what_runs_of_a_job_that_cannot_be_read_at_first_goes_on(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with ps.Environment(cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_written(out, RATE)
        before = attempts_of(cluster, handle.job_id)
        kept = cluster.directory / "shared" / "default" / "jobs" / handle.job_id
        [graph] = kept.glob("graph-*")
        away = graph.rename(tmp_path / "graph")
        kill_leader(cluster)
        deadline = Deadline(
            "TaskManagers that have registered, and a job that is not read", DEADLINE_S
        )
        with cluster.client() as client:
            while len(client.cluster().taskmanagers) < 2:
                deadline.left()
                time.sleep(0.05)
            assert "yet" in client.job(handle.job_id).summary.problem
        away.rename(graph)
        await_details(handle, lambda _, state: state == "RUNNING")
        assert attempts_of(cluster, handle.job_id) == before
        assert restarts(handle) == 0
        assert history_of(cluster, handle.job_id)[1].entries == []
        stop(handle, tmp_path)
    assert written(out) > RATE
    cluster.start(jobmanagers=2, taskmanagers=2)
