"""Everything that runs in this TaskManager's slots: starts, feeds, cancels and ends slot processes.

It joins the slot table (who holds what), the forkserver (processes), the artifact store (files) and
the slot processes. Invariants: a slot of the table is released only after its process has ended; an
attempt that the JobManager asked for gets exactly one terminal event, whatever happens to its slot.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.log import get_logger
from common.metrics import NamedMetrics
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import Fenced, NoResourceAvailable, TaskFailure
from penstock.partition_id import PartitionId
from penstock.pb import client_pb2
from penstock.pb.client_pb2 import ATTEMPT_STATE_CANCELED, ATTEMPT_STATE_FAILED
from taskmanager.partitions.spilling import Spilling
from taskmanager.processes.background import Background, BackgroundWork
from taskmanager.processes.forkserver_runner import ForkserverRunner
from taskmanager.processes.process_usage import memory_bytes
from taskmanager.processes.slot_channel import SlotChannel
from taskmanager.slots.artifact_cache_store import ArtifactCache
from taskmanager.slots.attempt_table import JobAttemptKey, key_of, state_event
from taskmanager.slots.requirements import check_requirements
from taskmanager.slots.slot_environment import SlotEnvironment, preloaded
from taskmanager.slots.slot_process_runner import ReportEvent, SlotProcessRunner, TakeResults
from taskmanager.slots.slot_table import SlotTable

_STOP_GRACE_S = 1.0
_DROP_GRACE_S = 0.5
_READY_TIMEOUT_S = 30.0
_CLOSED_ATTEMPTS_MAX = 20_000


@dataclass(slots=True)
class _Slot:
    """A held slot; ``work`` starts its process."""

    job_id: str
    config: Configuration
    work: BackgroundWork[internal_pb2.DataEndpoint] | None = None
    runner: SlotProcessRunner | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class SlotSupervisor:
    """Runs the slots.

    Args:
        environment: what all slots share.
        report_event: takes events for the JobManager.
        take_results: takes rows of collect sinks.
    """

    def __init__(
        self,
        *,
        environment: SlotEnvironment,
        table: SlotTable,
        forkserver: ForkserverRunner,
        artifacts: ArtifactCache,
        background: Background,
        clock: Clock,
        report_event: ReportEvent,
        take_results: TakeResults,
    ) -> None:
        self._environment = environment
        self._table = table
        self._forkserver = forkserver
        self._artifacts = artifacts
        self._background = background
        self._clock = clock
        self._report_event = report_event
        self._take_results = take_results
        self._slots: dict[str, _Slot] = {}
        self._last_causes: dict[str, str] = {}
        self._closed: OrderedDict[JobAttemptKey, None] = OrderedDict()
        self._process_count = 0
        self._drops = 0
        self._spilling = Spilling.ALLOWED
        self._log = get_logger(__name__)

    # ------------------------------------------------------------ what it says

    def metrics(self) -> tuple[internal_pb2.AttemptMetrics, ...]:
        """The latest metrics of every attempt whose slot is held; may be called from any thread."""
        return tuple(
            entry
            for slot in tuple(self._slots.values())
            if slot.runner is not None
            for entry in tuple(slot.runner.metrics.values())
        )

    def named_metrics(self) -> tuple[NamedMetrics, ...]:
        """The same with the names of jobs and operators; may be called from any thread."""
        return tuple(
            named
            for slot in tuple(self._slots.values())
            if slot.runner is not None
            for named in slot.runner.named_metrics()
        )

    def held_slots(self) -> list[internal_pb2.HeldSlot]:
        """What the heartbeat says about slots: whose they are, until their processes have ended."""
        return [self._held_slot(*holder) for holder in self._table.holders()]

    def _held_slot(self, slot_id: str, job_id: str) -> internal_pb2.HeldSlot:
        slot = self._slots.get(slot_id)
        if slot is None or slot.runner is None:
            return internal_pb2.HeldSlot(slot_id=slot_id, job_id=job_id)
        pid = slot.runner.pid
        return internal_pb2.HeldSlot(
            slot_id=slot_id, job_id=job_id, pid=pid, memory_bytes=memory_bytes(pid)
        )

    def held_attempts(self) -> list[internal_pb2.HeldAttempt]:
        """What a JobManager that takes over must know of the attempts in all slots."""
        held = [
            (slot_id, slot.runner)
            for slot_id, slot in self._slots.items()
            if slot.runner is not None
        ]
        return [
            attempt
            for slot_id, runner in held
            if self._table.is_allocated(slot_id)
            for attempt in runner.held_attempts()
        ]

    def ended_attempts(self) -> list[internal_pb2.AttemptId]:
        """Attempts that were given to it and that no process has any more, the newest of them."""
        return [
            internal_pb2.AttemptId(job_id=job_id, vertex=vertex, subtask_index=index, attempt=n)
            for job_id, vertex, index, n in self._closed
        ]

    def event_arrived(self, event: internal_pb2.TaskEvent) -> None:
        """The JobManager has taken an event over."""
        slot_id = self._slot_of(event.attempt)
        runner = None if slot_id is None else self._slots[slot_id].runner
        if runner is not None:
            runner.attempts.arrived(event)

    # ------------------------------------------------------------ slots

    async def allocate(
        self, request: internal_pb2.AllocateSlotsRequest
    ) -> list[internal_pb2.DataEndpoint]:
        """Starts a process for each slot, unless it has one; repeating it is harmless.

        Raises:
            JobRejected: a requirement is not met, or the request is malformed.
            NoResourceAvailable: a slot is not to be had.
            Fenced: the call has come late.
            TaskFailure: a process did not start.
        """
        check_requirements(
            request.requirements, self._environment.packages, self._environment.taskmanager_id
        )
        config = self._environment.config.merged(dict(request.config))
        allocation = self._table.allocate(request.job_id, request.slot_ids, request.allocation_id)
        drops = self._drops
        while allocation.wait_for:
            await self._wait_for_any(allocation.wait_for)
            if self._drops != drops:
                raise Fenced("the leader that has asked for the slots is followed no longer")
            allocation = self._table.allocate(
                request.job_id, request.slot_ids, request.allocation_id
            )
        for slot_id in allocation.new:
            slot = _Slot(request.job_id, config)
            self._slots[slot_id] = slot
            self._last_causes.pop(slot_id, None)
            slot.work = self._background.start(
                self._start(slot_id, slot, request), f"start of slot {slot_id}"
            )
        return [await self._endpoint(slot_id) for slot_id in request.slot_ids]

    async def _endpoint(self, slot_id: str) -> internal_pb2.DataEndpoint:
        slot = self._slots.get(slot_id)
        if slot is None or slot.work is None:
            cause = self._last_causes.get(slot_id, "it was freed meanwhile")
            raise TaskFailure(f"slot {slot_id} has no process: {cause}")
        return await slot.work.wait()

    async def _wait_for_any(self, slot_ids: Sequence[str]) -> None:
        for slot_id in slot_ids:
            slot = self._slots.get(slot_id)
            if slot is not None:
                await slot.gone.wait()
                return
        raise NoResourceAvailable(f"slots {', '.join(slot_ids)} are stopping and have no process")

    async def _start(
        self, slot_id: str, slot: _Slot, request: internal_pb2.AllocateSlotsRequest
    ) -> internal_pb2.DataEndpoint:
        try:
            files = await self._artifacts.prepare(slot.job_id, request.artifacts)
            runner = await self._fork(slot_id, slot)
        except BaseException as error:
            self._release(slot_id, slot, f"it could not be started: {error}")
            raise
        slot.runner = runner
        self._process_count += 1
        configuration = self._environment.configuration(
            slot.job_id,
            slot_id,
            self._process_count,
            files,
            slot.config,
            self._table.leader_epoch,
            request.oldest_peer_epoch,
        )
        self._background.start(self._supervise(slot, runner, configuration), f"slot {slot_id}")
        endpoint = await runner.configure(configuration, _READY_TIMEOUT_S)
        if self._spilling is not Spilling.ALLOWED:
            await runner.send(_spill_pressure(self._spilling))
        return endpoint

    async def _fork(self, slot_id: str, slot: _Slot) -> SlotProcessRunner:
        log_file = self._environment.job_logs(slot.job_id) / f"slot-{slot_id}.log"
        await asyncio.to_thread(log_file.parent.mkdir, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        descriptors = [theirs.fileno(), log]
        if self._environment.terminal_fd is not None:
            descriptors.append(self._environment.terminal_fd)
        try:
            child = await self._forkserver.fork(descriptors, preload=preloaded(slot.config))
            try:
                channel = await SlotChannel.open(ours)
            except BaseException:
                await self._forkserver.end(child)
                raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(log)
        return SlotProcessRunner(
            slot_id=slot_id,
            job_id=slot.job_id,
            taskmanager_id=self._environment.taskmanager_id,
            child=child,
            channel=channel,
            log_file=log_file,
            forkserver=self._forkserver,
            clock=self._clock,
            report_event=self._report_event,
            take_results=self._take_results,
        )

    async def _supervise(
        self,
        slot: _Slot,
        runner: SlotProcessRunner,
        configuration: internal_pb2.SlotConfiguration,
    ) -> None:
        self._log.info("slot.started", slot_id=runner.slot_id, job_id=slot.job_id, pid=runner.pid)
        cause = "its supervision ended"
        try:
            cause = await runner.run()
        finally:
            runner.kill(cause)
            for key in runner.attempts.attempt_keys():
                self._close_attempt(key)
            self._release(runner.slot_id, slot, cause)
        await asyncio.to_thread(self._environment.clear, configuration)

    def _release(self, slot_id: str, slot: _Slot, cause: str) -> None:
        if self._slots.get(slot_id) is slot:
            del self._slots[slot_id]
            self._table.released(slot_id)
            self._last_causes[slot_id] = cause
        slot.gone.set()

    # ------------------------------------------------------------ attempts

    async def deploy(
        self, tasks: Sequence[internal_pb2.TaskDeployment], allocation_id: int
    ) -> None:
        """Starts attempts in their slots; what cannot be started is reported FAILED.

        Args:
            tasks: what to start.
            allocation_id: number of the call; slots given out since are left alone.
        """
        for task in tasks:
            if key_of(task.attempt) in self._closed:
                continue  # cancelled before it came, or its slot ended: both are reported
            if self._table.is_late(task.slot_id, allocation_id):
                self._report_closed(task.attempt, f"slot {task.slot_id} was given out again")
                continue
            runner = self._runner(task.slot_id, task.attempt.job_id)
            if runner is None:
                cause = self._last_causes.get(
                    task.slot_id, f"slot {task.slot_id} is not held by job {task.attempt.job_id}"
                )
                self._report_closed(task.attempt, cause)
            else:
                await runner.deploy(task)

    def _cancel(self, attempts: Sequence[internal_pb2.AttemptId], *, is_final: bool) -> None:
        """Begins to cancel attempts; one that never came is CANCELED at once, and stays away.

        Args:
            attempts: to be cancelled.
            is_final: their job is never gone on with.
        """
        by_slot: dict[str, list[internal_pb2.AttemptId]] = {}
        for attempt in attempts:
            slot_id = self._slot_of(attempt)
            if slot_id is not None:
                by_slot.setdefault(slot_id, []).append(attempt)
            elif key_of(attempt) not in self._closed:
                self._close_attempt(key_of(attempt))
                self._report_event(state_event(attempt, ATTEMPT_STATE_CANCELED))
        for slot_id, own in by_slot.items():
            slot = self._slots[slot_id]
            assert slot.runner is not None
            self._background.start(
                slot.runner.cancel(
                    own, slot.config.task_cancellation_timeout_ms, is_final=is_final
                ),
                f"cancellation in slot {slot_id}",
            )

    async def send_commands(self, commands: Sequence[internal_pb2.TaskCommand]) -> None:
        """Passes commands on; those for attempts that have ended are dropped, and those that cancel others done."""
        for is_final in (False, True):
            ending = [
                command.attempt
                for command in commands
                if command.HasField("cancel") and command.cancel.is_final == is_final
            ]
            self._cancel(ending, is_final=is_final)
        for command in commands:
            if command.HasField("cancel"):
                continue
            slot_id = self._slot_of(command.attempt)
            runner = None if slot_id is None else self._slots[slot_id].runner
            if runner is None:
                self._log.debug("command.dropped", reason="the slot of the attempt has ended")
            else:
                await runner.tell(command)

    def _slot_of(self, attempt: internal_pb2.AttemptId) -> str | None:
        for slot_id, slot in self._slots.items():
            if slot.runner is not None and slot.runner.attempts.contains(attempt):
                return slot_id
        return None

    def _runner(self, slot_id: str, job_id: str) -> SlotProcessRunner | None:
        slot = self._slots.get(slot_id)
        if slot is None or slot.job_id != job_id or not self._table.is_allocated(slot_id):
            return None
        return slot.runner

    def _report_closed(self, attempt: internal_pb2.AttemptId, cause: str) -> None:
        self._close_attempt(key_of(attempt))
        failure = client_pb2.FailureCause(
            error_class="TaskFailure",
            message=f"the attempt could not be started: {cause}",
            vertex=attempt.vertex,
            subtask_index=attempt.subtask_index,
            attempt=attempt.attempt,
            taskmanager_id=self._environment.taskmanager_id,
            timestamp_ms=self._clock.now_ms(),
        )
        self._report_event(state_event(attempt, ATTEMPT_STATE_FAILED, failure))

    def _close_attempt(self, key: JobAttemptKey) -> None:
        self._closed[key] = None
        while len(self._closed) > _CLOSED_ATTEMPTS_MAX:
            self._closed.popitem(last=False)

    # ------------------------------------------------------------ partitions

    def writing(self) -> list[tuple[str, PartitionId]]:
        """Job and partition of all that processes of slots may be writing to disk."""
        return [
            (slot.job_id, partition_id)
            for slot in self._slots.values()
            if slot.runner is not None
            for partition_id in slot.runner.outputs
        ]

    async def release_partitions(
        self, job_id: str, partitions: Sequence[internal_pb2.PartitionId]
    ) -> None:
        """Tells the slots of a job to drop partitions of attempts that have finished."""
        if not partitions:
            return  # the job is over: its slots end, and with them what they hold
        release = internal_pb2.ReleasePartitions(job_id=job_id, partitions=partitions)
        for runner in self._runners():
            if runner.job_id == job_id:
                await runner.send(internal_pb2.SlotCommand(release_partitions=release))

    async def set_spilling(self, spilling: Spilling) -> None:
        """Tells every slot, also those to come, whether it may write to the spill directory."""
        self._spilling = spilling
        for runner in self._runners():
            await runner.send(_spill_pressure(spilling))

    def _runners(self) -> list[SlotProcessRunner]:
        return [slot.runner for slot in self._slots.values() if slot.runner is not None]

    # ------------------------------------------------------------ the end of slots

    async def free(self, job_id: str, slot_ids: Sequence[str], allocation_id: int) -> None:
        """Ends slots of a job; returns when their processes have ended.

        Args:
            job_id: whose slots.
            slot_ids: which, empty = all.
            allocation_id: number of the call; slots given out since are left alone.
        """
        stopped = self._table.stop(job_id, slot_ids, allocation_id)
        await self._stop(stopped, _STOP_GRACE_S, is_silent=False)
        stopping = self._table.stopping()
        still_stopping = [
            slot
            for slot_id, slot in self._slots.items()
            if slot_id in stopping
            and slot.job_id == job_id
            and (not slot_ids or slot_id in slot_ids)
        ]
        for slot in still_stopping:
            await slot.gone.wait()
        if not self._table.slots_of(job_id):
            await self._artifacts.release(job_id)

    async def drop_all(self, reason: str) -> None:
        """Ends every slot, silently: whoever they worked for is gone."""
        slot_ids = self._table.stop_all()
        await self.drop(slot_ids, reason)
        for slot in list(self._slots.values()):
            await slot.gone.wait()

    async def drop(self, slot_ids: Sequence[str], reason: str) -> None:
        """Ends slots that the table has marked as stopping, silently; what waits for slots gets none."""
        self._drops += 1
        if not slot_ids:
            return
        self._log.warning("slots.dropped", count=len(slot_ids), reason=reason)
        jobs = {self._slots[slot_id].job_id for slot_id in slot_ids if slot_id in self._slots}
        await self._stop(slot_ids, _DROP_GRACE_S, is_silent=True)
        for job_id in jobs:
            if not self._table.slots_of(job_id):
                await self._artifacts.release(job_id)

    async def _stop(self, slot_ids: Sequence[str], grace_s: float, *, is_silent: bool) -> None:
        work = [
            self._background.start(
                self._stop_one(slot_id, self._slots[slot_id], grace_s, is_silent=is_silent),
                f"end of slot {slot_id}",
            )
            for slot_id in slot_ids
            if slot_id in self._slots
        ]
        for item in work:
            await item.wait()

    async def _stop_one(
        self, slot_id: str, slot: _Slot, grace_s: float, *, is_silent: bool
    ) -> None:
        if slot.runner is None and slot.work is not None:
            await slot.work.cancel()
        if slot.runner is None:
            self._release(slot_id, slot, "it was freed before it had started")
        else:
            await slot.runner.stop(grace_s, is_silent=is_silent)
        await slot.gone.wait()


def _spill_pressure(spilling: Spilling) -> internal_pb2.SlotCommand:
    pressure = internal_pb2.SpillPressure(
        stop=spilling is not Spilling.ALLOWED, give_up=spilling is Spilling.GIVEN_UP
    )
    return internal_pb2.SlotCommand(spill_pressure=pressure)
