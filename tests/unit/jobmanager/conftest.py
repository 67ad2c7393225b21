"""A JobManager in this process and TaskManagers that only pretend to run tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow as pa
import pytest
from typing_extensions import override

from common.clock import SystemClock
from common.grpc_server import make_server
from common.pb import internal_pb2, internal_pb2_grpc
from jobmanager.assembly_runner import RunningJobManager, serving
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.config import Configuration
from penstock.pb import client_pb2, client_pb2_grpc, graph_pb2
from penstock.rows.schema import schema_to_bytes
from tests.support.jobs import DEADLINE_S

STATES = client_pb2.AttemptState


class FakeTaskManager(internal_pb2_grpc.TaskManagerInternalServicer):
    """Answers every call, reports what a test tells it to, and remembers what it was asked.

    ``on_deploy`` decides what becomes of a deployed task; the default runs it to RUNNING.
    """

    def __init__(self, taskmanager_id: str, jobmanager_port: int, slots: int = 2) -> None:
        self.id = taskmanager_id
        self.slots = slots
        self.incarnation = f"{taskmanager_id}-1"
        self.packages: Sequence[str] = ()
        self.allocated: list[str] = []
        self.freed: list[str] = []
        self.deployed: list[internal_pb2.TaskDeployment] = []
        self.commands: list[internal_pb2.TaskCommand] = []
        self.canceled: list[internal_pb2.AttemptId] = []
        self.ends_cancelled = True
        self._ending: list[internal_pb2.AttemptId] = []
        self.config: dict[str, str] = {}
        self.refuse_allocation = False
        self.allocation_errors: list[Exception] = []
        self.allocations: list[internal_pb2.AllocateSlotsRequest] = []
        self.refuse_freeing = False
        self.on_probe: Callable[[], Awaitable[object]] | None = None
        self.on_command: Callable[[internal_pb2.TaskCommand], Any] | None = None
        self.on_deploy: Callable[[internal_pb2.TaskDeployment], Any] = self.run_to_running
        self.on_sweep: Callable[[Any, Any], Awaitable[Any]] | None = None
        self.on_free: Callable[[], Awaitable[object]] | None = None
        self.all_freed = asyncio.Event()
        self.held: list[internal_pb2.HeldPartition] = []
        self.held_attempts: Sequence[internal_pb2.HeldAttempt] = ()
        self.promoted: list[internal_pb2.PromotedSet] = []
        self.version = 0
        self.refuse_promotion = False
        self.promotions: list[tuple[str, bool]] = []
        self.released: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.refuse_releasing = False
        self._jobmanager_port = jobmanager_port
        self._reports: asyncio.Queue[internal_pb2.TaskEvent] = asyncio.Queue()
        self.server = make_server()
        internal_pb2_grpc.add_TaskManagerInternalServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> None:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._jobmanager_port}")
        self.jobmanager = internal_pb2_grpc.JobManagerInternalStub(self.channel)
        await self.register()

    async def register(self) -> None:
        response = await self.jobmanager.RegisterTaskManager(
            internal_pb2.RegisterTaskManagerRequest(
                taskmanager_id=self.id,
                protocol_version=DAEMON_PROTOCOL_VERSION,
                version="9.8",
                rpc_address=f"127.0.0.1:{self.port}",
                slots=self.slots,
                python_version="3.11",
                cloudpickle_version="3.1.2",
                incarnation=self.incarnation,
                packages=self.packages,
                partition_endpoint=internal_pb2.DataEndpoint(
                    slot_id="partitions", host_id="h", unix_path=f"/{self.id}"
                ),
                holdings=self.holdings(),
                held_attempts=self.held_attempts,
            )
        )
        self.leader_epoch = response.leader_epoch

    def holdings(self) -> internal_pb2.Holdings:
        self.version += 1
        return internal_pb2.Holdings(
            partitions=self.held,
            count=len(self.held),
            size_bytes=sum(one.size_bytes for one in self.held),
            promoted=self.promoted,
            version=self.version,
        )

    async def beat(self, held: Sequence[tuple[str, str]] = ()) -> bool:
        """A heartbeat that names these slots and jobs; whether it is known."""
        request = internal_pb2.HeartbeatRequest(
            taskmanager_id=self.id,
            incarnation=self.incarnation,
            leader_epoch=self.leader_epoch,
            held_slots=[internal_pb2.HeldSlot(slot_id=slot, job_id=job) for slot, job in held],
            holdings=self.holdings(),
        )
        known: bool = (await self.jobmanager.Heartbeat(request)).known
        return known

    async def kill(self) -> None:
        await self.server.stop(None)

    async def close(self) -> None:
        await self.server.stop(None)
        await self.channel.close()

    # what it does with tasks

    def run_to_running(self, task: internal_pb2.TaskDeployment) -> None:
        self.report_state(task.attempt, STATES.ATTEMPT_STATE_INITIALIZING)
        self.report_state(task.attempt, STATES.ATTEMPT_STATE_RUNNING)

    def report_state(
        self,
        attempt: internal_pb2.AttemptId,
        state: Any,
        failure: client_pb2.FailureCause | None = None,
    ) -> None:
        changed = internal_pb2.AttemptStateChanged(state=state, failure=failure)
        self.report(internal_pb2.TaskEvent(attempt=attempt, state_changed=changed))

    def end_cancelled(self) -> None:
        """What was told to has come to its end."""
        ending, self._ending = self._ending, []
        for attempt in ending:
            self.report_state(attempt, STATES.ATTEMPT_STATE_CANCELED)

    def report(self, event: internal_pb2.TaskEvent) -> None:
        self._reports.put_nowait(event)

    async def send_reports(self) -> None:
        while True:
            events = [await self._reports.get()]
            while not self._reports.empty():
                events.append(self._reports.get_nowait())
            await self.jobmanager.ReportTaskEvents(
                internal_pb2.ReportTaskEventsRequest(
                    taskmanager_id=self.id,
                    incarnation=self.incarnation,
                    leader_epoch=self.leader_epoch,
                    events=events,
                ),
                timeout=DEADLINE_S,
            )

    # what the JobManager calls

    @override
    async def AllocateSlots(self, request: Any, context: Any) -> Any:
        self.allocations.append(request)
        if self.allocation_errors:
            raise self.allocation_errors.pop()
        if self.refuse_allocation:
            raise RuntimeError("no memory")
        self.allocated += (id for id in request.slot_ids if id not in self.allocated)
        self.config = dict(request.config)
        return internal_pb2.AllocateSlotsResponse(
            endpoints=[
                internal_pb2.DataEndpoint(slot_id=slot_id, host_id="h", unix_path=f"/{slot_id}")
                for slot_id in request.slot_ids
            ]
        )

    @override
    async def DeployTasks(self, request: Any, context: Any) -> Any:
        self.deployed += request.tasks
        for task in request.tasks:
            assert task.slot_id in self.allocated
            self.on_deploy(task)
        return internal_pb2.DeployTasksResponse()

    @override
    async def SendTaskCommands(self, request: Any, context: Any) -> Any:
        if not request.commands and self.on_probe is not None:
            await self.on_probe()
        ends = [one.attempt for one in request.commands if one.HasField("cancel")]
        self.canceled += ends
        self._ending += ends
        if self.ends_cancelled:
            self.end_cancelled()
        told = [one for one in request.commands if not one.HasField("cancel")]
        self.commands += told
        for command in told:
            if self.on_command is not None:
                self.on_command(command)
            elif command.HasField("commit_output"):
                self.report_state(command.attempt, STATES.ATTEMPT_STATE_FINISHED)
        return internal_pb2.SendTaskCommandsResponse()

    @override
    async def FreeSlots(self, request: Any, context: Any) -> Any:
        if self.refuse_freeing:
            raise RuntimeError("too busy")
        if self.on_free is not None:
            await self.on_free()
        self.freed += request.slot_ids
        if set(self.freed) >= set(self.allocated):
            self.all_freed.set()
        return internal_pb2.FreeSlotsResponse()

    @override
    async def SweepOutput(self, request: Any, context: Any) -> Any:
        if self.on_sweep is None:
            return internal_pb2.SweepOutputResponse()
        return await self.on_sweep(request, context)

    @override
    async def ReleasePartitions(self, request: Any, context: Any) -> Any:
        self.released.put_nowait((request.job_id, len(request.partitions)))
        if self.refuse_releasing:
            raise RuntimeError("too busy")
        return internal_pb2.ReleasePartitionsResponse()

    @override
    async def PromotePartitions(self, request: Any, context: Any) -> Any:
        if self.refuse_promotion:
            raise RuntimeError("no inodes left")
        self.promotions.append((self.id, request.set.confirmed))
        for partition in request.partitions:
            held = internal_pb2.HeldPartition(
                job_id=request.set.job_id, partition=partition, promoted_as=request.set.name
            )
            if held not in self.held:
                self.held.append(held)
        name = (request.set.name, request.set.job_id)
        others = [one for one in self.promoted if (one.name, one.job_id) != name]
        self.promoted = [*others, request.set]
        return internal_pb2.PromotePartitionsResponse(holdings=self.holdings())

    @override
    async def DropPromotedPartitions(self, request: Any, context: Any) -> Any:
        def is_dropped(name: str, job_id: str) -> bool:
            return name == request.name and request.job_id in ("", job_id)

        kept = [one for one in self.held if not is_dropped(one.promoted_as, one.job_id)]
        dropped, self.held = len(self.held) - len(kept), kept
        self.promoted = [one for one in self.promoted if not is_dropped(one.name, one.job_id)]
        return internal_pb2.DropPromotedPartitionsResponse(
            dropped=dropped, holdings=self.holdings()
        )

    @override
    async def ReadTaskLogs(self, request: Any, context: Any) -> Any:
        for task in self.deployed:
            attempt = task.attempt
            yield client_pb2.LogChunk(
                vertex=attempt.vertex,
                subtask_index=attempt.subtask_index,
                data=f"{self.id}\n".encode(),
            )


class Cluster:
    """A JobManager, its fake TaskManagers, and a client's stub."""

    def __init__(self, jobmanager: RunningJobManager, tasks: asyncio.TaskGroup) -> None:
        self.jobmanager = jobmanager
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{jobmanager.ports.port}")
        self.client = client_pb2_grpc.JobManagerStub(self.channel)
        self.taskmanagers: list[FakeTaskManager] = []
        self._tasks = tasks
        self.background: list[asyncio.Task[None]] = []

    async def add(self, taskmanager_id: str, slots: int = 2, **fields: Any) -> FakeTaskManager:
        taskmanager = FakeTaskManager(taskmanager_id, self.jobmanager.ports.port, slots)
        for name, value in fields.items():
            setattr(taskmanager, name, value)
        self.taskmanagers.append(taskmanager)
        await taskmanager.start()
        self.background.append(self._tasks.create_task(taskmanager.send_reports()))
        return taskmanager

    async def submit(self, graph: graph_pb2.JobGraph, job_id: str = "0" * 32) -> str:
        await self.client.SubmitJob(client_pb2.SubmitJobRequest(job_id=job_id, graph=graph))
        return job_id

    async def wait_for(self, job_id: str, *states: str) -> client_pb2.JobDetails:
        wanted = {client_pb2.JobState.Value(f"JOB_STATE_{state}") for state in states}
        watch = self.client.WatchJob(client_pb2.WatchJobRequest(job_id=job_id), timeout=DEADLINE_S)
        async for details in watch:
            if details.summary.state in wanted:
                watch.cancel()
                return details
        raise AssertionError(f"the job ended otherwise: {details}")


