"""What a JobManager does at its start with jobs whose storage, code or record it cannot read, and with
checkpoints that it cannot delete: it keeps them, says so, and tries again.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from common.pb import internal_pb2, job_record_pb2
from jobmanager.checkpoint.checkpoint_deletions_runner import CheckpointDeletionsRunner
from jobmanager.dispatcher import dispatcher_runner, ended_jobs_runner, recovery_runner
from jobmanager.job import ended_checkpoints_runner
from jobmanager.scheduler import cluster_runner
from jobmanager.stores.drains_store import DrainsStore
from penstock.config import Configuration
from penstock.errors import StoreTransient
from penstock.pb import client_pb2, graph_pb2
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    restarted,
    run,
    settings,
    take_checkpoint,
)
from tests.unit.jobmanager.test_operations_over_takeovers import Holding

PATIENCE_S = 0.3


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_runner.DispatcherRunner, "_slots_end_s", 0.02)
    for module in (recovery_runner, ended_jobs_runner):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.02)
        monkeypatch.setattr(module, "LAST_PAUSE_S", 0.02)
    monkeypatch.setattr(ended_checkpoints_runner, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(ended_checkpoints_runner, "_LAST_PAUSE_S", 0.02)
    monkeypatch.setattr("jobmanager.job.job_calls_runner._FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("jobmanager.job.job_calls_runner._LAST_PAUSE_S", 0.02)


def records(tmp_path: Path) -> list[str]:
    return sorted(JobRecords(tmp_path).all())


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - a thread makes it true
        await asyncio.sleep(0.01)


async def told(cluster: Any, state: str, text: str) -> Any:
    """Waits until the job is shown so, in the list and alone."""
    while True:
        [job] = (await cluster.client.ListJobs(client_pb2.ListJobsRequest())).jobs
        if text in job.problem:
            assert client_pb2.JobState.Name(job.state) == f"JOB_STATE_{state}"
            details = await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))
            assert details.summary.problem
            return details
        await asyncio.sleep(0.01)


async def has_restarted(cluster: Any, times: int) -> Any:
    """Waits until the job has begun so many restarts, whatever comes of them."""
    request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=20)
    async for details in cluster.client.WatchJob(request, timeout=DEADLINE_S):
        if details.summary.restarts >= times:
            return details
    raise AssertionError("the job has ended")


async def run_until_checkpoint(cluster: Any, graph: graph_pb2.JobGraph) -> None:
    Checkpointed(await cluster.add("tm1"))
    await cluster.submit(graph)
    await cluster.wait_for(JOB, "RUNNING")
    await take_checkpoint(cluster)


def hide(path: Path) -> Path:
    hidden = path.with_name(path.name + ".away")
    path.rename(hidden)
    return hidden


@pytest.mark.parametrize("is_mount_point_there", [True, False])
@pytest.mark.parametrize("strategy", ["exponential-delay", "none"])
def test_a_job_whose_storage_is_not_mounted_waits_for_it(
    cluster_of: Any, make_graph: Any, tmp_path: Path, is_mount_point_there: bool, strategy: str
) -> None:
    config = settings(tmp_path, **{"restart-strategy.type": strategy})

    async def scenario() -> None:
        async with cluster_of(config) as cluster:
            await run_until_checkpoint(cluster, make_graph())
        kept = records(tmp_path)
        for _ in range(2):  # over any number of JobManagers
            away = hide(tmp_path / "checkpoints")
            if is_mount_point_there:
                (tmp_path / "checkpoints").mkdir()
            async with cluster_of(config) as cluster:
                await told(cluster, "RESTARTING", "mounted")
            assert set(kept) <= set(records(tmp_path))
            if is_mount_point_there:
                (tmp_path / "checkpoints").rmdir()
            away.rename(tmp_path / "checkpoints")
        hide(tmp_path / "checkpoints")
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm2"))
            await told(cluster, "RESTARTING", "mounted")
            (tmp_path / "checkpoints.away").rename(tmp_path / "checkpoints")
            details = await cluster.wait_for(JOB, "RUNNING")
            assert not details.summary.problem
            assert {task.restore.checkpoint_id for task in fake.restored} == {1}

    run(scenario)


def test_a_job_outlives_checkpoints_that_are_away_for_a_moment(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    """Whether it runs meanwhile, or restarts, it says what is missing, and makes nothing in its place."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            away = hide(tmp_path / "checkpoints")
            with pytest.raises(grpc.aio.AioRpcError, match="mounted"):
                await take_checkpoint(cluster)
            fake.fail()
            details = await has_restarted(cluster, 3)
            assert "mounted" in details.failure.message
            assert not (tmp_path / "checkpoints").exists()
            away.rename(tmp_path / "checkpoints")
            await restarted(cluster, 3)
            assert {task.restore.checkpoint_id for task in fake.restored[4:]} == {1}
            assert await take_checkpoint(cluster) > 1

    run(scenario)


