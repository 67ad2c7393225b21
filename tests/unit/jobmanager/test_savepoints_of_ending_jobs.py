"""Aim: a savepoint whose job ends while it is stored says nothing of output that was thrown away, or that nobody has
committed.

Method: over real gRPC with a TaskManager that only pretends; the swap of HEAD waits until the job is being ended, or has
ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client.grpc_errors import error_from_rpc
from penstock.pb import checkpoint_pb2, client_pb2
from penstock.storage.head import HEAD_PATH
from penstock.storage.local_store import LocalStore
from tests.support.jobs import DEADLINE_S
from tests.unit.jobmanager.test_jobmanager_checkpoints import (
    JOB,
    Checkpointed,
    restarted,
    run,
    settings,
)

STATES = client_pb2.AttemptState
CANONICAL = checkpoint_pb2.SAVEPOINT_FORMAT_CANONICAL


class Swaps:
    """From ``hold`` on, swaps of HEAD wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self.goes_on, self._holds = threading.Event(), threading.Event(), False
        swap = LocalStore.compare_and_swap

        def held(store: LocalStore, path: str, expected: bytes | None, new: bytes) -> bool:
            if self._holds and path == HEAD_PATH and JOB in str(store.root):
                self.waits.set()
                assert self.goes_on.wait(DEADLINE_S)
            return swap(store, path, expected, new)

        monkeypatch.setattr(LocalStore, "compare_and_swap", held)

    def hold(self) -> None:
        self._holds = True


def asked(cluster: Any, what: str, directory: str) -> Awaitable[Any]:
    if what == "stop":
        return cluster.client.StopJob(
            client_pb2.StopJobRequest(job_id=JOB, operation_id="mine", directory=directory)
        )
    format = CANONICAL if what == "canonical" else 0
    return cluster.client.TriggerSavepoint(
        client_pb2.TriggerSavepointRequest(
            job_id=JOB, operation_id="mine", directory=directory, format=format
        )
    )


async def completed(cluster: Any) -> int:
    """How many checkpoints of the job are complete."""
    listed = await cluster.client.ListCheckpoints(client_pb2.ListCheckpointsRequest(job_id=JOB))
    return int(listed.completed_count)


def found(place: Path, name: str) -> bool:
    """Whether the savepoint in one of these directories has an object of this name."""
    return any(place.glob(f"*/{name}"))


@pytest.mark.parametrize("tasks_end", ["before it is stored", "behind"])
@pytest.mark.parametrize("end", ["cancelled", "cancelled, and retained", "failed"])
@pytest.mark.parametrize("what", ["native", "canonical", "stop"])
def test_what_its_job_has_not_committed_is_not_said_to_be(
    make_graph: Any,
    cluster_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    end: str,
    tasks_end: str,
) -> None:
    swaps = Swaps(monkeypatch)
    is_retained = end == "cancelled, and retained"
    retention = f"{'RETAIN' if is_retained else 'DELETE'}_ON_CANCELLATION"
    key = "execution.checkpointing.externalized-checkpoint-retention"
    more = {key: retention, "restart-strategy.type": "none"}
    place = tmp_path / "savepoints"

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path, **more)) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)
            taskmanager.ends_cancelled = tasks_end != "behind"
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            swaps.hold()
            answer = asyncio.ensure_future(asked(cluster, what, str(place)))
            assert await asyncio.to_thread(swaps.waits.wait, DEADLINE_S)
            if end == "failed":
                broken = client_pb2.FailureCause(message="broken", error_class="ValueError")
                taskmanager.report_state(
                    fake.attempts["v1", 0], STATES.ATTEMPT_STATE_FAILED, broken
                )
            else:
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            ended = "FAILED" if end == "failed" else "CANCELED"
            if tasks_end == "behind":
                await cluster.wait_for(JOB, "FAILING" if end == "failed" else "CANCELLING")
            else:
                await cluster.wait_for(JOB, ended)
            swaps.goes_on.set()
            if tasks_end == "behind":
                ending = len(fake.attempts) - (end == "failed")
                while len(taskmanager.canceled) < ending or not (  # noqa: ASYNC110 - a thread stores it
                    found(place, "manifest") if what == "canonical" else await completed(cluster)
                ):
                    await asyncio.sleep(0.01)
                taskmanager.end_cancelled()
                await cluster.wait_for(JOB, ended)
            with pytest.raises(grpc.RpcError) as refused:
                await answer
        told = str(error_from_rpc(refused.value))
        assert not found(place, "committed")
        if end == "cancelled" and what != "canonical":  # that names what tasks keep for it
            assert not found(place, "manifest"), told
        elif tasks_end == "behind":
            assert found(place, "manifest")
            assert "--in-doubt commit" in told

    run(scenario)