def job_graph(parallelism: int = 2, **fields: Any) -> graph_pb2.JobGraph:
    """source -> hash -> sink."""
    schema = schema_to_bytes(pa.schema([("line", pa.string())]))
    nothing = schema_to_bytes(pa.schema([]))
    return graph_pb2.JobGraph(
        name="test",
        vertices=[
            graph_pb2.Vertex(
                id="v0",
                name="read",
                parallelism=parallelism,
                max_parallelism=128,
                slot_group="default",
                operators=[
                    graph_pb2.Operator(
                        uid="src",
                        name="src",
                        input_schema=nothing,
                        output_schema=schema,
                        source=graph_pb2.SourceSpec(
                            socket=graph_pb2.SocketSource(host="127.0.0.1", port=1), bounded=True
                        ),
                    )
                ],
            ),
            graph_pb2.Vertex(
                id="v1",
                name="write",
                parallelism=parallelism,
                max_parallelism=128,
                slot_group="default",
                operators=[
                    graph_pb2.Operator(
                        uid="snk",
                        name="snk",
                        input_schema=schema,
                        output_schema=nothing,
                        sink=graph_pb2.SinkSpec(collect=graph_pb2.CollectSink(collect_id="c0")),
                    )
                ],
            ),
        ],
        edges=[
            graph_pb2.Edge(
                id="e0",
                source_vertex="v0",
                target_vertex="v1",
                partitioning=graph_pb2.PARTITIONING_HASH,
                key_columns=["line"],
                source_output=graph_pb2.ChainInput(operator_index=0),
                schema=schema,
            )
        ],
        **fields,
    )


@pytest.fixture
def make_graph() -> Callable[..., graph_pb2.JobGraph]:
    return job_graph


@pytest.fixture
def cluster_of(tmp_path: Path) -> Callable[..., Any]:
    """``async with cluster_of(config) as cluster``: everything is closed at the end."""

    @asynccontextmanager
    async def open_cluster(config: dict[str, object] | None = None) -> AsyncIterator[Cluster]:
        settings = {
            "jobmanager.rpc.port": 0,
            "jobmanager.metrics.port": -1,
            "security.open-loopback": True,
            # TaskManagers that only pretend beat when they are told to.
            "heartbeat.timeout": "1min",
            **(config or {}),
        }
        configuration = Configuration.from_mapping(settings)
        async with (
            serving(configuration, tmp_path, SystemClock()) as jobmanager,
            asyncio.TaskGroup() as tasks,
        ):
            cluster = Cluster(jobmanager, tasks)
            try:
                yield cluster
            finally:
                await jobmanager.dispatcher.stop()
                for task in cluster.background:
                    task.cancel()
                for taskmanager in cluster.taskmanagers:
                    await taskmanager.close()
                await cluster.channel.close()

    return open_cluster
