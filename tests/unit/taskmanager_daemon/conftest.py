"""A TaskManager daemon in this process, real slot processes behind it, a fake JobManager before it."""

# ruff: noqa: N802, ASYNC109 - gRPC names its methods; a deadline per call

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from common.grpc_options import channel_options
from common.grpc_server import make_server
from common.pb import internal_pb2, internal_pb2_grpc
from common.process import parse_daemon_arguments
from penstock.client.grpc_errors import error_from_rpc
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.errors import StreamError
from penstock.pb import client_pb2, graph_pb2
from taskmanager.main import TaskManagerDaemon
from tests.support import small_disk as small_disks

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FORKSERVER_ARGUMENTS = [
    "--entry",
    "fake_slot:run",
    "--partition-server",
    "fake_slot:serve_partitions",
    "--warm-up",
    "fake_slot:warm_up",
    "--preload",
    "",
]
DEADLINE_S = 90.0


def slot_environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(HERE)])
    return {**os.environ, "PYTHONPATH": path, **extra}


class FakeJobManager(internal_pb2_grpc.JobManagerInternalServicer):
    """Remembers what it is told; answers what the test wants."""

    def __init__(self) -> None:
        self.registrations: list[internal_pb2.RegisterTaskManagerRequest] = []
        self.heartbeats: list[internal_pb2.HeartbeatRequest] = []
        self.events: list[internal_pb2.TaskEvent] = []
        self.log: list[str] = []
        self.results: list[internal_pb2.PushResultsRequest] = []
        self.goodbyes: list[internal_pb2.GoodbyeRequest] = []
        self.refuse_results: StreamError | None = None
        self.artifacts: dict[str, bytes] = {}
        self.downloads: list[str] = []
        self.cluster_id = "test"
        self.epoch = 1
        self.heartbeat_timeout_ms = 5000
        self.is_known = True
        self.is_silent = False
        self.unanswered: list[float] = []
        self.refuse_registration: StreamError | None = None
        self.protocol_version = DAEMON_PROTOCOL_VERSION
        self.room = asyncio.Event()
        self.room.set()
        self.satisfied_at = -1
        self.fail_reports = 0
        self.changed = asyncio.Condition()

    async def note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, predicate: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(predicate)

    async def RegisterTaskManager(self, request: Any, context: Any) -> Any:
        if self.refuse_registration is not None:
            raise self.refuse_registration
        self.registrations.append(request)
        await self.note()
        return internal_pb2.RegisterTaskManagerResponse(
            leader_epoch=self.epoch,
            protocol_version=self.protocol_version,
            version="0.0.9",
            cluster_id=self.cluster_id,
            heartbeat_interval_ms=50,
            heartbeat_timeout_ms=self.heartbeat_timeout_ms,
        )

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        if self.is_silent:
            self.unanswered.append(asyncio.get_running_loop().time())
            await self.note()
            await asyncio.Event().wait()
        self.heartbeats.append(request)
        self.log.append("heartbeat")
        await self.note()
        return internal_pb2.HeartbeatResponse(
            known=self.is_known and request.incarnation == self.registrations[-1].incarnation
        )

    async def ReportTaskEvents(self, request: Any, context: Any) -> Any:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.fail_reports:
            self.fail_reports -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.events += request.events
        self.log.append("events")
        await self.note()
        return internal_pb2.ReportTaskEventsResponse()

    async def PushResults(self, request: Any, context: Any) -> Any:
        self.results.append(request)
        await self.note()
        if self.refuse_results is not None:
            raise self.refuse_results
        await self.room.wait()
        return internal_pb2.PushResultsResponse(
            satisfied=request.chunk.sequence == self.satisfied_at
        )

    async def DownloadArtifact(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.downloads.append(request.id)
        data = self.artifacts[request.id]
        for start in range(0, len(data), 7):
            yield internal_pb2.ArtifactData(data=data[start : start + 7])

    async def Goodbye(self, request: Any, context: Any) -> Any:
        self.goodbyes.append(request)
        await self.note()
        return internal_pb2.GoodbyeResponse()

    async def until_silent_for(self, seconds: float) -> None:
        """Answers nothing; returns when it has not answered heartbeats for so long."""
        self.is_silent = True
        self.unanswered.clear()
        await self.until(
            lambda: self.unanswered and self.unanswered[-1] - self.unanswered[0] > seconds
        )

    async def until_registered_again(self) -> None:
        """Forgets the TaskManager; returns when it serves a new registration."""
        count = len(self.registrations)
        self.is_known = False
        await self.until(lambda: len(self.registrations) > count)
        self.is_known = True
        incarnation = self.registrations[-1].incarnation
        await self.until(lambda: self.heartbeats[-1].incarnation == incarnation)

    def states(self, attempt: internal_pb2.AttemptId) -> list[int]:
        return [
            event.state_changed.state
            for event in self.events
            if event.attempt == attempt and event.WhichOneof("event") == "state_changed"
        ]

    async def until_state(self, attempt: internal_pb2.AttemptId, state: int) -> Any:
        """The failure of the event that says so."""
        await self.until(lambda: state in self.states(attempt))
        for event in self.events:
            if event.attempt == attempt and event.state_changed.state == state:
                return event.state_changed.failure
        raise AssertionError


@dataclass
class Cluster:
    """The daemon, its JobManager, and the JobManager's line to it."""

    directory: Path
    jobmanager: FakeJobManager
    stub: Any
    daemon: asyncio.Task[None]
    options: dict[str, str] = field(default_factory=dict)
    allocation_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def incarnation(self) -> str:
        registered: str = self.jobmanager.registrations[-1].incarnation
        return registered

    async def call(
        self, method: str, request: Any, timeout: float = DEADLINE_S, *, is_fenced: bool = True
    ) -> Any:
        """A call, with the incarnation and the number that a JobManager gives it."""
        if is_fenced and not request.incarnation:
            request.incarnation = self.incarnation
        if is_fenced and "allocation_id" in request.DESCRIPTOR.fields_by_name:
            request.allocation_id = next(self.allocation_ids)
        try:
            return await getattr(self.stub, method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None

    async def allocate(
        self, job: str = "job", slots: tuple[str, ...] = ("s0",), **more: Any
    ) -> Any:
        epoch = more.pop("epoch", self.jobmanager.epoch)
        request = internal_pb2.AllocateSlotsRequest(
            leader_epoch=epoch, job_id=job, slot_ids=slots, **more
        )
        return (await self.call("AllocateSlots", request)).endpoints

    async def deploy(
        self,
        behaviour: str,
        job: str = "job",
        slot: str = "s0",
        vertex: str = "v0",
        subtask: int = 0,
        number: int = 0,
    ) -> internal_pb2.AttemptId:
        attempt = internal_pb2.AttemptId(
            job_id=job, vertex=vertex, subtask_index=subtask, attempt=number
        )
        task = internal_pb2.TaskDeployment(
            attempt=attempt,
            slot_id=slot,
            leader_epoch=self.jobmanager.epoch,
            vertex=graph_pb2.Vertex(id=vertex, name=behaviour),
        )
        request = internal_pb2.DeployTasksRequest(leader_epoch=self.jobmanager.epoch, tasks=[task])
        await self.call("DeployTasks", request)
        return attempt

    async def cancel(self, *attempts: internal_pb2.AttemptId, is_final: bool = False) -> None:
        cancel = internal_pb2.CancelTask(is_final=is_final)
        await self.call(
            "SendTaskCommands",
            internal_pb2.SendTaskCommandsRequest(
                leader_epoch=self.jobmanager.epoch,
                commands=[internal_pb2.TaskCommand(attempt=one, cancel=cancel) for one in attempts],
            ),
        )

    async def free(self, job: str = "job", slots: tuple[str, ...] = ()) -> None:
        await self.call(
            "FreeSlots",
            internal_pb2.FreeSlotsRequest(
                leader_epoch=self.jobmanager.epoch, job_id=job, slot_ids=slots
            ),
        )


@asynccontextmanager
async def running_cluster(
    directory: Path,
    environment: dict[str, str] | None = None,
    forkserver_arguments: Sequence[str] = FORKSERVER_ARGUMENTS,
    **options: str,
) -> AsyncIterator[Cluster]:
    jobmanager = FakeJobManager()
    server = make_server()
    internal_pb2_grpc.add_JobManagerInternalServicer_to_server(jobmanager, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arguments = parse_daemon_arguments(
        "taskmanager", ["--dir", str(directory), "--jobmanager", f"127.0.0.1:{port}"]
    )
    values = {
        "taskmanager.metrics.port": "-1",
        "task.cancellation.timeout": "200ms",
        "security.open-loopback": "true",
    }
    # "a_b__c" stands for "a.b-c".
    more = {key.replace("__", "-").replace("_", "."): value for key, value in options.items()}
    config = arguments.load_configuration().merged({**values, **more})
    daemon = TaskManagerDaemon(
        arguments, config, "tm", environment or slot_environment(), forkserver_arguments
    )
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(daemon.run())
            registered = group.create_task(jobmanager.until(lambda: jobmanager.registrations))
            await asyncio.wait([task, registered], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                registered.cancel()
                await task
            address = jobmanager.registrations[0].rpc_address
            async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
                stub = internal_pb2_grpc.TaskManagerInternalStub(channel)
                yield Cluster(directory, jobmanager, stub, task)
            jobmanager.is_silent = False
            task.cancel()
    finally:
        await server.stop(0)


def run_async(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


@pytest.fixture
def cluster() -> Any:
    """``async with cluster(tmp_path) as c``."""
    return running_cluster


@pytest.fixture
def go() -> Any:
    """Runs a coroutine function to its end, with a deadline."""
    return run_async


@pytest.fixture
def environment() -> Any:
    """Environment variables under which slots find the fake."""
    return slot_environment


@pytest.fixture
def forkserver_arguments() -> list[str]:
    return list(FORKSERVER_ARGUMENTS)


@pytest.fixture
def python() -> list[str]:
    return [sys.executable, "-P"]


STATE = client_pb2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with small_disks.small_disk(tmp_path / "disk") as disk:
        yield disk
