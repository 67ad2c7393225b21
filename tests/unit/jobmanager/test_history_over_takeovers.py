"""Aim: what has become of a job is known to the next JobManager: failures, restarts, a delay that runs, checkpoints.

Method: over real gRPC with a TaskManager that only pretends; a JobManager is "killed" by putting its job's record back
as it was. The job collects, so nothing of it goes on by itself under the next JobManager.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.pb import job_record_pb2
from jobmanager.job.kept_history import EXCEPTIONS_BYTES_MAX, encode_history
from penstock.pb import client_pb2
from tests.support.job_records import JobRecords
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    restarted,
    run,
    settings,
    take_checkpoint,
)

DELAY_MS = 2_000


def delayed(tmp_path: Path, delay_ms: int = DELAY_MS, **more: object) -> dict[str, object]:
    strategy = {
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "3",
        "restart-strategy.fixed-delay.delay": f"{delay_ms}ms",
    }
    return settings(tmp_path, **strategy, **more)


async def shown(cluster: Any) -> tuple[Any, Any]:
    """What ``penstock exceptions`` and ``penstock checkpoints`` are told."""
    exceptions = client_pb2.ListExceptionsRequest(job_id=JOB)
    checkpoints = client_pb2.ListCheckpointsRequest(job_id=JOB)
    return (
        await cluster.client.ListExceptions(exceptions),
        await cluster.client.ListCheckpoints(checkpoints),
    )


async def details(cluster: Any) -> Any:
    return await cluster.client.GetJob(client_pb2.GetJobRequest(job_id=JOB))


async def until(
    records: JobRecords, is_noted: Callable[[job_record_pb2.StoredHistory], bool]
) -> job_record_pb2.StoredHistory:
    while True:
        record = records.all().get(JOB)
        if record is not None and is_noted(record.history):
            return record.history
        await asyncio.sleep(0.01)


def test_the_next_jobmanager_shows_failures_restarts_and_checkpoints(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    records = JobRecords(tmp_path)

    async def scenario() -> None:
        async with cluster_of(delayed(tmp_path, 10)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            fake.fail("first", "Traceback of it")
            await restarted(cluster, 1)
            await take_checkpoint(cluster)
            before, first = await shown(cluster), await details(cluster)
            await until(records, lambda history: history.checkpoints.completed_count == 2)
            await until(records, lambda history: not history.restarts.restarting)
            kept = records.copy()
        records.put_back(kept)
        async with cluster_of(delayed(tmp_path, 10)) as cluster:
            Checkpointed(await cluster.add("tm2"))
            now = await restarted(cluster, 2)  # nothing of it goes on: it begins again
            exceptions, checkpoints = await shown(cluster)
            begun_again, *others = exceptions.entries
            assert begun_again.root_cause.error_class == "JobManagerLost"
            assert others == [*before[0].entries]
            [entry] = others
            assert (entry.root_cause.message, entry.root_cause.traceback) == (
                "first",
                "Traceback of it",
            )
            assert checkpoints.checkpoints[-2:] == before[1].checkpoints
            assert checkpoints.completed_count >= 2
            assert now.failure == first.failure
            assert now.summary.running_at_ms == first.summary.running_at_ms > 0

    run(scenario)


def test_a_restart_that_another_jobmanager_had_begun_is_told_of_once(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    """Also where nothing of its delay is left."""
    records = JobRecords(tmp_path)

    async def scenario() -> None:
        async with cluster_of(delayed(tmp_path, 1)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            fake.taskmanager.on_deploy = lambda _: None
            fake.fail("it broke")
            await until(records, lambda history: bool(history.restarts.restarting))
            before, _ = await shown(cluster)
            kept = records.copy()
        records.put_back(kept)
        async with cluster_of(delayed(tmp_path, 1)) as cluster:
            Checkpointed(await cluster.add("tm2"))
            assert (await restarted(cluster, 1)).summary.restarts == 1
            assert (await shown(cluster))[0] == before

    run(scenario)


def test_the_rest_of_a_delay_runs_under_the_next_jobmanager_and_counts_once(
    cluster_of: Any, make_graph: Any, tmp_path: Path
) -> None:
    records = JobRecords(tmp_path)

    async def scenario() -> None:
        async with cluster_of(delayed(tmp_path)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            fake.fail("it broke")
            failed = time.monotonic()
            history = await until(records, lambda history: bool(history.exceptions))
            assert history.restarts.restarting == ["v0/0..1", "v1/0..1"]
            before, _ = await shown(cluster)
            kept = records.copy()
        records.put_back(kept)
        async with cluster_of(delayed(tmp_path)) as cluster:
            second = Checkpointed(await cluster.add("tm2"))
            now = await restarted(cluster, 1)
            waited_ms = (time.monotonic() - failed) * 1000
            assert waited_ms >= DELAY_MS * 0.9, "the delay is not cut short"
            assert now.summary.restarts == 1, "it is the restart that had been counted"
            assert (await shown(cluster))[0] == before
            # Two of three are left, and not one more.
            for number in (2, 3):
                second.fail(f"failure {number}")
                assert (await restarted(cluster, number)).summary.restarts == number
            second.fail("the last one")
            end = await cluster.wait_for(JOB, "FAILED")
            assert "restarted 3 times before" in end.failure.message

    run(scenario)


@pytest.mark.parametrize("state", ["FAILED", "FINISHED", "CANCELED"])
def test_a_job_that_has_ended_is_shown_as_before(
    cluster_of: Any, make_graph: Any, tmp_path: Path, state: str
) -> None:
    records = JobRecords(tmp_path)

    async def scenario() -> None:
        async with cluster_of(delayed(tmp_path, 10)) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            fake.fail("first", "Traceback of it")
            await restarted(cluster, 1)
            await end(cluster, fake, state)
            ended = await cluster.wait_for(JOB, state)
            before = await shown(cluster)
            await records.until_clean()
            last = await details(cluster)
        for _ in range(2):
            async with cluster_of(delayed(tmp_path, 10)) as cluster:
                now = await details(cluster)
                while now.summary.restorable_from != last.summary.restorable_from:
                    now = await details(cluster)
                assert now == last
                assert await shown(cluster) == before
        assert now.failure == ended.failure

    run(scenario)


DIRECTORY = "execution.checkpointing.dir"


@pytest.mark.parametrize("changed", ["", "elsewhere", "unusable"])
@pytest.mark.parametrize("ends", [True, False])
def test_a_job_is_gone_on_with_where_it_was_begun_whatever_is_configured_then(
    cluster_of: Any, make_graph: Any, tmp_path: Path, changed: str, ends: bool
) -> None:
    records = JobRecords(tmp_path)
    config = delayed(tmp_path, 10)
    then = dict(config)
    del then[DIRECTORY]
    if changed:
        then[DIRECTORY] = str(tmp_path / changed) if changed == "elsewhere" else "not/absolute"

    async def scenario() -> None:
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            await take_checkpoint(cluster)
            if ends:
                await end(cluster, fake, "FAILED")
                await cluster.wait_for(JOB, "FAILED")
                await records.until_clean()
        for _ in range(2):
            async with cluster_of(then) as cluster:
                if ends:
                    while not (now := await details(cluster)).summary.restorable_from:
                        pass
                    assert now.summary.restorable_from == f"{config[DIRECTORY]}/{JOB}/chk-1"
                    continue
                restarted = Checkpointed(await cluster.add("tm2"))
                await cluster.wait_for(JOB, "RUNNING")
                found = {task.restore.checkpoint_id for task in restarted.restored}
                assert found == {1}

    run(scenario)


async def end(cluster: Any, fake: Checkpointed, state: str) -> None:
    if state == "FAILED":
        fake.taskmanager.report_state(
            fake.attempts["v1", 0],
            client_pb2.ATTEMPT_STATE_FAILED,
            client_pb2.FailureCause(
                message="no more", error_class="Unrecoverable", cause_chain=["Unrecoverable"]
            ),
        )
    elif state == "CANCELED":
        await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
    else:
        fake.finish_on_completion = True
        fake.report_end_of_data()


def test_a_history_is_bounded(cluster_of: Any, make_graph: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        config = delayed(tmp_path, 0, **{"jobmanager.exception-history-size": 64})
        config["restart-strategy.fixed-delay.attempts"] = "100"
        async with cluster_of(config) as cluster:
            fake = Checkpointed(await cluster.add("tm1"))
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            for number in range(1, 41):
                fake.fail(f"failure {number}", "x" * 16_000)
                await restarted(cluster, number)
            runner = cluster.jobmanager.dispatcher.jobs[JOB].runner
            stored = encode_history(runner.master, "", runner.checkpoints.gauges.numbers, 0)
            size = sum(one.ByteSize() for one in stored.exceptions)
            assert size <= EXCEPTIONS_BYTES_MAX
            messages = [one.root_cause.message for one in stored.exceptions]
            newest = [f"failure {number}" for number in range(40, 0, -1)]
            assert messages == newest[: len(messages)]
            assert len(messages) > 16, "long ones are cut before they are left out"

    run(scenario)
