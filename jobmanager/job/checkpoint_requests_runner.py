"""Who waits for a checkpoint or savepoint that the coordinator was asked for.

A job that says it runs may have tasks that begin, for the first time or again: who asks then waits until all run, as
long as a checkpoint may take.

Invariant: each request is answered once, at the latest when the job's actor ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from common.clock import Clock
from jobmanager.checkpoint import messages as c
from jobmanager.job.job_calls_runner import JobCallsRunner
from penstock.errors import CheckpointAborted, JobRejected, StreamError
from penstock.storage.checkpoint_properties import CheckpointProperties

_PAUSE_S: Final = 0.2
"""How long who waits for tasks that are being started waits before asking again, which costs a message within the process."""


class TasksNotRunningError(StreamError):
    """A checkpoint cannot be taken yet: tasks do not run."""


class TasksStartingError(TasksNotRunningError):
    """A checkpoint cannot be taken yet: some tasks of a job that runs are being started."""


class JobLeavesError(TasksNotRunningError):
    """A checkpoint cannot be taken yet, or was not completed: tasks leave a TaskManager that is drained."""


class JobEndsError(StreamError):
    """A checkpoint is not taken any more: the job ends, or has ended."""


class CheckpointRequestsRunner:
    """The requests of one job.

    Args:
        calls: to the store: how long each may take, and the pauses between them.
        post: takes events for the job's machine.
    """

    def __init__(
        self,
        job_id: str,
        clock: Clock,
        calls: JobCallsRunner,
        post: Callable[[c.CheckpointRequested], None],
    ) -> None:
        self._job_id = job_id
        self._clock = clock
        self._calls = calls
        self._post = post
        self._answers: dict[str, asyncio.Future[int]] = {}
        self._has_ended = False

    def check_open(self) -> None:
        """Raises:
        JobRejected: the job has ended.
        """
        if self._has_ended:
            raise JobRejected(f"job {self._job_id} has ended")

    def end(self) -> None:
        """The job has ended; who still waits is told so."""
        self._has_ended = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._ended())

    def _ended(self) -> JobEndsError:
        return JobEndsError(f"job {self._job_id} has ended")

    async def request(self, request_id: str, properties: CheckpointProperties) -> int:
        """Has the coordinator take a checkpoint or savepoint; returns its id when it is complete.

        Raises:
            JobRejected: the job takes none, or has ended.
            CheckpointAborted: it began and did not complete.
            JobEndsError: none is taken any more.
            TasksNotRunningError: tasks do not run, or load their state.
            StreamError: it could not begin.
        """
        self.check_open()
        give_up_ms = self._clock.now_ms() + self._calls.timeout_ms
        while True:
            try:
                return await self._ask(request_id, properties)
            except TasksStartingError:
                if self._clock.now_ms() >= give_up_ms:
                    raise
                await self._calls.pause(_PAUSE_S)

    async def _ask(self, request_id: str, properties: CheckpointProperties) -> int:
        if self._has_ended:
            raise self._ended()
        answer = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        try:
            self._post(c.CheckpointRequested(request_id, self._clock.now_ms(), properties))
            checkpoint_id: int = await answer
            return checkpoint_id
        finally:
            del self._answers[request_id]

    def answer(self, effect: c.AnswerRequest) -> None:
        """Tells who asked, where they still wait."""
        answer = self._answers.get(effect.request_id)
        if answer is None or answer.done():
            return  # who asked has gone
        if effect.refused is None:
            answer.set_result(effect.checkpoint_id)
            return
        reason = effect.detail or effect.refused.value
        message = f"no checkpoint of job {self._job_id} was taken: {reason}"
        error: StreamError
        if effect.refused in (c.RequestRefused.DISABLED, c.RequestRefused.BLOCKING_EXCHANGE):
            error = JobRejected(message)
        elif effect.refused is c.RequestRefused.STARTING:
            error = TasksStartingError(message)
        elif effect.refused is c.RequestRefused.LEAVING:
            error = JobLeavesError(message)
        elif effect.refused in (c.RequestRefused.NOT_RUNNING, c.RequestRefused.LOADING):
            error = TasksNotRunningError(message)
        elif effect.refused is c.RequestRefused.ENDING:
            error = JobEndsError(message)
        elif effect.refused is c.RequestRefused.ABORTED and effect.checkpoint_id:
            error = CheckpointAborted(effect.checkpoint_id, reason)
        else:
            error = StreamError(message)
        answer.set_exception(error)
