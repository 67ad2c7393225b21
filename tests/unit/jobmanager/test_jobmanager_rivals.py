"""Aim: the JobManager starts rivals through real calls, shows them, and does not mind where they fail.

Method: real gRPC on 127.0.0.1, TaskManagers that only pretend to run tasks. Subtask 1 of the source does
nothing in its first attempt until it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.pb import internal_pb2
from jobmanager.metrics import build_registry
from penstock.pb import client_pb2, graph_pb2
from tests.support.jobs import DEADLINE_S

JOB = "0" * 32
STATES = client_pb2.AttemptState
SETTINGS = {
    "execution.batch.speculative.enabled": "true",
    "execution.runtime-mode": "batch",
    "slow-task-detector.check-interval": "10ms",
    "slow-task-detector.execution-time.baseline-lower-bound": "20ms",
    "slow-task-detector.execution-time.baseline-ratio": "0.5",
}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


def batch_graph(make_graph: Any, **config: str) -> graph_pb2.JobGraph:
    """source -> blocking -> sink, with two subtasks each."""
    graph: graph_pb2.JobGraph = make_graph()
    graph.edges[0].partition_type = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
    sink = graph.vertices[1].operators[0].sink
    sink.discard.SetInParent()
    sink.supports_concurrent_attempts = True
    graph.config.update(SETTINGS | config)
    return graph


class Players:
    """What the tasks of all TaskManagers do.

    Args:
        refused: what the start of a rival fails at, once; "" = nothing.
    """

    def __init__(self, *taskmanagers: Any, refused: str = "") -> None:
        self.refused = refused
        self.has_refused = asyncio.Event()
        self.deployed: dict[tuple[str, int, int], tuple[Any, internal_pb2.TaskDeployment]] = {}
        self.commands: list[internal_pb2.TaskCommand] = []
        self.changed = asyncio.Event()
        self.taskmanagers = taskmanagers
        self.listen(*taskmanagers)

    def listen(self, *taskmanagers: Any) -> None:
        """They play along."""
        for taskmanager in taskmanagers:
            taskmanager.on_deploy = self._deploy_on(taskmanager)
            taskmanager.on_command = self._command_on(taskmanager)

    def _refuse(self, what: str, is_of_rival: bool) -> None:
        if what == self.refused and is_of_rival and not self.has_refused.is_set():
            self.has_refused.set()
            raise RuntimeError("out of order")

    def _deploy_on(self, taskmanager: Any) -> Callable[[internal_pb2.TaskDeployment], None]:
        def deploy(task: internal_pb2.TaskDeployment) -> None:
            self._refuse("deployment", task.HasField("beside"))
            attempt = task.attempt
            key = (attempt.vertex, attempt.subtask_index, attempt.attempt)
            self.deployed[key] = taskmanager, task
            self.changed.set()
            taskmanager.run_to_running(task)
            if key == ("v0", 0, 0):
                found = internal_pb2.SplitsDiscovered(
                    operator_uid="src",
                    splits=[internal_pb2.Split(id=id, size=1) for id in "abc"],
                    final=True,
                )
                taskmanager.report(internal_pb2.TaskEvent(attempt=attempt, splits_discovered=found))
            if key == ("v0", 1, 0) and self.refused == "process":
                self.has_refused.set()
                for other in self.taskmanagers:
                    other.refuse_allocation = True
            if key[:2] != ("v0", 1):
                self.finish(*key)

        return deploy

    def _command_on(self, taskmanager: Any) -> Callable[[internal_pb2.TaskCommand], None]:
        def command(command: internal_pb2.TaskCommand) -> None:
            self._refuse("splits", command.HasField("add_splits") and command.attempt.attempt > 0)
            self.commands.append(command)
            if command.HasField("commit_output"):
                taskmanager.report_state(command.attempt, STATES.ATTEMPT_STATE_FINISHED)

        return command

    def finish(self, vertex: str, subtask_index: int, attempt: int) -> None:
        """It has done its work."""
        taskmanager, task = self.deployed[vertex, subtask_index, attempt]
        if vertex == "v0":
            taskmanager.report_state(task.attempt, STATES.ATTEMPT_STATE_FINISHED)
        else:
            end = internal_pb2.EndOfDataReached()
            taskmanager.report(internal_pb2.TaskEvent(attempt=task.attempt, end_of_data=end))

    async def wait_for(
        self, vertex: str, subtask_index: int, attempt: int
    ) -> tuple[Any, internal_pb2.TaskDeployment]:
        """An attempt of this number or a later one, once it is deployed, and where."""
        while True:
            self.changed.clear()
            for key, found in self.deployed.items():
                if key[:2] == (vertex, subtask_index) and key[2] >= attempt:
                    return found
            await self.changed.wait()

    async def rival(self) -> tuple[Any, internal_pb2.TaskDeployment]:
        """The rival of the straggler, once it is deployed, and where."""
        return await self.wait_for("v0", 1, 1)


async def details_with_rival(cluster: Any) -> client_pb2.JobDetails:
    request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=10)
    async for details in cluster.client.WatchJob(request, timeout=DEADLINE_S):
        rivals = [one for vertex in details.vertices for one in vertex.speculative_attempts]
        if any(one.state == STATES.ATTEMPT_STATE_RUNNING for one in rivals):
            return details
    raise AssertionError("the job has ended")


def counted(cluster: Any, which: str = "") -> float:
    """What Prometheus sees of rivals."""
    registry = build_registry(cluster.jobmanager.dispatcher, cluster.jobmanager.cluster)
    labels = {"job_id": JOB, "job_name": "test"}
    name = f"penstock_job_speculative_attempts{which}_total"
    return registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize("strategy", ["none", "fixed-delay"])
def test_a_rival_is_started_shown_and_wins(cluster_of: Any, make_graph: Any, strategy: str) -> None:
    """A job that its successor could go on with reserves the number first."""

    async def scenario() -> None:
        async with cluster_of() as cluster:
            players = Players(await cluster.add("tm1"), await cluster.add("tm2"))
            await cluster.submit(batch_graph(make_graph, **{"restart-strategy.type": strategy}))
            home, rival = await players.rival()
            straggler_home, straggler = players.deployed["v0", 1, 0]
            assert home is not straggler_home
            assert rival.HasField("beside")
            assert not straggler.HasField("beside")
            assert rival.beside == straggler.attempt.attempt
            details = await details_with_rival(cluster)
            (shown,) = details.vertices[0].speculative_attempts
            assert (shown.subtask_index, shown.attempt) == (1, rival.attempt.attempt)
            assert (shown.taskmanager_id, shown.slot_id) == (home.id, rival.slot_id)
            assert [one.attempt for one in details.vertices[0].subtasks] == [0, 0]
            told = {
                command.attempt.attempt: [split.id for split in command.add_splits.splits]
                for command in players.commands
                if command.HasField("add_splits") and command.attempt.subtask_index == 1
            }
            assert told[rival.attempt.attempt] == told[0] != []
            assert counted(cluster) == 1.0
            assert counted(cluster, "_won") == 0.0
            players.finish("v0", 1, rival.attempt.attempt)
            details = await cluster.wait_for(JOB, "FINISHED")
            assert [one.attempt for one in details.vertices[0].subtasks] == [0, 1]
            read = players.deployed["v1", 0, 0][1].inputs[0].channels[1].producer_attempt
            assert read.attempt == 1
            assert straggler.slot_id in straggler_home.freed
            assert not home.canceled
            assert not straggler_home.canceled
            assert details.summary.restarts == 0

    run(scenario)


@pytest.mark.parametrize("refused", ["process", "deployment", "splits"])
def test_a_rival_that_cannot_be_started_harms_nobody(
    cluster_of: Any, make_graph: Any, refused: str
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            fakes = [await cluster.add("tm1"), await cluster.add("tm2")]
            players = Players(*fakes, refused=refused)
            await cluster.submit(batch_graph(make_graph))
            await players.has_refused.wait()
            request = client_pb2.WatchJobRequest(job_id=JOB, interval_ms=10)
            async for details in cluster.client.WatchJob(request, timeout=DEADLINE_S):
                if counted(cluster) >= 1 and not details.vertices[0].speculative_attempts:
                    break
            for fake in fakes:
                fake.refuse_allocation = False
            players.finish("v0", 1, 0)
            details = await cluster.wait_for(JOB, "FINISHED")
            assert [one.attempt for one in details.vertices[0].subtasks] == [0, 0]
            assert details.summary.restarts == 0
            assert not details.HasField("failure")

    run(scenario)


def test_no_rival_goes_where_the_code_cannot_run(cluster_of: Any, make_graph: Any) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            numpy = {"packages": ["numpy==2.0"]}
            players = Players(await cluster.add("tm1", **numpy))
            graph = batch_graph(make_graph)
            graph.requirements.append("numpy")
            await cluster.submit(graph)
            await players.wait_for("v0", 1, 0)
            unfit, fit = await cluster.add("tm2"), await cluster.add("tm3", **numpy)
            players.listen(unfit, fit)
            home, rival = await players.rival()
            assert home is fit
            players.finish("v0", 1, rival.attempt.attempt)
            await cluster.wait_for(JOB, "FINISHED")
            assert not unfit.allocated

    run(scenario)
