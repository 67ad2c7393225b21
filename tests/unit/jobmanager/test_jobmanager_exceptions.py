"""Aim: a JobManager keeps the failures of its jobs, labelled, and tells of them as long as of the jobs.

Method: a JobManager over real gRPC with a TaskManager that fails attempts on demand.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobmanager.job.attempt_reports import AttemptReports
from penstock.client.job_exceptions import JobException, exception_of
from penstock.errors import ConfigurationError
from penstock.pb import client_pb2, graph_pb2
from tests.support.job_records import JobRecords
from tests.support.jobs import DEADLINE_S

FAILED = client_pb2.ATTEMPT_STATE_FAILED
JOB = "0" * 32
OFTEN = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "infinite",
    "restart-strategy.fixed-delay.delay": "0ms",
}


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


class Failing:
    """Makes a fake TaskManager fail the newest attempt of one subtask on demand."""

    def __init__(self, taskmanager: Any) -> None:
        self.taskmanager = taskmanager
        self.attempt: Any = None
        taskmanager.on_deploy = self.deploy

    def deploy(self, task: Any) -> None:
        if (task.attempt.vertex, task.attempt.subtask_index) == ("v1", 1):
            self.attempt = task.attempt
        self.taskmanager.run_to_running(task)

    def fail(self, message: str) -> None:
        cause = client_pb2.FailureCause(
            message=message, traceback="Traceback", cause_chain=["TaskFailure", "ValueError"]
        )
        self.taskmanager.report_state(self.attempt, FAILED, cause)


async def exceptions(cluster: Any) -> list[JobException]:
    request = client_pb2.ListExceptionsRequest(job_id=JOB[:5])
    return [exception_of(one) for one in (await cluster.client.ListExceptions(request)).entries]


async def restarted(cluster: Any, restarts: int) -> None:
    """Waits until all run again: where others go on, the job runs although what has failed is not there yet."""
    request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=20)
    async for details in cluster.client.WatchJob(request, timeout=DEADLINE_S):
        states = {subtask.state for vertex in details.vertices for subtask in vertex.subtasks}
        is_running = details.summary.state == client_pb2.JOB_STATE_RUNNING
        has_all = states == {client_pb2.ATTEMPT_STATE_RUNNING}
        if is_running and has_all and details.summary.restarts == restarts:
            return


@pytest.fixture
def enrichers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Names of a good enricher and of one that raises."""
    (tmp_path / "labels_of_failures.py").write_text(
        "class Team:\n"
        "    def labels(self, cause):\n"
        "        return {'team': cause.vertex}\n"
        "class Broken:\n"
        "    def labels(self, cause):\n"
        "        raise ZeroDivisionError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "labels_of_failures", raising=False)
    return "labels_of_failures:Broken, labels_of_failures:Team"


def test_the_last_failures_are_kept_and_labelled(
    cluster_of: Any, make_graph: Any, enrichers: str
) -> None:
    config = {
        **OFTEN,
        "jobmanager.failure-enrichers": enrichers,
        "jobmanager.exception-history-size": 2,
    }

    async def scenario() -> None:
        async with cluster_of(config) as cluster:
            failing = Failing(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            assert await exceptions(cluster) == []
            for number in (1, 2, 3):
                failing.fail(f"failure {number}")
                await restarted(cluster, number)
            newest, before = await exceptions(cluster)
            cause = newest.root_cause
            assert (cause.message, before.root_cause.message) == ("failure 3", "failure 2")
            assert (cause.vertex, cause.subtask_index, cause.attempt) == ("v1", 1, 2)
            assert cause.cause_chain == ("TaskFailure", "ValueError")
            assert cause.timestamp_ms > 0
            assert newest.labels == {"type": "USER", "team": "v1"}
            assert newest.restarted == ("v0/0..1", "v1/0..1")
            assert (newest.restart_number, newest.delay_ms) == (3, 0)
            await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            await cluster.wait_for(JOB, "CANCELED")
            assert await exceptions(cluster) == [newest, before]

    run(scenario)


def test_what_the_user_calls_hopeless_ends_the_job(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of(OFTEN) as cluster:
            failing = Failing(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            chain = ["TaskFailure", "ValueError", "Unrecoverable"]
            cause = client_pb2.FailureCause(message="no", traceback="T", cause_chain=chain)
            failing.taskmanager.report_state(failing.attempt, FAILED, cause)
            details = await cluster.wait_for(JOB, "FAILED")
            assert list(details.failure.cause_chain) == chain
            (entry,) = await exceptions(cluster)
            assert (entry.ended_job, entry.restarted, entry.restart_number) == (True, (), 0)

    run(scenario)


def test_a_job_that_ended_with_its_jobmanager_has_that_end_in_its_history(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            await cluster.add("tm1")
            in_memory = {"execution.checkpointing.storage": "jobmanager"}
            await cluster.submit(make_graph(config=in_memory))
            await cluster.wait_for(JOB, "RUNNING")
            jobs = JobRecords(tmp_path)
            kept = jobs.copy()
        jobs.put_back(kept)  # as if it had been killed
        async with cluster_of() as cluster:
            (entry,) = await exceptions(cluster)
            assert entry.ended_job
            assert "the JobManager ended while the job ran" in entry.root_cause.message
            assert entry.labels == {"type": "SYSTEM"}

    run(scenario)


async def told_last(cluster: Any, is_told: Callable[[Any], bool]) -> client_pb2.JobDetails:
    """The job as a client that watches it sees it, once something holds."""
    request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=20)
    watch = cluster.client.WatchJob(request, timeout=DEADLINE_S)
    async for details in watch:
        if is_told(details):
            watch.cancel()
            return details
    raise AssertionError("the job has ended")


def test_a_job_that_goes_on_running_shows_its_last_failure(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of(OFTEN) as cluster:
            failing = Failing(await cluster.add("tm1"))
            graph = make_graph()
            graph.edges[0].partitioning = graph_pb2.PARTITIONING_FORWARD  # two regions
            del graph.edges[0].key_columns[:]
            await cluster.submit(graph)
            await cluster.wait_for(JOB, "RUNNING")
            for number in (1, 2):
                failing.fail(f"failure {number}")
                details = await told_last(cluster, lambda details: details.HasField("failure"))
                assert details.summary.state == client_pb2.JOB_STATE_RUNNING
                await restarted(cluster, number)
                details = await cluster.wait_for(JOB, "RUNNING")
                assert details.failure.message == f"failure {number}"

    run(scenario)


def test_a_job_that_waits_for_slots_shows_what_for_and_why_it_was_restarted(
    cluster_of: Any, make_graph: Any
) -> None:
    async def scenario() -> None:
        async with cluster_of({**OFTEN, "slot.request.timeout": "60ms"}) as cluster:
            await cluster.add("tm1")
            await cluster.submit(make_graph(parallelism=4))

            def waits_again(details: Any) -> bool:
                return details.HasField("failure") and details.HasField("slot_wait")

            details = await told_last(cluster, waits_again)
            wait = details.slot_wait
            assert (wait.needed, wait.free, wait.total, wait.timeout_ms) == (4, 2, 2, 60)
            assert details.failure.error_class == "NoResourceAvailable"
            await cluster.add("tm2")
            assert not (await cluster.wait_for(JOB, "RUNNING")).HasField("slot_wait")

    run(scenario)


def test_a_bug_ends_a_job_whatever_had_restarted_it(
    cluster_of: Any, make_graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with cluster_of(OFTEN) as cluster:
            failing = Failing(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            failing.fail("failure 1")
            await restarted(cluster, 1)

            def crash(self: AttemptReports, event: Any) -> None:
                raise ZeroDivisionError("a bug")

            monkeypatch.setattr(AttemptReports, "take", crash)
            failing.fail("failure 2")
            details = await cluster.wait_for(JOB, "FAILED")
            assert "a bug" in details.failure.message
            newest, before = await exceptions(cluster)
            assert newest.ended_job
            assert "a bug" in newest.root_cause.message
            assert before.root_cause.message == "failure 1"

    run(scenario)


def test_a_jobmanager_does_not_start_without_its_enrichers(cluster_of: Any) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="no_such_module"):
            async with cluster_of({"jobmanager.failure-enrichers": "no_such_module:Team"}):
                pass

    run(scenario)
