"""Aim: in whatever phase of a job its leader dies, the next one brings it to its end: nothing is lost, doubled or done twice.

Method: as in ``test_takeovers``; leaders die at fault points (``tests/support/fault_points``): in front of what the machine
of a job wants done, behind the answer of a TaskManager, or on either side of what it stores. Some stand still there instead, until
their session is over and another one leads.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster
from tests.integration.high_availability.test_combined_takeovers import FailingNumber
from tests.integration.high_availability.test_kept_rows_over_takeovers import (
    await_progress,
    await_running,
    told,
)
from tests.integration.high_availability.test_kept_rows_over_takeovers import (
    submitted as submitted_with_kept_rows,
)
from tests.support.elected_cluster import (
    LEADS,
    RATE,
    await_roles,
    health,
    jobmanagers,
    numbers,
    slots_of,
    submitted,
    token_of,
    written,
)
from tests.support.examples import RUNS_ALL
from tests.support.fault_point_cluster import FaultPoints, beside
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import Deadline

pytestmark = [pytest.mark.integration, pytest.mark.sampled(11)]

ROWS = 4_000
BATCH = {"execution.runtime-mode": "batch", "execution.checkpointing.interval": "none"}
SPECULATIVE = BATCH | {
    "execution.batch.speculative.enabled": True,
    "slow-task-detector.check-interval": "50ms",
    "slow-task-detector.execution-time.baseline-lower-bound": "200ms",
    "slow-task-detector.execution-time.baseline-ratio": 0.5,
}
SCHEMA = {"n": "int64"}


def restarts_of(cluster: LocalCluster, handle: ps.JobHandle) -> int:
    with cluster.client() as client:
        return int(client.job(handle.job_id).summary.restarts)


def user_of(cluster: LocalCluster, handle: ps.JobHandle) -> str:
    """A TaskManager with slots of a job."""
    with cluster.client() as client:
        told = client.cluster().taskmanagers
    return next(
        one.taskmanager_id
        for one in told
        if any(slot.job_id == handle.job_id for slot in one.slots)
    )


RESTARTING = ("CancelTasks", "PrepareStart", "AllocateSlots", "DeployTasks", "deploy_tasks")
if not RUNS_ALL:
    RESTARTING = RESTARTING[::2]


def test_during_the_restart_of_a_region_it_counts_once(points: FaultPoints, tmp_path: Path) -> None:
    out, tells = tmp_path / "out", tmp_path / "fail"
    failing = type("Failing", (FailingNumber,), {"path": str(tells)})
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out, number=failing)
        await_progress(out)
        for restarts, point in enumerate(RESTARTING, start=1):
            points.arm(point)
            tells.touch()
            points.await_reached(point)
            await_progress(out)
            await_running(handle)
            assert restarts_of(points.cluster, handle) == restarts, point
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


def test_with_a_taskmanager_during_a_restart(points: FaultPoints, tmp_path: Path) -> None:
    out, tells = tmp_path / "out", tmp_path / "fail"
    failing = type("Failing", (FailingNumber,), {"path": str(tells)})
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out, number=failing)
        await_progress(out)
        used = user_of(points.cluster, handle)
        points.arm("DeployTasks")
        tells.touch()
        points.await_death("DeployTasks")
        points.kill_taskmanager(used)
        points.start()
        await_progress(out)
        await_running(handle)
        assert 1 <= restarts_of(points.cluster, handle) <= 2
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize(
    "point",
    [
        "before_note_cancellation",
        "note_cancellation",
        "CancelTasks",
        "send_commands",
        "before_note_end",
        "note_end",
        "FreeSlots",
        "free_slots",
        "PublishState.CANCELED",
        "before_note_clean",
        "note_clean",
    ],
)
def test_during_a_cancellation(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out, checkpoints = tmp_path / "out", points.cluster.directory.parent / "checkpoints"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        assert (checkpoints / handle.job_id).exists()
        points.arm(point)
        cancelled = beside(handle.cancel)
        points.await_reached(point)
        cancelled()
        deadline = Deadline("the end of the job", DEADLINE_S)
        while handle.status() != "CANCELED":
            deadline.left()
        while slots_of(points.cluster, handle.job_id):
            deadline.left()
        while (checkpoints / handle.job_id).exists():
            deadline.left()
        written(out)


@pytest.mark.parametrize(
    "point",
    [
        "before_save",
        "save",
        "reserve_attempts",
        "RequestSlots",
        "AllocateSlots",
        "allocate_slots",
        "DeployTasks",
        "deploy_tasks",
    ],
)
def test_during_the_start_of_a_job(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        points.arm(point)
        submission = beside(lambda: submitted(env, out, rows=RATE))
        points.await_reached(point)
        handle = submission()
        handle.wait(DEADLINE_S)
        assert written(out) == RATE
        with points.cluster.client() as client:
            assert [job.job_id for job in client.jobs()].count(handle.job_id) == 1


@pytest.mark.parametrize("point", ["TriggerTasks", "WriteManifest", "NotifyCompleted"])
def test_during_a_checkpoint_and_the_commit_behind_it(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        points.arm(point)
        points.await_reached(point)
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 0
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("end", ["savepoint", "stop"])
@pytest.mark.parametrize("point", ["TriggerTasks", "WriteManifest", "NotifyCompleted"])
def test_during_a_savepoint_and_a_stop(
    points: FaultPoints, tmp_path: Path, point: str, end: str
) -> None:
    """No other checkpoint comes to these points."""
    out, place = tmp_path / "out", str(tmp_path / "savepoints")
    config = {"execution.checkpointing.interval": "1h"}
    with ps.Environment(points.cluster.address, parallelism=2, config=config) as env:
        handle = submitted(env, out)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > RATE // 2)
        points.arm(point)
        asked = handle.savepoint if end == "savepoint" else handle.stop
        done = beside(lambda: asked(place, operation_id="mine"))
        points.await_reached(point)
        refusal = ""
        try:
            done()
        except ps.StreamError as error:
            refusal = str(error)
        if refusal:  # its manifest had not been written: what was held goes on
            assert (end, "runs on" in refusal) == ("stop", True)
            assert not list(Path(place).glob("*/manifest"))
        if handle.status() != "FINISHED":
            await_running(handle)
            handle.stop(place, operation_id="end")
        handle.wait(DEADLINE_S)
        assert restarts_of(points.cluster, handle) == 0
        assert len(list(Path(place).glob("*/manifest"))) in (1, 2)
        assert written(out) > 0


@pytest.mark.parametrize(
    "point", ["NoteCommit", "CommitOutput", "PublishState.FINISHED", "FreeSlots", "before_note_end"]
)
def test_during_the_only_commit_of_a_job_without_checkpoints(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out, config = tmp_path / "out", {"execution.checkpointing.interval": "none"}
    config["restart-strategy.type"] = "none"
    with ps.Environment(points.cluster.address, parallelism=2, config=config) as env:
        points.arm(point)
        handle = submitted(env, out, rows=RATE)
        points.await_reached(point)
        handle.wait(DEADLINE_S)
        assert written(out) == RATE
        assert restarts_of(points.cluster, handle) == 0


@pytest.mark.parametrize("point", ["ReplaceProducer", "send_commands"])
def test_while_consumers_compare_rows_that_come_again(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    config = {"execution.checkpointing.interval": "2s"}
    with ps.Environment(points.cluster.address, parallelism=2, config=config) as env:
        handle = submitted_with_kept_rows(env, tmp_path)
        await_progress(out)
        _, first = told(points.cluster, handle)
        points.arm("ReplaceProducer")
        (tmp_path / "producer").touch()
        points.await_reached("ReplaceProducer")
        if point != "ReplaceProducer":
            points.arm(point)  # behind what the next one tells
            points.await_reached(point)
        await_progress(out)
        restarts, after = told(points.cluster, handle)
        assert (restarts, after["consumers"]) == (1, first["consumers"])
        assert after["producers"] > first["producers"]
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("point", ["FindAttempts", "PublishState.RUNNING", "NotifyAborted"])
def test_during_a_takeover(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        before = slots_of(points.cluster, handle.job_id)
        points.arm(point)
        points.arm("WriteManifest")  # where the first one dies
        points.await_reached("WriteManifest")
        points.await_reached(point)
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 0
        assert slots_of(points.cluster, handle.job_id) == before != {}
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("point", ["FindAttempts", "PublishState.RUNNING"])
def test_with_a_taskmanager_during_a_takeover(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=4) as env:
        handle = submitted(env, out)
        await_progress(out)
        used = user_of(points.cluster, handle)
        points.arm(point)
        points.arm("WriteManifest")  # where the first one dies
        points.await_reached("WriteManifest")
        points.await_death(point)
        points.kill_taskmanager(used)
        points.start()
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 1
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


@pytest.mark.parametrize("dies", ["the leader", "a TaskManager with it"])
@pytest.mark.parametrize(
    ("point", "parallelism"),
    [("PrepareStart", 1), ("DeployTasks", 3), ("deploy_tasks", 4), ("PublishState.RUNNING", 1)],
)
def test_during_a_start_at_another_parallelism(
    points: FaultPoints, tmp_path: Path, point: str, parallelism: int, dies: str
) -> None:
    out, place = tmp_path / "out", str(tmp_path / "savepoints")
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        savepoint = handle.stop(place)
    before = written(out)
    with ps.Environment(points.cluster.address, parallelism=parallelism) as env:
        points.arm(point)
        submission = beside(lambda: submitted(env, out, from_savepoint=savepoint))
        points.await_death(point)
        if dies != "the leader":
            points.kill_taskmanager("tm-1")
        points.start()
        handle = submission()
        await_progress(out)
        await_running(handle)
        handle.stop(place)
    assert written(out) > before


@pytest.mark.parametrize(
    "point",
    [
        "before_write_drains",
        "write_drains",
        "CancelTasks",
        "AllocateSlots",
        "DeployTasks",
        "deploy_tasks",
    ],
)
def test_during_a_drain(points: FaultPoints, tmp_path: Path, point: str) -> None:
    out = tmp_path / "out"
    with (
        ps.Environment(points.cluster.address, parallelism=2) as env,
        Client(points.cluster.address, token_of(points.cluster)) as client,
    ):
        handle = submitted(env, out)
        await_progress(out)
        drained = user_of(points.cluster, handle)
        points.arm(point)
        drain = beside(lambda: client.drain(drained, f"drain-{point}"))
        points.await_reached(point)
        drain()
        shown = {one.taskmanager_id: one for one in client.cluster().taskmanagers}
        assert shown[drained].slots_free == shown[drained].slots_total
        assert shown[drained].drained
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) == 0
        client.undo_drain(drained)
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


def test_with_the_taskmanager_that_takes_over_during_a_drain(
    points: FaultPoints, tmp_path: Path
) -> None:
    """Whether the drain is done in the end, or has failed with a reason, no row is lost or there twice."""
    out = tmp_path / "out"
    with (
        ps.Environment(points.cluster.address, parallelism=2) as env,
        Client(points.cluster.address, token_of(points.cluster)) as client,
    ):
        handle = submitted(env, out)
        await_progress(out)
        drained = user_of(points.cluster, handle)
        points.arm("DeployTasks")
        drain = beside(lambda: client.drain(drained, "drain-and-kill"))
        points.await_death("DeployTasks")
        points.kill_taskmanager("tm-2" if drained == "tm-1" else "tm-1")
        points.start()
        refusal = ""
        try:
            drain()
        except ps.StreamError as error:
            refusal = str(error)
        shown = {one.taskmanager_id: one for one in client.cluster().taskmanagers}
        assert shown[drained].drained == (not refusal), refusal
        await_progress(out)
        await_running(handle)
        assert restarts_of(points.cluster, handle) <= 2
        client.undo_drain(drained)
        handle.stop(str(tmp_path / "savepoints"))
        written(out)


def held_in_one_process(root: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """The first process that has the row ``n`` = 1 stays there until a file is there."""
    holder, gate = str(root / "holder"), str(root / "gate")

    def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 1 in batch["n"].to_pylist():
            try:
                os.close(os.open(holder, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return batch
            while not Path(gate).exists():
                time.sleep(0.02)
        return batch

    return hold


def check_each_is_there_once(out: Path) -> None:
    found = pq.read_table(out).to_pylist()
    assert sorted((row["n"], row["count"]) for row in found) == [(n, 1) for n in range(ROWS)]


@pytest.mark.parametrize(
    "point",
    ["RequestSpareSlots", "StartRival", "start_rival", "ReportRival.STARTED", "ReportRival.WON"],
)
def test_while_a_second_attempt_begins_and_wins(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    with ps.Environment(points.cluster.address, parallelism=2, config=SPECULATIVE) as env:
        rows = env.from_rows([{"n": n} for n in range(ROWS)]).rebalance()
        held = rows.map_batches(held_in_one_process(tmp_path), schema=SCHEMA).key_by("n")
        held.aggregate(count=ps.count()).write_parquet(str(tmp_path / "out"))
        points.arm(point)
        handle = env.submit("rivals")
        try:
            points.await_reached(point)
            assert handle.wait(DEADLINE_S).status == "FINISHED", "the slow one is not waited for"
            assert handle.exceptions() == []
            points.await_nothing_left(handle)
        finally:
            (tmp_path / "gate").touch()
    check_each_is_there_once(tmp_path / "out")


@pytest.mark.parametrize("point", ["ReleasePartitions", "release_partitions"])
def test_while_partitions_are_released(points: FaultPoints, tmp_path: Path, point: str) -> None:
    with ps.Environment(points.cluster.address, parallelism=2, config=BATCH) as env:
        once = env.generate(numbers, rows=ROWS).key_by("n").filter(ps.col("n") >= 0)
        once.key_by("n").aggregate(count=ps.count()).write_parquet(str(tmp_path / "out"))
        points.arm(point)
        handle = env.submit("stages")
        points.await_reached(point)
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert handle.exceptions() == []
        points.await_nothing_left(handle)
    check_each_is_there_once(tmp_path / "out")


@pytest.mark.parametrize("point", ["PromotePartitions", "promote_partitions", "before_note_end"])
def test_while_partitions_are_given_a_name(points: FaultPoints, point: str) -> None:
    name = f"kept-{point}"
    with (
        ps.Environment(points.cluster.address, parallelism=2, config=BATCH) as env,
        points.cluster.client() as client,
    ):
        env.generate(numbers, rows=ROWS).rebalance().map(lambda row: row, schema=SCHEMA).persist(
            name
        )
        points.arm(point)
        handle = env.submit("persists")
        points.await_reached(point)
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert handle.exceptions() == []
        read = env.read_persisted(name).collect()
        assert sorted(row.n for row in read) == list(range(ROWS))
        points.await_nothing_left(handle, persisted=2)
        client.drop_partitions(name)
        points.await_nothing_left(handle)


@pytest.mark.parametrize("point", ["SweepOutput", "sweep_output", "note_end"])
def test_while_hidden_output_is_removed(points: FaultPoints, tmp_path: Path, point: str) -> None:
    """Only of a job that a leader has taken over, or that has failed, may attempts have ended without doing it."""
    out = tmp_path / "out"
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        handle = submitted(env, out)
        await_progress(out)
        points.arm("WriteManifest")
        points.await_reached("WriteManifest")
        await_progress(out)
        points.arm(point)
        cancelled = beside(handle.cancel)
        points.await_reached(point)
        cancelled()
        await_details(handle, lambda _, state: state == "CANCELED")
        deadline = Deadline("hidden files to go", DEADLINE_S)
        while left := [path.name for path in out.rglob("[._]*")]:
            deadline.left()
            time.sleep(0.05)
        assert left == []
        points.await_nothing_left(handle)
    written(out)


def await_next_leader(points: FaultPoints, paused: int) -> None:
    deadline = Deadline("another leader", DEADLINE_S)
    others = [one for one in jobmanagers(points.cluster).values() if one.pid != paused]
    while LEADS not in map(health, others):
        deadline.left()


@pytest.mark.parametrize(
    "point",
    ["DeployTasks", "before_swap_head", "swap_head", "before_delete_files", "before_note_end"],
)
def test_who_stands_still_there_and_goes_on_when_another_leads_touches_nothing(
    points: FaultPoints, tmp_path: Path, point: str
) -> None:
    out, savepoints = tmp_path / "out", str(tmp_path / "savepoints")
    with ps.Environment(points.cluster.address, parallelism=2) as env:
        if point == "DeployTasks":
            points.arm(point, "SIGSTOP")
        begun = beside(lambda: submitted(env, out))
        if point != "DeployTasks":
            await_progress(out)
            points.arm(point, "SIGSTOP")
        ended = beside(lambda: begun().stop(savepoints)) if point == "before_note_end" else None
        paused = points.await_come(point)
        try:
            await_next_leader(points, paused)
            handle = begun()
            if ended is None:
                await_progress(out)
        finally:
            os.kill(paused, signal.SIGCONT)
        _, again = await_roles(points.cluster)
        assert again.pid == paused, "it executes itself anew, and stands by"
        if ended is None:
            await_progress(out)
            await_running(handle)
            assert restarts_of(points.cluster, handle) == 0
            ended = beside(lambda: handle.stop(savepoints))
        ended()
        written(out)
        points.await_nothing_left(handle)
