"""Calls from the JobManager to one TaskManager.

Each call has a deadline and carries the leader epoch. A call that fails raises ``StreamError``: the
TaskManager's own error where it answered with one, ``TaskManagerLost`` where it could not be
reached.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from common.daemon_channel import DaemonChannel
from common.grpc_options import channel_options
from common.message_bounds import check_message
from common.pb import internal_pb2, internal_pb2_grpc
from common.tls.daemon_tls_runner import DaemonTls
from jobmanager.rpc.reachability_client import ReachabilityClient
from penstock.client.grpc_errors import UNANSWERED, error_from_rpc, is_ours, unanswered
from penstock.client.keyring import Token
from penstock.client.protocol import MESSAGE_SIZE_MAX_BYTES
from penstock.errors import StreamError, TaskManagerLost
from penstock.pb import client_pb2, graph_pb2

_ResponseT = TypeVar("_ResponseT", bound=Message)
_MessageT = TypeVar("_MessageT", bound=Message)

# Starting slot processes takes longer than any other call: imports on a busy machine.
_ALLOCATION_TIMEOUT_FACTOR = 3

_BATCH_SIZE_MAX_BYTES = MESSAGE_SIZE_MAX_BYTES // 2

_Endpoint = tuple[str, str, str, int]


def _place(endpoint: internal_pb2.DataEndpoint) -> _Endpoint:
    """Where it is, whatever slot is served there."""
    return (endpoint.host_id, endpoint.unix_path, endpoint.tcp_host, endpoint.tcp_port)


def in_batches(messages: Sequence[_MessageT], size_max_bytes: int) -> list[list[_MessageT]]:
    """Neighbours together up to a size; a message that is larger by itself stays alone."""
    batches: list[list[_MessageT]] = []
    size_bytes = 0
    for message in messages:
        if not batches or size_bytes + message.ByteSize() > size_max_bytes:
            batches.append([])
            size_bytes = 0
        batches[-1].append(message)
        size_bytes += message.ByteSize()
    return batches


class TaskManagerClient:
    """A channel to one TaskManager.

    Args:
        taskmanager_id: for error messages.
        address: host:port.
        token: the cluster's secret, "" without one.
        rpc_timeout_ms: deadline of a call.
        silence_max_ms: how long the TaskManager may pause without a call failing.
        incarnation: which start of the TaskManager the calls are for.

    Attributes:
        reachability: the connection that tells whether it is still there.
    """

    def __init__(
        self,
        taskmanager_id: str,
        address: str,
        *,
        token: Token,
        leader_epoch: int,
        rpc_timeout_ms: int,
        silence_max_ms: int,
        incarnation: str,
        tls: DaemonTls | None = None,
    ) -> None:
        self.taskmanager_id = taskmanager_id
        self.address = address
        self._leader_epoch = leader_epoch
        self._incarnation = incarnation
        self._allocation_ids = itertools.count(1)
        self._timeout_s = rpc_timeout_ms / 1000
        self._channel = DaemonChannel(address, token, channel_options(silence_max_ms), tls)
        self._stub: internal_pb2_grpc.TaskManagerInternalAsyncStub = (
            internal_pb2_grpc.TaskManagerInternalStub(self._channel.channel)
        )
        self.reachability = ReachabilityClient(
            address, token=token, leader_epoch=leader_epoch, incarnation=incarnation, tls=tls
        )
        self._endpoints: dict[str, _Endpoint] = {}
        self._partition_endpoint: internal_pb2.DataEndpoint | None = None

    def note_endpoint(self, endpoint: internal_pb2.DataEndpoint) -> None:
        """A process of this TaskManager takes data connections there."""
        self._endpoints[endpoint.slot_id] = _place(endpoint)

    def note_partition_endpoint(self, endpoint: internal_pb2.DataEndpoint) -> None:
        """What finished attempts of this TaskManager have left behind is served there."""
        self.note_endpoint(endpoint)
        self._partition_endpoint = endpoint

    @property
    def partition_endpoint(self) -> internal_pb2.DataEndpoint:
        """Where that is served.

        Raises:
            TaskManagerLost: it has not said so.
        """
        if self._partition_endpoint is None:
            raise TaskManagerLost(f"TaskManager {self.taskmanager_id} has no partition server")
        return self._partition_endpoint

    def serves(self, endpoint: internal_pb2.DataEndpoint) -> bool:
        """Whether data connections to this place go to this TaskManager."""
        return _place(endpoint) in self._endpoints.values()

    async def allocate_slots(
        self,
        job_id: str,
        slot_ids: Sequence[str],
        artifacts: Sequence[graph_pb2.Artifact],
        config: Mapping[str, str],
        requirements: Sequence[str],
        oldest_peer_epoch: int,
    ) -> internal_pb2.AllocateSlotsResponse:
        """Starts slot processes where there are none, and returns where all listen.

        Args:
            oldest_peer_epoch: slots of the job run on that were started under this leader.
        """
        request = internal_pb2.AllocateSlotsRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            job_id=job_id,
            slot_ids=slot_ids,
            artifacts=artifacts,
            config=config,
            requirements=requirements,
            allocation_id=next(self._allocation_ids),
            oldest_peer_epoch=oldest_peer_epoch,
        )
        timeout_s = self._timeout_s * _ALLOCATION_TIMEOUT_FACTOR
        response = await self._call(
            "start slots", lambda: self._stub.AllocateSlots(request, timeout=timeout_s)
        )
        for endpoint in response.endpoints:
            self.note_endpoint(endpoint)
        if response.HasField("partition_endpoint"):
            self.note_partition_endpoint(response.partition_endpoint)
        return response

    async def deploy_tasks(self, tasks: Sequence[internal_pb2.TaskDeployment]) -> None:
        """Starts attempts, in as many calls as the size of their code asks for."""
        for batch in in_batches(tasks, _BATCH_SIZE_MAX_BYTES):
            await self._deploy(batch)

    async def _deploy(self, tasks: Sequence[internal_pb2.TaskDeployment]) -> None:
        request = internal_pb2.DeployTasksRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            tasks=tasks,
            allocation_id=next(self._allocation_ids),
        )
        await self._call(
            "deploy tasks", lambda: self._stub.DeployTasks(request, timeout=self._timeout_s)
        )

    async def send_commands(self, commands: Sequence[internal_pb2.TaskCommand]) -> None:
        """Tells running attempts something."""
        for batch in in_batches(commands, _BATCH_SIZE_MAX_BYTES):
            await self._send(batch)

    async def _send(self, commands: Sequence[internal_pb2.TaskCommand]) -> None:
        request = internal_pb2.SendTaskCommandsRequest(
            leader_epoch=self._leader_epoch, incarnation=self._incarnation, commands=commands
        )
        await self._call(
            "take commands", lambda: self._stub.SendTaskCommands(request, timeout=self._timeout_s)
        )

    async def free_slots(self, job_id: str, slot_ids: Sequence[str]) -> None:
        """Ends slot processes."""
        request = internal_pb2.FreeSlotsRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            job_id=job_id,
            slot_ids=slot_ids,
            allocation_id=next(self._allocation_ids),
        )
        await self._call(
            "free slots", lambda: self._stub.FreeSlots(request, timeout=self._timeout_s)
        )

    async def sweep_output(self, job_id: str, sinks: Sequence[internal_pb2.SweptSink]) -> int:
        """Removes hidden files of a job that is over for good; returns how many there were."""
        request = internal_pb2.SweepOutputRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            job_id=job_id,
            sinks=sinks,
        )
        response: internal_pb2.SweepOutputResponse = await self._call(
            "sweep output", lambda: self._stub.SweepOutput(request, timeout=self._timeout_s)
        )
        return response.file_count

    async def release_partitions(
        self, job_id: str, partitions: Sequence[internal_pb2.PartitionId]
    ) -> None:
        """Drops partitions that nobody needs; none named = all of the job."""
        request = internal_pb2.ReleasePartitionsRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            job_id=job_id,
            partitions=partitions,
        )
        await self._call(
            "release partitions",
            lambda: self._stub.ReleasePartitions(request, timeout=self._timeout_s),
        )

    async def promote_partitions(
        self, promoted: internal_pb2.PromotedSet, partitions: Sequence[internal_pb2.PartitionId]
    ) -> internal_pb2.Holdings:
        """Lets complete partitions outlive their job, all or none; returns what is held then."""
        request = internal_pb2.PromotePartitionsRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            partitions=partitions,
            set=promoted,
        )
        response = await self._call(
            "promote partitions",
            lambda: self._stub.PromotePartitions(request, timeout=self._timeout_s),
        )
        return response.holdings

    async def drop_promoted_partitions(
        self, name: str, job_id: str = ""
    ) -> internal_pb2.DropPromotedPartitionsResponse:
        """Drops what was promoted under a name; of one job, "" = of all."""
        request = internal_pb2.DropPromotedPartitionsRequest(
            leader_epoch=self._leader_epoch, incarnation=self._incarnation, name=name, job_id=job_id
        )
        return await self._call(
            "drop promoted partitions",
            lambda: self._stub.DropPromotedPartitions(request, timeout=self._timeout_s),
        )

    async def read_logs(
        self, job_id: str, vertex: str, subtask_index: int
    ) -> AsyncIterator[client_pb2.LogChunk]:
        """What attempts have written; "" = all vertices, -1 = all subtasks."""
        request = internal_pb2.ReadTaskLogsRequest(
            leader_epoch=self._leader_epoch,
            incarnation=self._incarnation,
            job_id=job_id,
            vertex=vertex,
            subtask_index=subtask_index,
        )
        call = self._stub.ReadTaskLogs(request, timeout=self._timeout_s)
        try:
            async for chunk in call:
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise self._error("send its logs", error) from error

    async def close(self) -> None:
        """Ends the channel and whatever is under way on it."""
        await self.reachability.close()
        await self._channel.close()

    async def _call(self, action: str, call: Callable[[], Awaitable[_ResponseT]]) -> _ResponseT:
        try:
            response = await call()
        except grpc.aio.AioRpcError as error:
            raise self._error(action, error) from error
        except grpc.aio.UsageError as error:
            raise self._closed(action) from error
        except asyncio.CancelledError as error:
            # Closing a channel cancels the calls on it, not the task that awaits them.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._closed(action) from error
        check_message(response)
        return response

    def _closed(self, action: str) -> TaskManagerLost:
        return TaskManagerLost(
            f"TaskManager {self.taskmanager_id} at {self.address} was given up before it could "
            f"{action}"
        )

    def _error(self, action: str, error: grpc.aio.AioRpcError) -> StreamError:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            # While tokens are exchanged: it may accept this one in a moment, and nobody's job shall end for that.
            return TaskManagerLost(
                f"TaskManager {self.taskmanager_id} at {self.address} did not {action}: {error.details()}"
            )
        if is_ours(error) or error.code() not in UNANSWERED:
            return error_from_rpc(error)
        reason = self._channel.refusal or (
            f"{unanswered(error.code(), error.details())}; it has ended, is cut off or overloaded: its log tells"
        )
        return TaskManagerLost(
            f"TaskManager {self.taskmanager_id} at {self.address} did not {action}: {reason}"
        )
