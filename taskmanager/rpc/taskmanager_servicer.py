"""What the JobManager can ask of this TaskManager.

Each call that changes something is checked against the leader epoch first: only the leader with which
this TaskManager has registered is obeyed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from common.pb import internal_pb2, internal_pb2_grpc
from penstock.pb import client_pb2
from taskmanager.daemon.task_logs import read_logs
from taskmanager.slots.slot_supervisor_runner import SlotSupervisor

# One context type per method in the generated code; none of them is used.
_Context = Any


class TaskManagerServicer(internal_pb2_grpc.TaskManagerInternalServicer):
    """Serves ``TaskManagerInternal``; errors become statuses in the server's interceptor.

    Args:
        supervisor: runs the slots.
        enter: checks the epoch of a call; returns when a registration holds.
        logs: holds one directory of task logs per job.
    """

    def __init__(
        self, supervisor: SlotSupervisor, enter: Callable[[int], Awaitable[None]], logs: Path
    ) -> None:
        self._supervisor = supervisor
        self._enter = enter
        self._logs = logs

    @override
    async def AllocateSlots(
        self, request: internal_pb2.AllocateSlotsRequest, context: _Context
    ) -> internal_pb2.AllocateSlotsResponse:
        """Starts a process per slot."""
        await self._enter(request.leader_epoch)
        return internal_pb2.AllocateSlotsResponse(
            endpoints=await self._supervisor.allocate(request)
        )

    @override
    async def DeployTasks(
        self, request: internal_pb2.DeployTasksRequest, context: _Context
    ) -> internal_pb2.DeployTasksResponse:
        """Starts attempts."""
        await self._enter(request.leader_epoch)
        await self._supervisor.deploy(request.tasks)
        return internal_pb2.DeployTasksResponse()

    @override
    async def CancelTasks(
        self, request: internal_pb2.CancelTasksRequest, context: _Context
    ) -> internal_pb2.CancelTasksResponse:
        """Begins to cancel attempts."""
        await self._enter(request.leader_epoch)
        await self._supervisor.cancel(request.attempts, is_final=request.is_final)
        return internal_pb2.CancelTasksResponse()

    @override
    async def SendTaskCommands(
        self, request: internal_pb2.SendTaskCommandsRequest, context: _Context
    ) -> internal_pb2.SendTaskCommandsResponse:
        """Passes commands on to attempts."""
        await self._enter(request.leader_epoch)
        await self._supervisor.send_commands(request.commands)
        return internal_pb2.SendTaskCommandsResponse()

    @override
    async def FreeSlots(
        self, request: internal_pb2.FreeSlotsRequest, context: _Context
    ) -> internal_pb2.FreeSlotsResponse:
        """Ends slots; answered when their processes have ended."""
        await self._enter(request.leader_epoch)
        await self._supervisor.free(request.job_id, request.slot_ids)
        return internal_pb2.FreeSlotsResponse()

    @override
    async def ReadTaskLogs(
        self, request: internal_pb2.ReadTaskLogsRequest, context: _Context
    ) -> AsyncIterator[client_pb2.LogChunk]:
        """Streams the logs of attempts, all attempts of a subtask in order."""
        async for log, piece in read_logs(
            self._logs, request.job_id, request.vertex, request.subtask_index
        ):
            yield client_pb2.LogChunk(
                vertex=log.vertex,
                subtask_index=log.subtask_index,
                attempt=log.attempt,
                data=piece,
            )
