"""What the JobManager can ask of this TaskManager.

Each call is checked against leader epoch and incarnation first: only the leader with which this TaskManager has
registered is obeyed, and nothing that was meant for an earlier registration. That another one leads, it may say itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from common.pb import internal_pb2, internal_pb2_grpc
from penstock.errors import StoreTransient
from penstock.pb import client_pb2
from taskmanager.connectors.hidden_files import output_tag
from taskmanager.connectors.swept_output import sweep_output
from taskmanager.daemon.local_state_runner import LocalStateKeeper
from taskmanager.daemon.partition_keeper_runner import PartitionKeeper
from taskmanager.daemon.task_logs_store import read_logs
from taskmanager.slots.slot_supervisor_runner import SlotSupervisor

# One context type per method in the generated code; none of them is used.
_Context = Any


class TaskManagerServicer(internal_pb2_grpc.TaskManagerInternalServicer):
    """Serves ``TaskManagerInternal``; errors become statuses in the server's interceptor.

    Args:
        partitions: keeps what finished attempts have left behind.
        partition_endpoint: where that is served.
        local_state: keeps copies of snapshots.
        enter: checks the epoch and the incarnation of a call; returns when a registration holds.
        logs: holds one directory of task logs per job.
        hear_of_leader: told of a JobManager that leads, as it says itself.
    """

    def __init__(
        self,
        supervisor: SlotSupervisor,
        partitions: PartitionKeeper,
        partition_endpoint: internal_pb2.DataEndpoint,
        local_state: LocalStateKeeper,
        enter: Callable[[int, str], Awaitable[None]],
        logs: Path,
        hear_of_leader: Callable[[internal_pb2.HearOfLeaderRequest], None],
    ) -> None:
        self._supervisor = supervisor
        self._partitions = partitions
        self._partition_endpoint = partition_endpoint
        self._local_state = local_state
        self._enter = enter
        self._logs = logs
        self._hear_of_leader = hear_of_leader

    @override
    async def AllocateSlots(
        self, request: internal_pb2.AllocateSlotsRequest, context: _Context
    ) -> internal_pb2.AllocateSlotsResponse:
        """Starts a process per slot."""
        await self._enter(request.leader_epoch, request.incarnation)
        return internal_pb2.AllocateSlotsResponse(
            endpoints=await self._supervisor.allocate(request),
            partition_endpoint=self._partition_endpoint,
        )

    @override
    async def DeployTasks(
        self, request: internal_pb2.DeployTasksRequest, context: _Context
    ) -> internal_pb2.DeployTasksResponse:
        """Starts attempts."""
        await self._enter(request.leader_epoch, request.incarnation)
        await self._supervisor.deploy(request.tasks, request.allocation_id)
        return internal_pb2.DeployTasksResponse()

    @override
    async def SweepOutput(
        self, request: internal_pb2.SweepOutputRequest, context: _Context
    ) -> internal_pb2.SweepOutputResponse:
        """Removes hidden files of a job that is over for good."""
        await self._enter(request.leader_epoch, request.incarnation)
        found = 0
        for sink in request.sinks:
            tag = output_tag(request.job_id, sink.operator_uid)
            try:
                found += await asyncio.to_thread(
                    sweep_output, sink.directory, tag, frozenset(sink.kept)
                )
            except OSError as error:
                raise StoreTransient(f"hidden files in {sink.directory} stay: {error}") from error
        return internal_pb2.SweepOutputResponse(file_count=found)

    @override
    async def SendTaskCommands(
        self, request: internal_pb2.SendTaskCommandsRequest, context: _Context
    ) -> internal_pb2.SendTaskCommandsResponse:
        """Passes commands on to attempts."""
        await self._enter(request.leader_epoch, request.incarnation)
        await self._supervisor.send_commands(request.commands)
        return internal_pb2.SendTaskCommandsResponse()

    @override
    async def FreeSlots(
        self, request: internal_pb2.FreeSlotsRequest, context: _Context
    ) -> internal_pb2.FreeSlotsResponse:
        """Ends slots; answered when their processes have ended."""
        await self._enter(request.leader_epoch, request.incarnation)
        await self._supervisor.free(request.job_id, request.slot_ids, request.allocation_id)
        await self._local_state.slots_freed(request.job_id)
        return internal_pb2.FreeSlotsResponse()

    @override
    async def ReleasePartitions(
        self, request: internal_pb2.ReleasePartitionsRequest, context: _Context
    ) -> internal_pb2.ReleasePartitionsResponse:
        """Drops partitions, in slot processes and on disk."""
        await self._enter(request.leader_epoch, request.incarnation)
        await self._supervisor.release_partitions(request.job_id, request.partitions)
        await self._partitions.release(request.job_id, request.partitions)
        return internal_pb2.ReleasePartitionsResponse()

    @override
    async def PromotePartitions(
        self, request: internal_pb2.PromotePartitionsRequest, context: _Context
    ) -> internal_pb2.PromotePartitionsResponse:
        """Lets complete partitions outlive their job."""
        await self._enter(request.leader_epoch, request.incarnation)
        await self._partitions.promote(request.set, request.partitions)
        return internal_pb2.PromotePartitionsResponse(holdings=self._partitions.held.to_message())

    @override
    async def DropPromotedPartitions(
        self, request: internal_pb2.DropPromotedPartitionsRequest, context: _Context
    ) -> internal_pb2.DropPromotedPartitionsResponse:
        """Drops what was promoted under a name."""
        await self._enter(request.leader_epoch, request.incarnation)
        dropped = await self._partitions.drop_promoted(request.name, request.job_id)
        return internal_pb2.DropPromotedPartitionsResponse(
            dropped=dropped, holdings=self._partitions.held.to_message()
        )

    @override
    async def HearOfLeader(
        self, request: internal_pb2.HearOfLeaderRequest, context: _Context
    ) -> internal_pb2.HearOfLeaderResponse:
        """Changes nothing by itself: who says that it leads is asked, and a deposed one leads nobody away."""
        self._hear_of_leader(request)
        return internal_pb2.HearOfLeaderResponse()

    @override
    async def ReadTaskLogs(
        self, request: internal_pb2.ReadTaskLogsRequest, context: _Context
    ) -> AsyncIterator[client_pb2.LogChunk]:
        """Streams the logs of attempts, all attempts of a subtask in order."""
        await self._enter(request.leader_epoch, request.incarnation)
        async for log, piece in read_logs(
            self._logs, request.job_id, request.vertex, request.subtask_index
        ):
            yield client_pb2.LogChunk(
                vertex=log.vertex,
                subtask_index=log.subtask_index,
                attempt=log.attempt,
                data=piece,
            )
