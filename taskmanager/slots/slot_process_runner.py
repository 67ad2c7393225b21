"""One slot process, seen from the daemon: its line, its attempts, its end.

Invariants: reports are handled in the order the slot sent them, also those it sent before it died;
after ``run`` has returned the process has ended and every attempt in it has its terminal event; a
slot whose line has ended does not live on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from common.clock import Clock
from common.log import get_logger
from common.metrics import NamedMetrics
from common.pb import internal_pb2
from penstock.errors import StreamError, TaskFailure
from penstock.partition_id import PartitionId
from taskmanager.processes.exit_cause import likely_cause, log_tail
from taskmanager.processes.forkserver_runner import ForkedChild, ForkserverRunner
from taskmanager.processes.slot_channel import SlotChannel
from taskmanager.slots.attempt_table import AttemptTable, JobAttemptKey, describe, key_of
from taskmanager.slots.slot_traffic import count_traffic

_DRAIN_TIMEOUT_S = 1.0
_END_AFTER_LINE_S = 3.0

ReportEvent = Callable[[internal_pb2.TaskEvent], None]
TakeResults = Callable[["SlotProcessRunner", internal_pb2.SlotResults], Awaitable[None]]


class SlotProcessRunner:
    """Runs the daemon's side of one slot process.

    Args:
        taskmanager_id: for failure causes.
        channel: the line to it.
        log_file: what the process prints outside of any attempt.
        forkserver: ends the process.
        report_event: takes events for the JobManager.
        take_results: takes rows of collect sinks; waits while there is no room.
    """

    def __init__(
        self,
        *,
        slot_id: str,
        job_id: str,
        taskmanager_id: str,
        child: ForkedChild,
        channel: SlotChannel,
        log_file: Path,
        forkserver: ForkserverRunner,
        clock: Clock,
        report_event: ReportEvent,
        take_results: TakeResults,
    ) -> None:
        self.slot_id = slot_id
        self.job_id = job_id
        self.attempts = AttemptTable()
        self.metrics: dict[JobAttemptKey, internal_pb2.AttemptMetrics] = {}
        """Of the newest attempt of each subtask that was deployed here."""
        self._names: dict[str, tuple[str, str]] = {}
        """Vertex -> name of its job, and of its operators."""
        self.outputs: set[PartitionId] = set()
        """What attempts in it may be writing."""
        self._taskmanager_id = taskmanager_id
        self._child = child
        self._channel = channel
        self._log_file = log_file
        self._forkserver = forkserver
        self._clock = clock
        self._report_event = report_event
        self._take_results = take_results
        self._ready: asyncio.Future[internal_pb2.DataEndpoint] = (
            asyncio.get_running_loop().create_future()
        )
        self._changed = asyncio.Condition()
        self._leader_epoch = 0
        self._given_up = False
        self._is_overdue = False
        self._is_silent = False
        self._cause = ""
        self.ended = asyncio.Event()
        self._log = get_logger(__name__).bind(slot_id=slot_id, job_id=job_id, pid=child.pid)

    @property
    def pid(self) -> int:
        """The slot's process id."""
        return self._child.pid

    def named_metrics(self) -> list[NamedMetrics]:
        """The metrics with the names of job and operators; may be called from any thread."""
        return [
            NamedMetrics(*self._names[entry.attempt.vertex], entry)
            for entry in tuple(self.metrics.values())
        ]

    # ------------------------------------------------------------ life

    async def run(self) -> str:
        """Handles reports until the process has ended.

        Returns:
            How it ended.
        """
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            try:
                await asyncio.wait([self._child.exited])
                # What it sent before its end may still lie in the socket; a process of the user's
                # own that inherited the socket must not keep this waiting.
                await asyncio.wait([reading], timeout=_DRAIN_TIMEOUT_S)
            finally:
                reading.cancel()
                self._channel.close()
        ending = self._child.exited.result()
        tail = log_tail(self._log_file).strip()
        likely = "" if self._cause else likely_cause(ending.status, is_told=bool(tail))
        cause = self._cause or ending.reason + (f" ({likely})" if likely else "")
        await self._end(cause, tail)
        return cause

    async def _end(self, cause: str, tail: str) -> None:
        told = f"{cause}; its log ends with:\n{tail}" if tail else cause
        events = self.attempts.process_ended(
            told,
            self._taskmanager_id,
            self._clock.now_ms(),
            is_asked_for=self._given_up,
            is_overdue=self._is_overdue,
        )
        if not self._is_silent:
            for event in events:
                self._report_event(event)
        if not self._ready.done():
            self._ready.set_exception(TaskFailure(f"slot {self.slot_id} did not start: {told}"))
            self._ready.exception()
        self.ended.set()
        async with self._changed:
            self._changed.notify_all()
        log = self._log.info if self._given_up else self._log.error
        log("slot.ended", reason=cause)

    async def _read(self) -> None:
        try:
            while (report := await self._channel.receive()) is not None:
                await self._handle(report)
        except StreamError as error:
            self._cause = f"slot process {self.pid} was ended: {error}"
        else:
            # The line has ended: nobody can tell the process anything any more.
            await asyncio.wait([self._child.exited], timeout=_END_AFTER_LINE_S)
            if not self._child.exited.done():
                self._cause = f"slot process {self.pid} closed its line and did not exit"
        self._forkserver.kill(self._child)

    async def _handle(self, report: internal_pb2.SlotReport) -> None:
        match report.WhichOneof("report"):
            case "ready":
                if not self._ready.done():
                    self._ready.set_result(report.ready)
            case "task_event":
                if self.attempts.observe(report.task_event) and not self._is_silent:
                    self._report_event(report.task_event)
                async with self._changed:
                    self._changed.notify_all()
            case "metrics":
                for entry in report.metrics.attempts:
                    if self.attempts.contains(entry.attempt):
                        self.metrics[key_of(entry.attempt)] = entry
                count_traffic(report.metrics)
            case "results":
                await self._take_results(self, report.results)
            case _:
                raise StreamError("it sent a report of an unknown kind")

    # ------------------------------------------------------------ commands

    async def configure(
        self, configuration: internal_pb2.SlotConfiguration, timeout_s: float
    ) -> internal_pb2.DataEndpoint:
        """Sends the slot its configuration and waits until it takes connections.

        Raises:
            TaskFailure: it ended, or was not ready in time (then it is killed).
        """
        self._leader_epoch = configuration.leader_epoch
        await self.send(internal_pb2.SlotCommand(configure=configuration))
        await asyncio.wait([self._ready], timeout=timeout_s)
        if not self._ready.done():
            self.kill(f"slot process {self.pid} was not ready within {timeout_s:.0f} s")
        await asyncio.wait([self._ready])
        return self._ready.result()

    async def send(self, command: internal_pb2.SlotCommand) -> None:
        """Sends a command; one to a process that has ended goes nowhere: its end is reported."""
        try:
            await self._channel.send(command)
        except ConnectionError:
            self._log.info("command.dropped", reason="the slot process has ended")

    async def tell(self, command: internal_pb2.TaskCommand) -> None:
        """Tells an attempt something; one that has ended hears nothing."""
        if self.attempts.is_terminal(command.attempt):
            self._log.debug("command.dropped", reason="the attempt has ended")
            return
        self.attempts.told(command)
        await self.send(internal_pb2.SlotCommand(task_command=command))

    def held_attempts(self) -> list[internal_pb2.HeldAttempt]:
        """What a JobManager that takes the job over must know; nothing before the process listens."""
        listens = self._ready.done() and self._ready.exception() is None
        return self.attempts.held(self._ready.result(), self._leader_epoch) if listens else []

    async def deploy(self, deployment: internal_pb2.TaskDeployment) -> None:
        """Starts an attempt in the slot; a repeated call does nothing."""
        attempt = deployment.attempt
        if self.attempts.deployed(deployment):
            self._names[attempt.vertex] = deployment.job_name, deployment.vertex.name
            self._forget_metrics_of(attempt.vertex, attempt.subtask_index)
            known = self.attempts.attempt_keys()
            self.outputs = {
                output
                for output in self.outputs
                if (self.job_id, output.vertex, output.subtask_index, output.attempt) in known
            }
            self.outputs |= {
                PartitionId(output.edge.id, attempt.vertex, attempt.subtask_index, attempt.attempt)
                for output in deployment.outputs
            }
            await self.send(internal_pb2.SlotCommand(deploy=deployment))

    def _forget_metrics_of(self, vertex: str, subtask_index: int) -> None:
        """A process outlives many attempts, and each heartbeat carries all that is known."""
        subtask = (self.job_id, vertex, subtask_index)
        self.metrics = {key: entry for key, entry in self.metrics.items() if key[:3] != subtask}

    async def cancel(
        self,
        attempts: Sequence[internal_pb2.AttemptId],
        timeout_ms: int,
        *,
        is_final: bool = False,
    ) -> None:
        """Cancels attempts and kills the process when one of them does not end in time.

        Args:
            attempts: to be cancelled.
            timeout_ms: that they have.
            is_final: their job is never gone on with.
        """
        chosen = [
            attempt for attempt in attempts if self.attempts.cancelled(attempt, is_final=is_final)
        ]
        if not chosen:
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                for attempt in chosen:
                    cancel = internal_pb2.CancelTask(is_final=is_final)
                    command = internal_pb2.TaskCommand(attempt=attempt, cancel=cancel)
                    await self.send(internal_pb2.SlotCommand(task_command=command))
                async with self._changed:
                    await self._changed.wait_for(lambda: self._have_ended(chosen))
        except TimeoutError:
            stuck = [describe(item) for item in chosen if not self.attempts.is_terminal(item)]
            self._is_overdue = not self.ended.is_set()
            self.kill(
                f"slot process {self.pid} was killed, because {', '.join(stuck)} did not react to "
                f"its cancellation within {timeout_ms} ms (task.cancellation.timeout)"
            )
            await self.ended.wait()

    def _have_ended(self, attempts: Sequence[internal_pb2.AttemptId]) -> bool:
        return self.ended.is_set() or all(map(self.attempts.is_terminal, attempts))

    async def stop(self, grace_s: float, *, is_silent: bool = False) -> None:
        """Ends the process: asks, waits, kills; returns when it has ended.

        Args:
            grace_s: how long it may take to end by itself.
            is_silent: nobody wants to hear what becomes of its attempts.
        """
        self._given_up = True
        self._is_silent = self._is_silent or is_silent
        try:
            async with asyncio.timeout(grace_s):
                await self.send(internal_pb2.SlotCommand(shutdown=internal_pb2.ShutdownSlot()))
                await self.ended.wait()
        except TimeoutError:
            self.kill(f"slot process {self.pid} was killed: it did not end when it was told to")
            await self.ended.wait()

    def kill(self, cause: str) -> None:
        """Kills the process.

        Args:
            cause: why; the first one counts.
        """
        if not self.ended.is_set():
            self._cause = self._cause or cause
            self._forkserver.kill(self._child)
