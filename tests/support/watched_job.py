"""A job on real daemons, seen from outside: who runs where in which attempt, what failed, and how it ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import penstock as ps
from common.clock import SystemClock
from penstock.client.client import Client
from penstock.client.job import TERMINAL_STATES, JobHandle
from penstock.errors import StreamError
from penstock.pb import client_pb2
from tests.support.processes import DaemonCluster, Deadline

DEADLINE_S = 90.0
LOOK_MS = 50

Subtask = tuple[str, int]
"""Vertex id and index."""


@dataclass(frozen=True)
class Placed:
    """One subtask as the JobManager shows it."""

    attempt: int
    state: str
    taskmanager_id: str
    slot_id: str


def placed(details: client_pb2.JobDetails) -> dict[Subtask, Placed]:
    """Every subtask of a job."""
    return {
        (vertex.id, subtask.subtask_index): Placed(
            subtask.attempt,
            client_pb2.AttemptState.Name(subtask.state).removeprefix("ATTEMPT_STATE_"),
            subtask.taskmanager_id,
            subtask.slot_id,
        )
        for vertex in details.vertices
        for subtask in vertex.subtasks
    }


class WatchedJob:
    """One job that was submitted; at the end of a ``with`` block it does not run any more.

    Args:
        cluster: that it runs on.
        client: of that; not closed.
    """

    def __init__(self, cluster: DaemonCluster, client: Client, job_id: str) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self.handle = JobHandle(client, job_id)
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def await_that(
        self, condition: Callable[[client_pb2.JobDetails], object], what: str = "this"
    ) -> client_pb2.JobDetails:
        """Waits until this is so of the job."""
        deadline = Deadline(f"{what} of the job", DEADLINE_S)
        for details in self._client.watch(self.job_id, LOOK_MS):
            if condition(details):
                return details
            assert details.summary.state not in TERMINAL_STATES, details
            deadline.left()
        raise AssertionError("the JobManager stopped reporting")

    def await_running(self) -> client_pb2.JobDetails:
        """Waits until every subtask runs."""
        return self.await_that(
            lambda details: all(one.state == "RUNNING" for one in placed(details).values()),
            "that everything runs",
        )

    def await_checkpoints(self, count: int = 1) -> int:
        """Waits until so many more checkpoints have been completed; the id of the last."""
        before = self._client.checkpoints(self.job_id).completed_count
        self.await_that(
            lambda _: self._client.checkpoints(self.job_id).completed_count >= before + count,
            f"{count} checkpoints",
        )
        return self.handle.details().last_checkpoint_id

    def await_stuck(self, milliseconds: int) -> None:
        """Waits until a checkpoint has been pending for so long: something does not get on."""
        self.await_that(
            lambda _: any(
                one.status == "PENDING"
                and one.triggered_at_ms < SystemClock().now_ms() - milliseconds
                for one in self.handle.checkpoints()
            ),
            "a checkpoint that is stuck",
        )

    def placed(self) -> dict[Subtask, Placed]:
        """Every subtask now."""
        return placed(self.handle.details())

    def finish(self, seconds: float = DEADLINE_S) -> None:
        """Waits for its end, which must be a good one."""
        assert self.handle.wait(seconds).status == "FINISHED"

    def states(self) -> list[str]:
        """All states that the job has had, by the JobManagers' logs."""
        found = []
        for path in sorted((self.cluster.directory / "logs").glob("jobmanager-*.log")):
            for line in path.read_text(errors="replace").splitlines():
                if '"job.state_changed"' in line and self.job_id in line:
                    found.append(json.loads(line)["state"])
        return found

    def told(self) -> str:
        """What ``penstock exceptions`` prints."""
        ended = self.cluster.site.penstock(
            "exceptions", self.job_id, "--jobmanager", self.cluster.jobmanager
        )
        assert ended.status == 0, ended.stderr
        return ended.stdout

    def cancel(self) -> None:
        """Cancels it where it runs, and waits for its end."""
        with contextlib.suppress(StreamError):
            self.handle.cancel()
            self.handle.wait(DEADLINE_S)


def submitted(
    cluster: DaemonCluster,
    client: Client,
    build: Callable[[ps.Environment], None],
    *,
    parallelism: int,
    mode: str = "streaming",
    config: dict[str, Any] | None = None,
) -> WatchedJob:
    """Submits a job that is restarted whatever happens.

    Args:
        build: adds the job to an environment.
        mode: of the runtime.
        config: in addition to often checkpoints (in streaming mode) and quick restarts.
    """
    options: dict[str, Any] = {
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": "infinite",
        "restart-strategy.fixed-delay.delay": "100ms",
    }
    if mode == "streaming":
        options["execution.checkpointing.interval"] = "200ms"
    options.update(config or {})
    with ps.Environment(cluster.jobmanager, parallelism=parallelism, config=options) as env:
        env.set_runtime_mode(mode)
        build(env)
        return WatchedJob(cluster, client, env.submit("chaos").job_id)
