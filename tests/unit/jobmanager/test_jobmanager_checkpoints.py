"""Checkpoints, restarts and recovery of a JobManager over real gRPC.

The TaskManagers only pretend: a trigger makes every task of theirs acknowledge with a snapshot that a test
has chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.clock import SystemClock
from common.pb import internal_pb2, job_record_pb2
from jobmanager.assembly_runner import serving
from jobmanager.checkpoint.checkpoint_deletions_runner import CheckpointDeletionsRunner
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.dispatcher import known_jobs
from jobmanager.dispatcher.dispatcher_runner import DispatcherRunner
from jobmanager.metrics import build_registry
from penstock import errors
from penstock.client.grpc_errors import error_from_rpc
from penstock.client.job_checkpoints import checkpoint_of
from penstock.config import Configuration
from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import decode_manifest
from penstock.storage.snapshot_files import snapshot_file_name
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S

STATES = client_pb2.AttemptState
JOB = "0" * 32


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


class Checkpointed:
    """Makes a fake TaskManager take part in checkpoints; triggers of sources reach all its tasks."""

    def __init__(self, taskmanager: Any) -> None:
        self.taskmanager = taskmanager
        self.attempts: dict[tuple[str, int], Any] = {}
        self.restored: list[Any] = []
        self.completed: list[int] = []
        self.aborted: list[int] = []
        self.commits = True
        self.committing: list[tuple[Any, int]] = []
        """Who was told to say when what a checkpoint covers is committed."""
        self.finish_on_completion = False
        self.triggered_by = 0
        self.says_epoch: Callable[[int], int] = lambda epoch: epoch
        taskmanager.on_deploy = self.deploy
        taskmanager.on_command = self.obey

    def deploy(self, task: Any) -> None:
        attempt = task.attempt
        self.attempts[attempt.vertex, attempt.subtask_index] = attempt
        self.restored.append(task)
        self.taskmanager.run_to_running(task)

    def obey(self, command: Any) -> None:
        match command.WhichOneof("command"):
            case "trigger_checkpoint" if command.attempt.subtask_index == 0:
                checkpoint_id = command.trigger_checkpoint.checkpoint_id
                self.triggered_by = self.says_epoch(command.trigger_checkpoint.leader_epoch)
                for attempt in list(self.attempts.values()):
                    self.acknowledge(attempt, checkpoint_id)
            case "checkpoint_completed":
                self.completed.append(command.checkpoint_completed.checkpoint_id)
                if command.checkpoint_completed.awaited:
                    self.committing.append((command.attempt, self.completed[-1]))
                    if self.commits:
                        self.report_committed(*self.committing[-1])
                if self.finish_on_completion:
                    self.taskmanager.report_state(command.attempt, STATES.ATTEMPT_STATE_FINISHED)
            case "checkpoint_aborted":
                self.aborted.append(command.checkpoint_aborted.checkpoint_id)
            case _:
                pass

    def report_committed(self, attempt: Any, checkpoint_id: int) -> None:
        committed = internal_pb2.CheckpointCommitted(checkpoint_id=checkpoint_id)
        event = internal_pb2.TaskEvent(attempt=attempt, checkpoint_committed=committed)
        self.taskmanager.report(event)

    def acknowledge(self, attempt: Any, checkpoint_id: int) -> None:
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            vertex=attempt.vertex, subtask_index=attempt.subtask_index
        )
        snapshot.metrics.aligned_bytes = 5
        if attempt.vertex == "v0":
            snapshot.operators.add(operator_uid="src").splits.add(
                id=f"s{attempt.subtask_index}", position=b"7", size=5
            )
        else:
            name, item = self.sink_state(checkpoint_id)
            state = snapshot.operators.add(operator_uid="snk").lists.add(name=name)
            state.items.append(item)
        acked = internal_pb2.CheckpointAcknowledged(
            checkpoint_id=checkpoint_id,
            snapshot=snapshot,
            leader_epoch=self.triggered_by,
        )
        self.taskmanager.report(
            internal_pb2.TaskEvent(attempt=attempt, checkpoint_acknowledged=acked)
        )

    def sink_state(self, checkpoint_id: int) -> tuple[str, bytes]:
        """Name and item of the list that the sink keeps."""
        return "collect", checkpoint_id.to_bytes(8, "little")

    def report_end_of_data(self) -> None:
        for attempt in self.attempts.values():
            self.taskmanager.report(
                internal_pb2.TaskEvent(attempt=attempt, end_of_data=internal_pb2.EndOfDataReached())
            )

    def fail(self, message: str = "it broke", traceback: str = "") -> None:
        self.taskmanager.report_state(
            self.attempts["v1", 0],
            STATES.ATTEMPT_STATE_FAILED,
            client_pb2.FailureCause(message=message, traceback=traceback),
        )


def settings(tmp_path: Path, **more: object) -> dict[str, object]:
    return {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "1h",
        "restart-strategy.exponential-delay.initial-backoff": "10ms",
        **more,
    }


async def take_checkpoint(cluster: Any) -> int:
    request = client_pb2.TriggerCheckpointRequest(job_id=JOB)
    return int((await cluster.client.TriggerCheckpoint(request, timeout=DEADLINE_S)).checkpoint_id)


async def restarted(cluster: Any, restarts: int) -> Any:
    request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=20)
    async for details in cluster.client.WatchJob(request, timeout=DEADLINE_S):
        running = details.summary.state == client_pb2.JOB_STATE_RUNNING
        if running and details.summary.restarts >= restarts:
            return details
    raise AssertionError(f"the job ended: {details}")


def test_a_failed_job_goes_on_from_its_newest_checkpoint(
    cluster_of: Any, make_graph: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            assert await take_checkpoint(cluster) == 2
            store = LocalStore(tmp_path / "checkpoints" / JOB)
            orphan = f"shared/{snapshot_file_name(2, 'v1', 0, 0, 'u')}"
            store.put(orphan, [b"x"])
            fake.fail()
            details = await restarted(cluster, 1)
            assert details.last_checkpoint_id == 2
            second = fake.restored[4:]
            assert {task.attempt.attempt for task in second} == {1}
            assert all(task.takes_checkpoints for task in second)
            assert {task.checkpoint_directory for task in second} == {str(store.root)}
            assert {task.restore.checkpoint_id for task in second} == {2}
            assert {task.first_checkpoint_id for task in second} == {3}
            sources = [task for task in second if task.attempt.vertex == "v0"]
            assert sorted(t.restore.operators[0].splits[0].id for t in sources) == ["s0", "s1"]
            while store.list("shared/"):  # behind the start  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            head = HeadStore(store).read()
            assert head is not None
            assert [kept.checkpoint_id for kept in head.retained] == [2]
            manifest = decode_manifest(store.get(head.retained[0].manifest_path))
            assert [vertex.name for vertex in manifest.vertices] == ["read", "write"]
            assert len(manifest.subtasks) == 4
            # Acks of attempts that are over change nothing.
            assert await take_checkpoint(cluster) == 3
            listed = await cluster.client.ListCheckpoints(
                client_pb2.ListCheckpointsRequest(job_id=JOB)
            )
            assert [c.checkpoint_id for c in listed.checkpoints] == [3, 2, 1]
            assert [c.retained for c in listed.checkpoints] == [True, False, False]
            shown = checkpoint_of(listed.checkpoints[0])
            assert shown.aligned_bytes == shown.total_subtasks * 5
            assert listed.restored_checkpoint_id == 2
            assert listed.completed_count == 3
            dispatcher = cluster.jobmanager.dispatcher
            registry = build_registry(dispatcher, cluster.jobmanager.cluster)
            labels = {"job_id": JOB, "job_name": "test"}
            value = registry.get_sample_value
            assert value("penstock_job_restarts_total", labels) == 1.0
            of_region = {**labels, "region": "v0/0"}
            assert value("penstock_job_region_restarts_total", of_region) == 1.0
            assert value("penstock_job_checkpoints_completed_total", labels) == 3.0
            assert value("penstock_job_work_at_risk_seconds", labels) is not None
            in_flight = value("penstock_job_last_checkpoint_in_flight_bytes", labels)
            assert in_flight == shown.aligned_bytes
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
            while store.root.exists():  # noqa: ASYNC110 - a thread removes it
                await asyncio.sleep(0.01)
            await dispatcher._idle.wait()
            # The numbers stay for a minute, so that the last of them are scraped.
            assert value("penstock_job_restarts_total", labels) == 1.0
            assert value("penstock_job_checkpoints_completed_total", labels) == 3.0
            assert value("penstock_job_last_checkpoint_duration_seconds", labels) is not None
            assert value("penstock_job_work_at_risk_seconds", labels) is None
            monkeypatch.setattr(known_jobs, "METRICS_AFTER_END_MS", -1)
            assert value("penstock_job_restarts_total", labels) is None

    run(scenario)


def test_the_final_checkpoint_lets_waiting_tasks_finish(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            fake.finish_on_completion = True
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            fake.report_end_of_data()
            await cluster.wait_for(JOB, "FINISHED")
            assert fake.completed == [1] * 4

    run(scenario)


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_next_jobmanager_goes_on_with_the_job(
    cluster_of: Any, make_graph: Any, tmp_path: Path, is_killed: bool
) -> None:
    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            used = {task.attempt.attempt for task in fake.restored}
            jobs = JobRecords(tmp_path)
            kept = jobs.copy()
            await cluster.jobmanager.dispatcher.stop()
            details = (await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))).summary
            assert details.state == client_pb2.JOB_STATE_SUSPENDED
            if is_killed:
                jobs.put_back(kept)
        async with cluster_of(settings(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm2"))
            await cluster.wait_for(JOB, "RUNNING")
            assert {task.restore.checkpoint_id for task in fake.restored} == {1}
            assert not used & {task.attempt.attempt for task in fake.restored}
            # Its predecessor may have triggered any of those that it had reserved.
            assert await take_checkpoint(cluster) == 2 + IDS_RESERVED_AT_ONCE

    run(scenario)


def test_an_acknowledgement_meant_for_another_leader_is_refused_and_counted(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        config = settings(tmp_path, **{"execution.checkpointing.timeout": "1s"})
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            fake.says_epoch = lambda epoch: epoch - 1
            with pytest.raises(grpc.aio.AioRpcError, match="4 of 4 tasks have not acknowledged"):
                await take_checkpoint(cluster)
            registry = build_registry(cluster.jobmanager.dispatcher, cluster.jobmanager.cluster)
            labels = {
                "job_id": JOB,
                "job_name": "test",
                "part": "checkpoint reports to other leaders",
            }
            assert registry.get_sample_value("penstock_job_dropped_events_total", labels) == 4.0
            fake.says_epoch = lambda epoch: epoch
            assert await take_checkpoint(cluster) == 2

    run(scenario)


def test_unreadable_checkpoints_are_skipped_or_end_the_job(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    more = {"execution.checkpointing.num-retained": 2}

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path, **more)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            await take_checkpoint(cluster)
            store = LocalStore(tmp_path / "checkpoints" / JOB)
            manifests = [info.path for info in store.list("chk-")]
            assert len(manifests) == 2
            store.put(manifests[1], [b"broken"])
            fake.fail()
            await restarted(cluster, 1)
            assert {task.restore.checkpoint_id for task in fake.restored[4:]} == {1}
            store.put(manifests[0], [b"broken"])
            fake.fail()
            failure = (await cluster.wait_for(JOB, "FAILED")).failure
            assert failure.error_class == "Unrecoverable"
            assert manifests[0] in failure.message
            assert [info.path for info in store.list("chk-")] == manifests

    run(scenario)


def test_user_failures_end_a_job_whose_restarts_nobody_asked_for(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        config = settings(tmp_path)
        del config["execution.checkpointing.interval"]
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            fake.fail(message="the slot process died")
            await restarted(cluster, 1)
            fake.fail(traceback="Traceback ...")
            await cluster.wait_for(JOB, "FAILED")

    run(scenario)


def test_storage_in_memory_is_limited_and_named(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        config = {
            "execution.checkpointing.storage": "jobmanager",
            "execution.checkpointing.interval": "1h",
            "execution.checkpointing.jobmanager.max-size": "200 b",
            "restart-strategy.exponential-delay.initial-backoff": "10ms",
        }
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph(parallelism=1))
            await cluster.wait_for(JOB, "RUNNING")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await take_checkpoint(cluster)
            message = str(error_from_rpc(caught.value))
            assert "execution.checkpointing.jobmanager.max-size" in message
            assert {task.checkpoint_directory for task in fake.restored} == {""}

    run(scenario)


def test_storage_in_memory_is_refused_where_another_jobmanager_may_take_over(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        config = {
            "execution.checkpointing.storage": "jobmanager",
            "high-availability.type": "zookeeper",
            "high-availability.zookeeper.quorum": "127.0.0.1:1",
            "high-availability.storageDir": "/shared",
        }
        async with cluster_of(config) as cluster:
            await cluster.add("tm1")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.submit(make_graph(parallelism=1))
            error = error_from_rpc(caught.value)
            assert isinstance(error, JobRejected)
            assert "execution.checkpointing.storage: filesystem" in str(error)
            graph = make_graph(parallelism=1)
            graph.config["execution.checkpointing.interval"] = "none"
            await cluster.submit(graph)

    run(scenario)


def test_storage_in_memory_without_room_for_any_checkpoint_ends_the_job(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        config = {
            "execution.checkpointing.storage": "jobmanager",
            "execution.checkpointing.interval": "1h",
            "execution.checkpointing.jobmanager.max-size": "10 b",
            "restart-strategy.exponential-delay.initial-backoff": "10ms",
        }
        async with cluster_of(config) as cluster:
            await cluster.add("tm1")
            await cluster.submit(make_graph())
            details = await cluster.wait_for(JOB, "FAILED")
            assert details.summary.restarts == 0
            assert "execution.checkpointing.jobmanager.max-size" in details.failure.message

    run(scenario)


def test_checkpointing_that_was_asked_for_needs_a_directory(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            graph = make_graph(config={"execution.checkpointing.interval": "1s"})
            with pytest.raises(Exception) as refused:
                await cluster.submit(graph)
            error = error_from_rpc(refused.value)  # type: ignore[arg-type]
            assert isinstance(error, errors.JobRejected)
            assert "execution.checkpointing.dir" in str(error)

    run(scenario)


def test_a_job_that_was_cancelled_is_not_run_again(
    make_graph: Any, cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DispatcherRunner, "_slots_end_s", 0.02)

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await cluster.add("tm1")
            Checkpointed(taskmanager)
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            jobs = JobRecords(tmp_path)
            kept = jobs.copy()
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
        jobs.put_back(kept)

        def note(record: job_record_pb2.StoredJob) -> None:
            record.is_cancelled = record.is_emptied = True

        jobs.change(JOB, note)
        quiet = {"jobmanager.rpc.port": 0, "jobmanager.metrics.port": -1}
        config = Configuration.from_mapping({**settings(tmp_path), **quiet})
        async with serving(config, tmp_path, SystemClock()) as jobmanager:
            (record,) = jobmanager.dispatcher.records()
            assert record.summary().state == client_pb2.JOB_STATE_CANCELED
            await jobs.until_clean()

    run(scenario)


@pytest.mark.parametrize("end", ["CANCELED", "FINISHED"])
def test_a_jobmanager_killed_while_it_deletes_checkpoints_leaves_that_to_the_next(
    make_graph: Any,
    cluster_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    """It neither runs the job again nor leaves its checkpoints for ever."""
    monkeypatch.setattr(DispatcherRunner, "_slots_end_s", 0.02)
    jobs, kept = JobRecords(tmp_path), dict[Path, bytes]()

    def is_killed(_: CheckpointDeletionsRunner, **options: object) -> None:
        kept.update(jobs.copy())
        raise errors.StoreTransient("nothing was deleted")

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDeletionsRunner, "discard", is_killed)
            async with cluster_of(settings(tmp_path)) as cluster:
                fake = Checkpointed(await cluster.add("tm1"))
                await cluster.submit(make_graph())
                await cluster.wait_for(JOB, "RUNNING")
                await take_checkpoint(cluster)
                if end == "CANCELED":
                    await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
                else:
                    for attempt in fake.attempts.values():
                        fake.taskmanager.report_state(attempt, STATES.ATTEMPT_STATE_FINISHED)
                await cluster.wait_for(JOB, end)
        assert list((tmp_path / "checkpoints" / JOB).iterdir())
        jobs.put_back(kept)
        quiet = {"jobmanager.rpc.port": 0, "jobmanager.metrics.port": -1}
        config = Configuration.from_mapping({**settings(tmp_path), **quiet})
        async with serving(config, tmp_path, SystemClock()) as jobmanager:
            (record,) = jobmanager.dispatcher.records()
            assert record.summary().state == client_pb2.JobState.Value(f"JOB_STATE_{end}")
            await jobs.until_clean()
        assert not (tmp_path / "checkpoints" / JOB).exists()

    run(scenario)


def test_a_job_that_cannot_be_ended_from_its_stop_goes_on_from_before_it(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    """It runs on, and takes checkpoints: without them nothing of its output was committed ever again."""
    retained = {"execution.checkpointing.num-retained": 2}

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path, **retained)) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 1
            asked = client_pb2.StopJobRequest(
                job_id=JOB, operation_id="mine", directory=str(tmp_path / "savepoints")
            )
            await cluster.client.StopJob(asked, timeout=DEADLINE_S)
            fake.fail()  # before it has ended
            while len(fake.restored) < 8:  # noqa: ASYNC110 - it begins again
                await asyncio.sleep(0.01)
            assert {(t.restore.stopped, t.restore.checkpoint_id) for t in fake.restored[4:]} == {
                (True, 2)
            }
            broken = client_pb2.FailureCause(message="altered", error_class="StoreCorrupt")
            taskmanager.report_state(fake.attempts["v1", 0], STATES.ATTEMPT_STATE_FAILED, broken)
            while len(fake.restored) < 12:  # noqa: ASYNC110 - from before
                await asyncio.sleep(0.01)
            assert {(t.restore.stopped, t.restore.checkpoint_id) for t in fake.restored[8:]} == {
                (False, 1)
            }
            await cluster.wait_for(JOB, "RUNNING")
            assert await take_checkpoint(cluster) == 3

    run(scenario)


def test_a_submission_makes_nothing_in_the_place_of_a_storage_that_is_away(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    kept, away, checkpoints = (tmp_path / name for name in ("jobmanager", "away", "checkpoints"))

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            kept.rename(away)
            with pytest.raises(Exception, match="LEADER is gone"):
                await cluster.submit(make_graph())
            artifacts = client_pb2.MissingArtifactsRequest(ids=["0" * 64])
            with pytest.raises(Exception, match="LEADER is gone"):
                await cluster.client.MissingArtifacts(artifacts)
            assert (kept.exists(), checkpoints.exists()) == (False, False)
            away.rename(kept)
            await cluster.submit(make_graph())
            assert checkpoints.exists()

    run(scenario)
