"""A JobManager over real gRPC on 127.0.0.1, with TaskManagers that only pretend to run tasks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest

from common.pb import internal_pb2
from jobmanager.job.group_starts import GroupStarts
from jobmanager.stores.job_store import JobStore
from penstock import errors
from penstock.client.grpc_errors import error_from_rpc
from penstock.pb import client_pb2, graph_pb2
from tests.support.jobs import DEADLINE_S

STATES = client_pb2.AttemptState


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


async def raised(call: Any) -> errors.StreamError:
    try:
        await call
    except grpc.RpcError as error:
        return error_from_rpc(error)
    raise AssertionError("the call succeeded")


def ipc(values: list[int]) -> bytes:
    batch = pa.record_batch({"x": pa.array(values, pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def splits_event(attempt: Any, *ids: str) -> internal_pb2.TaskEvent:
    return internal_pb2.TaskEvent(
        attempt=attempt,
        splits_discovered=internal_pb2.SplitsDiscovered(
            operator_uid="src", splits=[internal_pb2.Split(id=i, size=1) for i in ids], final=True
        ),
    )


def end_of_data(attempt: Any) -> internal_pb2.TaskEvent:
    return internal_pb2.TaskEvent(attempt=attempt, end_of_data=internal_pb2.EndOfDataReached())


def test_a_job_runs_through_splits_and_commit_to_finished(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of({"execution.batch-rows": 100}) as cluster:
            one, two = await cluster.add("tm1"), await cluster.add("tm2")

            def deploy(taskmanager: Any) -> Any:
                def run_task(task: Any) -> None:
                    taskmanager.run_to_running(task)
                    if (task.attempt.vertex, task.attempt.subtask_index) == ("v0", 0):
                        taskmanager.report(splits_event(task.attempt, "a", "b", "c"))
                    if task.attempt.vertex == "v1":
                        taskmanager.report(end_of_data(task.attempt))

                return run_task

            def command(taskmanager: Any) -> Any:
                def obey(command: Any) -> None:
                    taskmanager.report_state(command.attempt, STATES.ATTEMPT_STATE_FINISHED)

                return obey

            for taskmanager in (one, two):
                taskmanager.on_deploy = deploy(taskmanager)
                taskmanager.on_command = command(taskmanager)
            job_id = await cluster.submit(make_graph())
            details = await cluster.wait_for(job_id, "FINISHED")
            # Spread: one slot of each TaskManager, one subtask of each vertex a slot.
            for taskmanager in (one, two):
                assert len(taskmanager.allocated) == 1
                assert sorted(t.attempt.vertex for t in taskmanager.deployed) == ["v0", "v1"]
                assert taskmanager.config["execution.batch-rows"] == "100"
                await taskmanager.all_freed.wait()
                assert taskmanager.freed == taskmanager.allocated
            commands = one.commands + two.commands
            added = [c.add_splits for c in commands if c.HasField("add_splits")]
            assert sorted(s.id for a in added for s in a.splits) == ["a", "b", "c"]
            assert all(a.final for a in added)
            committed = [c.attempt for c in commands if c.HasField("commit_output")]
            assert sorted(a.subtask_index for a in committed) == [0, 1]
            summary = details.summary
            assert 0 < summary.submitted_at_ms <= summary.running_at_ms <= summary.ended_at_ms
            assert [v.name for v in details.vertices] == ["read", "write"]
            assert details.vertices[0].is_source
            assert details.vertices[1].is_sink
            info = await cluster.client.GetCluster(client_pb2.GetClusterRequest())
            assert (info.slots_total, len(info.taskmanagers)) == (4, 2)
            logs = [
                chunk.data
                async for chunk in cluster.client.ReadLogs(
                    client_pb2.ReadLogsRequest(job_id=job_id[:5], subtask_index=-1)
                )
            ]
            assert set(logs) == {b"tm1\n", b"tm2\n"}
            with pytest.raises(grpc.RpcError):
                await cluster.wait_for("ffff", "FINISHED")

    run(scenario)


def test_a_failed_attempt_fails_the_job_and_keeps_the_users_traceback(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")

            def fail(task: Any) -> None:
                taskmanager.run_to_running(task)
                if (task.attempt.vertex, task.attempt.subtask_index) == ("v1", 1):
                    cause = client_pb2.FailureCause(
                        error_class="TaskFailure",
                        message="division by zero",
                        traceback="Traceback ...",
                        operator="map",
                        row="Row(x=0)",
                    )
                    taskmanager.report_state(task.attempt, STATES.ATTEMPT_STATE_FAILED, cause)

            taskmanager.on_deploy = fail
            job_id = await cluster.submit(make_graph())
            failure = (await cluster.wait_for(job_id, "FAILED")).failure
            assert failure.message == "division by zero"
            assert (failure.vertex, failure.subtask_index) == ("v1", 1)
            assert (failure.operator, failure.row) == ("map", "Row(x=0)")
            await taskmanager.all_freed.wait()
            assert len(taskmanager.canceled) == 3

    run(scenario)


@pytest.mark.parametrize("state", ["FINISHED", "CANCELED"])
def test_nothing_is_given_back_before_the_end_of_the_job_is_stored(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Else the next JobManager finds a job that runs, of which there is nothing, and begins it again."""
    note_end, began, goes_on = JobStore.note_end, threading.Event(), threading.Event()

    def stalled(*arguments: Any) -> None:
        began.set()
        assert goes_on.wait(20)
        note_end(*arguments)

    monkeypatch.setattr(JobStore, "note_end", stalled)

    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")

            def finish(task: Any) -> None:
                taskmanager.run_to_running(task)
                if state == "FINISHED":
                    taskmanager.report(end_of_data(task.attempt))

            def obey(command: Any) -> None:
                taskmanager.report_state(command.attempt, STATES.ATTEMPT_STATE_FINISHED)

            taskmanager.on_deploy, taskmanager.on_command = finish, obey
            job_id = await cluster.submit(make_graph())
            if state == "CANCELED":
                await cluster.wait_for(job_id, "RUNNING")
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=job_id))
            assert await asyncio.to_thread(began.wait, 10)
            for _ in range(5):
                await taskmanager.beat([(slot_id, job_id) for slot_id in taskmanager.allocated])
            assert taskmanager.freed == []
            goes_on.set()
            await cluster.wait_for(job_id, state)
            await taskmanager.all_freed.wait()

    try:
        run(scenario)
    finally:
        goes_on.set()