def test_checkpoints_that_fail_over_and_over_are_told_of_once(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    """In the log: as it begins, and when the storage is back. Each is counted, and shown with the job."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())
            with structlog.testing.capture_logs() as logs:
                away = hide(tmp_path / "checkpoints")
                for _ in range(3):
                    with pytest.raises(grpc.aio.AioRpcError, match="mounted"):
                        await take_checkpoint(cluster)
                away.rename(tmp_path / "checkpoints")
                await take_checkpoint(cluster)
            shown = await cluster.client.ListCheckpoints(
                client_pb2.ListCheckpointsRequest(job_id=JOB)
            )
            assert shown.failed_count == 3
        told = [one for one in logs if one["log_level"] != "debug"]
        assert [one["reason"] for one in told if one["event"] == "checkpoint.aborted"] == [
            "it could not be stored"
        ]
        assert [one["failures"] for one in told if one["event"].endswith("_again")] == [3]

    run(scenario)


@pytest.mark.parametrize("what", ["artifacts", "graph", "record", "head"])
def test_a_job_that_cannot_be_read_is_kept_until_it_can(
    cluster_of: Any, make_graph: Any, tmp_path: Path, what: str
) -> None:
    async def scenario() -> None:
        content = b"print(1)"
        async with cluster_of(settings(tmp_path)) as cluster:
            graph = make_graph()
            if what == "artifacts":
                artifact_id = hashlib.sha256(content).hexdigest()
                graph.artifacts.add(id=artifact_id, name="code")

                async def pieces() -> Any:
                    yield content

                artifacts = cluster.jobmanager.dispatcher._artifacts
                await artifacts.upload(artifact_id, pieces())
            await run_until_checkpoint(cluster, graph)
        damaged = {
            "artifacts": tmp_path / "artifacts",
            "graph": next((tmp_path / "jobmanager" / "jobs" / JOB).glob("graph-*")),
            "record": JobRecords(tmp_path).path(JOB),
            "head": tmp_path / "checkpoints" / JOB / "HEAD",
        }[what]
        away = hide(damaged)
        if what != "artifacts":
            damaged.write_bytes(b"\xff junk")
        async with cluster_of(settings(tmp_path)) as cluster:
            Checkpointed(await cluster.add("tm2"))
            await told(cluster, "RESTARTING", "yet")
            if what == "artifacts":
                damaged.mkdir(exist_ok=True)
                for path in away.iterdir():
                    path.rename(damaged / path.name)
            else:
                away.replace(damaged)
            await cluster.wait_for(JOB, "RUNNING")

    run(scenario)


def test_a_job_that_waits_to_be_read_can_be_cancelled(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())
        away = hide(tmp_path / "checkpoints")
        async with cluster_of(settings(tmp_path)) as cluster:
            await told(cluster, "RESTARTING", "mounted")
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
        # Its checkpoints are still to be deleted.
        assert not JobRecords(tmp_path).are_clean
        away.rename(tmp_path / "checkpoints")
        async with cluster_of(settings(tmp_path)) as cluster:
            await cluster.wait_for(JOB, "CANCELED")
            await JobRecords(tmp_path).until_clean()
            assert not (tmp_path / "checkpoints" / JOB).exists()

    run(scenario)


def hidden_graph(tmp_path: Path) -> Path:
    """The job cannot be read until it is called ``...`` without its last name again."""
    return hide(next((tmp_path / "jobmanager" / "jobs" / JOB).glob("graph-*")))


async def left_running(
    cluster_of: Any, graph: graph_pb2.JobGraph, tmp_path: Path
) -> list[internal_pb2.HeldAttempt]:
    """A JobManager is killed, and what it had deployed runs on; what its TaskManager tells the next one."""
    async with cluster_of(settings(tmp_path)) as cluster:
        fake = Holding(await cluster.add("tm1"))
        await cluster.submit(graph)
        await cluster.wait_for(JOB, "RUNNING")
        await take_checkpoint(cluster)
        kept, held = JobRecords(tmp_path).copy(), fake.held()
    JobRecords(tmp_path).put_back(kept)
    return held


def test_what_runs_of_a_job_that_cannot_be_read_yet_goes_on(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        held = await left_running(cluster_of, make_graph(), tmp_path)
        away = hidden_graph(tmp_path)
        async with cluster_of(settings(tmp_path)) as cluster:
            await told(cluster, "RESTARTING", "yet")
            taskmanager = await cluster.add("tm1", held_attempts=held)
            fake = Holding(taskmanager)
            taskmanager.allocated += {one.endpoint.slot_id for one in held}
            away.rename(away.with_suffix(""))
            details = await cluster.wait_for(JOB, "RUNNING")
            assert details.summary.restarts == 0
            assert fake.restored == taskmanager.freed == []

    run(scenario)


def test_what_runs_goes_on_however_long_the_storage_keeps_its_jobmanager_from_answering(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long TaskManagers may take to register counts from when they can."""
    config = Configuration.from_mapping({})
    others_ms = config.heartbeat_timeout_ms + config.heartbeat_interval_ms
    timeout = {"heartbeat.timeout": f"{config.heartbeat_timeout_ms}ms"}
    read = DrainsStore.read

    def slow(store: DrainsStore) -> Any:
        time.sleep(3 * PATIENCE_S)
        return read(store)

    async def scenario() -> None:
        held = await left_running(cluster_of, make_graph(), tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = f"127.0.0.1:{listening.getsockname()[1]}"
            JobRecords(tmp_path).change(JOB, lambda one: one.taskmanagers.update(tm1=address))
            monkeypatch.setattr(
                cluster_runner, "_REGISTRATION_RETRY_MS", 1_000 * PATIENCE_S - others_ms
            )
            monkeypatch.setattr(DrainsStore, "read", slow)
            async with cluster_of(settings(tmp_path) | timeout) as cluster:
                taskmanager = await cluster.add("tm1", held_attempts=held)
                fake = Holding(taskmanager)
                taskmanager.allocated += {one.endpoint.slot_id for one in held}
                details = await cluster.wait_for(JOB, "RUNNING")
                assert details.summary.restarts == 0
                assert fake.restored == []

    run(scenario)


@pytest.mark.parametrize("end", ["cancelled", "removed"])
def test_what_runs_of_a_job_that_has_ended_before_it_could_be_read_ends(
    cluster_of: Any, make_graph: Any, tmp_path: Path, end: str
) -> None:
    async def scenario() -> None:
        held = await left_running(cluster_of, make_graph(), tmp_path)
        record = JobRecords(tmp_path).path(JOB)
        away = hide(record)
        record.write_bytes(b"junk")
        async with cluster_of(settings(tmp_path)) as cluster:
            await told(cluster, "RESTARTING", "yet")
            taskmanager = await cluster.add("tm1", held_attempts=held)
            taskmanager.allocated += {one.endpoint.slot_id for one in held}
            if end == "cancelled":
                away.replace(record)
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
                await cluster.wait_for(JOB, "CANCELED")
            else:
                record.unlink()
                while (await cluster.client.ListJobs(client_pb2.ListJobsRequest())).jobs:  # noqa: ASYNC110 - over gRPC
                    await asyncio.sleep(0.01)
            await taskmanager.all_freed.wait()

    run(scenario)


@pytest.mark.parametrize("is_noted_first", [True, False])
def test_a_job_that_is_cancelled_as_it_can_be_read_again_does_not_run_on(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_noted_first: bool,
) -> None:
    """Who goes on with it has read what was noted of it a moment before; or whoever cancels it is told so a moment late."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())
        damaged = next((tmp_path / "jobmanager" / "jobs" / JOB).glob("graph-*"))
        away = hide(damaged)
        damaged.write_bytes(b"junk")
        async with cluster_of(settings(tmp_path)) as cluster:
            Checkpointed(await cluster.add("tm2"))
            await told(cluster, "RESTARTING", "yet")
            store = cluster.jobmanager.dispatcher._store
            read, note = store.read, store.note_cancellation
            has_looked, has_come, goes_on = (threading.Event() for _ in range(3))

            def wait() -> None:
                has_come.set()
                assert goes_on.wait(DEADLINE_S)

            def read_and_wait(job_id: str) -> Any:
                found = read(job_id)
                has_looked.set()
                if not found.problem:
                    wait()
                return found

            def wait_and_note(job_id: str) -> None:
                wait()
                note(job_id)

            cancel = client_pb2.CancelJobRequest(job_id=JOB)
            if is_noted_first:
                monkeypatch.setattr(store, "read", read_and_wait)
                # None that does not wait is under way any more.
                await asyncio.to_thread(has_looked.wait, DEADLINE_S)
                away.replace(damaged)
                await asyncio.to_thread(has_come.wait, DEADLINE_S)
                await cluster.client.CancelJob(cancel)
                goes_on.set()
            else:
                monkeypatch.setattr(store, "note_cancellation", wait_and_note)
                cancelling = asyncio.ensure_future(cluster.client.CancelJob(cancel))
                await asyncio.to_thread(has_come.wait, DEADLINE_S)
                away.replace(damaged)
                await cluster.wait_for(JOB, "RUNNING")
                goes_on.set()
                await cancelling
            await cluster.wait_for(JOB, "CANCELED")

    run(scenario)


@pytest.mark.parametrize("away", ["jobs", ""])
def test_a_job_that_runs_is_cancelled_where_what_the_jobmanager_keeps_is_away(
    cluster_of: Any, make_graph: Any, tmp_path: Path, away: str
) -> None:
    """Its tasks end at once; its end is told of when that is safe."""
    kept = tmp_path / "jobmanager" / away

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())
            hidden = hide(kept)
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELLING")
            hidden.rename(kept)
            await cluster.wait_for(JOB, "CANCELED")
            await JobRecords(tmp_path).until_clean()

    run(scenario)


def test_a_job_whose_record_is_damaged_is_cancelled_and_nothing_of_it_is_deleted(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    head = tmp_path / "checkpoints" / JOB / "HEAD"

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())
            JobRecords(tmp_path).path(JOB).write_bytes(b"damaged")
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            details = await cluster.wait_for(JOB, "CANCELED")
            assert f"{JOB}/record is" in details.summary.problem
            assert "restore the record from a backup" in details.summary.problem
            assert head.exists()
            assert JobRecords(tmp_path).path(JOB).read_bytes() == b"damaged"

    run(scenario)
    assert head.exists()


def test_a_job_that_has_ended_is_shown_so_where_its_settings_cannot_be_used(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        config = settings(tmp_path)
        async with cluster_of(config) as cluster:
            await run_until_checkpoint(cluster, make_graph())
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
            await JobRecords(tmp_path).until_clean()
        del config["execution.checkpointing.dir"]
        async with cluster_of(config) as cluster:
            details = await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))
            assert details.summary.state == client_pb2.JOB_STATE_CANCELED
            assert not details.summary.problem

    run(scenario)


def test_checkpoints_of_an_ended_job_are_deleted_at_last(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        tries: list[str] = []
        original = CheckpointDeletionsRunner.discard

        def fails(self: Any, **options: Any) -> None:
            tries.append("")
            raise StoreTransient("the disk is read-only")

        monkeypatch.setattr(CheckpointDeletionsRunner, "discard", fails)
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
            await until(lambda: len(tries) > 3)
        tries.clear()
        async with cluster_of(settings(tmp_path)) as cluster:
            await cluster.wait_for(JOB, "CANCELED")
            await until(lambda: len(tries) > 3)
            assert (tmp_path / "checkpoints" / JOB / "HEAD").exists()
            monkeypatch.setattr(CheckpointDeletionsRunner, "discard", original)
            await JobRecords(tmp_path).until_clean()
            assert not (tmp_path / "checkpoints" / JOB).exists()

    run(scenario)


def test_a_jobmanager_that_died_while_it_deleted_checkpoints_has_nothing_left_to_delete(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            await run_until_checkpoint(cluster, make_graph())

        def note(record: job_record_pb2.StoredJob) -> None:
            record.end.state, record.is_emptied = "FINISHED", True

        JobRecords(tmp_path).change(JOB, note)
        shutil.rmtree(tmp_path / "checkpoints" / JOB)
        async with cluster_of(settings(tmp_path)) as cluster:
            await cluster.wait_for(JOB, "FINISHED")
            await JobRecords(tmp_path).until_clean()

    run(scenario)


def test_what_is_in_nobodys_way_is_not_removed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that can be started again; whichever of the tries has something else to wait for."""
    failures, sweeps = ended_checkpoints_runner._TRIES_FOR_RESTORABLE - 1, 0

    def try_once() -> dict[str, Any]:
        nonlocal failures
        if failures:
            failures -= 1
            raise StoreTransient("away")
        return {}

    async def sweep(_: Any) -> None:
        nonlocal sweeps
        sweeps += 1
        raise StoreTransient("away")

    monkeypatch.setattr(ended_checkpoints_runner, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(ended_checkpoints_runner, "_LAST_PAUSE_S", 0.001)
    monkeypatch.setattr(ended_checkpoints_runner, "_one_try", lambda *_, **__: try_once)

    async def scenario() -> None:
        graph = graph_pb2.JobGraph()
        async with asyncio.timeout(DEADLINE_S):
            await ended_checkpoints_runner.delete_checkpoints(
                JOB, graph, "/x", None, int, slots_end_s=0.01, sweep=sweep, is_restorable=True  # type: ignore[arg-type]
            )  # fmt: skip

    asyncio.run(scenario())
    assert sweeps == 1