@pytest.mark.parametrize("then", ["cancelled", "begun again"])
@pytest.mark.parametrize("what", ["native", "stop"])
def test_what_is_complete_while_tasks_are_begun_again_is_committed_when_these_have_done_it(
    make_graph: Any,
    cluster_of: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    then: str,
) -> None:
    swaps = Swaps(monkeypatch)
    place = tmp_path / "savepoints"

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)
            taskmanager.ends_cancelled = False
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            swaps.hold()
            answer = asyncio.ensure_future(asked(cluster, what, str(place)))
            assert await asyncio.to_thread(swaps.waits.wait, DEADLINE_S)
            fake.fail()
            await cluster.wait_for(JOB, "RESTARTING")
            swaps.goes_on.set()
            while not await completed(cluster):  # noqa: ASYNC110 - a thread swaps HEAD
                await asyncio.sleep(0.01)
            assert not found(place, "committed")
            if then == "cancelled":
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
                taskmanager.end_cancelled()
                await cluster.wait_for(JOB, "CANCELED")
                with pytest.raises(grpc.RpcError):
                    await answer
                assert not found(place, "*")
                return
            taskmanager.end_cancelled()
            taskmanager.ends_cancelled = True
            await restarted(cluster, 1)
            if what == "stop":
                for attempt in fake.attempts.values():
                    taskmanager.report_state(attempt, STATES.ATTEMPT_STATE_FINISHED)
            await answer
            assert found(place, "manifest")
            assert found(place, "committed")

    run(scenario)


@pytest.mark.parametrize("then", ["committed", "cancelled", "failed", "begun again"])
@pytest.mark.parametrize("what", ["native", "canonical", "stop"])
def test_one_is_committed_when_its_tasks_have_said_so(
    make_graph: Any, cluster_of: Any, tmp_path: Path, what: str, then: str
) -> None:
    """They are told that a checkpoint is complete, and commit, which takes as long as it takes."""
    place = tmp_path / "savepoints"
    strategy = "none" if then == "failed" else "exponential-delay"

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path, **{"restart-strategy.type": strategy})) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)
            fake.commits = False
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            answer = asyncio.ensure_future(asked(cluster, what, str(place)))
            committers = len(fake.attempts)
            while len(fake.committing) < committers:  # noqa: ASYNC110 - they are told over gRPC
                await asyncio.sleep(0.01)
            *others, last = fake.committing
            for attempt, checkpoint_id in others:
                fake.report_committed(attempt, checkpoint_id)
            await completed(cluster)
            assert not answer.done()
            assert not found(place, "committed")
            if then == "committed":
                fake.report_committed(*last)
            elif then == "cancelled":
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
            else:
                fake.fail()
            if then in ("committed", "begun again"):
                await answer
                assert found(place, "manifest")
                assert found(place, "committed")
                return
            with pytest.raises(grpc.RpcError) as refused:
                await answer
            told = str(error_from_rpc(refused.value))
            assert ("--in-doubt commit" in told) is (then == "failed" or what == "canonical"), told
            assert not found(place, "committed")

    run(scenario)


@pytest.mark.parametrize("end", ["cancelled", "begun again"])
def test_tasks_hear_that_a_savepoint_is_void_before_they_are_cancelled(
    make_graph: Any, cluster_of: Any, tmp_path: Path, end: str
) -> None:
    """Behind that they leave what they have prepared for one, which may be complete."""

    async def scenario() -> None:
        async with cluster_of(settings(tmp_path)) as cluster:
            taskmanager = await cluster.add("tm1")
            fake = Checkpointed(taskmanager)
            await cluster.submit(make_graph())
            await cluster.wait_for(JOB, "RUNNING")
            triggered = asyncio.Event()
            told: list[str] = []

            def obey(command: Any) -> None:
                told.append(command.WhichOneof("command"))
                triggered.set()

            taskmanager.on_command = obey  # nobody acknowledges it
            answer = asyncio.ensure_future(
                asked(cluster, "canonical", str(tmp_path / "savepoints"))
            )
            await triggered.wait()
            assert not taskmanager.canceled
            running = len(fake.attempts)
            if end == "cancelled":
                await cluster.client.CancelJob(client_pb2.CancelJobRequest(job_id=JOB))
                await cluster.wait_for(JOB, "CANCELED")
            else:
                running -= 1
                broken = client_pb2.FailureCause(message="broken", error_class="ValueError")
                taskmanager.report_state(
                    fake.attempts["v1", 0], STATES.ATTEMPT_STATE_FAILED, broken
                )
                await restarted(cluster, 1)
            assert told.count("checkpoint_aborted") == running
            with pytest.raises(grpc.RpcError):
                await answer

    run(scenario)