def test_cancel_ends_a_running_job_and_one_that_waits_for_slots(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")
            running = await cluster.submit(make_graph())
            await cluster.wait_for(running, "RUNNING")
            waiting = await cluster.submit(make_graph(), "1" * 32)
            for job_id in (waiting, running):
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=job_id))
                await cluster.wait_for(job_id, "CANCELED")
            await taskmanager.all_freed.wait()
            assert len(taskmanager.allocated) == 2
            # Its slots are there for the next job.
            await cluster.wait_for(await cluster.submit(make_graph(), "2" * 32), "RUNNING")
            await cluster.submit(make_graph(), "2" * 32)  # again: harmless
            listed = await cluster.client.ListJobs(client_pb2.ListJobsRequest())
            assert len(listed.jobs) == 3

    run(scenario)


def test_a_killed_taskmanager_fails_its_jobs_long_before_heartbeats_are_missed(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            survivor, victim = await cluster.add("tm1"), await cluster.add("tm2")
            job_id = await cluster.submit(make_graph())
            await cluster.wait_for(job_id, "RUNNING")
            await victim.kill()
            failure = (await cluster.wait_for(job_id, "FAILED")).failure
            assert failure.error_class == "TaskManagerLost"
            assert f"TaskManager tm2 at 127.0.0.1:{victim.port}" in failure.message
            assert "has ended" in failure.message
            assert "log" in failure.message
            await survivor.all_freed.wait()

    run(scenario)


def test_goodbye_and_silence_and_restart_lose_a_taskmanager(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        config = {"heartbeat.interval": 20, "heartbeat.timeout": 200}
        async with cluster_of(config) as cluster:
            silent = await cluster.add("tm1")

            async def live() -> None:
                while await silent.beat():  # noqa: ASYNC110 - the interval of heartbeats
                    await asyncio.sleep(0.02)

            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(live())
                job_id = await cluster.submit(make_graph())
                await cluster.wait_for(job_id, "RUNNING")
                beating.cancel()
            failure = (await cluster.wait_for(job_id, "FAILED")).failure
            assert "no heartbeat for 0.2 s" in failure.message
            beat = internal_pb2.HeartbeatRequest(
                taskmanager_id="tm1",
                incarnation=silent.incarnation,
                leader_epoch=silent.leader_epoch,
            )
            assert not (await silent.jobmanager.Heartbeat(beat)).known
            late = internal_pb2.ReportTaskEventsRequest(
                taskmanager_id="tm1",
                incarnation=silent.incarnation,
                leader_epoch=silent.leader_epoch,
            )
            assert isinstance(await raised(silent.jobmanager.ReportTaskEvents(late)), errors.Fenced)

    run(scenario)


def test_no_slots_in_time_names_what_there_is(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of({"slot.request.timeout": "50ms"}) as cluster:
            await cluster.add("tm1", slots=1)
            job_id = await cluster.submit(make_graph(parallelism=3))
            failure = (await cluster.wait_for(job_id, "FAILED")).failure
            assert failure.error_class == "NoResourceAvailable"
            assert "needs 3 slots" in failure.message
            assert "1 of 1 slots on 1 TaskManagers" in failure.message

    run(scenario)


def test_slots_that_cannot_start_fail_the_job(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1", refuse_allocation=True)
            job_id = await cluster.submit(make_graph())
            failure = (await cluster.wait_for(job_id, "FAILED")).failure
            assert "no memory" in failure.message
            assert taskmanager.deployed == []

    run(scenario)


def test_submission_is_refused_before_anything_starts(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            await cluster.add("tm1", packages=["numpy==1.0"])
            bad = [
                (make_graph(python_version="3.9"), errors.ProtocolMismatch, "Python 3.9"),
                (make_graph(cloudpickle_version="1.0"), errors.ProtocolMismatch, "cloudpickle 1.0"),
                (make_graph(requirements=["numpy>=2"]), errors.JobRejected, "1.0 is installed"),
                (make_graph(requirements=["scipy"]), errors.JobRejected, "scipy is not installed"),
                (make_graph(requirements=["!"]), errors.JobRejected, "malformed"),
                (make_graph(config={"nonsense": "1"}), errors.ConfigurationError, "nonsense"),
                (
                    make_graph(artifacts=[graph_pb2.Artifact(id="0" * 64, name="a.zip")]),
                    errors.JobRejected,
                    "a.zip",
                ),
                (graph_pb2.JobGraph(name="x"), errors.JobRejected, "no operators"),
            ]
            for graph, cls, text in bad:
                error = await raised(cluster.submit(graph))
                assert type(error) is cls
                assert text in str(error)
            jobs = await cluster.client.ListJobs(client_pb2.ListJobsRequest())
            assert not jobs.jobs
            await cluster.submit(make_graph(requirements=["numpy", 'scipy; python_version<"3"']))

    run(scenario)


def test_a_taskmanager_that_comes_later_is_checked_when_it_gives_slots(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            job_id = await cluster.submit(make_graph(requirements=["scipy"]))
            await cluster.add("tm1")
            failure = (await cluster.wait_for(job_id, "FAILED")).failure
            assert failure.error_class == "JobRejected"
            assert "scipy is not installed" in failure.message

    run(scenario)


def test_artifacts_are_verified_and_served(cluster_of: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")
            content = bytes(range(256)) * 9000
            artifact_id = hashlib.sha256(content).hexdigest()
            missing = client_pb2.MissingArtifactsRequest(ids=[artifact_id])
            assert (await cluster.client.MissingArtifacts(missing)).ids == [artifact_id]

            def chunks(name: str) -> list[client_pb2.ArtifactChunk]:
                parts = [content[i : i + 100_000] for i in range(0, len(content), 100_000)]
                return [
                    client_pb2.ArtifactChunk(id="" if i else name, data=part)
                    for i, part in enumerate(parts)
                ]

            wrong = await raised(cluster.client.UploadArtifact(iter(chunks("0" * 64))))
            assert isinstance(wrong, errors.StoreCorrupt)

            async def begun(name: str) -> AsyncIterator[client_pb2.ArtifactChunk]:
                yield chunks(name)[0]
                await asyncio.Event().wait()  # what is still written would cover the answer

            outside = await raised(cluster.client.UploadArtifact(begun("../x")))
            assert isinstance(outside, errors.JobRejected)
            answer = await cluster.client.UploadArtifact(iter(chunks(artifact_id)))
            assert answer.size_bytes == len(content)
            assert not (await cluster.client.MissingArtifacts(missing)).ids
            request = internal_pb2.DownloadArtifactRequest(id=artifact_id)
            pieces = [p.data async for p in taskmanager.jobmanager.DownloadArtifact(request)]
            assert b"".join(pieces) == content

    run(scenario)


def test_results_wait_for_the_client_and_come_once(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobmanager.results.results_store.BUFFER_BYTES_MAX", 1000)

    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")
            job_id = await cluster.submit(make_graph())
            await cluster.wait_for(job_id, "RUNNING")

            def push(sequence: int, timeout: float = 10) -> Any:
                return taskmanager.jobmanager.PushResults(
                    internal_pb2.PushResultsRequest(
                        job_id=job_id,
                        collect_id="c0",
                        leader_epoch=taskmanager.leader_epoch,
                        chunk=client_pb2.ResultChunk(
                            subtask_index=0, sequence=sequence, arrow=ipc([sequence] * 100)
                        ),
                    ),
                    timeout=timeout,
                )

            await push(0)
            await push(0)  # its answer was lost: repeated
            full = await raised(push(1, timeout=0.5))
            assert isinstance(full, errors.StoreTransient)
            fetch = cluster.client.FetchResults(
                client_pb2.FetchResultsRequest(job_id=job_id, collect_id="c0")
            )
            chunks = aiter(fetch)
            assert (await anext(chunks)).sequence == 0
            await push(1)
            assert (await anext(chunks)).sequence == 1
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=job_id))
            assert [chunk async for chunk in chunks] == []

    run(scenario)


def test_a_bug_in_one_job_ends_that_job_only(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1", slots=4)
            healthy = await cluster.submit(make_graph())
            await cluster.wait_for(healthy, "RUNNING")
            original = GroupStarts.take_endpoints

            def crash(self: GroupStarts, event: Any) -> None:
                raise ZeroDivisionError("a bug")

            monkeypatch.setattr(GroupStarts, "take_endpoints", crash)
            sick = await cluster.submit(make_graph(), "1" * 32)
            failure = (await cluster.wait_for(sick, "FAILED")).failure
            assert failure.error_class == "Unrecoverable"
            assert "a bug" in failure.message
            monkeypatch.setattr(GroupStarts, "take_endpoints", original)
            await cluster.wait_for(healthy, "RUNNING")
            # The slots of the sick job are free again.
            await cluster.wait_for(await cluster.submit(make_graph(), "2" * 32), "RUNNING")
            assert len(taskmanager.freed) >= 2

    run(scenario)


def test_slots_that_a_taskmanager_holds_for_nobody_are_freed(cluster_of: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1")
            beat = internal_pb2.HeartbeatRequest(
                taskmanager_id="tm1",
                incarnation=taskmanager.incarnation,
                leader_epoch=taskmanager.leader_epoch,
                held_slots=[internal_pb2.HeldSlot(slot_id="tm1-0", job_id="gone")],
            )
            assert (await taskmanager.jobmanager.Heartbeat(beat)).known
            await taskmanager.all_freed.wait()
            assert taskmanager.freed == ["tm1-0"]

    run(scenario)


def test_slots_whose_end_nobody_confirmed_are_given_to_nobody(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            taskmanager = await cluster.add("tm1", refuse_freeing=True)
            first = await cluster.submit(make_graph())
            await cluster.wait_for(first, "RUNNING")
            held = [(slot, first) for slot in taskmanager.allocated]
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=first))
            await cluster.wait_for(first, "CANCELED")
            second = await cluster.submit(make_graph(), "1" * 32)
            info = await cluster.client.GetCluster(client_pb2.GetClusterRequest())
            assert (info.slots_total, info.slots_free) == (2, 0)
            # As long as it names them it is asked to end them.
            taskmanager.refuse_freeing = False
            assert await taskmanager.beat(held)
            await taskmanager.all_freed.wait()
            details = await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=second))
            assert details.summary.state == client_pb2.JOB_STATE_CREATED
            assert await taskmanager.beat()
            await cluster.wait_for(second, "RUNNING")

    run(scenario)


def test_an_id_in_use_is_refused_and_a_restart_is_not(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            first = await cluster.add("w1")
            error = await raised(cluster.add("w1", incarnation="w1-2"))
            assert isinstance(error, errors.JobRejected)
            assert f"w1 is in use by 127.0.0.1:{first.port}" in str(error)
            assert await first.beat()
            # The same place: it has lost its registration.
            first.incarnation = "w1-3"
            await first.register()
            assert await first.beat()
            # A place that refuses connections is no place.
            await first.kill()
            async with asyncio.timeout(DEADLINE_S):
                while (
                    await cluster.client.GetCluster(client_pb2.GetClusterRequest())
                ).taskmanagers:
                    pass
            second = await cluster.add("w1", incarnation="w1-4")
            assert await second.beat()

    run(scenario)


def test_the_jobs_that_ended_first_are_forgotten_first(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of({"jobmanager.retained-jobs": 1}) as cluster:
            taskmanager = await cluster.add("tm1", slots=4)
            long, short = [await cluster.submit(make_graph(), digit * 32) for digit in "01"]
            for job_id in (short, long):
                await cluster.wait_for(job_id, "RUNNING")
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=job_id))
                await cluster.wait_for(job_id, "CANCELED")
            await taskmanager.all_freed.wait()
            third = await cluster.submit(make_graph(), "2" * 32)
            await cluster.wait_for(third, "RUNNING")
            known = [record.job_id for record in cluster.jobmanager.dispatcher.records()]
            assert known == [long, third]
            held = {job_id for job_id, _ in cluster.jobmanager.dispatcher._results._results}
            assert held <= {long, third}, "nothing is kept of rows that nobody can ask for any more"

    run(scenario)


def test_a_sweep_that_fails_does_no_harm(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_prefix: str) -> list[object]:
        raise errors.StoreTransient("it cannot be listed")

    async def scenario() -> None:
        async with cluster_of({"jobmanager.retained-jobs": 1}) as cluster:
            taskmanager = await cluster.add("tm1")
            artifacts = cluster.jobmanager.dispatcher._artifacts
            monkeypatch.setattr(artifacts._store, "list", fail)
            for digit in "012":
                job_id = await cluster.submit(make_graph(), digit * 32)
                await cluster.wait_for(job_id, "RUNNING")
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=job_id))
                await cluster.wait_for(job_id, "CANCELED")
            assert await taskmanager.beat()

    run(scenario)


def test_stopping_fails_jobs_that_nobody_can_go_on_with_and_a_successor_has_a_higher_epoch(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        epochs = []
        for job_id in ("1" * 32, "2" * 32):
            async with cluster_of() as cluster:
                taskmanager = await cluster.add("tm1")
                epochs.append(taskmanager.leader_epoch)
                graph = make_graph()
                # Its checkpoints go with the JobManager, so nobody can go on with it.
                graph.config["execution.checkpointing.storage"] = "jobmanager"
                await cluster.submit(graph, job_id)
                await cluster.wait_for(job_id, "RUNNING")
                await cluster.jobmanager.dispatcher.stop()
                failure = (await cluster.wait_for(job_id, "FAILED")).failure
                assert failure.message == "JobManager stopped"
                assert taskmanager.all_freed.is_set()
        assert epochs == [1, 2]
        async with cluster_of() as cluster:  # how they ended is not forgotten
            for job_id in ("1" * 32, "2" * 32):
                failure = (await cluster.wait_for(job_id, "FAILED")).failure
                assert failure.message == "JobManager stopped"

    run(scenario)


def test_nothing_is_made_in_shared_storage_where_jobs_cannot_be_stored(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_away(_store: JobStore) -> None:
        raise errors.StoreNotFound("the storage is away")

    monkeypatch.setattr(JobStore, "check_leads", is_away)
    shared = tmp_path / "shared"

    async def scenario() -> None:
        async with cluster_of({"taskmanager.spill.shared-dir": str(shared)}) as cluster:
            graph = make_graph()
            graph.edges[0].partition_type = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
            error = await raised(cluster.submit(graph))
            assert isinstance(error, errors.StoreNotFound)

    run(scenario)
    assert not shared.exists()
